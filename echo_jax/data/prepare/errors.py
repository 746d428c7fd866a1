"""What stops ``echo-jax prepare``, and what it counts and skips."""

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
    """The command cannot be carried out; nothing readable was written."""


class TooManyBadError(PrepareError):
    """More of the source is bad than ``--max-bad`` allows."""


class BadExampleError(ValueError):
    """An example cannot be used; the message is the reason, in a few words."""


@dataclass(frozen=True)
class Bad:
    """Something of the source that is skipped.

    Attributes:
      split: The split that it would have been in.
      name: Its name in the source.
      reason: Why, in a few words that are the same for all of a kind.
    """

    split: str
    name: str
    reason: str


@dataclass
class Skipped:
    """Counts what is skipped, and tells when it is too much.

    Attributes:
      limit: How many may be skipped.
      total: Of how many.
      counts: How many were, by reason.
      named: The first hundred.
    """

    limit: int
    total: int
    counts: Counter[str] = field(default_factory=Counter)
    named: list[Bad] = field(default_factory=list)

    def add(self, bad: Bad) -> None:
        """Counts one."""
        self.counts[bad.reason] += 1
        if len(self.named) < _MAX_NAMED:
            self.named.append(bad)

    def check(self) -> None:
        """Stops if it is too much.

        Raises:
          TooManyBadError: With the names of the first.
        """
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
    """Returns how many of a total may be skipped.

    Args:
      max_bad: A number, or a share such as ``"0.1%"``.
      total: How many there are.

    Raises:
      PrepareError: If it is neither.

    Example:
      >>> allowed("7", 500), allowed("1%", 500), allowed("0.1%", 500)
      (7, 5, 0)
    """
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
    """Returns how two sets of options differ, for an error message.

    Example:
      >>> difference({"block": 256}, {"block": 512})
      '--block was 256 and is 512'
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(
        f"--{name.replace('_', '-')} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in names
    )
