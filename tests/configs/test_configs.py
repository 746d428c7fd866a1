"""Every config is a record of an experiment: it must not change unnoticed.

`golden.json` has the fields of `default_config`, those in which each config differs
from it, and those in which a variant differs from the plain config of its file. When a
config is changed on purpose, or `default_config` gets a field, write it and review it:

    python tests/configs/test_configs.py
"""

import ast
import functools
import json
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from echo_jax.config import default_config, load_config
from echo_jax.config.check import check_config

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden.json"
ABSENT = "absent"  # where a variant lacks a field of its file's plain config
VARIANTS = {
    "cifar": ["", "cifar100,mobilenet", "tiny", "tiny,device"],
    "coco": ["", "tiny", "tiny,device"],
    "communication": ["", "echo", "tiny"],
    "imagenet": ["", "small", "tiny", "tiny,device"],
    "large_batch": ["", "echo", "tiny"],
    "lm": [
        "",
        "bytes",
        "c4",
        "example",
        "gpt2",
        "gpt2,tiny",
        "tiny",
        "tiny,device",
        "wikitext103",
        "wikitext2",
        "wikitext2,tiny",
    ],
    "quickstart": ["", "bursty", "fed", "tiny", "which"],
    "shapes": ["", "tiny"],
    "sweeps/cifar_batch_size": ["", "512", "tiny"],
    "sweeps/cifar_buffer": ["", "tiny"],
    "sweeps/cifar_echo_factor": ["", "tiny"],
    "sweeps/cifar_placement": ["", "tiny"],
    "sweeps/coco_placement": ["", "tiny"],
    "sweeps/imagenet_batch_size": ["", "4096", "tiny"],
    "sweeps/imagenet_echo_factor": ["", "tiny"],
    "sweeps/imagenet_placement": ["", "tiny"],
    "sweeps/lm_batch_size": ["", "64", "tiny"],
    "sweeps/lm_buffer": ["", "tiny"],
    "sweeps/lm_echo_factor": ["", "4096", "tiny"],
    "sweeps/lm_seconds": ["", "2", "8", "tiny"],
    "sweeps/s1_placement": ["", "cifar", "tiny"],
    "sweeps/s2_factor": ["", "8", "128", "decay", "tiny"],
    "sweeps/s3_untuned": ["", "tiny"],
    "sweeps/s4_lag": ["", "8", "cifar", "long", "tiny"],
    "sweeps/s5_epochs": ["", "tiny"],
    "sweeps/s6_schedules": ["", "cifar", "decay", "tiny"],
    "sweeps/s7_communication": ["", "echo", "tiny"],
    "sweeps/s8_large_batch": ["", "tiny"],
}
# What the configs import.
NO_CONFIGS = {"echo_variants", "sweeps/sweep_parts"}
NAMES = [
    f"{file}:{variant}" if variant else file
    for file, variants in VARIANTS.items()
    for variant in variants
]


def load(name: str) -> ConfigDict:
    file, _, variant = name.partition(":")
    return load_config(f"{CONFIGS / file}.py" + (f":{variant}" if variant else ""))


def fields_of(tree, prefix=""):
    """Returns the fields of a nested config by their dotted names."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= fields_of(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


@functools.cache
def fields(name):
    return fields_of(default_config().to_dict() if not name else load(name).to_dict())


def differences(name):
    """Returns the fields of a config that differ from what it is compared with."""
    file, _, variant = name.partition(":")
    mine, others = fields(name), fields(file if variant else "")
    if not variant and any(key.startswith("base.") for key in mine):
        others = {f"base.{key}": value for key, value in others.items()}
    new = {k: v for k, v in mine.items() if k not in others or others[k] != v}
    return new | {key: ABSENT for key in others.keys() - mine.keys()}


def golden():
    """Returns what `golden.json` is to hold, as JSON reads it back."""
    found = {"default_config": fields("")} | {name: differences(name) for name in NAMES}
    return json.loads(json.dumps(found))


def _on_one_line(found):
    return "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]"


@pytest.fixture(scope="module")
def stored():
    return json.loads(GOLDEN.read_text())


def test_every_config_is_tested():
    files = {
        path.relative_to(CONFIGS).with_suffix("").as_posix()
        for path in CONFIGS.rglob("*.py")
    }
    assert files - NO_CONFIGS == set(VARIANTS)


def test_configs_are_the_golden_ones(stored):
    found = golden()
    assert found.keys() == stored.keys()
    for name, expected in stored.items():
        assert found[name] == expected, name


@pytest.mark.parametrize("name", NAMES)
def test_config_is_valid_and_locked(name):
    config = load(name)
    assert config.is_locked
    check_config(config.base if "base" in config else config)


@pytest.mark.parametrize("file", VARIANTS)
def test_unknown_variant_is_refused(file):
    with pytest.raises(ValueError, match="variant 'huge' is unknown; use"):
        load(f"{file}:huge")


@pytest.mark.parametrize("file", VARIANTS)
def test_config_says_which_command_runs_it(file):
    text = ast.get_docstring(ast.parse((CONFIGS / f"{file}.py").read_text()))
    assert f"--config configs/{file}.py --workdir" in text


if __name__ == "__main__":
    text = json.dumps(golden(), indent=1, sort_keys=True)
    # A list stands on one line.
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", _on_one_line, text)
    GOLDEN.write_text(text + "\n")
