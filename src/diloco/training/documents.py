"""Documents: the texts of files or of a data set, read one after the other, from any place.

A **part** is one file, or one of the files that a data set consists of. Its **rows** are numbered from 0: the lines of
a JSONL file, the rows of a Parquet file or of a data set, and pieces of a plain text file, cut after the end of a line.
Every row is one document. A cursor of plain values says where reading goes on.
"""

import glob
import gzip
import hashlib
import json
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from diloco.config import DataTable
from diloco.errors import ConfigError, translated

if TYPE_CHECKING:
    from datasets import IterableDataset

PIECE_BYTES = 1 << 16
"""Length of a piece of a plain text file; it goes on to the end of a line, unless a line is as long as a piece."""

_PARQUET_ROWS = 64
"""Rows of a Parquet file that are decoded at a time."""

_ROWS_OF_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_NOT_READ = (".zst", ".bz2", ".xz", ".lz4", ".zip")
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError)  # pyarrow's errors are among them


@dataclass(frozen=True)
class Document:
    """A text; `is_end` is False for a piece of a file after which the file goes on."""

    text: str | bytes
    is_end: bool = True


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

    def digest(self) -> bytes:
        """Of as little as tells this part from another one."""


@dataclass(frozen=True)
class Documents:
    """All parts. `by_parts`: learners are dealt whole parts where these divide over them (`Deal`)."""

    parts: tuple[Part, ...]
    by_parts: bool = False

    def digest(self) -> str:
        """sha256 (hex) of the parts' digests."""
        return hashlib.sha256(b"".join(part.digest() for part in self.parts)).hexdigest()


def open_documents(data: DataTable) -> tuple[Documents, Documents | None]:
    """What a `text` or `huggingface` table reads for training, and the held-out part where it names one.

    Raises ConfigError when there is no such file, data set or split.
    """
    if data.kind == "text":
        held_out = _files(data.held_out_paths, data.text_column) if data.held_out_paths else None
        return _files(data.paths, data.text_column), held_out
    held_out = _dataset(data, data.held_out_split) if data.held_out_split else None
    return _dataset(data, data.split), held_out


def _files(paths: tuple[Path, ...], column: str) -> Documents:
    return Documents(tuple(_part(path, column) for path in matching(paths)))


def matching(paths: tuple[Path, ...]) -> list[Path]:
    """The files that paths and patterns (`*`, `**`, `?`) name, those of a pattern sorted."""
    found: list[Path] = []
    for path in paths:
        # A pattern that matches nothing is taken for a name, which then cannot be read.
        names = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        found += [Path(name) for name in names] or [path]
    return found


def _part(path: Path, column: str) -> Part:
    if path.suffix in _NOT_READ:
        raise ConfigError(f"data file {path} is compressed in a way that is not read; compress it with gzip instead")
    with _reading(path):
        path.open("rb").close()
    if path.suffix == ".parquet":
        return _parquet(path, column)
    return LinesPart(path, column) if path.name.endswith(_ROWS_OF_LINES) else TextPart(path)


def _reading(path: Path) -> Any:
    return translated(
        _UNREADABLE, ConfigError, f"cannot read the data file {path}", "check data.paths, and that it is whole"
    )


class _FileRows:
    """What `take` takes from a file at each call, from an offset in the uncompressed bytes on."""

    def __init__(self, part: "TextPart | LinesPart", offset: int) -> None:
        self._part = part
        with _reading(part.path):
            compressed = part.path.suffix == ".gz"
            self._file: Any = gzip.open(part.path) if compressed else part.path.open("rb")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            self._file.seek(offset)

    def next(self) -> Any | None:
        with _reading(self._part.path):
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
        """The bytes of a plain file, memory-mapped; of an empty one, nothing."""
        with _reading(self.path):
            return [np.memmap(self.path, dtype=np.uint8, mode="r")] if self.path.stat().st_size else []

    def rows(self, cursor: Any = None) -> Rows:
        return _FileRows(self, cursor or 0)

    def take(self, file: Any) -> Document | None:
        """The next piece: whole lines, or as much of one as a piece holds, without cutting a character."""
        piece: bytes = file.read(PIECE_BYTES) + file.readline(PIECE_BYTES)
        if not piece:
            return None
        while (following := file.peek(1)[:1]) and following[0] & 0xC0 == 0x80 and len(piece) <= 2 * PIECE_BYTES + 3:
            piece += file.read(1)  # the rest of a character in UTF-8
        return Document(piece, is_end=not following)

    def document(self, row: Any, number: int) -> Document:
        piece: Document = row
        return piece

    def digest(self) -> bytes:
        return _file_digest(self.path)


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
        return _text_of(value, self.column, where)

    def digest(self) -> bytes:
        return _file_digest(self.path)


