"""The documents of a `[data]` table: texts that are read in order, from any position.

A **part** is one file, or one of the shards of a Hugging Face data set. Its **rows** are numbered from 0: the lines of
a JSONL file, the rows of a Parquet file or of a data set, or pieces of a plain text file. Every row is one document.

`datasets` reads Parquet files and data sets, and its `state_dict` is their position. Plain text and JSONL are read
here: the JSON reader of `datasets` takes hundreds of megabytes, refuses a file in which a later row has one more
column, turns texts that look like dates into dates, and parses a file from its beginning to resume in its middle.
"""

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from diloco.config import DataTable
from diloco.errors import ConfigError, first_line, translated

if TYPE_CHECKING:
    from datasets import IterableDataset

PIECE_BYTES = 1 << 16
"""Length of a piece of a plain text file. A piece extends to the end of a line, unless the line is longer than that."""

_PARQUET_ROWS = 64
"""Rows of a Parquet file that are decoded at a time, instead of a whole row group."""

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_UNSUPPORTED = (".zst", ".bz2", ".xz", ".lz4", ".zip")

_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError)
"""Errors of reading a file or a data set that is absent, damaged or of another format."""


@dataclass(frozen=True)
class Document:
    """A text.

    Attributes:
        is_end: False for a piece of a file that another piece follows.
        path: the file that the text is a piece of, if any.
        begin: offset of the piece in the uncompressed bytes of the file.
    """

    text: str | bytes
    is_end: bool = True
    path: Path | None = None
    begin: int = 0


class Rows(Protocol):
    """The rows of a part, with the interface of `IterableDataset`: an iterator starts at the loaded state."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class FileRows:
    """The rows of a file; its state is an offset in the uncompressed bytes."""

    def __init__(self, part: "FilePart") -> None:
        self._part, self._offset = part, 0

    def __iter__(self) -> Iterator[Any]:
        path = self._part.path
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            file.seek(self._offset)
            while (row := self._part.read_row(file)) is not None:
                self._offset = file.tell()
                yield row

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self._offset}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._offset = int(state_dict["offset"])


@dataclass(frozen=True)
class FilePart:
    """A file of JSON lines, each with a text in `column`; without a column, a plain text in pieces."""

    path: Path
    column: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are one text."""
        return self.column is None and self.path.suffix != ".gz"

    def reading(self) -> AbstractContextManager[None]:
        """A context that turns the errors of an unreadable file into a ConfigError."""
        return _reading(self.path)

    def rows(self) -> Rows:
        """The rows, from the first or from a loaded state."""
        return FileRows(self)

    def read_row(self, file: Any) -> bytes | Document | None:
        """The next non-blank line; or the next piece, which has whole lines, or whole characters of a long line."""
        if self.column is not None:
            return next((line for line in file if not line.isspace()), None)
        begin = file.tell()
        piece: bytes = file.read(PIECE_BYTES) + file.readline(PIECE_BYTES)
        while (following := file.peek(1)[:1]) and following[0] & 0xC0 == 0x80 and len(piece) <= 2 * PIECE_BYTES + 3:
            piece += file.read(1)  # the rest of a UTF-8 character
        return Document(piece, not following, self.path, begin) if piece else None

    def document(self, row: Any, number: int) -> Document:
        """The text of a row. Raises ConfigError if it has none."""
        if self.column is None:
            piece: Document = row
            return piece
        where = f"row {number + 1} of {self.path}"
        with translated((ValueError, RecursionError), ConfigError, f"{where} is not JSON", "correct or remove the row"):
            value = json.loads(row)
        if not isinstance(value, dict):
            raise ConfigError(
                f"{where} is a {type(value).__name__}, not an object with a text; correct or remove the row"
            )
        return _text_of(value, self.column, where)

    def digest(self, *, whole: bool = False) -> bytes:
        """sha256 of the column, and of the size and excerpts of the file (with `whole`, of all its bytes)."""
        found = _file_digest(self.path, whole=whole)
        return found if self.column is None else hashlib.sha256(found + self.column.encode()).digest()


