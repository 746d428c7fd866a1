"""Fields that a workload's config may leave out, and what they are then.

A flag may set them as any other; in a config file they are added to an unlocked config.
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
            "vocab": 0,  # 0: that of the data
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
