"""Documents: texts of files or of a data set, which are read one after the other, from any place.

A **part** is one file, or one of the shards that a data set has. Its **rows** are numbered from 0: the lines of a JSONL
file, the rows of a Parquet file or of a data set, and pieces of a plain text file, cut after the end of a line. Every
row is one document. A cursor of plain values says where reading goes on.
"""

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from diloco.errors import ConfigError

SEPARATOR = b"\0"
"""A byte that no text contains marks the end of each, where tokens are bytes."""

UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError)
"""What reading a file or a data set ends in that is absent, damaged or of another kind."""


@dataclass(frozen=True)
class Document:
    """A text; `is_end` is False for a piece of a file after which the file goes on.

    Attributes:
        path: the file, where the text is bytes of it.
        begin: of the text, in the uncompressed bytes of the file.
    """

    text: str | bytes
    is_end: bool = True
    path: Path | None = None
    begin: int = 0


class Rows(Protocol):
    """The rows of a part, from some place on."""

    def next(self) -> Any | None:
        """The next row, as it was read; None: there is none."""

    def cursor(self) -> Any:
        """Plain values with which `Part.rows` goes on after the last row."""


class Part(Protocol):
    """A file, or one of the files of a data set."""

    def rows(self, cursor: Any = None) -> Rows:
        """The rows from a cursor on, or all."""

    def document(self, row: Any, number: int) -> Document:
        """What a row is. Raises ConfigError where it has no text."""

    def digest(self, *, whole: bool = False) -> bytes:
        """Of as little as tells this part from another one, the same for a copy of it; `whole`: of all local bytes."""


@dataclass(frozen=True)
class Documents:
    """All parts. `by_parts`: learners are dealt whole parts where these divide over them (`Deal`)."""

    parts: tuple[Part, ...]
    by_parts: bool = False

    def digest(self, *, whole: bool = False) -> str:
        """sha256 (hex) of the parts' digests."""
        return hashlib.sha256(b"".join(part.digest(whole=whole) for part in self.parts)).hexdigest()


def text_of(row: dict[str, Any], column: str, where: str) -> Document:
    """The document of a row of columns. Raises ConfigError that says `where` it is, if it has no text."""
    if column not in row:
        raise ConfigError(no_column(where, column, list(row)))
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(f'{where} has {type(text).__name__} in "{column}", not a text; correct or remove the row')
    # Half of a surrogate pair is possible in JSON and has no UTF-8.
    return Document(text if text.isascii() else text.encode("utf-8", errors="replace").decode())


def no_column(where: str, column: str, names: list[str]) -> str:
    """The sentence for a row, a file or a data set without the column."""
    return f'{where} has no column "{column}" (it has {", ".join(names)}); set data.text_column'
