"""Links of a report to the pages that show examples and predictions of its runs."""

import contextlib
import html
from collections.abc import Sequence
from urllib.parse import quote

from echo_jax.files.folders import FolderError, RunPath

__all__ = ["picture_links"]

# The file names of `echo-jax report examples` and `echo-jax evaluate --report`.
_PAGES = {"examples.html": "first examples", "evaluation.html": "evaluation"}
_COMMANDS = (
    "<code>echo-jax report examples RUN</code> draws the first examples of a run with "
    "each of their uses, and <code>echo-jax evaluate RUN --report RUN</code> what its "
    "model makes of others; the next report links these pages."
)


# A page is linked if it is a file (not a link) in the run's folder within the report's
# folder, or beside the report of a single run.
def picture_links(folder: RunPath, names: Sequence[str]) -> list[str]:
    """Returns the HTML that links to the pages of examples and predictions."""
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
    """Returns the link to a page in the first of the places that has it, or ""."""
    for place in places:
        path = f"{place}/{page}" if place else page
        # A run's folder that is a link itself is refused.
        with contextlib.suppress(FolderError):
            if (folder / path).is_file():
                return f'<a href="{quote(path)}">{_PAGES[page]}</a>'
    return ""
