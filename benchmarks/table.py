"""The table of measured figures, of one session or several, in `docs/benchmarks.md`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.harness import Result, machine, versions
from echo_jax.training.records.environment import code_commit


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


def write_table(page: Path, sessions: Sequence[Session], command: str) -> None:
    """Writes the first part of a page; what begins with a heading of its own stays.

    Args:
      page: May not be there.
      sessions: In their order; of the same benchmarks, or of some of them.
      command: Measured the last of them.

    Raises:
      ValueError: The sessions are of several machines.
    """
    if len({str(each.machine) for each in sessions}) > 1:
        raise ValueError("the sessions are of several machines; show each by itself")
    rest = page.read_text() if page.exists() else ""
    _, heading, rest = rest.partition("\n## ")
    page.write_text(_table(sessions, command) + heading + rest)


def _table(sessions: Sequence[Session], command: str) -> str:
    latest = sessions[-1]
    about = latest.machine
    packages = ", ".join(f"{name} {each}" for name, each in latest.versions.items())
    commits = {each.commit or "no checkout" for each in sessions}
    number = {1: "one session", 2: "two sessions"}
    counted = number.get(len(sessions), f"{len(sessions)} sessions")
    by_id = [{result.id: result for result in each.results} for each in sessions]
    rows = "\n".join(
        _row([found[result.id] for found in by_id if result.id in found])
        for result in latest.results
    )
    return f"""# Benchmarks

Written by `{command} --docs docs/benchmarks.md`, code of
{", ".join(sorted(commits))}, in {counted}. A ratio is the median over pairs of
runs, ours and the peer's in turn in one process; beside it stand its least and
largest pair, and after it those of later sessions. Absolute times hold on the machine
below alone.

Machine: {about["system"]} {about["processor"]}, {about["cores"]} cores, Python
{about["python"]}; {packages}.

| id | what | peer, in the same run | value (min to max) | n | goal | met | note |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


def _row(found: list[Result]) -> str:
    """Returns the row of one figure, as the sessions found it."""
    latest = found[-1]
    values = ", ".join(
        f"**{each.value:.4g} {each.unit}** ({each.spread})" for each in found
    )
    met = "yes" if all(each.met for each in found) else "**no**"
    n = len(latest.repeats)
    columns = (latest.id, latest.title, latest.peer, values, n, latest.goal, met)
    return f"| {' | '.join(map(str, columns))} | {latest.note} |"
