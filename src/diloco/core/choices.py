"""Choices as values: an answer that a Method holds is a frozen dataclass that JSON and TOML can carry.

A choice becomes `{"type": "Nesterov", "lr": 0.7, "momentum": 0.9}`. Reading is strict: an unknown type or field is an
error that names the nearest known one.
"""

import dataclasses
import difflib
import math
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeGuard, TypeVar

from diloco.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Choice(ABC):  # noqa: B024 - each question's own base class declares the abstract methods
    """Base of the frozen dataclasses that answer one question of a Method."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (check := field.metadata.get("check")) is not None:
                name = f"{type(self).__name__}({field.name}=…)"
                object.__setattr__(self, field.name, check(name, getattr(self, field.name)))

    def to_dict(self) -> dict[str, object]:
        """The type's name and every field, in plain JSON types (tuples become lists)."""
        fields = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"type": type(self).__name__, **fields}


def checked(check: Callable[[str, object], Any], default: Any = dataclasses.MISSING) -> Any:
    """A field of a choice whose value is what `check` returns, given its name and value; it raises ConfigError."""
    return dataclasses.field(default=default, metadata={"check": check})


def one_of(*words: str) -> Callable[[str, object], Any]:
    """A check that a value is one of these words."""
    listed = " or ".join(map(repr, words)) if len(words) == 2 else f"one of {', '.join(map(repr, words))}"

    def check(name: str, value: object) -> object:
        if value not in words:
            raise ConfigError(f"{name} is {value!r}; use {listed}.")
        return value

    return check


ChoiceT_co = TypeVar("ChoiceT_co", bound=Choice, covariant=True)


class Registry(Generic[ChoiceT_co]):
    """The known answers to one question: types of choices, by name.

    Arguments:
        what: the question, in errors ("outer optimizer").
        kinds: the answers.
    """

    def __init__(self, what: str, *kinds: type[ChoiceT_co]) -> None:
        self._what = what
        self._kinds = {kind.__name__: kind for kind in kinds}

    def __iter__(self) -> Iterator[type[ChoiceT_co]]:
        return iter(self._kinds.values())

    def read(self, values: object) -> ChoiceT_co:
        """Read back what `to_dict` wrote, e.g. `{"type": "Nesterov", "lr": 0.7}`.

        Raises ConfigError on an unknown type or field (naming the nearest known one), on a missing field, and on a
        value that the type itself refuses.
        """
        if not isinstance(values, Mapping):
            example = next(iter(self._kinds))
            raise ConfigError(
                f"{values!r} is not a valid {self._what}; write a table with its type, such as {{type: {example!r}}}"
            )
        name = values.get("type")
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ConfigError(f"{name!r} is not a known {self._what}{nearest(str(name), self._kinds)}")
        fields = {field.name: field for field in dataclasses.fields(kind)}
        arguments = {key: value for key, value in values.items() if key != "type"}
        for key in arguments:
            if key not in fields:
                raise ConfigError(
                    f"{self._what} {name} has no field {key!r}{self._elsewhere(key) or nearest(key, fields)}"
                )
        for key, field in fields.items():
            if key not in arguments and field.default is dataclasses.MISSING:
                raise ConfigError(f"{self._what} {name} needs a value for {key!r}.")
        return kind(**arguments)

    def _elsewhere(self, field: str) -> str:
        """The end of a sentence that names the types which have this field; "" if none has."""
        having = [kind.__name__ for kind in self if field in {each.name for each in dataclasses.fields(kind)}]
        return (
            f", which {' and '.join(having)} {'have' if having[1:] else 'has'}; give that type too." if having else ""
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that helps after a typo: `; did you mean 'lr'?` or `; known are 'eps', 'lr'.`."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(repr(each) for each in names)}." if names else "; it takes none."


def whole_number(name: str, value: object, minimum: int) -> int:
    """`value`, or ConfigError unless it is an int (no bool) of at least `minimum`."""
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, not {value!r}.")
    return value


def positive(name: str, value: object) -> float:
    """`value` as a float, or ConfigError unless it is a finite number above 0."""
    if _is_number(value) and value > 0:
        return float(value)
    raise ConfigError(f"{name} must be a finite number above 0, not {value!r}.")


def fraction(name: str, value: object, *, below_one: bool) -> float:
    """`value` as a float, or ConfigError unless it is in [0, 1), or in [0, 1] when `below_one` is false."""
    if _is_number(value) and 0 <= value <= 1 and not (below_one and value == 1):
        return float(value)
    raise ConfigError(f"{name} must be a number from 0 to 1{' but below 1' if below_one else ''}, not {value!r}.")


FROM_0, FROM_1 = (partial(whole_number, minimum=minimum) for minimum in (0, 1))
BELOW_1, UP_TO_1 = (partial(fraction, below_one=below_one) for below_one in (True, False))
"""Whole numbers and fractions, as checks of fields."""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: object) -> object:
    """A value in plain JSON types: choices become tables, tuples become lists."""
    if isinstance(value, Choice):
        return value.to_dict()
    return [plain(item) for item in value] if isinstance(value, tuple) else value