@dataclass(frozen=True)
class DatasetPart:
    """One of the shards of a Hugging Face data set.

    Attributes:
        files: the local files of all shards; empty for a data set that is downloaded while it is read.
        identity: the number of rows and the fingerprint of a local data set.
    """

    dataset: "IterableDataset"
    index: int
    column: str
    what: str
    files: tuple[Path, ...]
    identity: str

    def reading(self) -> AbstractContextManager[None]:
        """A context that turns the errors of an unreadable data set into a ConfigError."""
        return _loading(self.column, self.what)

    def rows(self) -> Rows:
        """As `FilePart.rows`."""
        rows: Rows = self.dataset.shard(self.dataset.num_shards, self.index)
        return rows

    def document(self, row: Any, number: int) -> Document:
        """The text of a row. Raises ConfigError if it has none."""
        return _text_of(row, self.column, f"row {number + 1} in shard {self.index} of {self.what}")

    def digest(self, *, whole: bool = False) -> bytes:
        """sha256 of the local files, or of the first text of a data set that is downloaded while it is read."""
        found = hashlib.sha256(json.dumps([self.index, self.column, self.identity]).encode())
        if self.index == 0:
            for path in self.files:
                found.update(_file_digest(path, whole=whole))
        if self.index == 0 and not self.files:  # a reader of local files has threads until the process ends
            with self.reading():
                first = next(iter(self.rows()), None)
            found.update(b"" if first is None else str(self.document(first, 0).text).encode())
        return found.digest()


Part = FilePart | DatasetPart


@dataclass(frozen=True)
class Documents:
    """All parts. `by_parts`: learners get whole parts if these divide equally over them (`reading.DocumentShard`)."""

    parts: tuple[Part, ...]
    by_parts: bool = False

    def digest(self, *, whole: bool = False) -> str:
        """sha256 (hex) of the parts' digests."""
        return hashlib.sha256(b"".join(part.digest(whole=whole) for part in self.parts)).hexdigest()


def open_documents(data: DataTable) -> tuple[Documents, Documents | None]:
    """Open the training documents of a `text` or `huggingface` table, and the held-out ones if it names any.

    Raises ConfigError when a file, data set or split does not exist or is named twice.
    """
    if data.kind == "text":
        paths, held_out_paths = named_files(data)
        return _files(paths, data.text_column), _files(held_out_paths, data.text_column) if held_out_paths else None
    if data.held_out_split == data.split:
        raise ConfigError(f'the split "{data.split}" is both trained on and held out; set another data.held_out_split')
    held_out = _split(data, data.held_out_split) if data.held_out_split else None
    return _split(data, data.split), held_out


def named_files(data: DataTable) -> tuple[list[Path], list[Path]]:
    """The training files and the held-out files. Raises ConfigError for a file that is named twice."""
    train, held_out = _matching(data.paths), _matching(data.held_out_paths)
    seen: set[str] = set()
    for path in train + held_out:
        file = os.path.realpath(path)  # unlike Path.resolve, also for a cycle of links
        if file in seen:
            raise ConfigError(
                f"data.paths and data.held_out_paths name the file {path} twice; name it once, or move it out of the "
                "pattern"
            )
        seen.add(file)
    return train, held_out


def _matching(paths: tuple[Path, ...]) -> list[Path]:
    """The files that paths and patterns (`*`, `**`, `?`) match; those of a pattern are sorted."""
    found: list[Path] = []
    for path in paths:
        # A pattern without a match is used as a file name, which then cannot be read.
        names = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        found += [Path(name) for name in names] or [path]
    return found


def _files(paths: Sequence[Path], column: str) -> Documents:
    parts: list[Part] = []
    for is_parquet, group in groupby(paths, lambda path: path.suffix == ".parquet"):
        files = list(group)
        for path in files:
            if path.suffix in _UNSUPPORTED:
                raise ConfigError(f"data file {path} has an unsupported compression; compress it with gzip instead")
            with _reading(path):
                path.open("rb").close()
        if is_parquet:
            parts += _parquet(files, column)
        else:
            parts += [FilePart(path, column if path.name.endswith(_JSON_LINES) else None) for path in files]
    return Documents(tuple(parts))


