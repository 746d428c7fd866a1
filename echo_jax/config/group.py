"""Groups of config fields: frozen dataclasses, whose types bound their values.

The type of a field says which values it may have, and the comment behind it, or above
it, what it is:

    lr: Positive = 1e-3  # peak learning rate
    scale: Literal["none", "linear"] = "none"  # its growth with the batch size
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

_FIELD = re.compile(r"    (\w+): ")


@dataclass(frozen=True)
class Bounds:
    """At least `least`, or above it; at most `most`, and below `below`.

    They hold for a number of the type of `least`, or for each number of a tuple.
    """

    least: float
    below: float = math.inf
    most: float = math.inf
    is_above: bool = False

    def rule(self, value: Any) -> str:
        """Returns the rule that a number breaks, or ""."""
        kind = type(self.least)
        if isinstance(value, bool) or not isinstance(value, int | kind):
            return f"must be {'a whole' if kind is int else 'a'} number"
        if not -math.inf < value < math.inf:
            return "must be finite"
        if value < self.least or (self.is_above and value == self.least):
            return f"must be {'above' if self.is_above else 'at least'} {self.least:g}"
        if value > self.most:
            return f"must be at most {self.most:g}"
        return "" if value < self.below else f"must be below {self.below}"


Natural = Annotated[int, Bounds(0)]
Count = Annotated[int, Bounds(1)]
Amount = Annotated[float, Bounds(0.0)]
Fraction = Annotated[float, Bounds(0.0, most=1.0)]
Probability = Annotated[float, Bounds(0.0, most=1.0, is_above=True)]
Positive = Annotated[float, Bounds(0.0, is_above=True)]
Share = Annotated[float, Bounds(0.0, below=1.0)]
# Updates after which something changes, as 32-bit integers.
Boundaries = Annotated[tuple[int, ...], Bounds(1, below=2**31)]
# The type of numbers in a computation.
Precision = Literal["float32", "bfloat16", "float16"]


class Group:
    """A group of fields; it checks its own values when it is made."""

    def __post_init__(self):
        for name, kind in _kinds(type(self)).items():
            if rule := _broken_rule(kind, getattr(self, name)):
                self.refuse(name, rule, getattr(type(self), name))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def refuse(self, name: str, rule: str, fix: Any) -> None:
        """Raises the ValueError of a field, by its dotted name, that breaks a rule."""
        value = operator.attrgetter(name)(self)
        raise ValueError(f"{name}={value!r} {rule}; set {name}={fix}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a nested dict."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]


def defaults_of(group: type) -> dict[str, Any]:
    """Returns the default of every field of a group, as a nested dict."""
    found = _defaults(group)
    for name, value in found.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found[name] = dataclasses.asdict(value)
    return found


def made(group: type, values: Mapping[str, Any]) -> Any:
    """Makes a group of nested values; refuses an unknown field."""
    own, defaults = dict(values), _defaults(group)
    for name, value in values.items():
        if name not in defaults:
            fix = f"remove it, or use one of {', '.join(defaults)}"
            raise ValueError(f"{name}={value!r} is no field; {fix}")
        kind = type(defaults[name])
        if dataclasses.is_dataclass(kind) and not dataclasses.is_dataclass(value):
            with named(f"{name}."):
                own[name] = made(kind, value)
    return group(**own)


def changed(group: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a group with other values, by their dotted names."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    for name, values in inner.items():
        with named(f"{name}."):
            own[name] = changed(getattr(group, name), values)
    return dataclasses.replace(group, **own)


@contextlib.contextmanager
def named(group: str) -> Iterator[None]:
    """Puts a group, such as ``"optim."``, before the field of a ValueError."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("config."):
            raise
        is_field = re.match(r"[\w.]+(=| must |: )", str(error))
        flag = "--config." if group == "config." else group
        text = re.sub(r"(set|Use) ([\w.]+=)", rf"\1 {flag}\2", str(error))
        before = group if is_field else f"{group.rstrip('.')}: "
        raise ValueError(before + text) from error


def _defaults(group: type) -> dict[str, Any]:
    found = {}
    for each in dataclasses.fields(group):
        factory = each.default_factory
        found[each.name] = each.default if factory is dataclasses.MISSING else factory()
    return found


def _broken_rule(kind: Any, value: Any) -> str:
    """Returns the rule of a field's type that a value breaks, or ""."""
    if get_origin(kind) is Literal and value not in get_args(kind):
        return f"must be one of {', '.join(get_args(kind))}"
    numbers = value if isinstance(value, tuple) else (value,)
    bounds = getattr(kind, "__metadata__", ())
    rules = (each.rule(number) for each in bounds for number in numbers)
    return next(filter(None, rules), "")


@functools.cache
def _kinds(group: type) -> dict[str, Any]:
    hints = get_type_hints(group, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(group)}


def described(group: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the description of every field of a group."""
    about = {}
    for each in reversed(group.__mro__):
        if dataclasses.is_dataclass(each):
            about |= _comments(inspect.getsource(each))
    for name, value in _defaults(group).items():
        kind, said = _kinds(group)[name], about.get(name, "")
        if get_origin(kind) is Literal and " | " not in said:
            said = f"{' | '.join(get_args(kind))}{said and f': {said}'}"
        yield f"{prefix}{name}", said
        if dataclasses.is_dataclass(value):
            yield from described(type(value), f"{prefix}{name}.")


def _comments(source: str) -> dict[str, str]:
    """Returns the comment behind each field of a class, or in the lines above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in source.split("\n"):
        code, _, said = line.partition("#")
        if field := _FIELD.match(code):
            found[field[1]] = " ".join([*above, said.strip()]).strip()
        above = [*above, said.strip()] if said and not code.strip() else []
    return found
