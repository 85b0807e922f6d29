"""Inputs of commands besides the run file: keys, lists of numbers."""

import json
from typing import TypeVar

from diloco.errors import ConfigError

N = TypeVar("N", int, float)


def with_keys(overrides: list[str] | None, keys: str | None) -> list[str]:
    """What overrides a run file, the keys of `--keys` among it."""
    return [*(overrides or ()), *([] if keys is None else [f"syncer.keys={json.dumps(keys)}"])]


def parse_list(option: str, text: str, kind: type[N], what: str, example: str) -> tuple[N, ...]:
    """The numbers of `text`, between commas. Raises ConfigError that names the option and `what` it takes."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of {what}; write for example {example}") from None
