"""Processes of `diloco` that are forked from one that has imported what they need, so that each begins at once.

Importing torch and transformers takes some seconds of processor time, which every process would spend again.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTS = ("diloco.training.loop", "diloco.exchange.remote", "transformers.models.llama.modeling_llama")
IS_POSSIBLE = sys.platform == "linux"
"""Elsewhere a fork after these imports may crash."""


class Forked:
    """`diloco` with these arguments, its standard output and error in files; has what is used of a `Popen`.

    It has a session of its own, and ends with this process. The first one waits until the imports are done.
    """

    def __init__(self, arguments: Sequence[str], out: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTS])
        self._process = context.Process(target=_run, args=([*arguments], out, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended. Returns the exit code. Raises TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, where it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], out: Path, log: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    for path, flags, number in ((out, os.O_TRUNC, 1), (log, os.O_APPEND, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = arguments
    runpy.run_module("diloco", run_name="__main__", alter_sys=True)


def _end_with(parent: BaseProcess) -> None:
    """The kernel would tell of the end of the server, which lives as long as what it has forked."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
