"""What commands read besides the run file: tokens, and lists of numbers in options."""

from pathlib import Path
from typing import TypeVar

from diloco.errors import ConfigError

N = TypeVar("N", int, float)


def read_token(path: Path | None) -> str | None:
    """The secret in a token file; None without one. Raises ConfigError when it cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {path} ({error}); check its path and permissions") from error


def parse_list(option: str, text: str, kind: type[N], what: str, example: str) -> tuple[N, ...]:
    """The numbers of `text`, between commas. Raises ConfigError that names the option, `what` it takes and an example."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of {what}; write for example {example}") from None


def check_shard(shard: int, learners: int) -> None:
    """Raise ConfigError unless a run of so many learners has this shard."""
    if shard >= learners:
        raise ConfigError(f"--shard {shard} does not exist; shards are 0 to {learners - 1}")
