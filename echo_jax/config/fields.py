"""Lists the fields of a config with their descriptions, and those it may leave out."""

import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from echo_jax.config import Config, default_config

# A flag sets them as any other; a config file adds them to an unlocked config.
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

_FIELD = re.compile(r"\s*config\.([\w.]+) = ")


def field_lines(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the flag and the description of every field of a training or a study."""
    about = dict(described_fields(inspect.getsource(default_config)))
    for name, value in _leaves(config):
        said = about.get(name.removeprefix("base."), "")
        yield f"--config.{name}={value}", said


# The description of a field or a group is the comment after its line, or in the lines
# above it.
def described_fields(source: str) -> Iterator[tuple[str, str]]:
    """Yields name and description of all fields that a function's source sets."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.split("\n")
    for number, line in enumerate(lines, start=1):
        if not (found := _FIELD.match(line)):
            continue
        said = [comments[number]] if number in comments else []
        above = number - 1
        while above in comments and lines[above - 1].strip().startswith("#"):
            said.insert(0, comments[above])
            above -= 1
        yield found[1], " ".join(said)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if hasattr(value, "keys"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
