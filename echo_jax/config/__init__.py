"""Configs: the shared fields, their valid values, and the objects made from them."""

from echo_jax.config.defaults import Config, default_config, load_config, override
from echo_jax.lazy import door

__all__ = ["Config", "default_config", "load_config", "override"]

__getattr__ = door(
    __name__,
    {
        "defaults": ["load_with_flags"],
        "files": ["import_config", "packaged_configs"],
        "run": ["RunSpec", "check_config"],
        "saved": ["read_config"],
        "specs": ["BatchSpec"],
        "study": ["arm_names", "default_study", "set_arms"],
    },
)
