"""The published trials of the studies: whole, and what their tables say."""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import published_tables
from echo_jax.config import load_config
from echo_jax.files import run_folder
from echo_jax.runs import ConfigRefusedError, run_study
from echo_jax.searches import (
    best_variants,
    is_searched,
    read_search,
    refuse_other_predictions,
    search_report,
)
from echo_jax.studies import read_study, study_report

RESULTS = Path(__file__).parents[2] / "results"
DOCS = RESULTS.parent / "docs"
STUDIES = sorted(path.name for path in RESULTS.iterdir() if is_searched(path))
# Studies of runs. All that their notes say stands in one of them.
TABLES = ("which", "bursty", "communication_echo", "quickstart", "seconds/R4_seed0")


@pytest.fixture(scope="module")
def studies():
    return {name: read_search(RESULTS / name) for name in STUDIES}


@pytest.mark.parametrize("name", STUDIES)
def test_published_trials_are_whole_and_make_the_published_table(studies, name):
    search = studies[name]
    protocol = search.protocol
    for variant in search.variants:
        if protocol.space.axes:
            assert len(variant.trials) == protocol.repeats * protocol.points
        assert len(variant.confirmed) == protocol.repeats * protocol.num_seeds
    assert search_report(search).markdown() == (RESULTS / name / "table.md").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_published_runs_make_the_published_table(name):
    report = study_report(read_study(RESULTS / name))
    assert report.markdown() == (RESULTS / name / "table.md").read_text()


def test_predictions_are_those_from_before_the_trials(tmp_path):
    shutil.copytree(RESULTS / "s3", tmp_path / "s3")
    study = load_config(str(RESULTS.parent / "configs/sweeps/s3_untuned.py"))
    folder = run_folder(tmp_path / "s3")
    refuse_other_predictions(study.falsifiers, folder)
    first, *rest = study.falsifiers
    new = {"says": "hindsight", "arm": "e4", "over": "baseline", "below": 0.4}
    moved = {**first, "below": 0.9}
    for other in ((moved, *rest), (first, *rest, new), ()):
        with pytest.raises(ValueError, match=r"predictions\) are not"):
            refuse_other_predictions(other, folder)
    # The command asks before it trains: this study is small enough to be looked at.
    study = load_config(str(RESULTS.parent / "configs/sweeps/s4_lag.py:tiny"))
    study.falsifiers = (new,)
    with pytest.raises(ConfigRefusedError, match=r"predictions\) are not"):
        run_study(study, tmp_path / "s3")
    shutil.rmtree(tmp_path / "s3" / "trials")
    refuse_other_predictions((new,), folder)


NUMBER = r"([-+]?\d+\.\d+)"
# That of a probe, in an example, is followed by how it was measured.
INTERVAL = re.compile(rf"{NUMBER}x?(?: \(|, ){NUMBER} to {NUMBER}(?![\d:])")


def measured(search):
    """The intervals that a study has found, and their inverses and negatives."""
    found = [
        i
        for variant in search.variants
        for i in (variant.fresh, variant.updates, variant.final)
        if i
    ]
    found += [each.ratio for each in search.predictions]
    if search.has_target:
        found += [best.speedup for best in best_variants(search)]
    for value, low, high in found:
        yield value, low, high
        if search.has_target:
            yield 1 / value, 1 / high, 1 / low
        else:
            yield -value, -high, -low


def is_rounded(texts, interval):
    """Whether numbers are those of an interval, at as many digits as they have."""
    return all(
        abs(float(text) - number) <= 0.501 * 10 ** -len(text.partition(".")[2])
        for text, number in zip(texts, interval, strict=True)
    )


@pytest.fixture(scope="module")
def known(studies):
    # This study has a script of its own, not a search.
    mixing = INTERVAL.findall((RESULTS / "mixing/table.md").read_text())
    found = [i for search in studies.values() for i in measured(search)]
    return [*found, *(tuple(map(float, each)) for each in mixing)]


def test_the_tables_of_the_pages_are_those_of_the_published_trials(tmp_path, studies):
    pages = {"results.md", *(table.page for table in published_tables.TABLES.values())}
    marked = re.compile(r"(<!-- (.*): begin -->\n)(.*)(<!-- \2: end -->)", re.S)
    for name in pages:
        emptied = marked.sub(r"\1\4", (DOCS / name).read_text())
        assert emptied != (DOCS / name).read_text()
        (tmp_path / name).write_text(emptied)
    published_tables.write_tables(studies, RESULTS, tmp_path)
    for name in pages:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()


# Of large batches the next paragraph is of studies that did not search.
@pytest.mark.parametrize(
    ("page", "least", "until"),
    [
        ("results.md", 70, None),
        ("choose-an-echo.md", 7, None),
        ("large-batches.md", 4, "**Longer, with a 16th"),
        ("reproduce-paper.md", 20, None),
        ("../README.md", 2, None),
    ],
)
def test_every_interval_of_a_page_is_one_of_the_published_trials(
    known, page, least, until
):
    text = (DOCS / page).read_text()
    assert until is None or until in text
    said = INTERVAL.findall(text.partition(until or "\0")[0])
    assert len(said) >= least
    assert not [each for each in said if not any(is_rounded(each, i) for i in known)]


def test_every_config_of_the_answers_can_be_loaded():
    named = re.findall(
        r"`(configs/sweeps/\w+\.py)(:\w+)?`((?:, `:\w+`)*)",
        (DOCS / "results.md").read_text(),
    )
    names = {
        path + variant
        for path, first, others in named
        for variant in (first, *re.findall(r":\w+", others))
    }
    assert len(names) > 15
    for name in names:
        load_config(str(RESULTS.parent / name))


def test_the_probe_advises_with_the_intervals_of_the_published_factors(studies):
    variants = [
        variant for size in (8, 32, 128) for variant in studies[f"s2_{size}"].variants
    ]
    advice = RESULTS.parent / "echo_jax/echo/instrument/advice.py"
    for factor in (2, 4, 8, 16):
        found = [
            variant.updates for variant in variants if variant.name == f"e{factor}"
        ]
        low = f"{min(each.low for each in found):.2f}"
        high = f"{max(each.high for each in found):.2f}"
        before = "math.inf:" if factor == 16 else f"{factor}:"
        assert f"{before} ({low}, {high})" in advice.read_text()
