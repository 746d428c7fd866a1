"""Studies of several seeds as one: what each arm needed, over them."""

import io
import json

import pytest
from rich.console import Console

from echo_jax import cli
from echo_jax.studies.figures import mean_curve
from echo_jax.studies.runs import StudyError
from echo_jax.studies.seeds import read_seeds, seeds_table, write_seeds_report

# Evaluations every 100 updates of 10 examples: the baseline meets the target after 300,
# 200 and 200 updates, of 0.5 s each.
LOSSES = {0: (3.0, 2.0, 1.0), 1: (3.0, 1.0, 0.5), 2: (2.0, 0.75, 0.25)}


@pytest.fixture
def make_seeds(tmp_path, make_study):
    def make(arm=lambda seed: {}, base=lambda seed: {}, seeds=(0, 1, 2)):
        return [
            make_study(
                tmp_path / f"{place}",
                {"baseline": {"losses": LOSSES[seed]}, "arm": arm(seed)},
                {"seed": seed, "batch_size": 10, **base(seed)},
            )
            for place, seed in enumerate(seeds)
        ]

    return make


def written(folders, out):
    write_seeds_report(read_seeds(folders), out)
    lines = (out / "table.md").read_text().splitlines()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if "|" in line]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]], "\n".join(lines)


def test_an_arm_has_the_mean_least_and_largest_over_seeds(tmp_path, make_seeds):
    folders = make_seeds(lambda seed: {"factor": 2.0, "losses": (3.0, 1.0, 0.5 + seed)})
    (baseline, arm), text = written(folders, tmp_path / "out")
    assert text.startswith("**a study, seeds 0, 1, 2, simulated storage**")
    assert baseline["n"] == arm["n"] == "3"
    assert baseline["fresh examples"] == "2,333 (2,000 to 3,000)"
    assert baseline["updates"] == "233 (200 to 300)"
    assert baseline["seconds"] == "116.7 (100.0 to 150.0)"
    assert baseline["final loss"] == "0.5833 (0.2500 to 1.000)"
    # Always the same: no range. Beside the baseline of the same seed it is one.
    assert arm["fresh examples"] == "1,000"
    assert arm["fresh, x"] == "0.44 (0.33 to 0.50)"
    assert (arm["final loss"], arm["best loss"]) == (
        "1.500 (0.5000 to 2.500)",
        "0.8333 (0.5000 to 1.000)",
    )


def test_costs_are_of_the_seeds_that_met_the_target(tmp_path, make_seeds):
    folders = make_seeds(lambda seed: {"losses": (2.0, 1.5 - 0.5 * seed)})
    (_, arm), text = written(folders, tmp_path / "out")
    assert (arm["n"], arm["updates"]) == ("2 of 3", "200")
    assert "Costs are those of the n seeds that met it." in text


def test_a_seed_that_diverged_is_said(tmp_path, make_seeds):
    folders = make_seeds()
    file = folders[1] / "arm" / "summary.json"
    facts = json.loads(file.read_text())
    file.unlink()
    content = json.dumps({**facts, "update": 250, "rows": 6})
    (folders[1] / "arm" / "diverged.json").write_text(content)
    (_, arm), text = written(folders, tmp_path / "out")
    assert arm["n"] == "2 of 3"
    assert "- arm, seed 1, diverged at update 250." in text
    assert "arm (x: 1 of 3 diverged)" in (tmp_path / "out/figure.svg").read_text()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda seed: {"optim": {"lr": 0.1 * seed}}, r"differ in optim\.lr \(0\.1, 0"),
        (lambda seed: {"seed": 5}, "two of the studies have seed 5"),
        (lambda seed: {"seed": None}, "does not say its seed"),
    ],
)
def test_studies_that_differ_in_more_or_less_than_the_seed_are_refused(
    make_seeds, base, message
):
    with pytest.raises(StudyError, match=message):
        read_seeds(make_seeds(base=base))


def test_arms_that_differ_are_refused_and_fields_of_another_version_are_not(make_seeds):
    folders = make_seeds(base=lambda seed: {"old": 1} if seed else {})
    assert read_seeds(folders)
    file = folders[1] / "arm" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eval_every": 7}))
    with pytest.raises(StudyError, match=r"differ in arm: eval_every \(7, 100\)"):
        read_seeds(folders)


def test_a_latency_that_was_chosen_for_one_ratio_is_no_difference(make_seeds):
    storage = lambda seed: {"data": {"storage": {"latency_s": seed / 1e3}}}  # noqa: E731
    folders = make_seeds(base=storage)
    assert read_seeds(folders).seeds == [0, 1, 2]
    file = folders[2] / "study.json"
    calibration = {"calibration": {"storage_ratio": 2.0}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **calibration}))
    with pytest.raises(StudyError, match="differ in storage_ratio"):
        read_seeds(folders)


def test_the_command_joins_studies_and_prints_80_columns(tmp_path, make_seeds, capsys):
    folders = make_seeds()
    out = tmp_path / "out"
    assert cli.main(["report", *map(str, folders), "--workdir", str(out)]) == 0
    assert "baseline" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {"table.md", "figure.png", "figure.svg", "report.html"}
    file = io.StringIO()
    Console(width=80, file=file).print(seeds_table(read_seeds(folders)))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(
        line.split() == ["baseline", "3", "2,333", "233", "116.7", "0.5833"]
        for line in lines
    )


def test_a_mean_goes_as_far_as_all_of_its_curves():
    curves = [[(0, 4.0), (10, 2.0)], [(0, 5.0), (12, 3.0), (24, 1.0)]]
    assert mean_curve(curves) == [(0, 4.5), (11, 2.5)]
