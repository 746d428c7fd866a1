"""Errors of ``echo-jax prepare``, and the count of skipped examples."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Bad",
    "BadExampleError",
    "PrepareError",
    "Skipped",
    "TooManyBadError",
    "allowed",
    "difference",
]

_MAX_NAMED = 100
_MAX_SHOWN = 5


class PrepareError(ValueError):
    """The command failed; nothing readable was written."""


class TooManyBadError(PrepareError):
    """The source has more bad examples than ``--max-bad`` allows."""


class BadExampleError(ValueError):
    """An example cannot be used; the message is a short reason."""


@dataclass(frozen=True)
class Bad:
    """A skipped example; `reason` is the same text for all examples of its kind."""

    split: str
    name: str
    reason: str


@dataclass
class Skipped:
    """Counts skipped examples by reason, and names the first hundred of them."""

    limit: int
    total: int
    counts: Counter[str] = field(default_factory=Counter)
    named: list[Bad] = field(default_factory=list)

    def add(self, bad: Bad) -> None:
        self.counts[bad.reason] += 1
        if len(self.named) < _MAX_NAMED:
            self.named.append(bad)

    def check(self) -> None:
        """Raises `TooManyBadError` if there are more than the limit."""
        if (count := self.counts.total()) > self.limit:
            raise TooManyBadError(
                f"more than {self.limit} of {self.total} are bad: {self}. Look at "
                f"them, or allow more with --max-bad={count} or, say, --max-bad=1%"
            )

    def metadata(self) -> dict[str, Any]:
        """Returns the counts and names as JSON values."""
        return {
            "count": self.counts.total(),
            "reasons": dict(sorted(self.counts.items())),
            "first": [vars(bad) for bad in self.named],
        }

    def __str__(self) -> str:
        shown = [
            f"{bad.split}: {bad.name!r} ({bad.reason})"
            for bad in self.named[:_MAX_SHOWN]
        ]
        rest = self.counts.total() - len(shown)
        return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def allowed(max_bad: str, total: int) -> int:
    """Returns the number that may be skipped; `max_bad` is a number or a share."""
    text = max_bad.removesuffix("%")
    try:
        value = float(text) if max_bad.endswith("%") else int(text)
    except ValueError:
        value = -1
    if not (value >= 0) or (max_bad.endswith("%") and value > 100):
        raise PrepareError(
            f"--max-bad={max_bad} is neither a number nor a share such as 0.1%"
        )
    return int(total * value / 100) if max_bad.endswith("%") else int(value)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the differences between two sets of options, for an error message."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(
        f"--{name.replace('_', '-')} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in names
    )