def _dataset(data: DataTable, split: str) -> Documents:
    """A split: of a directory of `save_to_disk`, or by `load_dataset`, which with `stream` downloads nothing ahead."""
    import datasets

    assert data.dataset is not None  # checked by DataTable
    path, what = Path(data.dataset), f'split "{split}" of the data set {data.dataset}'
    with _loading(data.text_column, what):
        if (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(data.dataset)[split]
        elif (path / "state.json").is_file():
            rows = datasets.load_from_disk(data.dataset)
        else:
            rows = datasets.load_dataset(data.dataset, data.dataset_config, split=split, streaming=data.stream)
        if isinstance(rows, datasets.Dataset):
            rows = rows.to_iterable_dataset()
    return Documents(tuple(_shards(rows, data.text_column, what)), by_parts=True)


def _parquet(path: Path, column: str) -> Part:
    import datasets

    with _reading(path):
        # A few rows of one column are decoded at a time, instead of a group of rows.
        rows = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True, batch_size=_PARQUET_ROWS
        )
    [part] = _shards(rows, column, str(path))
    return part


def _shards(rows: "IterableDataset", column: str, what: str) -> "list[DatasetPart]":
    names = list(rows.features or ())
    if names and column not in names:
        raise ConfigError(_no_column(what, column, names))
    return [DatasetPart(rows, index, column, what) for index in range(rows.num_shards)]


def _loading(column: str, what: str) -> Any:
    failed = f'cannot load column "{column}" of {what}'
    advice = "check data.dataset, data.split and data.text_column"
    return translated(_UNREADABLE, ConfigError, failed, advice)


@dataclass(frozen=True)
class DatasetPart:
    """One of the shards that a Hugging Face data set has."""

    dataset: "IterableDataset"
    index: int
    column: str
    what: str

    def rows(self, cursor: Any = None) -> Rows:
        return _DatasetRows(self, cursor)

    def document(self, row: Any, number: int) -> Document:
        return _text_of(row, self.column, f"row {number + 1} in shard {self.index} of {self.what}")

    def digest(self) -> bytes:
        """Of the first text of the first part: more would mean to download more."""
        first = self.rows().next() if self.index == 0 else None
        text = None if first is None else str(self.document(first, 0).text)
        return hashlib.sha256(json.dumps([self.index, text]).encode()).digest()


class _DatasetRows:
    def __init__(self, part: DatasetPart, cursor: Any) -> None:
        self._part, self._cursor = part, cursor
        with _loading(part.column, part.what):
            self._rows = part.dataset.shard(part.dataset.num_shards, part.index)
            if cursor is not None:
                self._rows.load_state_dict(cursor)
            self._iterator = iter(self._rows)
        self._is_read = False

    def next(self) -> Any | None:
        with _loading(self._part.column, self._part.what):
            row = next(self._iterator, None)
        self._is_read = True
        return row

    def cursor(self) -> Any:
        """The data set's own."""
        return self._rows.state_dict() if self._is_read else self._cursor


def _text_of(row: dict[str, Any], column: str, where: str) -> Document:
    if column not in row:
        raise ConfigError(_no_column(where, column, list(row)))
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(f'{where} has {type(text).__name__} in "{column}", not a text; correct or remove the row')
    # Half of a surrogate pair is possible in JSON and has no UTF-8.
    return Document(text if text.isascii() else text.encode("utf-8", errors="replace").decode())


def _no_column(where: str, column: str, names: list[str]) -> str:
    return f'{where} has no column "{column}" (it has {", ".join(names)}); set data.text_column'


def _file_digest(path: Path) -> bytes:
    """sha256 of the size of a file and of 16 stretches of it."""
    with _reading(path), path.open("rb") as file:
        size = path.stat().st_size
        found = hashlib.sha256(str(size).encode())
        for k in range(16):
            file.seek(size * k // 16)
            found.update(file.read(256))
    return found.digest()
