"""Host memory that is used again, and returned to the system beyond that, without torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

_HUGE_PAGE_BYTES = 2 << 20

MOST_KEPT = 6
"""Blocks kept for the next request: a learner repeatedly needs a residual, a version and two payloads, and the system
takes as long to find and clear pages for them as their arithmetic takes."""

_kept: list[mmap.mmap] = []  # in the order of their release


def new_buffer(num_bytes: int) -> memoryview:
    """A new writable buffer with any content.

    Its memory is kept for later buffers of about this size once nothing uses it, that of the newest few: a request that
    none of them fits first returns as many bytes of them to the system.
    """
    if is_small(num_bytes):
        return memoryview(bytearray(num_bytes))
    block = _take(num_bytes) or _map(num_bytes)
    buffer = (ctypes.c_char * num_bytes).from_buffer(block)
    weakref.finalize(buffer, _release, block).atexit = False
    return memoryview(buffer).cast("B")


def is_small(num_bytes: int) -> bool:
    """Whether a buffer is too small for huge pages, or the platform has none."""
    return num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE")


# Lists are their own locks here: the collector may release a block anywhere, also while this thread takes one. It does
# so before it ends the objects of a cycle that the block is in: what is in a cycle with a buffer must not read it then.


def _take(num_bytes: int) -> mmap.mmap | None:
    for block in _kept[::-1]:
        if num_bytes <= len(block) <= num_bytes + num_bytes // 8:
            with contextlib.suppress(ValueError):  # another thread was faster
                _kept.remove(block)
                return block
    freed = 0
    with contextlib.suppress(IndexError):  # none is left
        while freed < num_bytes:
            freed += len(_kept.pop(0))
    return None


def _release(block: mmap.mmap) -> None:
    _kept.append(block)
    del _kept[:-MOST_KEPT]


def _map(num_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
