"""Long files, written past the system's cache: what a syncer writes is rarely read again, and on many machines each
new page of the cache costs several times a copy.

The system then takes only whole pages, from and to places of whole pages. So all goes through one block of memory, and
the file is cut to its length at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.core.buffers import is_small, new_buffer

_PAGE_BYTES = 4096
"""A multiple of what devices require of places, lengths and memory."""

_BLOCK_BYTES = 4 << 20
"""Long enough to be mapped, and so to begin with a page."""


def write_parts(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file; a long one past the system's cache, where the file system can.

    Raises:
        OSError: the disk refused; a part of the file may be left.
    """
    if is_small(num_bytes := sum(map(len, parts))) or not _write_past_cache(path, parts, num_bytes):
        with path.open("wb") as file:
            file.writelines(parts)


def _write_past_cache(path: Path, parts: Sequence[bytes | memoryview], num_bytes: int) -> bool:
    block = new_buffer(_BLOCK_BYTES)
    try:
        with open(path, "wb", buffering=0, opener=_past_cache) as file:
            for filled in _blocks(parts, block):
                done, end = 0, -(-filled // _PAGE_BYTES) * _PAGE_BYTES
                while done < end:
                    done += file.write(block[done:end])
            file.truncate(num_bytes)
    except OSError:  # this file system does not write like that; or the ordinary way says what the disk refuses
        return False
    return True


def _past_cache(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)


def _blocks(parts: Sequence[bytes | memoryview], block: memoryview) -> Iterator[int]:
    """Fill `block` again and again; yields how many bytes are in it."""
    filled = 0
    for each in parts:
        part = memoryview(each).cast("B")
        while part:
            taken = part[: len(block) - filled]
            block[filled : filled + len(taken)] = taken
            filled, part = filled + len(taken), part[len(taken) :]
            if filled == len(block):
                yield filled
                filled = 0
    yield filled
