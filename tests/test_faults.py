"""A trial of every campaign of faults, and that campaigns see what fails."""

import dataclasses
import json
from collections import Counter

import jax
import pytest
from slow_cases import slow_but_for

from benchmarks.faults import campaign as campaigns
from benchmarks.faults.__main__ import FAULTS, main
from benchmarks.faults.campaign import Bench, Verdict
from echo_jax.training.records import code_commit
from echo_jax.training.saving import Checkpoints

# Kinds of which a trial starts commands, for seconds each. Those that take longer are
# campaigns alone: tests of their own look at workers, devices and several processes.
COMMANDS = {
    "F1": "host|Grain|device|stochastic|adaptive|study|prepare",
    "F2": "host|prepare",
    "F3": "host, disk|host, limit|host, small disk",
    "F4": "resumed run",
    "F7": "loss, host|loss, device",
    "F11": "report|train|export|search|shards of WebDataset",
}
COMMANDS = [(name, kind) for name in COMMANDS for kind in COMMANDS[name].split("|")]
SLOW = [("F3", "host, limit"), ("F11", "train")]


def campaign(fault, folder, trials, kinds):
    """Runs trials of some kinds; returns their counts, and what failed."""
    chosen = {k: t for k, t in fault.trials.items() if k in kinds}
    fault = dataclasses.replace(fault, trials=chosen)
    bench = Bench(folder)
    (*_, tallies) = campaigns.run_campaign(fault, 7, bench, trials=trials, on_skip=skip)
    counts = sum((tally.counts for tally in tallies.values()), start=Counter())
    return counts, [each for tally in tallies.values() for each in tally.failures]


def skip(kind, why):
    pytest.skip(f"{kind}: {why}")


@pytest.mark.parametrize("name", slow_but_for(["F7", "F12"], ["F4", "F7", "F12"]))
def test_everything_holds(tmp_path, name):
    kinds = {kind for kind in FAULTS[name].trials if (name, kind) not in COMMANDS}
    found = campaign(FAULTS[name], tmp_path, len(kinds), kinds)
    assert found == ({Verdict.HELD: len(kinds)}, [])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), SLOW)
def test_a_command_holds(tmp_path, name, kind):
    found = campaign(FAULTS[name], tmp_path, 1, [kind])
    assert found == ({Verdict.HELD: 1}, [])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kind"), sorted({*COMMANDS} - {*SLOW}))
def test_every_command_holds(tmp_path, name, kind):
    test_a_command_holds(tmp_path, name, kind)


@pytest.mark.parametrize("trials", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_what_a_disk_does_to_a_checkpoint_is_seen(tmp_path, trials):
    found = campaign(FAULTS["F4"], tmp_path, trials, ["checkpoint"])
    assert found == ({Verdict.HELD: trials}, [])


def test_a_checkpoint_that_comes_back_otherwise_is_silent(tmp_path, monkeypatch):
    restore = Checkpoints.restore_newest

    def restore_otherwise(*args):
        found = restore(*args)
        state = jax.tree.map(lambda x: x + x.dtype.type(1), found.state)
        return found._replace(state=state)

    monkeypatch.setattr(Checkpoints, "restore_newest", restore_otherwise)
    counts, failures = campaign(FAULTS["F4"], tmp_path, 1, ["checkpoint"])
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
    page = docs.read_text()
    assert f"--trials 4`, code of {code_commit() or 'no checkout'}\n" in page
    assert "| F4 | decision log | 2 |  | 2 | 0 | 0 | 0 | 0 | 0 |" in page
    assert "`python -m benchmarks.faults F4 --seed 5 --trial 1`" in page
    # It is run again as it was, and adds up with what was counted before.
    assert main(["F4", "--seed", "5", "--trial", "3"]) == 1
    assert main(["F4", "--seed", "5", "--trial", "2"]) == 0
    assert main([*argv, "--add", str(record), "--docs", str(docs)]) == 1
    assert "| F4 | decision log | 4 |  | 4 |" in docs.read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["F99"])
    assert "unknown: F99; use F1, " in capsys.readouterr().err
