"""The scaling report: efficiencies by hand, groups, and the command."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from echo_jax import cli
from echo_jax.studies.runs import StudyError
from echo_jax.studies.scaling import (
    HEADINGS,
    Scaling,
    cells,
    notes,
    read_scaling,
    terminal_tables,
    write_markdown,
)
from echo_jax.studies.scaling_figure import write_scaling


@pytest.fixture
def make(make_run, tmp_path):
    """Makes a run of 300 updates on so many devices, at so many steps per second."""

    def make(
        name: str,
        devices: int,
        *,
        batch: int = 10,
        steps_per_s: float = 2.0,
        kind: str = "TPU v5e",
        **summary,
    ) -> Path:
        repeats = 100 if summary.get("factor", 1.0) > 1 else 0
        folder = make_run(
            tmp_path / name,
            **{
                "seconds_per_update": 1 / steps_per_s,
                "fresh": 300 * batch - repeats,
                "repeats": repeats,
                **summary,
            },
        )
        change(folder / "environment.json", devices=[kind] * devices, backend="tpu")
        return folder

    return make


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rows(scaling: Scaling) -> list[dict[str, str]]:
    return [
        dict(zip(HEADINGS, cells(scaling, point), strict=True))
        for point in scaling.points
    ]


def test_weak_scaling_by_hand(make):
    """10 examples a device: 2, 1.8 and 1.5 steps a second on 1, 2 and 4 devices."""
    four = make("four", 4, batch=40, steps_per_s=1.5)
    change(four / "environment.json", processes=2)
    runs = [four, make("one", 1), make("two", 2, batch=20, steps_per_s=1.8)]
    (scaling,) = read_scaling(runs)
    assert scaling.kind == "weak scaling"
    assert scaling.examples_per_s_of_one == 20
    assert [point.examples_per_s for point in scaling.points] == [20, 36, 60]
    efficiencies = [scaling.efficiency(point) for point in scaling.points]
    assert efficiencies == pytest.approx([1, 0.9, 0.75])
    assert rows(scaling)[2] == {
        "run": "four",
        "processes": "2",
        "devices": "4",
        "batch per device": "10",
        "steps/s": "1.5",
        "examples/s": "60",
        "efficiency": "0.75",
        "idle": "75%",
    }
    assert [row["processes"] for row in rows(scaling)] == ["1", "1", "2"]
    assert scaling.heading == (
        "lm, echo: none, on TPU v5e, simulated storage: weak scaling, "
        "S = 20 examples/s on 1 device"
    )


def test_strong_scaling_by_hand(make):
    """16 examples in all: 2 and 5 steps a second on 2 and 8 devices."""
    runs = [make("two", 2, batch=16), make("eight", 8, batch=16, steps_per_s=5.0)]
    (scaling,) = read_scaling(runs)
    assert scaling.kind == "strong scaling"
    assert scaling.examples_per_s_of_one == 16
    assert scaling.efficiency(scaling.points[1]) == 80 / (16 * 8)
    assert rows(scaling)[1]["batch per device"] == "2"
    assert scaling.heading.endswith("S = 16 examples/s on 2 devices")


def test_points_stand_in_the_order_of_their_devices(make):
    runs = [make("two_hosts", 4), make("b", 4), make("a", 8)]
    change(runs[0] / "environment.json", processes=2)
    change(runs[1] / "environment.json", processes=4)
    (scaling,) = read_scaling(runs[::-1])
    assert [point.name for point in scaling.points] == ["two_hosts", "b", "a"]


def test_neither_weak_nor_strong(make):
    runs = [make("one", 1), make("two", 2), make("four", 4, batch=20)]
    (scaling,) = read_scaling(runs)
    assert scaling.kind.startswith("neither weak nor strong scaling")


def test_repeats_are_examples_too(make):
    """T counts what is trained on, so an echo makes it grow as its steps do."""
    (scaling,) = read_scaling([make("one", 1, factor=2.0), make("two", 2, factor=2.0)])
    assert scaling.examples_per_s_of_one == 20
    assert "echo: 2x after augment" in scaling.name


def test_the_base_is_the_mean_of_its_runs(make):
    runs = [make("a", 1), make("b", 1, steps_per_s=4.0), make("c", 2, steps_per_s=3.0)]
    (scaling,) = read_scaling(runs)
    assert scaling.examples_per_s_of_one == pytest.approx(30)
    assert [scaling.efficiency(point) for point in scaling.points] == pytest.approx(
        [2 / 3, 4 / 3, 1 / 2]
    )


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        ({"data": -1, "fsdp": 1}, 8),
        ({"data": -1, "fsdp": 3}, 6),
        ({"data": 2, "fsdp": 1}, 2),
        ({"data": 2, "fsdp": 2}, 4),
    ],
)
def test_devices_outside_the_mesh_do_not_count(make, mesh, devices):
    run = make("many", 8)
    change(run / "config.json", mesh=mesh)
    (scaling,) = read_scaling([make("one", 1), run])
    assert scaling.points[1].devices == devices


def test_only_runs_that_train_the_same_are_compared(make):
    echoed = {"factor": 4.0}
    runs = [make("one", 1), make("two", 2), make("echo_1", 1, **echoed)]
    runs += [make("echo_4", 4, steps_per_s=1.0, **echoed), make("gpu", 2, kind="H100")]
    storage = {"latency_s": 1.0, "distribution": "constant", "bytes_per_s": 0.0}
    runs.append(make("slower_storage", 2, storage=storage))
    groups = read_scaling(runs)
    assert [[p.name for p in group.points] for group in groups] == [
        ["one", "two"],
        ["echo_1", "echo_4"],
        ["gpu"],
        ["slower_storage"],
    ]
    assert groups[1].efficiency(groups[1].points[1]) == 0.125
    assert groups[2].kind == "one number of devices"


def test_a_factor_that_was_measured_makes_no_other_group(make):
    asked = {"after": "augment", "order": "spread", "buffer": 8, "factor_asked": "auto"}
    runs = [
        make(f"on_{n}", n, echo={**asked, "factor": factor})
        for n, factor in ((1, 2.31), (2, 2.28))
    ]
    assert len(read_scaling(runs)) == 1


def test_groups_of_one_name_are_numbered(make):
    runs = [make("a", 1), make("b", 2), make("c", 1), make("d", 2)]
    for run, width in zip(runs, (64, 64, 128, 128), strict=True):
        change(run / "config.json", model={"width": width})
    names = [group.name for group in read_scaling(runs)]
    name = "lm, echo: none, on TPU v5e, simulated storage"
    assert names == [f"{name} (1)", f"{name} (2)"]


def test_runs_on_one_number_of_devices_are_refused(make):
    with pytest.raises(StudyError, match=r"\(a: 2, b: 2\); name runs of one config"):
        read_scaling([make("a", 2), make("b", 2, batch=20)])


def test_notes_say_what_cpu_devices_are(make):
    runs = [make("one", 1), make("two", 2)]
    assert not any("CPU" in note for note in notes(read_scaling(runs)))
    for run in runs:
        change(run / "environment.json", backend="cpu")
    assert any("CPU devices" in note for note in notes(read_scaling(runs)))


def test_the_terminal_tables_fit_into_80_columns(make):
    groups = read_scaling([make("[red]one", 1), make("two", 2)])
    with (console := Console(width=80)).capture() as capture:
        console.print(terminal_tables(groups))
    lines = capture.get().splitlines()
    (line,) = [line for line in lines if line.startswith("two")]
    assert line.split() == [*("two", "1", "2", "5", "2", "20", "0.50", "75%")]
    assert any("[red]one" in line for line in lines)


def test_files_hold_the_same(make, tmp_path):
    groups = read_scaling([make("a|<b>", 1), make("two", 2)])
    page, png = write_scaling(groups, tmp_path / "out")
    assert png.read_bytes().startswith(b"\x89PNG")
    lines = page.read_text().splitlines()
    assert lines[0].startswith("**lm, echo: none, on TPU v5e, simulated storage")
    assert lines[2] == f"| {' | '.join(HEADINGS)} |"
    assert lines[4].startswith("| a&#124;&lt;b&gt; | 1 | 1 | 10 | 2 | 20 | 1.00 |")
    assert [line[2:] for line in lines if line.startswith("- ")] == notes(groups)
    write_markdown(groups, tmp_path / "again.md")
    assert (tmp_path / "again.md").read_text() == page.read_text()


def test_the_command(make, tmp_path, capsys):
    runs = [str(make("one", 1)), str(make("two", 2, steps_per_s=1.5))]
    out = tmp_path / "out"
    assert cli.main(["report", "scaling", *runs, "--workdir", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "strong scaling" in shown
    assert shown.split()[-2:] == [str(out / "scaling.md"), str(out / "scaling.png")]
    assert "| two | 1 | 2 | 5 | 1.5 | 15 | 0.38 |" in (out / "scaling.md").read_text()


def test_a_folder_may_be_named_scaling(make, tmp_path, monkeypatch, capsys):
    make("scaling", 2)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "./scaling"]) == 0
    assert (tmp_path / "scaling" / "report.html").exists()
    assert cli.main(["report", "scaling"]) == 2
    assert "a folder of that name is ./scaling" in capsys.readouterr().err


def test_the_command_refuses_what_does_not_compare(make, tmp_path, capsys):
    runs = [str(make("a", 2)), str(make("b", 2))]
    assert cli.main(["report", "scaling", *runs]) == 2
    assert "add --workdir FOLDER" in capsys.readouterr().err
    argv = ["report", "scaling", *runs, "--workdir", f"{tmp_path}/out"]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no two of the runs train the same thing" in line
    assert not (tmp_path / "out").exists()
