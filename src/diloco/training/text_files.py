"""Plain text files and files of JSON lines, compressed with gzip or not."""

import gzip
import hashlib
import json
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from diloco.errors import ConfigError, translated
from diloco.training.rows import SEPARATOR, UNREADABLE, Document, Rows, text_of

PIECE_BYTES = 1 << 16
"""Length of a piece of a plain text file; it goes on to the end of a line, unless a line is as long as a piece."""


def reading(path: Path | str) -> AbstractContextManager[None]:
    """Inside, what a file cannot be read for becomes a ConfigError that names it."""
    return translated(
        UNREADABLE, ConfigError, f"cannot read the data file {path}", "check data.paths, and that it is whole"
    )


class _FileRows:
    """What `take` takes from a file at each call, from an offset in the uncompressed bytes on."""

    def __init__(self, part: "TextPart | LinesPart", offset: int) -> None:
        self._part = part
        with reading(part.path):
            compressed = part.path.suffix == ".gz"
            self._file: Any = gzip.open(part.path) if compressed else part.path.open("rb")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            self._file.seek(offset)

    def next(self) -> Any | None:
        with reading(self._part.path):
            return self._part.take(self._file)

    def cursor(self) -> int:
        return int(self._file.tell())


@dataclass(frozen=True)
class TextPart:
    """A plain text file in pieces of `PIECE_BYTES`."""

    path: Path

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are those of the text."""
        return self.path.suffix != ".gz"

    def mapped(self) -> list[npt.NDArray[Any]]:
        """The bytes of a plain file, memory-mapped, and a separator; of an empty one, nothing."""
        with reading(self.path):
            if not self.path.stat().st_size:
                return []
            return [np.memmap(self.path, dtype=np.uint8, mode="r"), np.frombuffer(SEPARATOR, dtype=np.uint8)]

    def rows(self, cursor: Any = None) -> Rows:
        return _FileRows(self, cursor or 0)

    def take(self, file: Any) -> Document | None:
        """The next piece: whole lines, or as much of one as a piece holds, without cutting a character."""
        begin = file.tell()
        piece: bytes = file.read(PIECE_BYTES) + file.readline(PIECE_BYTES)
        if not piece:
            return None
        while (following := file.peek(1)[:1]) and following[0] & 0xC0 == 0x80 and len(piece) <= 2 * PIECE_BYTES + 3:
            piece += file.read(1)  # the rest of a character in UTF-8
        return Document(piece, not following, self.path, begin)

    def document(self, row: Any, number: int) -> Document:
        piece: Document = row
        return piece

    def digest(self, *, whole: bool = False) -> bytes:
        return file_digest(self.path, whole=whole)


@dataclass(frozen=True)
class LinesPart:
    """A file of JSON objects, one a line, each with a text in `column`."""

    path: Path
    column: str

    def rows(self, cursor: Any = None) -> Rows:
        return _FileRows(self, cursor or 0)

    def take(self, file: BinaryIO) -> bytes | None:
        """The next line that is not blank."""
        line: bytes = file.readline()
        while line and line.isspace():
            line = file.readline()
        return line or None

    def document(self, row: Any, number: int) -> Document:
        where = f"row {number + 1} of {self.path}"
        with translated((ValueError, RecursionError), ConfigError, f"{where} is not JSON", "correct or remove the row"):
            value = json.loads(row)
        if not isinstance(value, dict):
            raise ConfigError(
                f"{where} is a {type(value).__name__}, not an object with a text; correct or remove the row"
            )
        return text_of(value, self.column, where)

    def digest(self, *, whole: bool = False) -> bytes:
        return hashlib.sha256(file_digest(self.path, whole=whole) + self.column.encode()).digest()


def file_digest(path: Path, *, whole: bool) -> bytes:
    """sha256 of a whole file, or of its size and of 16 stretches of it."""
    with reading(path), path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").digest()
        size = path.stat().st_size
        found = hashlib.sha256(str(size).encode())
        for k in range(16):
            file.seek(size * k // 16)
            found.update(file.read(256))
    return found.digest()
