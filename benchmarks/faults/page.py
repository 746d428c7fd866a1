"""The counts of campaigns: on a terminal, as JSON, and as a page."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.faults.campaign import Fault, Tally, Verdict
from benchmarks.harness import machine, versions


@dataclass(frozen=True)
class Campaign:
    """What one command has counted.

    Attributes:
      command: It.
      commit: Of the code that it broke.
      seed: Of its trials.
      is_interrupted: Whether somebody has ended it early.
      tallies: The counts, by fault and kind.
    """

    command: str
    commit: str | None
    seed: int
    is_interrupted: bool
    tallies: Mapping[str, Mapping[str, Tally]]


def _rows(
    faults: Mapping[str, Fault], campaigns: Sequence[Campaign]
) -> list[tuple[str, str, Tally]]:
    """Adds up campaigns, in the order of the faults and their kinds."""
    rows = []
    for name, fault in faults.items():
        for kind in fault.trials:
            found = [
                campaign.tallies[name][kind]
                for campaign in campaigns
                if kind in campaign.tallies.get(name, {})
            ]
            counts = sum((tally.counts for tally in found), start=Counter())
            failures = [each for tally in found for each in tally.failures]
            kills = sum(tally.kills for tally in found)
            if counts.total():
                rows.append((name, kind, Tally(counts, failures, kills)))
    return rows


def _numbers(tally: Tally) -> list[str]:
    verdicts = [str(tally.counts[verdict]) for verdict in Verdict]
    return [str(tally.trials), _count(tally.kills), *verdicts]


def _count(kills: int) -> str:
    return str(kills or "")


def table(faults: Mapping[str, Fault], campaigns: Sequence[Campaign]) -> Table:
    """Makes the table for a terminal.

    Args:
      faults: By name.
      campaigns: Those that are added up.
    """
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown.add_column("fault")
    shown.add_column("kind", overflow="fold")
    for heading in ("trials", "kills", *(verdict.value for verdict in Verdict)):
        shown.add_column(heading, justify="right")
    for name, kind, tally in _rows(faults, campaigns):
        shown.add_row(name, kind, *_numbers(tally))
    return shown


def as_json(campaigns: Sequence[Campaign]) -> dict[str, Any]:
    """The record that ``--json`` writes, and `read_campaign` reads.

    Args:
      campaigns: Of which the last was run now; the others have records of their own.
    """
    campaign = campaigns[-1]
    return {
        "command": campaign.command,
        "commit": campaign.commit,
        "seed": campaign.seed,
        "interrupted": campaign.is_interrupted,
        "campaigns": [
            {
                "id": name,
                "kind": kind,
                "trials": tally.trials,
                "kills": tally.kills,
                **{verdict.value: tally.counts[verdict] for verdict in Verdict},
                "failures": tally.failures,
            }
            for name, kinds in campaign.tallies.items()
            for kind, tally in kinds.items()
        ],
        "machine": machine(),
        "versions": versions(),
    }


def read_campaign(file: Path) -> Campaign:
    """Reads what ``--json`` wrote."""
    content = json.loads(file.read_text())
    tallies: dict[str, dict[str, Tally]] = {}
    for each in content["campaigns"]:
        counts = Counter({verdict: each[verdict.value] for verdict in Verdict})
        kinds = tallies.setdefault(each["id"], {})
        # Records that are older do not say.
        kills = each.get("kills", 0)
        kinds[each["kind"]] = Tally(+counts, each["failures"], kills)
    return Campaign(
        content["command"],
        content["commit"],
        content["seed"],
        content["interrupted"],
        tallies,
    )


def document(faults: Mapping[str, Fault], campaigns: Sequence[Campaign]) -> str:
    """The page that ``--docs`` writes; see `table`."""
    about = machine()
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    rows = _rows(faults, campaigns)
    failed = [
        f"- `python -m benchmarks.faults {name} --seed {campaign.seed} --trial "
        f"{each['trial']}` ({kind}): {each['verdict']}. {each['note']:.300}"
        for campaign in campaigns
        for name, kinds in campaign.tallies.items()
        for kind, tally in kinds.items()
        for each in tally.failures
    ]
    commands = "\n".join(
        f"- `{campaign.command}`, code of {campaign.commit or 'no checkout'}"
        f"{', interrupted' * campaign.is_interrupted}"
        for campaign in campaigns
    )
    meanings = "\n".join(
        f"| {name} | {fault.title} | {fault.holds} "
        f"| {sum(tally.trials for of, _, tally in rows if of == name)} "
        f"| {_count(sum(tally.kills for of, _, tally in rows if of == name))} "
        f"| {sum(len(tally.failures) for of, _, tally in rows if of == name)} |"
        for name, fault in faults.items()
        if any(of == name for of, _, _ in rows)
    )
    kinds = "\n".join(
        f"| {' | '.join([name, kind, *_numbers(tally)])} |"
        for name, kind, tally in rows
    )
    verdicts = " | ".join(verdict.value for verdict in Verdict)
    return (
        f"""# Faults

Written with `--docs` by

{commands}

Every trial follows from the seed and its number, and one that failed stands below with
the command that runs it again. A failure is: **wrong**, another result; **silent**,
damage that was not noticed and changed the result; **hung**, over its limit of time;
**escaped**, a file outside of its folder read or written, or code run; **traceback**, a
traceback, a crash, or memory used up in place of a sentence. A trial may kill more than
once: kills are those that struck a process that was running. Records from before they
were counted have none.

Machine: {about["system"]} {about["processor"]}, {about["cores"]} cores, Python
{about["python"]}; {packages}.

| id | what is done | a trial holds if it is | trials | kills | failures |
| --- | --- | --- | ---: | ---: | ---: |
{meanings}

By kind of run or file:

| id | kind | trials | kills | {verdicts} |
| --- | --- | ---: | ---: {"| ---: " * len(Verdict)}|
{kinds}

{"Failures:" if failed else "No trial failed."}

{chr(10).join(failed)}
""".rstrip()
        + "\n"
    )
