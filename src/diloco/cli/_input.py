"""Inputs of commands besides the run file: tokens, lists of numbers."""

import json
from pathlib import Path
from typing import TypeVar

from diloco.errors import ConfigError
from diloco.secret_files import read_secret

N = TypeVar("N", int, float)


def read_token(path: Path | None) -> str | None:
    """The secret in a token file; None without one. Raises ConfigError when it cannot be read, or others may."""
    return None if path is None else read_secret(path, "token file").decode(errors="replace").strip()


def with_keys(overrides: list[str] | None, keys: Path | None) -> list[str]:
    """What overrides a run file, the keys of `--keys` among it."""
    return [*(overrides or ()), *([] if keys is None else [f"syncer.keys={json.dumps(str(keys))}"])]


def parse_list(option: str, text: str, kind: type[N], what: str, example: str) -> tuple[N, ...]:
    """The numbers of `text`, between commas. Raises ConfigError that names the option and `what` it takes."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of {what}; write for example {example}") from None
