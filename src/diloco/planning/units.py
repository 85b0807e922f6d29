"""Quantities with units, parsed and printed: "100 Mbit/s", "50 ms", "3.5e9 bytes", "0.09 USD/GB".

A number without a unit is refused: Mbit/s and MB/s differ by a factor of eight that no later check would detect.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.core.choices import positive
from diloco.errors import ConfigError
from diloco.tables import nearest

SMALLEST, LARGEST = 1e-30, 1e30
"""Range of nonzero amounts in base units: products of several of them remain finite."""

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*)?\.?\d+\.?(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


@dataclass(frozen=True)
class Quantity:
    """A kind of quantity.

    Arguments:
        name: for error messages.
        units: factor of each unit to the base unit, whose factor is 1.
        example: of the notation.
        shown: units that `show` chooses from; empty: all of `units`.
        coarse: units that `show` uses only for values with at most one decimal: 65 s is not shown as 1.08 min.
    """

    name: str
    units: Mapping[str, float]
    example: str
    shown: tuple[str, ...] = ()
    coarse: tuple[str, ...] = ()

    def parse(self, text: object, key: str = "", *, positive: bool = False) -> float:
        """Parse `text` into the base unit, for example "100 Mbit/s" → 1e8.

        `key` names the option in errors. Zero is valid unless the quantity must be `positive`. Raises ConfigError for a
        number without unit, an unknown unit, and a value that is negative, not finite or out of range.
        """
        given = f"{key} = {json.dumps(text, default=str)}" if key else json.dumps(text, default=str)
        match = _NUMBER.fullmatch(str(text))
        if match is None:
            raise ConfigError(
                f'{given} is not a {self.name}; write a number and its unit, for example "{self.example}"'
            )
        number, unit = float(match[1]), match[2]
        if not unit:
            raise ConfigError(f'{given} has no unit; write for example "{match[1]} {self.example.partition(" ")[2]}"')
        if unit not in self.units:
            raise ConfigError(f'{given}: unknown unit "{unit}" of a {self.name}; {self._nearest(unit)}')
        if number < 0 or (positive and number == 0):
            wanted = "above 0" if positive else "0 or more"
            raise ConfigError(f'{given} has to be {wanted}; write for example "{self.example}"')
        value = number * self.units[unit]
        if number and not SMALLEST <= value <= LARGEST:
            raise ConfigError(f'{given} is out of range; write for example "{self.example}"')
        return value

    def show(self, value: float, digits: int = 3) -> str:
        """Format `value`, in the base unit, with the largest unit of which it is at least one; see `coarse`."""
        if not math.isfinite(value):
            return str(value)
        rounded = float(f"{value:.{digits - 1}e}")
        names = sorted(self.shown or self.units, key=self.units.__getitem__)
        if rounded == 0:
            return f"0 {min(names, key=lambda name: abs(math.log(self.units[name])))}"
        texts = {name: significant(value / self.units[name], digits) for name in reversed(names)}
        for unit, text in texts.items():
            if self.units[unit] <= abs(rounded) and (unit not in self.coarse or len(text.partition(".")[2]) <= 1):
                return f"{text} {unit}"
        return f"{texts[names[0]]} {names[0]}"

    def _nearest(self, unit: str) -> str:
        unit = re.sub("(b/s|bps)$", "bit/s", unit)  # a small b is a bit: never suggest eight times as much
        alike = [name for name in self.units if name.lower() == unit.lower()]
        return f'did you mean "{alike[0]}"?' if alike else nearest(unit, list(self.units))


def amount(name: str, value: float) -> float:
    """Validate a number without a unit, such as one of tokens. Raises ConfigError naming it where it is out of
    range."""
    positive(name, value)
    if not SMALLEST <= value <= LARGEST:
        raise ConfigError(f"{name} = {value!r} is out of range; give a number from {SMALLEST:g} to {LARGEST:g}.")
    return value


def significant(value: float, digits: int = 3) -> str:
    """Format `value` to `digits` significant digits, without exponent or trailing zeros; integer digits are kept."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimal(base: str, prefixes: str, factor: float = 1.0) -> dict[str, float]:
    """Return `base` and its multiples: prefixes such as "kMGT" are successive powers of a thousand."""
    return {base: factor} | {f"{prefix}{base}": factor * 1000.0 ** (i + 1) for i, prefix in enumerate(prefixes)}


def _binary(base: str, factor: float = 1.0) -> dict[str, float]:
    return {f"{prefix}i{base}": factor * 1024.0 ** (i + 1) for i, prefix in enumerate("KMGT")}


_BYTES: dict[str, Any] = {"bytes": 1.0, "byte": 1.0} | _decimal("B", "kMGTP") | _binary("B")
YEAR_S = 365.25 * 86400.0
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BITS = _decimal("bit/s", "kMGT")

RATE = Quantity("rate", _BITS | _decimal("B/s", "kMGT", 8.0) | _binary("B/s", 8.0), "100 Mbit/s", tuple(_BITS))
"""Bits per second."""

TIME = Quantity(
    "time", _TIMES | dict.fromkeys(("y", "year"), YEAR_S), "50 ms", ("us", "ms", "s", "min", "h", "d"),
    coarse=("min", "h", "d"),
)  # fmt: skip
"""Seconds; a year has 365.25 days."""

SIZE = Quantity("size", _BYTES, "3.5 GB", ("bytes", *_decimal("B", "kMGTP")))
"""Bytes."""

COMPUTE = Quantity("speed", _decimal("FLOP/s", "kMGTPE"), "300 TFLOP/s")
"""Floating-point operations per second."""

_BYTE_PRICES = {"USD/GB": 1e-9, "USD/TB": 1e-12, "USD/GiB": 2.0**-30, "USD/TiB": 2.0**-40, "USD/MB": 1e-6}
PRICE_PER_BYTE = Quantity("price", _BYTE_PRICES, "0.09 USD/GB", ("USD/GB",))
"""US dollars per byte."""

_TIME_PRICES = {"USD/h": 1 / 3600, "USD/d": 1 / 86400, "USD/s": 1.0, "USD/min": 1 / 60}
PRICE_PER_S = Quantity("price", _TIME_PRICES, "2 USD/h", ("USD/h",))
"""US dollars per second."""
