"""Real processes for tests, forked from one that has imported torch: an import costs seconds of processor time in every process.

The server is a fresh interpreter of the standard library's that imports and does nothing else, so that what it forks has no threads,
sockets or random state of the tests. What a test starts with `python -m diloco` it starts as users do, and not through here.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path

ROOT = Path(__file__).parents[1]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "torch.distributed", "safetensors.torch", "diloco", "diloco.exchange.collective", "diloco.exchange.remote", "diloco.learner"]
)  # fmt: skip


def start_module(module: str, arguments: Sequence[str], *, out: int, stdin: int | None = None) -> ForkServerProcess:
    """A process that does what `python -W error -m module ARGUMENTS` does.

    Arguments:
        out: the descriptor of what it writes on standard output and standard error.
        stdin: of what it reads; by default there is nothing to read.
    """
    process = _SERVER.Process(target=_run, args=(module, list(arguments), _Descriptor(out), _Descriptor(stdin)), daemon=True)
    process.start()
    return process


class _Descriptor:
    """A file descriptor on its way to the new process."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (None if self.number is None else DupFd(self.number),)


def _received(duplicate: object) -> _Descriptor:
    return _Descriptor(None if duplicate is None else duplicate.detach())  # type: ignore[attr-defined]


def _run(module: str, arguments: list[str], out: _Descriptor, stdin: _Descriptor) -> None:
    os.chdir(ROOT)
    for source, target in ((stdin.number, 0), (out.number, 1), (out.number, 2)):
        if source is not None:
            os.dup2(source, target)
    for source in {out.number, stdin.number} - {None}:
        os.close(source)
    if stdin.number is not None:
        sys.stdin = open(0, closefd=False)
    warnings.simplefilter("error")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
