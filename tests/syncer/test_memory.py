"""The syncer's process shares the heaps of its C library."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, threading
from diloco.cli.syncer import serve

if sys.argv[1] == "shared":
    serve._share_arenas()
libc, barrier = ctypes.CDLL(None), threading.Barrier(8)
libc.malloc.restype, libc.fdopen.restype = ctypes.c_void_p, ctypes.c_void_p

def allocate():
    libc.malloc(ctypes.c_size_t(1000))
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def num_heaps(how: str) -> int:
    """Of a process with nine threads, as its C library says."""
    said = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, check=True, text=True).stdout
    return said.count("<heap nr")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
def test_threads_share_two_heaps() -> None:
    assert num_heaps("shared") == 2
    assert num_heaps("own") > 2
