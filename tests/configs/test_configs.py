"""Configs that come with the package: their records, their names, and copies of them.

Every config is a record of an experiment: it must not change unnoticed. `golden.json`
has the fields of `default_config`, those in which each config differs from it, and
those in which a variant differs from the plain config of its file. When a config is
changed on purpose, or `default_config` gets a field, write it and review it:

    python tests/configs/test_configs.py
"""

import ast
import functools
import json
import re
import tomllib
from pathlib import Path

import pytest

from echo_jax import cli
from echo_jax.config import (
    check_config,
    default_config,
    import_config,
    load_config,
    load_with_flags,
    packaged_configs,
)

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = Path(__file__).parent / "golden.json"
ABSENT = "absent"  # where a variant lacks a field of its file's plain config
# A file, and the variants that are recorded beside its plain config.
VARIANTS = {
    "cifar": ["cifar100,mobilenet", "tiny", "tiny,device"],
    "coco": ["tiny", "tiny,device"],
    "communication": ["echo", "tiny"],
    "imagenet": ["small", "tiny", "tiny,device"],
    "heat": ["adaptive", "spread", "tiny"],
    "large_batch": ["echo", "tiny"],
    "lm": [
        *("bytes", "c4", "crawl", "crawl,tiny", "example", "gpt2", "gpt2,tiny"),
        *("tiny", "tiny,device", "wikitext103", "wikitext2", "wikitext2,tiny"),
    ],
    "quickstart": ["bursty", "fed", "storage", "tiny", "which"],
    "shapes": ["tiny"],
    "sweeps/cifar_batch_size": ["512", "tiny"],
    "sweeps/cifar_buffer": ["tiny"],
    "sweeps/cifar_echo_factor": ["tiny"],
    "sweeps/cifar_placement": ["tiny"],
    "sweeps/coco_placement": ["tiny"],
    "sweeps/equal_budget": ["imagenet", "tiny"],
    "sweeps/imagenet_batch_size": ["4096", "tiny"],
    "sweeps/imagenet_echo_factor": ["seconds", "tiny", "tiny_seconds"],
    "sweeps/imagenet_placement": ["tiny"],
    "sweeps/lm_batch_size": ["64", "tiny"],
    "sweeps/lm_buffer": ["tiny"],
    "sweeps/lm_crawl": ["tiny"],
    "sweeps/lm_echo_factor": ["4096", "tiny"],
    "sweeps/lm_seconds": ["2", "8", "tiny"],
    "sweeps/s10_heat": ["tiny"],
    "sweeps/s9_photographs": ["tiny"],
    "sweeps/s10_seconds": ["fed", "tiny"],
    "sweeps/s1_placement": ["cifar", "tiny"],
    "sweeps/s2_factor": ["8", "128", "decay", "tiny"],
    "sweeps/s3_untuned": ["tiny"],
    "sweeps/s4_lag": ["8", "cifar", "long", "tiny"],
    "sweeps/s5_epochs": ["tiny"],
    "sweeps/s6_schedules": ["cifar", "decay", "tiny"],
    "sweeps/s7_communication": ["echo", "tiny"],
    "sweeps/s8_large_batch": ["tiny"],
}
# What the configs import.
NO_CONFIGS = {"echo_variants", "sweeps/rotations", "sweeps/sweep_parts"}
NAMES = [
    name
    for file, variants in VARIANTS.items()
    for name in (file, *(f"{file}:{variant}" for variant in variants))
]


def load(name):
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


def test_configs_are_the_golden_ones():
    found, stored = golden(), json.loads(GOLDEN.read_text())
    assert found.keys() == stored.keys()
    for name, expected in stored.items():
        assert found[name] == expected, name


