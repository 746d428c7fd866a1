"""A profile of a few updates: when it is made, and that the run is the same."""

import contextlib
import signal

import pytest
from jax.profiler import ProfileData
from tiny_workload import rows_of, run, stop_at

from echo_jax.training import Interrupted

pytestmark = pytest.mark.usefixtures("compiled_soon")

WINDOW = {"profile__start": 2, "profile__updates": 3}


def traces(workdir):
    return sorted(workdir.glob("profile/process-0/plugins/profile/*/*.xplane.pb"))


def updates_in(workdir):
    """The number of updates that the trace of a run holds.

    Not which ones: to read an event's numbers ends the process in jax 0.12.
    """
    (file,) = traces(workdir)
    return sum(
        event.name == "training update"
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
    )


def test_a_profile_holds_its_updates_and_changes_nothing_of_the_run(tmp_path, capsys):
    options = {"echo__factor": 2.5, "mesh__data": 8}
    plain = run(tmp_path / "plain", **options, profile__start=2)
    profiled = run(tmp_path / "profiled", **options, **WINDOW)
    assert "profiled update 3 to 5; see" in capsys.readouterr().out
    assert updates_in(tmp_path / "profiled") == 3
    assert not (tmp_path / "plain" / "profile").exists()
    for name in ("params_sha256", "updates", "fresh", "repeats", "final"):
        assert profiled[name] == plain[name]
    counts = [
        [
            [row.get(name) for name in ("kind", "updates", "fresh", "repeats", "loss")]
            for row in rows_of(tmp_path / name)
        ]
        for name in ("plain", "profiled")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("start", "updates", "steps", "found"),
    [
        # It ends where the loop evaluates.
        (3, 5, 1, "profiled update 4 to 6"),
        # Groups of 4 are the first and the last; between them it is one by one.
        (2, 1, 4, "profiled update 5 to 5"),
        (7, 2, 4, "profiled update 8 to 12"),
        (9, 2, 4, "nothing was profiled"),
    ],
)
def test_it_holds_whole_groups_of_updates(
    tmp_path, capsys, start, updates, steps, found
):
    groups = {"dispatch__mode": "unroll", "dispatch__steps": 4} if steps > 1 else {}
    run(tmp_path, **groups, profile__start=start, profile__updates=updates)
    assert found in capsys.readouterr().out


def test_a_run_that_resumes_behind_it_keeps_it(tmp_path):
    options = {"echo__factor": 2.5, **WINDOW}
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(8, signal.SIGTERM), **options)
    (trace,) = traces(tmp_path)
    # Who looks at a run is no part of it: it may stop looking.
    run(tmp_path, **{**options, "profile__updates": 0})
    assert traces(tmp_path) == [trace]


def test_a_run_that_stops_within_it_has_none(tmp_path):
    options = {"echo__factor": 2.5, **WINDOW}
    with pytest.raises(Interrupted) as caught:
        run(tmp_path, on_batch=stop_at(4, signal.SIGTERM), **options)
    assert 2 < caught.value.update < 5
    assert traces(tmp_path) == []
    run(tmp_path, **options)
    assert traces(tmp_path) == []


def test_updates_that_are_done_again_are_profiled_again(tmp_path):
    def killed(number):
        if number == 8:
            raise OSError("killed")

    with contextlib.suppress(OSError):
        run(tmp_path, echo__factor=2.5, on_batch=killed, **WINDOW)
    (before,) = traces(tmp_path)
    stamp = before.stat().st_mtime_ns
    # Nothing was saved, so it starts anew.
    run(tmp_path, echo__factor=2.5, **WINDOW)
    assert [path.stat().st_mtime_ns > stamp for path in traces(tmp_path)] == [True]
