"""Optional fields of a workload's config, and their defaults.

A flag sets them like any other field; a config file adds them to an unlocked config.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["OPTIONAL_FIELDS"]

OPTIONAL_FIELDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "lm": {
        "model": {
            "positions": "learned",
            "activation": "gelu",
            "bias": False,
            "tied": False,
            "vocab": 0,  # 0: the vocabulary of the data
            "segments": False,
        },
        "data": {
            "tokenizer": "",
            "train_split": "train",
            "eval_split": "validation",
            "train_examples": 0,  # 0: all of them
        },
    }
}
"""By workload and group: so the small model of bytes is as it always was."""
