"""What a command says while something is slow, by a clock that the tests set."""

import io
import itertools
import threading

import pytest
from rich.console import Console

from echo_jax.terminal import notes


class Clock:
    """Lets time pass where something is waited for; it is done at the end."""

    def __init__(self, done_s):
        self.now_s, self._done_s = 0.0, done_s
        self.said = []

    def wait(self, seconds):
        self.now_s = min(self.now_s + seconds, self._done_s)
        return self.now_s == self._done_s

    def say(self, text):
        self.said.append((self.now_s, text))


def test_what_takes_long_is_said_again_and_again_and_what_does_not_is_not():
    quick, slow = Clock(2.9), Clock(100.0)
    for clock in (quick, slow):
        notes.say_while_slow("compiling", clock.say, clock.wait)
    assert quick.said == []
    assert slow.said == [
        (3, "compiling ..."),
        (8, "compiling ... 8 s"),
        (18, "compiling ... 18 s"),
        (38, "compiling ... 38 s"),
        (78, "compiling ... 78 s"),
    ]


@pytest.mark.parametrize("silent_s", [0.0, 1.5, 2.9, 50.0])
def test_nobody_is_silent_for_longer_because_two_things_are_slow(silent_s):
    first, second, *later = itertools.islice(notes.pauses(silent_s), 12)
    assert 1 <= first <= 3 and (silent_s + first <= 4 or first == 1)
    assert second == 5
    assert all(a <= b <= 2 * a for a, b in itertools.pairwise([second, *later]))
    assert later[-1] == 60


def test_nothing_is_said_where_nobody_reads_on():
    said = []

    def say(text):
        said.append(text)
        raise BrokenPipeError

    notes.say_while_slow("compiling", say, lambda seconds: False)
    assert said == ["compiling ..."]


def test_lines_come_while_something_is_slow_and_none_after_it(monkeypatch):
    spoken = threading.Event()
    monkeypatch.setattr(notes, "pauses", lambda silent_s: iter([0.0, 0.0, 1000.0]))
    text = io.StringIO()
    said = notes.Notes(Console(file=text), mark="[held]")
    note = said.note
    monkeypatch.setattr(said, "note", lambda line: (note(line), spoken.set()))
    with said.slow("reading"):
        assert spoken.wait(60)
    num_threads = threading.active_count()
    assert text.getvalue().splitlines()[0].endswith("  [held]  reading ...")
    with said.slow("reading something else"):
        assert threading.active_count() == num_threads + 1
    assert threading.active_count() == num_threads