def test_every_config_is_recorded_valid_and_locked():
    files = (path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.py"))
    names = {file.with_suffix("").as_posix() for file in files}
    assert names - NO_CONFIGS == {*VARIANTS} == {*packaged_configs()}
    for name in NAMES:
        config = load(name)
        assert config.is_locked, name
        check_config(config.base if "base" in config else config)


@pytest.mark.parametrize("file", VARIANTS)
def test_a_config_names_its_variants_and_the_command_that_runs_it(file):
    with pytest.raises(ValueError, match="variant 'huge' is unknown; use") as refused:
        load(f"{file}:huge")
    module = import_config(packaged_configs()[file])
    for variant in map(str, module.VARIANTS):
        assert variant in str(refused.value)
        module.get_config(variant)
    text = ast.get_docstring(ast.parse((CONFIGS / f"{file}.py").read_text()))
    assert f"--config configs/{file}.py --workdir" in text


# A study of a figure, the rows of the paper's file, and the arm of each variant there.
PAPER = [
    ("cifar_batch_size:128", "3c", "batch after before"),
    ("cifar_buffer", "3c", "batch_1 - before_10000"),
    ("cifar_echo_factor", "3c", "- - e02"),
    ("cifar_placement", "3c", "batch after before"),
    ("coco_placement", "3e", "batch after before"),
    ("imagenet_batch_size:256", "6b 256", "batch after before"),
    ("imagenet_batch_size:1024", "6b 1024", "batch after before"),
    ("imagenet_batch_size:4096", "6b 4096", "batch after before"),
    ("imagenet_batch_size:16384", "6b 16384", "batch after before"),
    ("imagenet_echo_factor", "4-fresh", "e02 e03 e04 e05"),
    ("imagenet_placement", "3d", "batch after before"),
    ("lm_batch_size:64", "6a 64", "batch example"),
    ("lm_batch_size:256", "6a 256", "batch example"),
    ("lm_batch_size:1024", "3a", "batch example"),
    ("lm_batch_size:4096", "6a 4096", "batch example"),
    ("lm_buffer", "7a", "batch_1 batch_10 batch_100 - - -"),
    ("lm_buffer", "7b", "example_100000 example_1000000 example_10000000"),
    ("lm_crawl", "3b", "batch example"),
    ("lm_echo_factor", "5a", "e02 e04 e08 e16"),
    ("lm_echo_factor:4096", "5b", "e02 e04 e08 e16"),
    ("s2_factor", "5a", "e2 e4 e8 e16"),
]


@pytest.mark.parametrize(("name", "figure", "arms"), PAPER)
def test_the_paper_s_values_are_those_of_its_figures(name, figure, arms):
    study = load(f"sweeps/{name}")
    key, _, size = figure.partition(" ")
    found = json.loads((ROOT / "results/paper/choi2019_figures.json").read_text())
    rows = [
        row for row in found[key] if row["e"] > 1 and size in ("", str(row["batch"]))
    ]
    expected = {
        arm: 1 / row["speedup_fresh"]
        for arm, row in zip(arms.split(), rows, strict=False)
        if arm != "-"
    }
    assert expected
    for arm, ratio in expected.items():
        assert study.paper[arm] == pytest.approx(ratio, abs=1e-3), arm
        assert arm in study.arms
    named = [each for each, *_ in PAPER]
    if named.count(name) == 1:
        assert {*study.paper} == {*expected}


def test_an_equal_budget_is_one_of_fresh_examples():
    for variant in ("lm", "imagenet"):
        study = load(f"sweeps/equal_budget:{variant}")
        budget = study.base.updates * study.base.batch_size
        for name, arm in study.arms.items():
            if name == "baseline":
                continue
            buffer = 0 if name == "batch" else study.base.echo.buffer
            uses = arm.updates * study.base.batch_size + buffer
            assert 0 <= budget - uses / arm.echo.factor < study.base.batch_size
        assert {*study.paper} == {*study.arms} - {"baseline"}


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_file_wins_over_a_name_and_a_folder_does_not(empty_folder):
    assert "arms" in load_config("sweeps/s1_placement:tiny")
    (empty_folder / "lm").mkdir()
    assert load_config("lm:tiny").updates == 60
    (empty_folder / "lm.py").write_text(
        "from echo_jax.config import default_config\n"
        "def get_config(variant=''):\n"
        "    return default_config()\n"
    )
    assert load_config("lm.py:tiny").updates == 1000


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quikstart", "did you mean 'quickstart', which comes with echo-jax?"),
        ("configs/lm.py", "did you mean 'lm', which comes with echo-jax?"),
        ("s1_placement:tiny", "did you mean 'sweeps/s1_placement', which comes"),
        ("nothing", "give PATH.py, or one that comes with echo-jax: cifar, coco, comm"),
        (".", "'.' is not a file at /.*; give PATH.py"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(name, said):
    with pytest.raises(FileNotFoundError, match=rf"^config .*{said}"):
        load_config(name)


def test_the_wheel_carries_the_configs_to_where_they_are_looked_for():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    carried = build["build"]["targets"]["wheel"]["force-include"]
    assert carried == {"configs": "echo_jax/configs"}


@pytest.mark.usefixtures("empty_folder")
def test_configs_are_listed_and_shown_with_what_they_are(capsys):
    def said(*argv):
        assert cli.main(["configs", *argv]) == 0
        return capsys.readouterr().out.splitlines()

    lines = said()
    assert {line for line in lines if not line.startswith(" ")} == {*VARIANTS}
    about = "    A small ResNet on synthetic images of eight shapes, stored as JPEG."
    assert lines[lines.index("shapes") + 1] == about
    assert (
        lines[lines.index("quickstart") + 2]
        == "    :tiny  :storage  :fed  :which  :bursty"
    )
    lines = said("show", "lm:tiny")
    flags = [line for line in lines if line.startswith("--config.")]
    assert load_with_flags("lm:tiny", flags).to_dict() == load("lm:tiny").to_dict()
    at = lines.index("--config.init_from=")
    assert lines[at + 1].startswith("    A run folder, or a file of 'echo-jax export")
    assert "--config.base.init_from=" in said("show", "quickstart")
    # Also those of a workload that nobody here knows.
    made = "c = default_config().unlock(); c.workload, c.model.rings = 'chess', 3"
    Path("own.py").write_text(
        "from echo_jax.config import default_config\n"
        f"def get_config():\n    {made}; return c\n"
    )
    lines = said("show", "own.py")
    assert "--config.model.rings=3" in lines and "    optimizer steps" in lines


# Each with imports, or with a config that it loads, of another kind.
@pytest.mark.parametrize("name", ["lm", "sweeps/coco_placement", "sweeps/s3_untuned"])
def test_a_copy_needs_nothing_of_the_package_s_configs(name, empty_folder, capsys):
    expected = load(f"{name}:tiny").to_dict()
    assert cli.main(["configs", "copy", name, "mine"]) == 0
    *copies, _, command = capsys.readouterr().out.splitlines()
    verb = "study" if "arms" in expected else "train"
    assert command.startswith(f"echo-jax {verb} --config mine/{name}.py --workdir ")
    assert load_config(f"mine/{name}.py:tiny").to_dict() == expected
    # All that the package has of the names in it is in the copy, too.
    text = "\n".join((empty_folder / copy).read_text() for copy in copies)
    needed = {*re.findall(r"(?m)^from (\w+) import", text)}
    needed |= {*re.findall(r'"(?:\w+/)*(\w+)\.py[:"]', text)}
    files = {path.stem for path in CONFIGS.rglob("*.py")}
    assert needed & files <= {Path(copy).stem for copy in copies}


@pytest.mark.usefixtures("empty_folder")
def test_a_copy_replaces_no_file_of_the_user_s(empty_folder, capsys):
    folder = empty_folder / "configs"
    for _ in range(2):  # The same again is no harm.
        assert cli.main(["configs", "copy", "lm"]) == 0
    capsys.readouterr()
    (folder / "echo_variants.py").write_text("mine = 1\n")
    (folder / "lm.py").unlink()
    for argv, said in (
        ("copy lm", "echo_variants.py is there, and is another file"),
        ("copy quickstarts", "'quickstarts' does not come with echo-jax; use one"),
        ("copy lm --all", "unknown option '--all'"),
        ("show no", "'no' is not a file"),
    ):
        assert cli.main(["configs", *argv.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("echo-jax configs: ") and said in line
    assert not (folder / "lm.py").exists()


def _on_one_line(found):
    return "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]"


if __name__ == "__main__":
    text = json.dumps(golden(), indent=1, sort_keys=True)
    # A list stands on one line.
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", _on_one_line, text)
    GOLDEN.write_text(text + "\n")
