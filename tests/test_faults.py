"""A trial of each cheap kind holds, and campaigns see each way to fail."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.faults import damaged, hostile, runs, stops
from benchmarks.faults.__main__ import FAULTS, main
from benchmarks.faults.campaign import Bench, Fault, Verdict, run_trial
from echo_jax import cli
from echo_jax.training.records import code_commit

CHEAP = [
    ("F1", "prepare"),
    ("F11", "archive"),
    *(("F6", k) for k in FAULTS["F6"].trials),
]
# These take several seconds each; the command runs all others.
TRAINED = [("F2", "host"), ("F3", "host, limit"), ("F4", "checkpoint"), ("F5", "host")]


class Verify(runs.Prepare):
    """Checks a prepared folder: no damage of a shard is without consequence."""

    def argvs(self, bench, folder):
        return [["prepare", "verify", str(self.make_sources(bench))]]

    def same_end(self, folder, other):
        return False


def verify(folder):
    return Verify("verify", lambda bench: folder, "")


read_damaged = partial(damaged.read, runs.PREPARE, "*.arrayrecord", verify)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


def outcome_of(trial, bench):
    return run_trial(Fault("F", "a fault", {"a kind": trial}), 7, 0, bench)


def test_a_damaged_shard_is_seen(bench):
    outcome = outcome_of(read_damaged, bench)
    assert outcome.verdict is Verdict.HELD, outcome.note


@pytest.mark.parametrize(("name", "kind"), CHEAP)
def test_a_trial_holds(bench, name, kind):
    outcome = outcome_of(FAULTS[name].trials[kind], bench)
    assert outcome.verdict is Verdict.HELD, outcome.note


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(("name", "kind"), TRAINED)
def test_a_trial_of_a_run_holds(bench, name, kind):
    outcome = outcome_of(FAULTS[name].trials[kind], bench)
    assert outcome.verdict is Verdict.HELD, outcome.note


def prepare_otherwise(argv):
    return cli.main([*argv, "--shard-mb", "1"])


def see_nothing(argv):
    return 0


def refuse_without_name(argv):
    print("some file is damaged")
    return 1


def crash(argv):
    raise KeyError("nobody's sentence")


def use_all_memory(argv):
    bytearray(hostile._MEMORY_BYTES * 2)


def write_outside(argv):
    (Path(argv[2]).parents[1] / "home" / "new").touch()


@pytest.mark.parametrize(
    ("trial", "broken", "verdict"),
    [
        (partial(stops.kill, runs.PREPARE), prepare_otherwise, Verdict.WRONG),
        (read_damaged, see_nothing, Verdict.SILENT),
        (partial(hostile.fuzz, "tar"), refuse_without_name, Verdict.TRACEBACK),
        (partial(hostile.fuzz, "tar"), crash, Verdict.TRACEBACK),
        (partial(hostile.fuzz, "tar"), use_all_memory, Verdict.TRACEBACK),
        (hostile.archive, write_outside, Verdict.ESCAPED),
    ],
)
def test_a_broken_command_is_seen(bench, monkeypatch, trial, broken, verdict):
    # What trials compare with comes from the command as it is.
    assert outcome_of(trial, bench).verdict is Verdict.HELD
    monkeypatch.setattr(runs, "done", partial(runs.done, main=broken))
    assert outcome_of(trial, bench).verdict is verdict


def fail(rng, bench):
    raise KeyError("nobody's sentence")


def test_the_command_counts_and_says(tmp_path, capsys, monkeypatch):
    kinds = {"list": lambda rng, bench: hostile.held_if(True, "fine"), "broken": fail}
    monkeypatch.setitem(FAULTS, "F4", Fault("F4", "a fault", kinds))
    record = tmp_path / "out.json"
    argv = ["F4", "--seed", "5", "--trials", "4", "--json", str(record)]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "F4, broken: traceback: KeyError" in said
    assert "python -m benchmarks.faults F4 --seed 5 --trial 3" in said
    found = json.loads(record.read_text())
    assert [each["held"] for each in found["campaigns"]] == [2, 0]
    assert [each["traceback"] for each in found["campaigns"]] == [0, 2]
    assert found["commit"] == code_commit()
    # It is run again as it was.
    assert main(["F4", "--seed", "5", "--trial", "3"]) == 1
    assert main(["F4", "--seed", "5", "--trial", "2"]) == 0
