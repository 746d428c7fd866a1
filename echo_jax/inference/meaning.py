"""What the inputs and outputs of a task mean, by what it was made with."""

from collections.abc import Mapping
from typing import Any

from echo_jax.data.prepare.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer

__all__ = ["class_names", "tokenizer_of"]


def class_names(task_info: Mapping[str, Any]) -> list[str]:
    """Returns the names of the classes, in the order of the model's outputs.

    Args:
      task_info: See `echo_jax.workloads.base.Workload`; of text there are none.

    Example:
      >>> class_names({"categories": [{"id": 18, "name": "dog"}]})
      ['dog']
    """
    categories = task_info.get("categories", [])
    return task_info.get("classes", [each["name"] for each in categories])


def tokenizer_of(
    task_info: Mapping[str, Any], task_files: Mapping[str, bytes]
) -> Tokenizer:
    """Makes the tokenizer of a language model.

    Args:
      task_info: See `echo_jax.workloads.base.Workload`; this and what follows.
      task_files: Where its file is, if it has one.
    """
    name = task_info["tokenizer"]
    return ByteTokenizer() if name == "bytes" else SubwordTokenizer(task_files[name])
