"""Threads that work through the runs of a fragment's arithmetic (`core.memory.Each`)."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_starting = threading.Lock()


class ThreadMap:
    """A pool of threads, started when there is work for two of them; each computes by one core.

    Arguments:
        num_threads: at least 1. With one, the calling thread does the work.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, function: Callable[[S], T], items: Iterable[S], /) -> Iterable[T]:
        """As `core.memory.Each`. A single item is the calling thread's."""
        items = iter(items)
        first = list(islice(items, 2))
        in_order = self._in_threads if min(self.num_threads, len(first)) > 1 else map
        return in_order(function, chain(first, items))

    def _in_threads(self, function: Callable[[S], T], items: Iterator[S]) -> Iterator[T]:
        with _starting:
            pool = self._pool = self._pool or _single_core_threads(self.num_threads)
        ahead: deque[Future[T]] = deque()  # few, so that results which wait for their turn take little memory
        try:
            for item in islice(items, 2 * self.num_threads):
                ahead.append(pool.submit(function, item))
            while ahead:
                found = ahead.popleft().result()
                for item in islice(items, 1):
                    ahead.append(pool.submit(function, item))
                yield found
        finally:
            for future in ahead:
                future.cancel()
            wait(ahead)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _single_core_threads(num_threads: int) -> ThreadPoolExecutor:
    """A pool whose threads compute torch operations by one core, where torch would divide each among all cores. One is
    started at a time, since a number of torch's threads is that of the process for a moment. Raises RuntimeError if the
    system starts no more threads."""
    started, num_torch_threads = threading.Barrier(num_threads + 1), torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread, and of all that begin later
        torch.get_num_threads()  # or this thread's first operation takes the number that is set then
        started.wait()

    pool = ThreadPoolExecutor(num_threads, "diloco-runs", initializer=begin)
    try:
        for _ in range(num_threads):
            pool.submit(lambda: None)
        started.wait()
    except BaseException:
        started.abort()  # those that were started wait there
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(num_torch_threads)
    return pool
