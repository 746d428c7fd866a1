"""The space of a search: an interval or a choice for each field, and its points.

Points are quasi-random (Bousquet et al. 2017; Choi et al. 2019, section 3): they fill a
space more evenly than random points. A longer search begins with the points of a
shorter one, so that a search can be made longer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.studies.fields import flat_fields

_SCALES = ("linear", "log", "log1m")
# The part of the unit interval that counts as the edge of an axis.
_EDGE = 0.1


@dataclass(frozen=True)
class Axis:
    """The values of a field that are tried.

    Attributes:
      scale: ``linear``; ``log``; ``log1m`` (1 minus the value is logarithmic, as for a
        momentum near 1); or ``choice``.
      low, high: The ends of an interval; for ``log1m`` of 1 minus the value.
    """

    scale: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """Reads ``SCALE:LOW:HIGH`` or ``choice:A,B,...``, or raises ValueError."""
        scale, _, rest = str(text).partition(":")
        if scale == "choice" and rest:
            return cls(scale, choices=tuple(map(_value, rest.split(","))))
        try:
            low, high = map(float, rest.split(":"))
        except ValueError:
            low = high = math.nan
        if scale not in _SCALES or not low < high or (scale != "linear" and low <= 0):
            raise ValueError(
                f"{text!r} is not a space to search; give SCALE:LOW:HIGH, such as "
                f"log:1e-4:1e-2, with a SCALE of {', '.join(_SCALES)} and LOW above 0 "
                "but for linear; or choice:A,B"
            )
        return cls(scale, low, high)

    def at(self, place: float) -> Any:
        """Returns the value at a place in [0, 1), to six digits."""
        if self.scale == "choice":
            return self.choices[int(place * len(self.choices))]
        if self.scale == "linear":
            return _short(self.low + place * (self.high - self.low))
        value = self.low * (self.high / self.low) ** place
        return _short(1 - value if self.scale == "log1m" else value)

    def is_edge(self, value: Any) -> bool:
        """Whether a value is in the outer tenth on either side; False for a choice."""
        if self.scale == "choice":
            return False
        value = 1 - value if self.scale == "log1m" else value
        if not value > 0 and self.scale != "linear":
            return True  # The value comes from another space.
        ends = self.low, self.high, value
        low, high, at = ends if self.scale == "linear" else map(math.log, ends)
        place = (at - low) / (high - low)
        return not _EDGE <= place <= 1 - _EDGE


@dataclass(frozen=True)
class Space:
    """The searched fields of a config; `axes` has their dotted names, sorted."""

    axes: Mapping[str, Axis]

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Space":
        """Reads the axes of nested fields; a ValueError names the wrong field."""
        axes = {}
        for name, text in sorted(flat_fields(fields).items()):
            try:
                axes[name] = Axis.parse(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return cls(axes)

    def points(self, number: int, seed: int) -> list[dict[str, Any]]:
        """Returns the values of all fields at each point of a Sobol sequence."""
        if not self.axes:
            return [{}] * number
        # Imported here: the import takes a second, and training alone does not search.
        from scipy.stats import qmc

        sequence = qmc.Sobol(len(self.axes), rng=np.random.default_rng(seed))
        whole = max(1, number - 1).bit_length()  # Sobol needs powers of two.
        return [
            {
                name: axis.at(float(place))
                for (name, axis), place in zip(self.axes.items(), row, strict=True)
            }
            for row in sequence.random_base2(whole)[:number]
        ]

    def edges(self, point: Mapping[str, Any]) -> list[str]:
        """Returns the fields whose value is at the edge of its axis."""
        return [name for name, axis in self.axes.items() if axis.is_edge(point[name])]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _short(value: float) -> float:
    return float(f"{value:.6g}")
