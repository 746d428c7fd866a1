"""A study with an arm that diverges: marked, kept, and not in the way of the others."""

import dataclasses
import json

import pytest
from ml_collections import ConfigDict
from tiny_workload import make_workload, tiny_config

from echo_jax import arms, refusals, runs
from echo_jax.cli import report_command
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import unseal
from echo_jax.training.finite import NonFiniteLossError

ARMS = {"hot": {"optim": {"lr": 1e30}}, "last": {}}


def build(config):
    workload = make_workload(config)
    return dataclasses.replace(workload, metadata={"data": {"synthetic": True}})


def study(updates=6):
    base = tiny_config(updates=updates, log_every=2, eval_every=2, target=1e-9)
    return ConfigDict(
        {"name": "two", "base": base.to_dict(), "arms": ARMS, "storage_ratio": 0.0}
    )


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(refusals, "build", build)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "build", build)
        runs.run_study(study(), folder)
    return folder


def test_a_diverged_arm_is_written_down_and_the_next_one_finishes(diverged):
    assert json.loads((diverged / "last" / "summary.json").read_text())["updates"] == 6
    assert not (diverged / "last" / "diverged.json").exists()
    assert not (diverged / "hot" / "summary.json").exists()
    content = json.loads((diverged / "hot" / "diverged.json").read_text())
    assert unseal(content)["update"] == 2
    with pytest.raises(ValueError, match="checksum"):
        unseal({**content, "update": 3})


def test_a_study_that_is_repeated_trains_no_diverged_arm_again(
    diverged, monkeypatch, capsys
):
    def train(config, *others):
        assert config.optim.lr != 1e30
        return train_checked(config, *others)

    train_checked = arms.train_checked
    monkeypatch.setattr(arms, "train_checked", train)
    runs.run_study(study(), diverged)
    assert "hot diverged at update 2: the study marks it" in capsys.readouterr().out
    # One that ends before it diverges is another matter.
    assert arms.read_diverged(run_folder(diverged / "hot"), study().base) == 2
    assert arms.read_diverged(run_folder(diverged / "hot"), study(1).base) is None


def test_table_page_figure_and_terminal_say_when_an_arm_diverged(diverged, capsys):
    report_command.show([run_folder(diverged)], run_folder(diverged))
    printed = " ".join(capsys.readouterr().out.split())
    assert "hot diverged: its loss" in printed and "from update 2 on" in printed
    rows = (diverged / "table.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith("| hot |")]
    assert "| — | diverged at update 2 | — | — |" in row
    assert "<td>diverged at update 2</td>" in (diverged / "report.html").read_text()
    figure = (diverged / "figure.svg").read_text()
    assert "<!-- hot (x: diverged at update 2) -->" in figure


def test_a_run_alone_that_diverges_still_fails(tmp_path):
    config = study().base
    config.optim.lr = 1e30
    with pytest.raises(NonFiniteLossError, match="of update 2 is not finite"):
        runs.run_train(config, tmp_path)
    assert not (tmp_path / "diverged.json").exists()
