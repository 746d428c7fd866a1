"""A report: one table with notes and figures, for a terminal, Markdown and HTML."""

import html
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from etils import epath
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from echo_jax.files.folders import run_folder, write
from echo_jax.files.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.studies import page
from echo_jax.studies.figures import write_drawn

# First cells up to this length stay whole in a terminal; other columns are folded.
_WHOLE_NAME = 20


@dataclass(frozen=True, kw_only=True)
class Report:
    """A table with its notes and figures; every text may hold any character.

    Attributes:
      title: The name of what is compared.
      caveats: Facts about the input that a reader of the table must know.
      headings, rows: The table.
      notes: Sentences on the meaning and the limits of the numbers.
      num_texts: Number of leading columns that hold words; the others hold numbers.
      in_terminal: The headings that a terminal shows, which has 80 columns; () for all.
      figures: A function for each figure that draws it, by the name of its files.
      details: Returns the parts of the page below the table (HTML), given the folder
        of the report.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    caveats: Sequence[str] = ()
    num_texts: int = 2
    in_terminal: Collection[str] = ()
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    details: Callable[[epath.Path], Iterable[str]] = lambda folder: ()

    def terminal(self) -> Table:
        """Returns the table for a terminal; text in brackets is below its number."""
        # Text, not str: square brackets in a name are not markup.
        table = Table(
            title=Text(f"{self._title}\n", style="bold"),
            caption=Text("\n".join(["", *self.notes])),
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        for number, name in enumerate(self.headings):
            is_text = number < self.num_texts
            justify = "left" if is_text else "right"
            # A column of numbers is not widened by its heading.
            name_lines = Text(name if is_text else name.replace(" ", "\n"))
            if self._is_shown(name):
                table.add_column(name_lines, justify=justify, overflow="fold")
        table.columns[0].no_wrap = all(len(row[0]) <= _WHOLE_NAME for row in self.rows)
        before = ""
        for first, *others in self.rows:
            texts = others[: self.num_texts - 1]
            numbers = [cell.replace(" (", "\n(") for cell in others[len(texts) :]]
            # A name that several rows share is shown once.
            cells = ["" if first == before else first, *texts, *numbers]
            named = zip(self.headings, cells, strict=True)
            table.add_row(*(Text(x) for name, x in named if self._is_shown(name)))
            before = first
        return table

    def markdown(self) -> str:
        """Returns the table and its notes as Markdown."""
        ends = [
            "---" if k < self.num_texts else "---:" for k in range(len(self.headings))
        ]
        cells = [self.headings, ends, *(map(_markdown_text, row) for row in self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        notes = [f"- {_markdown_text(note)}" for note in self.notes]
        title = f"**{_markdown_text(self._title)}**"
        return "\n".join([title, "", *lines, "", *notes]) + "\n"

    def html(self, svgs: Iterable[str]) -> list[str]:
        """Returns the figures, the table and the notes as parts of a page."""
        table = page.table(self.headings, self.rows, texts=self.num_texts)
        return [*map(page.figure, svgs), table, page.items(self.notes)]

    def write(self, folder: str | os.PathLike[str]) -> list[epath.Path]:
        """Writes ``table.md``, the figures as PNG and SVG, and ``report.html``.

        Returns:
          The paths of the PNGs, and of the page.
        """
        folder = run_folder(folder)
        with FolderLock(folder, name=REPORT_LOCK_NAME):
            write(folder / "table.md", self.markdown())
            drawn = [write_drawn(draw, folder / k) for k, draw in self.figures.items()]
            svgs = [svg.read_bytes().decode() for _, svg in drawn]
            parts = [*self.html(svgs), *self.details(folder)]
            path = folder / "report.html"
            write(path, page.page(self.title, ", ".join(self.caveats), parts))
        return [*(png for png, _ in drawn), path]

    @property
    def _title(self) -> str:
        return ", ".join([self.title, *self.caveats])

    def _is_shown(self, heading: str) -> bool:
        return not self.in_terminal or heading in self.in_terminal


def _markdown_text(text: str) -> str:
    """Escapes text for a Markdown cell: HTML, cell borders and line breaks."""
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())
