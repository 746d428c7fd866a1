"""A place in a page for the tables of a benchmark, and the bar shown meanwhile."""

import re
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn


class Place:
    """The part of a page that a command writes, between two marks."""

    def __init__(self, page: Path, name: str):
        """Finds it.

        Args:
          page: A Markdown file.
          name: Of the marks, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.

        Raises:
          ValueError: The page has no such marks.
        """
        self._page = page
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        self._pattern = re.compile(f"(?<={begin}\\n).*(?={end})", re.S)
        if not self._pattern.search(page.read_text(encoding="utf-8")):
            raise ValueError(f"{page} has no marks {begin} and end")

    @property
    def text(self) -> str:
        """What is between the marks now."""
        found = self._pattern.search(self._page.read_text(encoding="utf-8"))
        if not found:
            raise ValueError(f"{self._page} has lost its marks")
        return found[0]

    def write(self, text: str) -> None:
        """Replaces the text between the marks."""
        # Read again: somebody may have edited the page since.
        page = self._page.read_text(encoding="utf-8")
        page = self._pattern.sub(lambda _: f"\n{text}\n", page)
        self._page.write_text(page, encoding="utf-8")


def progress_bar(*, disable: bool = False) -> Progress:
    """Returns a bar with counts and the time that is left."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), transient=True, disable=disable)
