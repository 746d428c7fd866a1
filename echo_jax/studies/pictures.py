"""Links of a report to the pages that show examples and predictions of its runs."""

import contextlib
import html
from collections.abc import Sequence
from urllib.parse import quote

from echo_jax.files.folders import FolderError, RunPath

__all__ = ["picture_links"]

# What `echo-jax report examples` and `echo-jax evaluate --report` call theirs.
_PAGES = {"examples.html": "first examples", "evaluation.html": "evaluation"}
_COMMANDS = (
    "<code>echo-jax report examples RUN</code> draws the first examples of a run with "
    "each of their uses, and <code>echo-jax evaluate RUN --report RUN</code> what its "
    "model makes of others; the next report links these pages."
)


def picture_links(folder: RunPath, names: Sequence[str]) -> list[str]:
    """Makes the part of a page that leads to what the runs have seen and predicted.

    A page is linked where it lies in the report's folder as a file, and no link: in the
    run's own folder within it, or beside the report if there is but one run.

    Args:
      folder: The report's.
      names: Of the runs.

    Returns:
      HTML.
    """
    lines, is_whole = [], True
    for name in names:
        places = [name, ""] if len(names) == 1 else [name]
        found = [_link(folder, places, page) for page in _PAGES]
        is_whole = is_whole and all(found)
        if any(found):
            lines.append(f"<li>{html.escape(name)}: {', '.join(filter(None, found))}")
    parts = ["<h2>Examples and predictions</h2>"]
    if lines:
        parts.append(f"<ul>{''.join(f'{line}</li>' for line in lines)}</ul>")
    if not is_whole:
        parts.append(f"<p>{_COMMANDS}</p>")
    return parts


def _link(folder: RunPath, places: Sequence[str], page: str) -> str:
    """Returns the link to a page in the first of the places that has it, or nothing."""
    for place in places:
        path = f"{place}/{page}" if place else page
        # A run's folder that is a link itself is refused.
        with contextlib.suppress(FolderError):
            if (folder / path).is_file():
                return f'<a href="{quote(path)}">{_PAGES[page]}</a>'
    return ""
