"""The documents that a `[data]` table names."""

import glob
from itertools import groupby
from pathlib import Path

from diloco.config import DataTable
from diloco.errors import ConfigError
from diloco.training.data_sets import open_parquet, open_split
from diloco.training.rows import Documents, Part
from diloco.training.text_files import LinesPart, TextPart, reading

_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_NOT_READ = (".zst", ".bz2", ".xz", ".lz4", ".zip")


def open_documents(data: DataTable) -> tuple[Documents, Documents | None]:
    """What a `text` or `huggingface` table reads for training, and the held-out part where it names one.

    Raises ConfigError when there is no such file, data set or split.
    """
    if data.kind == "text":
        held_out = _files(data.held_out_paths, data.text_column) if data.held_out_paths else None
        return _files(data.paths, data.text_column), held_out
    held_out = open_split(data, data.held_out_split) if data.held_out_split else None
    return open_split(data, data.split), held_out


def _files(paths: tuple[Path, ...], column: str) -> Documents:
    parts: list[Part] = []
    for is_parquet, group in groupby(matching(paths), lambda path: path.suffix == ".parquet"):
        files = list(group)
        for path in files:
            with reading(path):
                path.open("rb").close()
        parts += open_parquet(files, column) if is_parquet else (_part(path, column) for path in files)
    return Documents(tuple(parts))


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
    return LinesPart(path, column) if path.name.endswith(_LINES) else TextPart(path)
