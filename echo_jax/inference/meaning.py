"""The meaning of a task's inputs and outputs, from its `Workload.task_info`."""

from collections.abc import Mapping
from typing import Any

from echo_jax.data.prepare.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer

__all__ = ["class_names", "tokenizer_of"]


def class_names(task_info: Mapping[str, Any]) -> list[str]:
    """Returns the names of the classes in the order of the model's outputs."""
    categories = task_info.get("categories", [])
    return task_info.get("classes", [each["name"] for each in categories])


def tokenizer_of(
    task_info: Mapping[str, Any], task_files: Mapping[str, bytes]
) -> Tokenizer:
    name = task_info["tokenizer"]
    return ByteTokenizer() if name == "bytes" else SubwordTokenizer(task_files[name])
