"""Configs: the fields that all have, what they may be, and what is made of them."""

from echo_jax.config.defaults import Config, default_config, load_config, override

__all__ = ["Config", "default_config", "load_config", "override"]
