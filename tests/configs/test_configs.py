"""Every config is a record of an experiment: it must not change unnoticed.

When a config is changed on purpose, or `default_config` gets a field, write the
golden files anew and review their diff:

    python tests/configs/test_configs.py
"""

import importlib.util
import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from echo_jax.config import check_config, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
VARIANTS = {
    "lm": ["", "tiny"],
    "quickstart": ["", "bursty", "fed", "tiny", "which"],
    "shapes": ["", "tiny"],
}
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
    return GOLDEN / f"{name.replace(':', '_')}.json"


def test_every_config_is_tested():
    assert {path.stem for path in CONFIGS.glob("*.py")} == set(VARIANTS)
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
    spec = importlib.util.spec_from_file_location(file, CONFIGS / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert f"--config configs/{file}.py --workdir" in module.__doc__


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        golden_file(name).write_text(dump(name))
