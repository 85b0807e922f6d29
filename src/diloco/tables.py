"""TOML files as pydantic tables. Errors name the key, and for an unknown key the nearest known one."""

import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from diloco.errors import ConfigError, translated

T = TypeVar("T", bound=BaseModel)

MAX_DEPTH = 50
"""Nesting limit of a file: validation is recursive."""


class Table(BaseModel):
    """A table of a TOML file: frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True)

    def refuse_unused(self, *rules: tuple[str, bool, str]) -> None:
        """Raise ValueError for a key that is set without effect; a rule: key, whether it has an effect, why not."""
        for key, is_used, why in rules:
            if not is_used and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect {why}; drop it")


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file. Raises ConfigError that names the file and its kind, `what`."""
    try:
        with translated(OSError, ConfigError, f"cannot read the {what} {path}", "check the path"):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {path} is not UTF-8 text; save it as UTF-8") from error


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Parse a TOML text, with or without a byte-order mark. Raises ConfigError that names source and line."""
    try:
        tables = tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:  # ValueError includes integers with thousands of digits
        raise ConfigError(f"{source} is not TOML: {error}; correct that line") from error
    below: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        below = [each for value in below for each in (value.values() if isinstance(value, dict) else value)
                 if isinstance(each, dict | list)]  # fmt: skip
    if below:
        raise ConfigError(f"{source} has tables or lists more than {MAX_DEPTH} deep; write it flatter")
    return tables


def validate(kind: type[T], tables: Mapping[str, Any], source: str) -> T:
    """Validate `tables` as a `kind`. Raises ConfigError: one sentence about the first error."""
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error, kind, tables)}") from error


def number_ranges(name: str, text: object) -> tuple[tuple[int, int], ...]:
    """The pairs (first, stop) of a text such as "0-15" or "0,3,8-11", in ascending order; `stop` is excluded.

    Raises ConfigError for another text, or one that names a number twice.
    """
    found: list[tuple[int, int]] = []
    for part in text.split(",") if isinstance(text, str) else [""]:
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f'{name}={text!r} is not a list of numbers; write it as "0-15" or "0,3,8-11".')
        found.append((int(match[1]), int(match[2] or match[1]) + 1))
    found.sort()
    for (_, stop), (first, _) in itertools.pairwise(found):
        if first < stop:
            raise ConfigError(f"{name}={text!r} names {first} twice; name each number once.")
    return tuple(found)


def nearest(key: str, known: Sequence[str]) -> str:
    """Advice for an unknown key: the nearest known one, or all known ones."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else "known are " + ", ".join(sorted(known))


def _explain(error: ValidationError, kind: type[BaseModel], tables: Mapping[str, Any]) -> str:
    errors = error.errors()
    unknown = [each for each in errors if each["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]  # a misspelt key may also be reported as missing
    keys, name = first["loc"], _name(first["loc"], tables)
    if first["type"] == "extra_forbidden":
        table = kind
        # The number of a table in an array and the name of one in a table of tables are no fields.
        for key in keys[:-1]:
            field = None if isinstance(key, int) else table.model_fields.get(key)
            table = (None if field is None else _table_of(field.annotation)) or table
        return f'unknown key "{name}"; {nearest(str(keys[-1]), list(table.model_fields))}'
    if first["type"] == "missing":
        return f'"{name}" is missing; add it'
    if first["type"] in ("model_type", "dict_type"):
        return f"{name} must be a table, [{name}]"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"[{name}] {message}" if name else message
    value = json.dumps(first["input"], default=str)
    return f"{name} = {value}: {message[0].lower()}{message[1:]}"


def _name(keys: tuple[int | str, ...], tables: Any) -> str:
    """The keys joined by dots; a table of an array is named by its key `name`, or else by its number, from 1."""
    parts = []
    for key in keys:
        try:
            tables = tables[key]
        except (KeyError, IndexError, TypeError):
            tables = None
        own = tables.get("name") if isinstance(key, int) and isinstance(tables, Mapping) else None
        parts.append(str(own or key + 1) if isinstance(key, int) else key)
    return ".".join(parts)


def _table_of(annotation: Any) -> Any:
    """The table in `Site`, `Site | None`, `tuple[Site, ...]` or `dict[str, Site]`; None: there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_table_of, get_args(annotation)) if found is not None), None)


def write_toml(tables: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML, without None. Raises ConfigError for a value of another type."""
    import tomlkit
    from tomlkit.exceptions import ConvertError

    try:
        return tomlkit.dumps(_without_none(tables))
    except ConvertError as error:
        raise ConfigError(f"a value is not valid in TOML ({error}); use numbers, strings, lists, tables") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value
