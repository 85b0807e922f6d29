"""Host memory that is returned to the system, without torch."""

from __future__ import annotations

import contextlib
import mmap

_HUGE_PAGE_BYTES = 2 << 20


def new_buffer(num_bytes: int) -> memoryview:
    """A new writable buffer of zeros."""
    if is_small(num_bytes):
        return memoryview(bytearray(num_bytes))
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def is_small(num_bytes: int) -> bool:
    """Whether a buffer is too small for huge pages, or the platform has none."""
    return num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE")
