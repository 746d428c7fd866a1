"""The rows of `docs/benchmarks.md` that a run of the benchmarks has measured."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.harness import Result, machine, versions
from benchmarks.pages import Place
from echo_jax.training.records.environment import code_commit

_MARK = "measured"
_EMPTY = f"""# Benchmarks

<!-- {_MARK}: begin -->

| what (id) | compared with | values (least to largest) | goal | met | machine |
| --- | --- | --- | --- | --- | --- |

<!-- {_MARK}: end -->
"""
# A benchmark without a goal of its own has this one.
_NO_GOAL = ">= 0"


class Session(NamedTuple):
    """Figures of one run of the command.

    Attributes:
      results: The figures.
      machine: Where they were measured.
      versions: Of packages.
      commit: Of the code; None outside of a checkout.
    """

    results: list[Result]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None

    @classmethod
    def now(cls, results: list[Result]) -> Self:
        """Returns what was measured here and now."""
        return cls(results, machine(), versions(), code_commit())

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Self:
        """Reads what ``--json`` wrote."""
        first = records[0]
        results = [Result.of_json(record) for record in records]
        return cls(results, first["machine"], first["versions"], first.get("commit"))


def table_of(page: Path) -> Place:
    """Returns the part of a page that has the rows; makes a page if there is none.

    Raises:
      ValueError: The page has no marks.
    """
    if not page.exists():
        page.write_text(_EMPTY, encoding="utf-8")
    return Place(page, _MARK)


def write_rows(page: Path, sessions: Sequence[Session]) -> None:
    """Replaces the rows of a page whose benchmarks were measured.

    A row names its benchmarks in brackets, as ``(P5; P5-items)``. Its first two cells
    are written by hand and stay. Other rows and all text stay, too. A benchmark that
    has no row gets one after the last.

    Args:
      page: A Markdown file, as for `table_of`.
      sessions: Runs of the same benchmarks, or of some of them, in their order.

    Raises:
      ValueError: The sessions are of several machines, or the page has no marks.
    """
    if len({str(each.machine) for each in sessions}) > 1:
        raise ValueError("the sessions are of several machines; write one at a time")
    place = table_of(page)
    found: dict[str, list[Result]] = {}
    for session in sessions:
        for result in session.results:
            found.setdefault(result.id, []).append(result)
    where = _short(sessions[-1].machine["processor"])
    lines = place.text.strip().splitlines()
    for number, line in enumerate(lines):
        words, peer, *_ = [*_cells(line), "", ""]
        ids = _ids(words)
        if ids and found.keys() >= set(ids):
            lines[number] = _row(words, peer, [found.pop(each) for each in ids], where)
    rows = [
        _row(f"{each[-1].title} ({id_})", each[-1].peer, [each], where)
        for id_, each in found.items()
    ]
    end = max(number for number, line in enumerate(lines, 1) if line.startswith("|"))
    place.write("\n".join([*lines[:end], *rows, *lines[end:]]) + "\n")


def _cells(line: str) -> list[str]:
    """Returns the cells of a row; none of a line that is not a row."""
    if not line.startswith("|"):
        return []
    return [each.strip() for each in line.strip().strip("|").split("|")]


def _ids(words: str) -> list[str]:
    """Returns the ids in brackets at the end of a row's first cell."""
    brackets = re.search(r"\(([^()]+)\)$", words)
    return brackets[1].split("; ") if brackets else []


def _row(words: str, peer: str, found: Sequence[Sequence[Result]], where: str) -> str:
    """Returns a row; ``found`` has the results of all sessions for each id."""
    values = "; ".join(map(_values, found))
    goals = _joined(each[-1].goal for each in found)
    met = _joined("yes" if all(r.met for r in each) else "**no**" for each in found)
    if goals == _NO_GOAL:
        goals = met = ""
    return f"| {words} | {peer} | {values} | {goals} | {met} | {where} |"


def _values(found: Sequence[Result]) -> str:
    """Returns the value of each session, and the range of all their repeats."""
    unit = f" {found[0].unit}" if found[0].unit not in ("", "x") else ""
    repeats = [repeat for each in found for repeat in each.repeats]
    low, high = f"{min(repeats):.4g}", f"{max(repeats):.4g}"
    spread = f" ({low} to {high})" if low != high else ""
    return f"{', '.join(f'{each.value:.4g}' for each in found)}{unit}{spread}"


def _joined(cells: Iterable[str]) -> str:
    """Returns one cell for all, or each of them if they differ."""
    all_ = list(cells)
    return all_[0] if len(set(all_)) == 1 else "; ".join(all_)


def _short(processor: str) -> str:
    """Returns a processor's name without architecture, family and model."""
    name = processor.partition(" ")[2].partition(" (cpu")[0]
    return re.sub(r"\(R\)| Processor", "", name) or processor
