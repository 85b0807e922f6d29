"""Values of the driver's events as JSON, and back: the format of a journal's values.

Numbers, strings, lists and mappings are unchanged. Every other value is an object whose key "$" names its kind:

    {"$": "protocol.contribution.Contribution", …}   a dataclass of `core` or `protocol`, by its fields
    {"$": "layout", "digest": …, "tensors": …}   the layout of a model; "method": likewise
    {"$": "InitialModel", …}, {"$": "SavedRun", …}   each fragment as its version and digest
    {"$": "error", "is": "NoRoomError", "says": …}
    {"$": "set"}, {"$": "bytes"}                 sorted elements; length and SHA-256
    {"$": "push", "n": 3}, {"$": "connection", "n": 3}   objects of the driver, numbered from 1

Tuples and lists are not distinguished: outside of mappings, arrays are read as tuples. No value names executable code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from diloco import errors
from diloco.errors import DilocoError, StoreError
from diloco.run.ports import InitialModel, SavedRun

TAG = "$"
ROOMS = ("core.", "protocol.")
"""Packages of the dataclasses, below `diloco`."""

NumberOf = Callable[[object], tuple[str, int] | None]
"""Returns the kind and number of an object of the driver; None for other objects."""


@dataclass(frozen=True)
class BytesRead:
    """Represents bytes, of which only length and digest are journalled."""

    num_bytes: int
    sha256: str


def write_plain(value: object, number_of: NumberOf = lambda _: None) -> str:
    """Serialize a value as JSON.

    Raises:
        TypeError: it has no plain form.
    """

    def plain_of(other: Any) -> object:
        if (numbered := number_of(other)) is not None:
            return {TAG: numbered[0], "n": numbered[1]}
        return _plain_of(other)

    return json.dumps(value, default=plain_of, separators=(",", ":"), ensure_ascii=False)


def _plain_of(value: Any) -> object:
    if isinstance(value, InitialModel | SavedRun):
        held = [[each.version, each.digest] for each in value.fragments]
        return {TAG: type(value).__name__, **_fields_of(value), "fragments": held}
    if isinstance(value, bytes):
        value = BytesRead(len(value), hashlib.sha256(value).hexdigest())
    if isinstance(value, BytesRead):
        return {TAG: "bytes", "num": value.num_bytes, "sha256": value.sha256}
    if isinstance(value, set | frozenset):
        return {TAG: "set", "of": sorted(value)}
    if isinstance(value, DilocoError):
        return {TAG: "error", "is": type(value).__name__, "says": str(value)}
    if hasattr(value, "first_difference"):
        return {TAG: "layout", "digest": value.digest(), "is": value.to_dict()}
    if hasattr(value, "with_own_overlap"):
        return {TAG: "method", "is": value.to_dict()}
    if is_dataclass(value) and type(value).__module__.removeprefix("diloco.").startswith(ROOMS):
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("diloco.")
        return {TAG: name, **_fields_of(value)}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no plain form; add one to diloco.run.journal.serialization")


def _fields_of(value: Any) -> dict[str, object]:
    return {name: getattr(value, name) for name in _names(type(value))}  # type: ignore[arg-type]


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


class PlainReader:
    """Reads serialized values.

    Arguments:
        layout, method: read the values of `to_dict`.
        held: returns a fragment by index, version and digest.
        numbered: returns an object of the driver by kind and number.
    """

    def __init__(
        self, *, layout: Callable[[Any], Any], method: Callable[[Any], Any], held: Callable[[int, int, str], Any],
        numbered: Callable[[str, int], Any],
    ) -> None:  # fmt: skip
        self._layout, self._method, self._held, self._numbered = layout, method, held, numbered

    def read(self, value: Any) -> Any:
        """Read a value that `write_plain` has serialized.

        Raises:
            StoreError: the value has an unknown form.
        """
        if isinstance(value, list):
            return tuple(self.read(each) for each in value)
        if not isinstance(value, dict) or TAG not in value:
            return value
        try:
            return self._read_tagged(value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"the journal has a {value[TAG]!r} that this version of diloco cannot read ({error!r}); read "
                "it with the version that wrote it."
            ) from error

    def _read_tagged(self, value: dict[str, Any]) -> Any:
        match value[TAG]:
            case "push" | "connection" as kind:
                return self._numbered(kind, value["n"])
            case "layout":
                return self._layout(value["is"])
            case "method":
                return self._method(value["is"])
            case "set":
                return frozenset(self.read(each) for each in value["of"])
            case "bytes":
                return BytesRead(value["num"], value["sha256"])
            case "error":
                return _error_class(value["is"])(value["says"])
            case "InitialModel":
                return InitialModel(**self._fields(value))
            case "SavedRun":
                return SavedRun(**self._fields(value))
            case str() as name:
                return _dataclass(name)(**self._fields(value))
        raise ValueError(f"a tag is {value[TAG]!r}")

    def _fields(self, value: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: self.read(each) for name, each in value.items() if name != TAG}
        if value[TAG] in ("InitialModel", "SavedRun"):
            found["fragments"] = tuple(self._held(index, *each) for index, each in enumerate(found["fragments"]))
        return found


@cache
def _dataclass(name: str) -> type[Any]:
    module, _, qualname = name.rpartition(".")
    if not module.startswith(ROOMS):
        raise ValueError(f"{name} is not a value of core or protocol")
    kind = getattr(import_module(f"diloco.{module}"), qualname)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"{name} is not a dataclass")
    return kind


def _error_class(name: str) -> type[DilocoError]:
    kind = getattr(errors, name)
    if not (isinstance(kind, type) and issubclass(kind, DilocoError)):
        raise ValueError(f"{name} is not an error of diloco")
    return kind
