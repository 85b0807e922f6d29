"""`diloco syncer` as a process that can be killed and started again on the same port."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from diloco.demo.plan import free_port


def until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Look again until it holds.

    Raises:
        TimeoutError: it does not within `limit_s`; with `what`.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} (within {limit_s:g} s)")
        threading.Event().wait(0.02)


class SyncerProcess:
    """Serves the run of a run file; its state and its log are in `directory`.

    Attributes:
        address: what learners dial; stays the same.
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
        command = [
            sys.executable, "-m", "diloco", "syncer", str(self.directory / "run.toml"), "--address", self.address,
            "--state-dir", str(self.directory / "state"), "--port-file", str(port_file),
        ]  # fmt: skip
        with open(self.directory / "syncer.log", "ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        until(lambda: port_file.exists() or self.process.poll() is not None, "the syncer does not start")
        if self.process.poll() is not None:
            raise RuntimeError((self.directory / "syncer.log").read_text())

    def kill(self) -> None:
        """kill -9, if it lives."""
        self.process.kill()
        self.process.wait()
