"""A trial of campaigns of faults, and that campaigns see what fails."""

import dataclasses
import json
from collections import Counter

import jax
import pytest

from benchmarks.faults import campaign as campaigns
from benchmarks.faults.__main__ import FAULTS, main
from benchmarks.faults.campaign import Bench, Verdict
from echo_jax.training.records import code_commit
from echo_jax.training.saving import Checkpoints

# Kinds whose trials start commands, for seconds each.
COMMANDS = {"resumed run", "loss, host", "loss, device"}


def campaign(name, folder, trials, kinds):
    fault = FAULTS[name]
    chosen = {k: t for k, t in fault.trials.items() if k in kinds}
    fault = dataclasses.replace(fault, trials=chosen)
    bench = Bench(folder)
    (*_, tallies) = campaigns.run_campaign(fault, 7, bench, trials=trials, on_skip=skip)
    counts = sum((tally.counts for tally in tallies.values()), start=Counter())
    return counts, [each for tally in tallies.values() for each in tally.failures]


def skip(kind, why):
    pytest.skip(f"{kind}: {why}")


@pytest.mark.parametrize(
    "name", ["F7", "F12", pytest.param("F4", marks=pytest.mark.slow)]
)
def test_everything_holds(tmp_path, name):
    kinds = {*FAULTS[name].trials} - COMMANDS
    found = campaign(name, tmp_path, len(kinds), kinds)
    assert found == ({Verdict.HELD: len(kinds)}, [])


# The others are run by the command, `python -m benchmarks.faults`.
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_a_command_holds(tmp_path):
    found = campaign("F3", tmp_path, 1, ["host, limit"])
    assert found == ({Verdict.HELD: 1}, [])


def test_what_a_disk_does_to_a_checkpoint_is_seen(tmp_path):
    found = campaign("F4", tmp_path, 10, ["checkpoint"])
    assert found == ({Verdict.HELD: 10}, [])


def test_a_checkpoint_that_comes_back_otherwise_is_silent(tmp_path, monkeypatch):
    restore = Checkpoints.restore_newest

    def restore_otherwise(*args):
        found = restore(*args)
        state = jax.tree.map(lambda x: x + x.dtype.type(1), found.state)
        return found._replace(state=state)

    monkeypatch.setattr(Checkpoints, "restore_newest", restore_otherwise)
    counts, failures = campaign("F4", tmp_path, 1, ["checkpoint"])
    assert counts == {Verdict.SILENT: 1}
    assert [each["trial"] for each in failures] == [0]


def _fail():
    raise KeyError("nobody's sentence")


def test_the_command_counts_says_and_documents(tmp_path, capsys, monkeypatch):
    fault = FAULTS["F4"]
    broken = {**fault.trials, "records": lambda rng, bench: _fail()}
    kinds = {kind: broken[kind] for kind in ("decision log", "records")}
    monkeypatch.setitem(FAULTS, "F4", dataclasses.replace(fault, trials=kinds))
    docs, record = tmp_path / "faults.md", tmp_path / "out.json"
    argv = ["F4", "--seed", "5", "--trials", "4"]
    assert main([*argv, "--json", str(record), "--docs", str(docs)]) == 1
    said = capsys.readouterr().out
    assert "python -m benchmarks.faults F4 --seed 5 --trial 3" in said
    found = json.loads(record.read_text())
    assert [each["traceback"] for each in found["campaigns"]] == [0, 2]
    assert found["commit"] == code_commit()
    assert "| F4 | decision log | 2 |  | 2 | 0 | 0 | 0 | 0 | 0 |" in docs.read_text()
    # It is run again as it was, and adds up with what was counted before.
    assert main(["F4", "--seed", "5", "--trial", "3"]) == 1
    assert main([*argv, "--add", str(record), "--docs", str(docs)]) == 1
    assert "| F4 | decision log | 4 |  | 4 |" in docs.read_text()
