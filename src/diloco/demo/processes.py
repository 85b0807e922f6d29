"""Child processes that are watched: one that dies by a signal is started again, one that fails ends the demo."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from diloco.errors import ExchangeError

RESTART_AFTER_S = 1.0


@dataclass
class Child:
    """One process of the demo. `restart` are the arguments it is started with after it was killed."""

    name: str
    command: Sequence[str]
    restart: Sequence[str]
    process: subprocess.Popen[bytes]
    kills: int = 0
    killed_at: float | None = None

    @property
    def done(self) -> bool:
        """It ended in good order."""
        return self.process.poll() == 0


@dataclass
class Family:
    """All processes of one demo. Leaving the context ends them.

    Raises:
        ExchangeError: from `watch`, when a process fails by itself; shows the end of its log.
    """

    directory: Path
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], restart: Sequence[str] | None = None) -> Child:
        """Run `python -m diloco` with these arguments; output goes to `logs/`."""
        child = Child(name, command, restart or command, self._spawn(name, command))
        self.children[name] = child
        self._write_pids()
        return child

    def watch(self) -> None:
        """Start again what was killed; call it often."""
        for child in self.children.values():
            code = child.process.poll()
            if code is None or code == 0:
                continue
            if code > 0:
                raise ExchangeError(
                    f"{child.name} failed with exit code {code}; the end of its log says why:\n{self.tail(child.name)}"
                )
            if child.killed_at is None:
                child.killed_at = time.monotonic()
                child.kills += 1
            elif time.monotonic() - child.killed_at >= RESTART_AFTER_S:
                child.killed_at = None
                child.process = self._spawn(child.name, child.restart)
                self._write_pids()

    def kill(self, name: str) -> None:
        """kill -9."""
        self.children[name].process.send_signal(signal.SIGKILL)

    def finish(self, name: str) -> None:
        """Ask a process to end and wait until it has."""
        child = self.children.pop(name)
        child.process.terminate()
        child.process.wait(timeout=30)

    @property
    def num_kills(self) -> int:
        """Processes that were killed and came back."""
        return sum(child.kills for child in self.children.values())

    def output(self, name: str) -> str:
        """What a process printed on standard output."""
        return (self.directory / "logs" / f"{name}.out").read_text()

    def tail(self, name: str) -> str:
        """The last lines of a process's log."""
        return "\n".join((self.directory / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def __enter__(self) -> Self:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            if child.process.poll() is None:
                child.process.kill()
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=10)

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        logs = self.directory / "logs"
        with open(logs / f"{name}.out", "wb") as out, open(logs / f"{name}.log", "ab") as log:
            return subprocess.Popen([sys.executable, "-m", "diloco", *command], stdout=out, stderr=log)

    def _write_pids(self) -> None:
        pids = {child.name: child.process.pid for child in self.children.values()}
        (self.directory / "pids.json").write_text(json.dumps(pids))
