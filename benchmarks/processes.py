"""`diloco syncer` as a process that can be killed and started again on the same port."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit

from diloco.demo.plan import free_port


def until(condition: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
    """Look again until it holds.

    Raises:
        TimeoutError: it does not within `limit_s`; with `what`.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} (within {limit_s:g} s)")
        threading.Event().wait(0.02)


def run_file(run: str, *, syncer: dict[str, Any] | None = None, **method: Any) -> str:
    """A run file whose budget is never spent. `syncer`, `method`: its tables."""
    return tomlkit.dumps({"run": {"name": run, "tokens": 10**9}, "method": method, "syncer": syncer or {}})


class SyncerProcess:
    """Serves the run of a run file; its state and its log are in `directory`.

    Attributes:
        address: what learners dial; stays the same.
        pid: process id of the newest one.
    """

    def __init__(self, directory: Path, run_file: str) -> None:
        self.directory = directory
        (directory / "run.toml").write_text(run_file)
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        """Again, if it was killed."""
        port_file = self.directory / "port"
        port_file.unlink(missing_ok=True)
        arguments = [
            "syncer", str(self.directory / "run.toml"), "--address", self.address,
            "--state-dir", str(self.directory / "state"), "--port-file", str(port_file),
        ]  # fmt: skip
        with open(self.directory / "syncer.log", "ab") as log:
            self.pid = self._spawn(arguments, log.fileno())
        until(lambda: port_file.exists() or self.has_ended(), "the syncer does not start")
        if self.has_ended():
            raise RuntimeError((self.directory / "syncer.log").read_text())

    def _spawn(self, arguments: list[str], log: int) -> int:
        """Run `python -m diloco` with its output to this descriptor; returns the process id."""
        self._process = subprocess.Popen([sys.executable, "-m", "diloco", *arguments], stderr=log, stdout=log)
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """kill -9, if it lives."""
        self._process.kill()
        self._process.wait()
