"""The scaling report: efficiencies by hand, groups, and the command."""

import pytest
from study_folders import change, make_run, read_table

from echo_jax.cli import main
from echo_jax.studies import StudyError, read_scaling

GROUP = "lm, echo: none, on TPU v5e, simulated storage"


@pytest.fixture
def make(tmp_path):
    """Makes a run of 300 updates on so many devices, at so many steps per second."""

    def make(name, devices, *, batch=10, steps_per_s=2.0, kind="TPU v5e", **facts):
        repeats = 100 if facts.get("factor", 1.0) > 1 else 0
        counts = {"fresh": 300 * batch - repeats, "repeats": repeats}
        counts["seconds_per_update"] = 1 / steps_per_s
        folder = make_run(tmp_path / name, **{**counts, **facts})
        change(folder / "environment.json", devices=[kind] * devices, backend="tpu")
        return folder

    return make


@pytest.fixture
def report(tmp_path, capsys):
    """Gives what the command prints, and the rows and other lines of its file."""

    def report(*runs):
        out = tmp_path / "out"
        argv = ["report", "scaling", *map(str, runs), "--workdir", str(out)]
        assert main(argv) == 0
        said = capsys.readouterr().out
        assert said.split()[-2:] == [str(out / "scaling.md"), str(out / "scaling.png")]
        assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
        return said, *read_table(out / "scaling.md")

    return report


def test_weak_scaling_by_hand(make, report):
    """10 examples a device: 2, 1.8 and 1.5 steps a second on 1, 2 and 4 devices."""
    four = make("a|<b>", 4, batch=40, steps_per_s=1.5)
    change(four / "environment.json", processes=2)
    runs = [four, make("one", 1), make("[red]", 2, batch=20, steps_per_s=1.8)]
    said, rows, (title, *notes) = report(*runs)
    assert title == f"**{GROUP}: weak scaling, S = 20 examples/s on 1 device**"
    assert rows[2] == {
        "run": "a&#124;&lt;b&gt;",
        "processes": "2",
        "devices": "4",
        "batch per device": "10",
        "steps/s": "1.5",
        "examples/s": "60",
        "efficiency": "0.75",
        "idle": "75%",
    }
    assert [row["efficiency"] for row in rows] == ["1.00", "0.90", "0.75"]
    assert [row["processes"] for row in rows] == ["1", "1", "2"]
    assert max(map(len, said.splitlines()[:-2])) <= 80
    line = next(line for line in said.splitlines() if line.startswith("[red]"))
    assert line.split() == [*("[red]", "1", "2", "10", "1.8", "36", "0.90", "75%")]
    assert not any("CPU" in note for note in notes)


def test_strong_scaling_by_hand_on_parts_of_a_cpu(make, report):
    """16 examples in all: 2 and 5 steps a second on 2 and 8 devices."""
    runs = [make("two", 2, batch=16), make("eight", 8, batch=16, steps_per_s=5.0)]
    for run in runs:
        change(run / "environment.json", backend="cpu")
    _, rows, (title, *notes) = report(*runs)
    assert title.endswith("strong scaling, S = 16 examples/s on 2 devices**")
    assert (rows[1]["batch per device"], rows[1]["efficiency"]) == ("2", "0.62")
    assert any("CPU devices" in note for note in notes)


def test_the_base_is_the_mean_of_its_runs(make):
    rates = ((1, 2.0), (1, 4.0), (2, 3.0))
    # Repeats are examples, too: T counts what is trained on.
    runs = [make(f"{r}", n, steps_per_s=r, factor=2.0) for n, r in rates]
    (scaling,) = read_scaling(runs)
    assert "echo: 2x after augment" in scaling.name
    assert scaling.examples_per_s_of_one == pytest.approx(30)
    found = [scaling.efficiency(point) for point in scaling.points]
    assert found == pytest.approx([2 / 3, 4 / 3, 1 / 2])


@pytest.mark.parametrize(("data", "fsdp", "devices"), [(-1, 3, 6), (2, 2, 4)])
def test_devices_outside_the_mesh_do_not_count(make, data, fsdp, devices):
    run = make("many", 8)
    change(run / "config.json", mesh={"data": data, "fsdp": fsdp})
    (scaling,) = read_scaling([make("one", 1), run])
    assert scaling.points[1].devices == devices


def test_only_runs_that_train_the_same_are_compared(make):
    echoed = {"factor": 4.0}
    runs = [make("one", 1), make("two", 2), make("echo_1", 1, **echoed)]
    runs += [make("echo_4", 4, steps_per_s=1.0, **echoed), make("gpu", 2, kind="H100")]
    runs += [make("wide_1", 1), make("wide_2", 2)]
    for run in runs[-2:]:
        change(run / "config.json", model={"width": 128})
    groups = read_scaling(runs)
    assert [[p.name for p in group.points] for group in groups] == [
        *(["one", "two"], ["echo_1", "echo_4"], ["gpu"], ["wide_1", "wide_2"])
    ]
    assert groups[1].efficiency(groups[1].points[1]) == 0.125
    assert groups[2].kind == "one number of devices"
    # Those of one name are numbered.
    assert (groups[0].name, groups[3].name) == (f"{GROUP} (1)", f"{GROUP} (4)")


def test_runs_on_one_number_of_devices_are_refused(make, tmp_path, capsys):
    runs = [str(make("a", 2)), str(make("b", 2, batch=20))]
    with pytest.raises(StudyError, match=r"\(a: 2, b: 2\); name runs of one config"):
        read_scaling(runs)
    out = tmp_path / "out"
    assert main(["report", "scaling", *runs, "--workdir", str(out)]) == 2
    assert not out.exists() and capsys.readouterr().err.count("\n") == 1
