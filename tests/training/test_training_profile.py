"""A profile of a few updates: what it measures, and that the run is the same."""

import contextlib
import json
import signal

import pytest
from tiny_workload import rows_of, run, stop_at

from echo_jax.files.json_files import unseal
from echo_jax.training import Interrupted
from echo_jax.training.xla import profile
from echo_jax.training.xla.collectives import Op, Trace

pytestmark = pytest.mark.usefixtures("compiled_soon")

WINDOW = {"profile__start": 2, "profile__updates": 3}


def traces(workdir):
    return sorted(workdir.glob("profile/process-0/plugins/profile/*/*.xplane.pb"))


def test_eight_devices_spend_some_time_in_collectives(tmp_path, capsys):
    found = run(tmp_path, mesh__data=8, **WINDOW)["profile"]
    by_device = found["collective_fraction_by_device"]
    assert (found["first_update"], found["updates"], found["devices"]) == (3, 3, 8)
    assert len(by_device) == 8
    assert all(0 < fraction < 1 for fraction in by_device)
    assert found["collective_fraction"] == pytest.approx(sum(by_device) / 8)
    assert 0 < found["exposed_fraction"] <= found["collective_fraction"]
    assert found["seconds"] > 0
    assert len(traces(tmp_path)) == 1
    share = f"{found['collective_fraction']:.1%}"
    assert f"profiled update 3 to 5: {share} of the time in" in capsys.readouterr().out


def test_one_device_spends_none(tmp_path):
    found = run(tmp_path, mesh__data=1, **WINDOW)["profile"]
    assert found["collective_fraction"] == found["exposed_fraction"] == 0
    assert found["collective_fraction_by_device"] == [0]


def test_a_profile_changes_nothing_of_the_run(tmp_path):
    options = {"echo__factor": 2.5, "mesh__data": 8}
    plain = run(tmp_path / "plain", **options, profile__start=2)
    profiled = run(tmp_path / "profiled", **options, **WINDOW)
    assert plain["profile"] is None
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


def test_it_ends_where_the_loop_evaluates(tmp_path):
    found = run(tmp_path, profile__start=3, profile__updates=5)["profile"]
    assert (found["first_update"], found["updates"]) == (4, 3)


@pytest.mark.parametrize(
    ("start", "updates", "window"),
    [(2, 1, (5, 1)), (7, 2, (8, 5)), (9, 2, None)],
    ids=["starts later", "ends later", "never starts"],
)
def test_it_holds_whole_groups_of_updates(tmp_path, capsys, start, updates, window):
    """Groups of 4 are the first and the last; between them it is one by one."""
    found = run(
        tmp_path,
        dispatch__mode="unroll",
        dispatch__steps=4,
        profile__start=start,
        profile__updates=updates,
    )["profile"]
    assert window == (found and (found["first_update"], found["updates"]))
    assert ("nothing was profiled" in capsys.readouterr().out) == (window is None)


def test_a_run_that_resumes_behind_it_keeps_it(tmp_path):
    options = {"echo__factor": 2.5, **WINDOW}
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(8, signal.SIGTERM), **options)
    found = unseal(json.loads((tmp_path / "profile" / "collectives.json").read_text()))
    (trace,) = traces(tmp_path)
    # Who looks at a run is no part of it: it may stop looking.
    summary = run(tmp_path, **{**options, "profile__updates": 0})
    assert summary["profile"] == found
    assert traces(tmp_path) == [trace]


def test_a_run_that_stops_within_it_has_none(tmp_path):
    options = {"echo__factor": 2.5, **WINDOW}
    with pytest.raises(Interrupted) as caught:
        run(tmp_path, on_batch=stop_at(4, signal.SIGTERM), **options)
    assert 2 < caught.value.update < 5
    assert traces(tmp_path) == []
    assert run(tmp_path, **options)["profile"] is None
    assert traces(tmp_path) == []


def test_updates_that_are_done_again_are_profiled_again(tmp_path):
    def killed(number):
        if number == 8:
            raise OSError("killed")

    for options in (WINDOW, {"profile__updates": 0}):
        folder = tmp_path / str(len(options))
        with contextlib.suppress(OSError):
            run(folder, echo__factor=2.5, on_batch=killed, **WINDOW)
        (before,) = traces(folder)
        stamp = before.stat().st_mtime_ns
        # Nothing was saved, so it starts anew.
        summary = run(folder, echo__factor=2.5, **options)
        after = traces(folder)
        if options is WINDOW:
            assert summary["profile"]["first_update"] == 3
            assert [path.stat().st_mtime_ns > stamp for path in after] == [True]
        else:
            assert summary["profile"] is None
            assert not (folder / "profile").exists()


@pytest.mark.parametrize(
    "trace", [None, Trace((0, 1), {}), Trace((0, 1), {"CPU:0": [Op(0, 1, True)]})]
)
def test_a_device_that_is_missing_means_that_nothing_is_known(
    tmp_path, monkeypatch, capsys, trace
):
    monkeypatch.setattr(profile, "read_trace", lambda file, mark: trace)
    found = run(tmp_path, mesh__data=8, **WINDOW)["profile"]
    assert found["updates"] == 3
    for name in ("", "_by_device"):
        assert found[f"collective_fraction{name}"] is None
    assert found["exposed_fraction"] is None
    assert "the trace tells nothing of collectives" in capsys.readouterr().out