def _parquet(paths: Sequence[Path], column: str) -> list[DatasetPart]:
    """The parts of Parquet files. Raises ConfigError when they cannot be read or have no such column."""
    import datasets

    what = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    names = [str(path) for path in paths]
    with _reading(what):
        rows = datasets.load_dataset(
            "parquet", data_files=names, split="train", streaming=True, batch_size=_PARQUET_ROWS
        )
    return _shards(rows, column, what, tuple(paths))


def _split(data: DataTable, split: str) -> Documents:
    """The documents of a split, of a directory of `save_to_disk` or by `load_dataset`; `stream` downloads nothing
    ahead."""
    import datasets

    assert data.dataset is not None  # checked by DataTable
    path, what = Path(data.dataset), f'split "{split}" of the data set {data.dataset}'
    identity, files = "", []
    with _loading(data.text_column, what):
        if (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(data.dataset)[split]
        elif (path / "state.json").is_file():
            rows = datasets.load_from_disk(data.dataset)
        elif data.stream:
            builder = datasets.load_dataset_builder(data.dataset, data.dataset_config)
            rows = builder.as_streaming_dataset(split=split)
            files = (builder.config.data_files or {}).get(datasets.NamedSplit(split), [])
        else:
            rows = datasets.load_dataset(data.dataset, data.dataset_config, split=split)
        if isinstance(rows, datasets.Dataset):
            identity, files = f"{rows.num_rows} {rows._fingerprint}", [each["filename"] for each in rows.cache_files]
            rows = rows.to_iterable_dataset()  # of a memory-mapped file
    if (path / "state.json").is_file() and (data.held_out_split or split not in ("train", str(rows.split))):
        raise ConfigError(f"{path} is a single split; remove data.split and data.held_out_split, or save a DatasetDict")
    local = tuple(path for path in map(Path, files) if path.is_file())
    return Documents(tuple(_shards(rows, data.text_column, what, local, identity)), by_parts=True)


def _shards(
    rows: "IterableDataset", column: str, what: str, files: tuple[Path, ...], identity: str = ""
) -> list[DatasetPart]:
    names = list(rows.features or ())
    if names and column not in names:
        raise ConfigError(_no_column(what, column, names))
    return [DatasetPart(rows, index, column, what, files, identity) for index in range(rows.num_shards)]


def _text_of(row: dict[str, Any], column: str, where: str) -> Document:
    """The document of a row of columns. Raises ConfigError that names the row (`where`) if it has no text."""
    if column not in row:
        raise ConfigError(_no_column(where, column, list(row)))
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(f'{where} has a {type(text).__name__} in "{column}", not a text; correct or remove the row')
    # JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
    return Document(text if text.isascii() else text.encode("utf-8", errors="replace").decode())


def _no_column(where: str, column: str, names: list[str]) -> str:
    return f'{where} has no column "{column}" (it has {", ".join(names)}); set data.text_column'


def _file_digest(path: Path, *, whole: bool) -> bytes:
    """sha256 of a whole file, or of its size and 16 excerpts."""
    with _reading(path), path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").digest()
        size = path.stat().st_size
        found = hashlib.sha256(str(size).encode())
        for k in range(16):
            file.seek(size * k // 16)
            found.update(file.read(256))
    return found.digest()


def _reading(path: Path | str) -> AbstractContextManager[None]:
    return translated(
        _UNREADABLE, ConfigError, f"cannot read the data file {path}", "check data.paths, and that the file is complete"
    )


@contextmanager
def _loading(column: str, what: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (*_UNREADABLE, DatasetsError) as error:
        cause: BaseException = error
        while isinstance(cause, DatasetsError) and cause.__cause__ is not None:
            cause = cause.__cause__  # the error itself has no details
        raise ConfigError(
            f'cannot load column "{column}" of {what} ({first_line(cause)}); check data.dataset, data.split and '
            "data.text_column, and that the data is complete"
        ) from error
