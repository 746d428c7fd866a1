"""Configs: the shared fields, their valid values, and the objects made from them."""

from echo_jax.config.defaults import Config, default_config, load_config, override
from echo_jax.lazy import door

__all__ = ["Config", "default_config", "load_config", "override"]

__getattr__ = door(
    __name__,
    {
        "batch": ["BatchSpec"],
        "files": ["import_config", "packaged_configs"],
        "flags": ["load_with_flags"],
        "run": ["RunSpec", "check_config"],
        "saved": ["read_config"],
        "study": ["arm_names", "default_study", "protocol_of", "set_arms"],
    },
)
