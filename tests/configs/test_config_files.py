"""Configs that come with the package: found by name, listed, copied."""

import shutil
import tomllib
from pathlib import Path

import pytest

from echo_jax import cli
from echo_jax.config import files as config_files
from echo_jax.config import load_config
from echo_jax.config.files import copy_config, import_config, packaged_configs
from echo_jax.config.flags import load_with_flags

ROOT = Path(__file__).parents[2]
NAMES = [*packaged_configs()]
# Each with imports, or with a config that it loads, of another kind.
COPIED = ["lm", "shapes", "large_batch", "sweeps/coco_placement", "sweeps/s3_untuned"]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("empty_folder")
def test_a_name_means_a_config_that_comes_with_the_package():
    assert load_config("lm:tiny").updates == 60
    assert "arms" in load_config("sweeps/s1_placement:tiny")


def test_a_file_wins_over_a_name_and_a_folder_does_not(empty_folder):
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
        (".", "'.' is a folder; give PATH.py"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(name, said):
    with pytest.raises(FileNotFoundError, match=rf"^config .*{said}"):
        load_config(name)


def test_the_wheel_carries_the_configs_to_where_they_are_looked_for(
    tmp_path, monkeypatch
):
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    (source, target), *others = build["build"]["targets"]["wheel"][
        "force-include"
    ].items()
    assert not others
    shutil.copytree(ROOT / source, tmp_path / target)
    monkeypatch.setattr(config_files, "_PACKAGE", tmp_path / "echo_jax")
    assert list(packaged_configs()) == NAMES
    assert all(path.is_relative_to(tmp_path) for path in packaged_configs().values())
    assert load_config("sweeps/lm_buffer:tiny").base.updates == 60


@pytest.mark.parametrize("name", NAMES)
def test_a_config_names_its_variants(name):
    module = import_config(packaged_configs()[name])
    assert module.VARIANTS
    for variant in map(str, module.VARIANTS):
        module.get_config(variant)
    with pytest.raises(ValueError, match=", ".join(map(str, module.VARIANTS[:1]))):
        module.get_config("huge")


@pytest.mark.usefixtures("empty_folder")
def test_the_list_says_what_each_config_is_and_its_variants(capsys):
    assert cli.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == NAMES
    about = lines[lines.index("shapes") + 1]
    assert (
        about
        == "    A small ResNet on synthetic images of eight shapes, stored as JPEG."
    )
    assert lines[lines.index("quickstart") + 2] == "    :fed  :tiny  :which  :bursty"


def test_a_config_is_shown_as_flags_with_what_they_are(capsys):
    assert cli.main(["configs", "show", "lm:tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if line.startswith("--config.")]
    shown = load_with_flags("lm:tiny", [*flags])
    assert shown.to_dict() == load_config("lm:tiny").to_dict()
    at = lines.index("--config.init_from=")
    assert lines[at + 1].startswith("    A run folder, or a file of 'echo-jax export")
    assert cli.main(["configs", "show", "quickstart"]) == 0
    assert "--config.base.init_from=\n    A run folder" in capsys.readouterr().out
    assert cli.main(["configs", "show", "no"]) == 2


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_needs_nothing_of_the_package_s_configs(
    name, empty_folder, monkeypatch, capsys
):
    expected = load_config(f"{name}:tiny").to_dict()
    assert cli.main(["configs", "copy", name, "mine"]) == 0
    *_, command = capsys.readouterr().out.splitlines()
    verb = "study" if "arms" in expected else "train"
    assert command.startswith(f"echo-jax {verb} --config mine/{name}.py --workdir ")
    monkeypatch.setattr(config_files, "_PACKAGE", empty_folder)
    assert load_config(f"mine/{name}.py:tiny").to_dict() == expected


def test_a_copy_replaces_no_file_of_the_user_s(empty_folder, capsys):
    copies = copy_config("sweeps/s4_lag", "configs")
    assert [path.name for path in copies][:2] == ["s4_lag.py", "sweep_parts.py"]
    # The same again is no harm.
    assert copy_config("sweeps/s4_lag", "configs") == copies
    (empty_folder / "configs" / "echo_variants.py").write_text("mine = 1\n")
    (empty_folder / "configs" / "lm.py").unlink(missing_ok=True)
    assert cli.main(["configs", "copy", "lm"]) == 2
    assert "echo_variants.py is there, and is another file" in capsys.readouterr().err
    assert not (empty_folder / "configs" / "lm.py").exists()


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["copy", "quickstarts"], "'quickstarts' does not come with echo-jax; use one"),
        (["copy", "lm", "--all"], "unknown option '--all'"),
    ],
)
def test_a_copy_that_cannot_be_made_is_said_in_a_line(argv, said, capsys):
    assert cli.main(["configs", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echo-jax configs: ") and said in line
