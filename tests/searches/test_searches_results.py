"""The published trials of the studies: whole, and what their tables say."""

from pathlib import Path

import pytest

from echo_jax.folders import run_folder
from echo_jax.searches.comparison import is_searched, read_search
from echo_jax.searches.table import write_search_markdown

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = sorted(path.name for path in RESULTS.iterdir() if is_searched(path))


def test_there_are_published_studies():
    assert STUDIES


@pytest.mark.parametrize("name", STUDIES)
def test_a_published_table_is_made_from_the_published_trials(tmp_path, name):
    folder = RESULTS / name
    search = read_search(folder)
    write_search_markdown(search, run_folder(tmp_path) / "table.md")
    assert (tmp_path / "table.md").read_text() == (folder / "table.md").read_text()


@pytest.mark.parametrize("name", STUDIES)
def test_every_trial_of_the_protocol_is_published(name):
    search = read_search(RESULTS / name)
    protocol = search.protocol
    for arm in search.arms:
        if protocol.space.axes:
            assert len(arm.trials) == protocol.repeats * protocol.points
        assert len(arm.confirmed) == protocol.repeats * protocol.streams
