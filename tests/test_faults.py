"""A trial of every campaign of faults, and that campaigns see what fails."""

import ctypes
import dataclasses
import itertools
import json
import random
import signal
import time
from collections import Counter

import jax
import pytest
from slow_cases import slow_but_for

from benchmarks.faults import stops
from benchmarks.faults.__main__ import FAULTS, main
from benchmarks.faults.campaign import (
    Bench,
    Fault,
    NotHereError,
    Verdict,
    held,
    run_campaign,
    run_trial,
)
from benchmarks.faults.damage import flip_or_cut, mutate
from benchmarks.faults.processes import Ended, isolated
from echo_jax.training.records import code_commit
from echo_jax.training.saving import Checkpoints, DamagedCheckpointError

# Kinds of which a trial starts commands, for seconds each. Those that take longer are
# campaigns alone: tests of their own look at workers, devices and several processes.
COMMANDS = {
    "F1": ("host", "Grain", "device", "stochastic", "adaptive", "study", "prepare"),
    "F2": ("host", "prepare"),
    "F3": ("host, disk", "host, limit", "host, small disk"),
    "F4": ("resumed run",),
    "F7": ("loss, host", "loss, device"),
    "F11": ("report", "train", "export", "search", "shards of WebDataset"),
}
SLOW = [("F1", "adaptive"), ("F3", "host, limit"), ("F11", "train")]


def campaign(fault, folder, trials, kinds):
    """Runs trials of some kinds; returns their counts, and what failed."""
    chosen = {k: t for k, t in fault.trials.items() if k in kinds}
    fault = dataclasses.replace(fault, trials=chosen)
    bench = Bench(folder)
    (*_, tallies) = run_campaign(fault, 7, bench, trials=trials, on_skip=skip)
    counts = sum((tally.counts for tally in tallies.values()), start=Counter())
    return counts, [each for tally in tallies.values() for each in tally.failures]


def skip(kind, why):
    pytest.skip(f"{kind}: {why}")


@pytest.mark.parametrize(
    "name", ["F7", "F12", pytest.param("F4", marks=pytest.mark.slow)]
)
def test_everything_holds(tmp_path, name):
    kinds = FAULTS[name].trials.keys() - {*COMMANDS.get(name, ())}
    found = campaign(FAULTS[name], tmp_path, len(kinds), kinds)
    assert found == ({Verdict.HELD: len(kinds)}, [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=pytest.mark.slow if (name, kind) in SLOW else pytest.mark.exhaustive,
        )
        for name in COMMANDS
        for kind in COMMANDS[name]
    ],
)
def test_every_command_holds(tmp_path, name, kind):
    found = campaign(FAULTS[name], tmp_path, 1, [kind])
    assert found == ({Verdict.HELD: 1}, [])


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


def _sleep():
    time.sleep(1000)


def _fail():
    raise KeyError("nobody's sentence")


def _say():
    raise DamagedCheckpointError("it is damaged")


def _crash():
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("function", "limit_s", "verdict"),
    [
        (_sleep, 0.5, Verdict.HUNG),
        (_fail, 100, Verdict.TRACEBACK),
        (_crash, 100, Verdict.TRACEBACK),
        (_say, 100, Verdict.HELD),
    ],
)
def test_what_a_parser_may_not_do_is_seen(function, limit_s, verdict):
    assert isolated(function, limit_s=limit_s).verdict is verdict


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (lambda rng, bench: _sleep(), Verdict.HUNG),
        (lambda rng, bench: _fail(), Verdict.TRACEBACK),
        (lambda rng, bench: held(), Verdict.HELD),
    ],
)
def test_a_trial_ends_in_time_and_never_the_campaign(tmp_path, trial, verdict):
    fault = Fault("X", "planted", "never", {"a": trial}, limit_s=0.2)
    assert run_trial(fault, 0, 0, Bench(tmp_path)).verdict is verdict
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("status", "output", "is_unsaid"),
    [
        (1, "echo-jax train: a sentence", False),
        (1, "Traceback (most recent call last):\n  ...", True),
        (1, "echo-jax train: unexpected KeyError; this may be a bug: run", True),
        (1, "echo-jax train: a file cannot be written: No space left", True),
        (-9, "", False),
        (-11, "", True),
    ],
)
def test_what_a_command_says_is_looked_at(status, output, is_unsaid):
    assert bool(Ended(status, output, 0).unsaid()) == is_unsaid


def test_what_cannot_be_run_here_is_said_once_and_does_not_count(tmp_path):
    def refuse(rng, bench):
        raise NotHereError("no disk")

    trials = {"a": refuse, "b": lambda *_: held()}
    fault, skipped = Fault("X", "planted", "never", trials), []
    options = {"trials": 4, "on_skip": lambda *what: skipped.append(what)}
    (*_, tallies) = run_campaign(fault, 7, Bench(tmp_path), **options)
    assert skipped == [("a", "no disk")]
    assert (tallies["a"].trials, tallies["b"].trials) == (0, 2)


def test_a_trial_follows_from_seed_and_number(tmp_path):
    drawn = []
    trial = lambda rng, bench: drawn.append(rng.random()) or held()  # noqa: E731
    fault = Fault("X", "planted", "never", dict.fromkeys("ab", trial))
    for seed, number in ((0, 3), (0, 3), (1, 3), (0, 4)):
        run_trial(fault, seed, number, Bench(tmp_path))
    assert drawn[0] == drawn[1] and len({*drawn}) == 3
    assert [fault.kind(number) for number in range(3)] == ["a", "b", "a"]
    for seed in range(200):
        data, what = flip_or_cut(b"a line\nanother\n", random.Random(seed))
        assert data != b"a line\nanother\n" and what
        mutate(b'{"a": 12}', random.Random(seed))


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


def test_kills_that_struck_are_counted_and_old_records_have_none(tmp_path, monkeypatch):
    """A kill that came after the end of the command is none."""
    statuses = itertools.cycle([-signal.SIGKILL, 0])
    monkeypatch.setattr(stops, "command", lambda *_, **__: Ended(next(statuses), "", 0))

    def kill(rng, bench):
        whole = stops.Whole(tmp_path, writes=3, seconds=0.0)
        rng.random = lambda: 0.0  # before a write, not at a moment
        for _ in range(4):
            stops._kill_once([], tmp_path / "log", whole, rng, bench)
        return held()

    fault = dataclasses.replace(FAULTS["F1"], trials={"host": kill})
    monkeypatch.setitem(FAULTS, "F1", fault)
    docs, record = tmp_path / "faults.md", tmp_path / "out.json"
    argv = ["F1", "--docs", str(docs)]
    assert main([*argv, "--trials", "2", "--json", str(record)]) == 0
    assert "| F1 | host | 2 | 4 | 2 |" in docs.read_text()
    content = json.loads(record.read_text())
    for each in content["campaigns"]:
        del each["kills"]
    record.write_text(json.dumps(content))
    main([*argv, "--trials", "0", "--add", str(record)])
    assert "| F1 | host | 2 |  | 2 |" in docs.read_text()
