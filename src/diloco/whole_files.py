"""Small text files that are whole or absent."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text in UTF-8, durably: readers find what was there before or all of the text.

    A file that has this text already is left alone, so that a full disk does not refuse it again.

    Raises:
        OSError: what was there before still is, and nothing else.
    """
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
