"""What another machine said: text that is safe to show, and JSON that may be malformed."""

import json
import logging
import re
import time
from typing import Any

from diloco.errors import DilocoError, translated

KEY_LINE = "diloco1."
"""How a line of keys begins (`exchange.key_pair`)."""

_KEY_LINE = re.compile(re.escape(KEY_LINE) + r"[\w-]+")

MAX_REASON = 300
"""Characters of a reason that a peer gives."""


def printable(text: str, most: int | None = None) -> str:
    r"""`text` with an escape, as in "\x1b", for each character that is not printable; at most so many characters of
    it. Spaces are printable, line ends are not."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def is_key_line(text: str) -> bool:
    """Whether a text is a line of keys."""
    return text.lstrip().startswith(KEY_LINE)


def without_key_lines(text: str) -> str:
    """The text with only the beginning of each line of keys in it."""
    return _KEY_LINE.sub(f"{KEY_LINE}…", text)


def shortened(text: str, most: int) -> str:
    """`text` in at most so many characters: the middle is left out, since names differ at their ends."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


class PlainFormatter(logging.Formatter):
    """Messages on one line each, and of a traceback only lines that are printable, whatever is quoted in them. Times
    are UTC."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


def log_plainly() -> None:
    """Log from the level INFO on to standard error: the time in UTC, the level, a sentence."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading plain values ends in that are not what they should be: of another type, missing, too large, too deep."""


def read_json(text: str | bytes, what: str, error: type[DilocoError], advice: str) -> Any:
    """The values of a JSON text.

    Raises:
        DilocoError: an `error` that names `what` is not JSON, or too deep, and gives the advice.
    """
    with translated((ValueError, RecursionError), error, f"{what} is not JSON", advice):
        return json.loads(text)
