"""Hugging Face data sets and Parquet files, row by row."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config import DataTable
from diloco.errors import ConfigError, first_line, translated
from diloco.training.rows import UNREADABLE, Document, Documents, Rows, no_column, text_of
from diloco.training.text_files import file_digest, reading

if TYPE_CHECKING:
    from datasets import IterableDataset

_PARQUET_ROWS = 64
"""Rows of a Parquet file that are decoded at a time, instead of a whole group of rows."""


def open_split(data: DataTable, split: str) -> Documents:
    """A split: of a directory of `save_to_disk`, or by `load_dataset`, which with `stream` downloads nothing ahead."""
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
        raise ConfigError(
            f"{path} is one split, and has no others to choose from; drop data.split and data.held_out_split, or save "
            "a DatasetDict"
        )
    local = tuple(path for path in map(Path, files) if path.is_file())
    return Documents(tuple(_shards(rows, data.text_column, what, local, identity)), by_parts=True)


def open_parquet(paths: Sequence[Path], column: str) -> "list[DatasetPart]":
    """Parquet files, with texts in `column`. Raises ConfigError where they cannot be read or have no such column."""
    import datasets

    what = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    names = [str(path) for path in paths]
    with reading(what):
        rows = datasets.load_dataset(
            "parquet", data_files=names, split="train", streaming=True, batch_size=_PARQUET_ROWS
        )
    return _shards(rows, column, what, tuple(paths))


def _shards(
    rows: "IterableDataset", column: str, what: str, files: tuple[Path, ...], identity: str = ""
) -> "list[DatasetPart]":
    names = list(rows.features or ())
    if names and column not in names:
        raise ConfigError(no_column(what, column, names))
    return [DatasetPart(rows, index, column, what, files, identity) for index in range(rows.num_shards)]


@contextmanager
def _loading(column: str, what: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    failed = f'cannot load column "{column}" of {what}'
    advice = "check data.dataset, data.split and data.text_column, and that the data is whole"
    try:
        with translated(UNREADABLE, ConfigError, failed, advice):
            yield
    except DatasetsError as error:  # it says that there was an error, and its causes say which
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(f"{failed} ({first_line(cause)}); {advice}") from error


@dataclass(frozen=True)
class DatasetPart:
    """One of the shards that a Hugging Face data set has.

    Attributes:
        files: the local files of all shards; none of what is downloaded while it is read.
        identity: the number of rows and the fingerprint of a data set that is local.
    """

    dataset: "IterableDataset"
    index: int
    column: str
    what: str
    files: tuple[Path, ...]
    identity: str

    def rows(self, cursor: Any = None) -> Rows:
        return _DatasetRows(self, cursor)

    def document(self, row: Any, number: int) -> Document:
        return text_of(row, self.column, f"row {number + 1} in shard {self.index} of {self.what}")

    def digest(self, *, whole: bool = False) -> bytes:
        """Of what is local, or of the first text of the first part: more would mean to download more."""
        found = hashlib.sha256(json.dumps([self.index, self.column, self.identity]).encode())
        if self.index == 0:
            for path in self.files:
                found.update(file_digest(path, whole=whole))
        if self.index == 0 and not self.files:  # local files are not opened for a row: a reader has threads, to its end
            first = self.rows().next()
            found.update(b"" if first is None else str(self.document(first, 0).text).encode())
        return found.digest()


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
