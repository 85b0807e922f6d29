"""Untrusted input: text made safe to print, and JSON that may be malformed."""

import json
import logging
import time
from typing import Any

from diloco.errors import DilocoError, translated

MAX_REASON = 300
"""Length limit of a peer's reason, in characters."""


def printable(text: str, most: int | None = None) -> str:
    r"""Escape each unprintable character, as in "\x1b", after cutting the text to `most` characters. Spaces are
    printable, line ends are not."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shortened(text: str, most: int) -> str:
    """Cut a text to `most` characters by omitting its middle, since names differ at their ends."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


class PlainFormatter(logging.Formatter):
    """Formats each message as one printable line; lines of tracebacks are made printable, too. Times are UTC."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


def log_plainly() -> None:
    """Log to standard error from level INFO on: time in UTC, level, message."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading malformed plain values: wrong type, missing, too large, too deep."""


def read_json(text: str | bytes, what: str, error: type[DilocoError], advice: str) -> Any:
    """Parse a JSON text.

    Raises:
        DilocoError: an `error` with `what` and the advice, if the text is not JSON or nested too deeply.
    """
    with translated((ValueError, RecursionError), error, f"{what} is not JSON", advice):
        return json.loads(text)
