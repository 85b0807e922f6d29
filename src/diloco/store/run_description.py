"""`run.json`: what the database says of the run, once more, so that a lost database does not cost the run.

It has the columns of the table `run` without the record, and a hash over them. It is written when the run is
initialised, and at each start where it is not as the database says.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.plain_json import MALFORMED
from diloco.store.records import FORMAT
from diloco.whole_files import write_whole

DESCRIPTION = "run.json"

Row = Mapping[str, Any]
"""A row of the table `run`, by column."""

RUN_COLUMNS = frozenset({
    "id", "run", "method", "layout", "source", "step", "tokens", "static_file", "static_sha256", "created_at", "run_id",
})  # fmt: skip
"""Of the table `run`, without the record."""


def run_row(db: sqlite3.Connection) -> dict[str, Any]:
    """The row of the run, without the record; empty: there is no run."""
    cursor = db.execute("SELECT * FROM run")
    row = cursor.fetchone() or ()
    return {column[0]: value for column, value in zip(cursor.description, row, strict=False) if column[0] != "record"}


def insert_run(db: sqlite3.Connection, row: Row) -> None:
    """Put a run into an empty database, inside the caller's transaction."""
    columns = ", ".join(row)
    db.execute(f"INSERT INTO run ({columns}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))  # noqa: S608


def write_description(path: Path, row: Row) -> None:
    """Describe the run in a store's directory.

    Raises:
        OSError: what was there before still is.
    """
    write_whole(path / DESCRIPTION, json.dumps({"format": FORMAT, "run": row, "sha256": _hash_of(row)}, indent=1))


def read_description(path: Path) -> dict[str, Any] | None:
    """The row of the run; None: the file is missing, damaged or of another format.

    Raises:
        OSError: unreadable.
    """
    try:
        plain = json.loads((path / DESCRIPTION).read_bytes())
        row: dict[str, Any] = plain["run"]
        return row if plain["format"] == FORMAT and plain["sha256"] == _hash_of(row) else None
    except (FileNotFoundError, *MALFORMED):
        return None


def _hash_of(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
