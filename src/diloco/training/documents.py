"""The documents that a `[data]` table names."""

import glob
import os
from collections.abc import Sequence
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

    Raises ConfigError when there is no such file, data set or split, or one is named twice.
    """
    if data.kind == "text":
        paths, held_out_paths = named_files(data)
        return _files(paths, data.text_column), _files(held_out_paths, data.text_column) if held_out_paths else None
    if data.held_out_split == data.split:
        raise ConfigError(f'the split "{data.split}" is both trained on and held out; set another data.held_out_split')
    held_out = open_split(data, data.held_out_split) if data.held_out_split else None
    return open_split(data, data.split), held_out


def _files(paths: Sequence[Path], column: str) -> Documents:
    parts: list[Part] = []
    for is_parquet, group in groupby(paths, lambda path: path.suffix == ".parquet"):
        files = list(group)
        for path in files:
            with reading(path):
                path.open("rb").close()
        parts += open_parquet(files, column) if is_parquet else (_part(path, column) for path in files)
    return Documents(tuple(parts))


def named_files(data: DataTable) -> tuple[list[Path], list[Path]]:
    """The files to train on and the held-out ones. Raises ConfigError for a file that is named twice."""
    train, held_out = _matching(data.paths), _matching(data.held_out_paths)
    seen: set[str] = set()
    for path in train + held_out:
        file = os.path.realpath(path)  # unlike Path.resolve, of a loop of links too
        if file in seen:
            raise ConfigError(
                f"data.paths and data.held_out_paths name the file {path} twice; name it once, or move it out of reach "
                "of the pattern"
            )
        seen.add(file)
    return train, held_out


def _matching(paths: tuple[Path, ...]) -> list[Path]:
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
