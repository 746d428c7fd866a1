"""Every config is a record of an experiment: it must not change unnoticed.

When a config is changed on purpose, or `default_config` gets a field, write the
golden files anew and review their diff:

    python tests/configs/test_configs.py
"""

import ast
import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from echo_jax.config import load_config
from echo_jax.config.check import check_config

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
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


def dump(name: str) -> str:
    return json.dumps(load(name).to_dict(), indent=2, sort_keys=True) + "\n"


def golden_file(name: str) -> Path:
    plain = name.replace(":", "_").replace("/", "_").replace(",", "_")
    return GOLDEN / f"{plain}.json"


def test_every_config_is_tested():
    files = {
        path.relative_to(CONFIGS).with_suffix("").as_posix()
        for path in CONFIGS.rglob("*.py")
    }
    assert files - NO_CONFIGS == set(VARIANTS)
    assert {path.stem for path in GOLDEN.glob("*.json")} == {
        golden_file(name).stem for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_config_equals_its_golden_file(name):
    assert dump(name) == golden_file(name).read_text()


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
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        golden_file(name).write_text(dump(name))
