"""The processes of a run end together, with one sentence; over a store in memory."""

import json
import socket
import threading
import time

import jax
import pytest
from tiny_workload import tiny_config

from echo_jax.terminal import Notes
from echo_jax.training.processes import Peers, connected

LOST = 75


class Store:
    """What jax's runtime gives a process of its key-value store."""

    def __init__(self):
        self.values = {}
        self.is_answering = True

    def _ask(self, is_fine=True):
        if not (self.is_answering and is_fine):
            raise jax.errors.JaxRuntimeError("refused")

    def key_value_set(self, key, value, allow_overwrite=False):
        self._ask(allow_overwrite or key not in self.values)
        self.values[key] = value

    def key_value_try_get(self, key):
        self._ask(key in self.values)
        return self.values[key]

    def key_value_dir_get(self, folder):
        self._ask()
        return [(k, v) for k, v in self.values.items() if k.startswith(folder)]


class Ended(BaseException):
    """Stands for the end of a process."""


class Run:
    """Three processes whose threads are turned by hand, and their clock."""

    def __init__(self):
        self.seconds, self.turns = 0.0, 0
        self.store = Store()
        self.each = [
            Peers(self.store, number, 3, now=lambda: self.seconds)
            for number in range(3)
        ]

    def pass_time(self, seconds):
        self.seconds += seconds

    def turn(self, *processes, seconds=2.0):
        """Lets processes give a sign; returns how those end that do."""
        self.seconds += seconds
        self.turns += 1
        ends = {}
        for process in processes:
            try:
                self.each[process].beat(self.turns)
            except Ended as end:
                ends[process] = end.args
        return ends

    def begin(self, process, call, *args):
        """Calls what waits for the others, in a thread of its own."""
        caller = threading.Thread(target=call, args=args, daemon=True)
        caller.start()
        peer = self.each[process]
        while not peer.has_ended and peer.silent_s == 60.0:
            pass
        return caller


@pytest.fixture
def run(monkeypatch):
    def end(status, message, *, resumes):
        raise Ended(status, message, resumes)

    run = Run()
    monkeypatch.setattr("echo_jax.terminal.ending.owns_process", lambda: True)
    monkeypatch.setattr("echo_jax.terminal.ending.end", end)
    monkeypatch.setattr(time, "sleep", run.pass_time)
    return run


def test_all_end_as_the_first_that_tells(run):
    run.turn(0, 1, 2)
    one = run.begin(1, run.each[1].tell, 143, "process 1 of 3 waited")
    other = run.begin(2, run.each[2].tell, 9, "process 2 of 3 did, too")
    # Both that have told leave by themselves.
    assert run.turn(1, 2, 0) == {0: (143, "process 1 of 3 waited", True)}
    for caller in (one, other):
        caller.join()
    assert all(each.has_ended for each in run.each)


def test_who_is_silent_is_named_by_the_first_to_all(run):
    while not (ends := run.turn(0, 2)):
        assert run.seconds < 100
    assert run.seconds > 60
    status, said, resumes = ends[0]
    assert (status, resumes) == (LOST, True)
    assert said.startswith("process 1 of 3 gives no sign since ")
    assert run.turn(2) == {2: ends[0]}


def test_a_first_process_that_does_not_answer_is_named_by_all(run):
    run.turn(0, 1, 2)
    run.store.is_answering = False
    for process in (1, 2):
        run.each[process].look()
    run.seconds += 61
    for process in (1, 2):
        with pytest.raises(Ended, match=f"{LOST}.*process 0 of 3 gives no sign since "):
            run.each[process].look()


def test_a_process_that_is_aborted_says_so_if_the_first_one_is_gone(run):
    with socket.create_server(("127.0.0.1", 0)) as first:
        address = "{}:{}".format(*first.getsockname())
        caller = threading.Thread(target=run.each[2].before_abort, args=(address,))
        caller.start()
        call, _ = first.accept()
        with call:
            call.send(b"-")
            caller.join()  # It is aborted for another reason.
        # As it is being killed, the first one takes calls that it does not answer.
        end_of_first = threading.Timer(0.2, first.close)
        end_of_first.start()
        with pytest.raises(Ended) as dying:
            run.each[2].before_abort(address)
        end_of_first.join()
    with pytest.raises(Ended) as gone:
        run.each[2].before_abort(address)
    for end in (dying, gone):
        status, said, resumes = end.value.args
        assert (status, resumes) == (LOST, True)
        assert said.startswith("process 0 of 3 does not answer any more: ")


def test_an_error_is_told_by_its_first_line_and_a_goodbye_comes_last(run):
    run.each[2].start()
    run.each[2].fail(ValueError("no such file\nand more"))
    ends = run.turn(0, 1)
    assert ends[0] == ends[1] == (1, "process 2 of 3 failed: no such file", False)
    # The first process waits until this one has said it, too.
    sign = "echo_jax/signs/2"
    assert json.loads(run.store.values[sign])[0] is not None
    run.each[2].leave_ended()
    assert json.loads(run.store.values[sign])[0] is None


def test_what_one_waits_for_is_shown_by_the_first_once(run):
    shown = []
    run.each[0].shared_note(shown.append)("its own")
    run.each[2].shared_note(shown.append)("waits for a batch")
    for _ in range(2):
        run.turn(2, 0, 1)
    assert shown == ["its own", "process 2 of 3 waits for a batch"]


def test_a_signal_is_heard_by_all_once(run):
    heard = []
    for number, each in enumerate(run.each):
        each.when_stop_asked(lambda number=number: heard.append(number))
    run.turn(0, 1, 2)
    assert heard == []
    # jax's preemption service says so.
    run.store.values["RECEIVED_PREEMPTION_NOTICE"] = "2026-11-22"
    for _ in range(3):
        run.turn(0, 1, 2)
    assert heard == [0, 1, 2]


@pytest.fixture
def slurm(monkeypatch):
    """The environment of the first of four tasks."""
    tasks = {"NTASKS": "4", "PROCID": "0", "STEP_NODELIST": "node[1-2]"}
    for name, value in tasks.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return monkeypatch


NAMES = "SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_NODELIST=node[1-2]"
FLAG = "--config.distributed.detect=False"


def test_who_waits_for_others_says_what_speaks_of_them_and_how_to_ignore_it(slurm):
    shown, is_said = [], threading.Event()
    slurm.setattr(Notes, "note", lambda _, text: shown.append(text) or is_said.set())
    slurm.setattr("echo_jax.terminal.notes.pauses", lambda silent_s: iter([0.0]))
    slurm.setattr(jax.distributed, "initialize", lambda **given: is_said.wait(5.0))
    with connected(tiny_config()):
        assert all(each in "".join(shown) for each in (NAMES, FLAG))


@pytest.mark.parametrize(
    ("tasks", "count"), [("4", None), ("2(x2)", 4), ("2(x3),1", 7), ("many", None)]
)
def test_tasks_are_read_in_the_short_form_of_slurm(slurm, tasks, count):
    slurm.setenv("SLURM_NTASKS", tasks)
    found = []
    slurm.setattr(jax.distributed, "initialize", lambda **given: found.append(given))
    with connected(tiny_config()):
        assert found[0].get("num_processes") == count  # None: jax reads it.


@pytest.mark.parametrize("error", [ValueError("int: 'many'"), RuntimeError("TIMEOUT")])
def test_processes_that_cannot_be_connected_are_named(slurm, error):
    def initialize(**given):
        raise error

    slurm.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(type(error)) as said, connected(tiny_config()):
        pass
    assert all(each in str(said.value) for each in (NAMES, str(error), FLAG))
