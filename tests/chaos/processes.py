"""Child processes of a chaos run: each one that ends is started again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

RESTART_AFTER_S = 1.0

DIES_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", 'test $PPID = $0 && exec "$@"')
"""Followed by the parent's process id and a command: the kernel kills that (prctl(2), util-linux) when the thread that
started it ends, for any reason. A parent that ended before this was arranged is looked for."""

Command = Callable[[], Sequence[str]]
"""A module and its arguments, asked for at each start."""


@dataclass
class Child:
    """One process. `back_after_s`: from its next end to its next start; `restart_at`: on the monotonic clock, while it
    is away."""

    command: Command
    process: subprocess.Popen[bytes]
    back_after_s: float = RESTART_AFTER_S
    restart_at: float | None = None


@dataclass(frozen=True)
class End:
    """A process ended and is to be started again. `t`: Unix time in seconds. `code`: negative for a signal."""

    name: str
    t: float
    code: int


@dataclass
class Family:
    """The processes of one run; a context manager that ends them. Start and watch them from the main thread.

    They have sessions of their own, so that a Ctrl-C in the terminal reaches the parent alone, which then ends them.
    `ends`: of those that were to be started again.
    """

    directory: Path
    children: dict[str, Child] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)

    def start(self, name: str, command: Command, *, once: bool = False) -> None:
        """Run `python -m COMMAND`; its output goes to `logs/NAME.log`. `once`: it is not started again."""
        self.children[name] = Child(command, self._spawn(name, command), math.inf if once else RESTART_AFTER_S)
        self._write_pids()

    def watch(self) -> None:
        """Start again what has ended and has been away for long enough; call it often."""
        for name, child in self.children.items():
            if (code := child.process.poll()) is None:
                continue
            now = time.monotonic()
            if child.restart_at is None:
                child.restart_at = now + child.back_after_s
                self.ends.append(End(name, time.time(), code))
            elif now >= child.restart_at:
                child.restart_at, child.back_after_s = None, RESTART_AFTER_S
                child.process = self._spawn(name, child.command)
                self._write_pids()

    def kill(self, name: str, back_after_s: float, number: int = signal.SIGKILL, *, wait: bool = False) -> None:
        """Send a signal that ends a process, and wait for its end where that is asked for."""
        child = self.children[name]
        child.back_after_s = back_after_s
        child.process.send_signal(number)
        if wait:
            child.process.wait()

    def __enter__(self) -> Self:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.process.kill()
        for child in self.children.values():
            child.process.wait()

    def _spawn(self, name: str, command: Command) -> subprocess.Popen[bytes]:
        arguments = [*DIES_WITH_ITS_PARENT, str(os.getpid()), sys.executable, "-m", *command()]
        with (self.directory / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _write_pids(self) -> None:
        """For tests and people that kill one. The file appears whole."""
        partial = self.directory / ".pids.json"
        partial.write_text(json.dumps({name: child.process.pid for name, child in self.children.items()}))
        partial.replace(self.directory / "pids.json")
