"""The benchmark that judges what predicts a repeat's worth, on hand-made arms."""

import json

import pytest

from benchmarks.worth import Point, regrets, write_worth


def point(factor, worth, *, probed, study="s2_32", size=10):
    """An arm whose baseline needs 100 updates of ten examples."""
    # Each update gains 1 / e + worth (1 - 1 / e) of what a fresh one does.
    updates = 100 / (1 / factor + worth * (1 - 1 / factor))
    return Point(
        study=study,
        arm=f"e{factor}",
        batch_size=size,
        factor=factor,
        fresh=updates * size / factor,
        updates=updates,
        measured=worth,
        branch_updates=10,
        num_branches=4,
        probed=probed,
        by_noise=0.5,
        by_gap=0.1 * factor,
        by_fit=0.2,
    )


# Repeats lose their worth: 4 gains 2.5 times as much as 1, and 16 less than 2.
WORTHS = {2: 1.0, 4: 0.5, 16: -0.03}


def test_who_knows_the_worth_of_every_factor_has_no_regret():
    found = regrets([point(e, worth, probed=worth) for e, worth in WORTHS.items()])
    assert found["probed"] == pytest.approx([0, 0, 0, 0])
    # R = 16: the largest factor takes 100 / 0.034 steps, and that of 2 takes 800.
    updates = 100 / (1 / 16 - 0.03 * 15 / 16)
    assert found["no cap"][-1] == pytest.approx(updates / 640 - 1)
    # 4 feeds the accelerator at R = 4, and is the best there.
    assert found["cap 4"][1] == pytest.approx(0)


def test_who_takes_a_repeat_for_fresh_pays_where_it_is_not():
    found = regrets([point(e, worth, probed=1.0) for e, worth in WORTHS.items()])
    assert found["probed"][0] == pytest.approx(0)
    assert found["probed"][-1] == found["no cap"][-1] > 1


def test_what_was_found_is_written_as_table_figure_and_numbers(tmp_path):
    points = [point(e, worth, probed=worth) for e, worth in WORTHS.items()]
    write_worth(points, tmp_path)
    assert [
        row["measured"] for row in json.loads((tmp_path / "worth.json").read_text())
    ]
    table = (tmp_path / "table.md").read_text()
    assert (
        "branches on fresh data: rank correlation with the measured worth 1.00" in table
    )
    assert "root mean square error 0.00 (n = 3 arms)" in table
    # It grows with the factor, as worth falls.
    assert "of repeats: rank correlation with the measured worth 1.00" in table
    assert (tmp_path / "worth.png").exists()
