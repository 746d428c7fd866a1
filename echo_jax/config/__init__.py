"""Configs: the shared fields, their valid values, and the objects made from them."""

from echo_jax.config.defaults import Config, default_config, load_config, override

__all__ = ["Config", "default_config", "load_config", "override"]
