"""Real processes for tests, forked from one that has imported torch: an import costs seconds of processor time in every
process.

The server is a fresh interpreter of the standard library's that imports and does nothing else, so that what it forks
has no threads, sockets or random state of the tests. What a test starts with `python -m diloco` it starts as users do,
and not through here.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.processes import SyncerProcess

ROOT = Path(__file__).parents[1]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([
    "torch", "torch._dynamo", "safetensors.torch", "diloco.learner", "diloco.exchange.collective",
    "diloco.exchange.remote",
    "diloco.exchange.torchft", "diloco.syncer.server", "tests.frozen",
])  # fmt: skip
"""What is absent is left out. The first optimizer of a process imports `torch._dynamo`, which takes as long as torch
itself."""


def start_module(
    module: str, *arguments: str, stdin: int | None = None, out: int = 1, err: int = 2,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:  # fmt: skip
    """A process that does what `python -W error -m module ARGUMENTS` does, with these descriptors; without `stdin` it
    reads nothing. `environment`: more variables."""
    streams = {number: _Descriptor(given) for number, given in enumerate((stdin, out, err)) if given is not None}
    process = _SERVER.Process(target=_run, args=(module, arguments, streams, environment or {}), daemon=True)
    process.start()
    return process


class ForkedSyncer(SyncerProcess):
    """The process of a syncer, forked. `environment`: more variables."""

    environment: Mapping[str, str] = MappingProxyType({})

    def _spawn(self, arguments: list[str], log: int) -> int:
        self._forked = start_module("diloco", *arguments, out=log, err=log, environment=self.environment)
        assert self._forked.pid is not None
        return self._forked.pid

    def has_ended(self) -> bool:
        return self._forked.exitcode is not None

    def kill(self) -> None:
        self._forked.kill()
        self._forked.join()


class _Descriptor:
    """A file descriptor on its way to the new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (DupFd(self.number),)


def _received(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _run(
    module: str, arguments: Sequence[str], streams: dict[int, _Descriptor], environment: Mapping[str, str]
) -> None:
    os.chdir(ROOT)
    os.environ.update(environment)
    for target, source in streams.items():
        os.dup2(source.number, target)
        os.close(source.number)
    if 0 in streams:
        sys.stdin = os.fdopen(0, closefd=False)
    warnings.simplefilter("error")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
