"""Child processes that are watched: one that is killed is started again, one that fails by itself ends the demo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from diloco.demo import forked
from diloco.errors import RunError
from diloco.report.timeline import Kill

RESTART_AFTER_S = 1.0
"""As a service manager would: not at once, so that a person sees it gone."""

STOPPED = 128 + signal.SIGTERM
"""Exit code of a supervised learner that a signal has stopped."""

FINISH_TIMEOUT_S = 20.0
TAIL_LINES = 15

_DIES_WITH_ITS_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""A program that becomes another one (its arguments), which the kernel kills when the thread that started it ends, by
whatever. 1: PR_SET_PDEATHSIG of prctl(2); it outlives exec. A parent that ended before that is looked for here."""

Restart = Callable[[], Sequence[str]]
"""The arguments to start a process with again, asked for at that moment."""


@dataclass
class Child:
    """One process of the demo.

    Attributes:
        restart: how to start it after it was killed.
        serves: it never ends by itself, so ending in good order means that it was asked to.
        supervised: it is started again also where it failed, or was stopped, by itself.
        back_after_s: how long it is away then.
        forks: it is forked from a process that has imported what it needs, where that is possible.
    """

    name: str
    process: subprocess.Popen[bytes] | forked.Forked
    restart: Restart
    serves: bool
    supervised: bool = False
    back_after_s: float = RESTART_AFTER_S
    forks: bool = False
    restart_at: float | None = None  # on the monotonic clock, while it is dead

    @property
    def done(self) -> bool:
        """Whether it ended in good order."""
        return self.process.poll() == 0


@dataclass(frozen=True)
class End:
    """A process ended and is to be started again. `t`: Unix time in seconds. `code`: negative for a signal."""

    name: str
    t: float
    code: int


@dataclass
class Family:
    """All processes of one demo. Leaving the context ends them.

    They have sessions of their own, so that a Ctrl-C in the terminal reaches the demo alone, which then ends them. On
    Linux they also end with the thread that started them, where that is killed: start and watch them from the main one.

    Attributes:
        kills, ends: of processes that were started again; `ends` with how they ended.
    """

    directory: Path
    children: dict[str, Child] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        restart: Restart | None = None,
        serves: bool = False,
        supervised: bool = False,
        forks: bool = False,
    ) -> None:
        """Run `python -m diloco` with these arguments; standard output and error go to `logs/`."""
        process = self._spawn(name, command, forks)
        again = restart or (lambda: command)
        self.children[name] = Child(name, process, again, serves, supervised, forks=forks)
        self._write_pids()

    def watch(self) -> None:
        """Start again what was killed; call it often.

        Raises:
            RunError: a process failed by itself; shows the end of its log.
        """
        for child in self.children.values():
            code = child.process.poll()
            if code is None or (code == 0 and not child.serves):
                continue
            if code > 0 and code != STOPPED and not child.supervised:
                log = self._log(child.name)
                raise RunError(f"{child.name} failed with exit code {code}; the end of {log} says why:\n{_tail(log)}")
            now = time.monotonic()
            if child.restart_at is None:
                child.restart_at = now + child.back_after_s
                self.kills.append(Kill(child.name, time.time()))
                self.ends.append(End(child.name, time.time(), code))
            elif now >= child.restart_at:
                child.restart_at, child.back_after_s = None, RESTART_AFTER_S
                child.process = self._spawn(child.name, child.restart(), child.forks)
                self._write_pids()

    def kill(self, name: str, number: int = signal.SIGKILL, back_after_s: float = RESTART_AFTER_S) -> None:
        """Send a signal that ends a process; it is started again after a while."""
        child = self.children[name]
        child.back_after_s = back_after_s
        child.process.send_signal(number)

    def bring_back(self, name: str) -> None:
        """Start a process again that was killed, at the next `watch`."""
        child = self.children[name]
        child.back_after_s = 0.0
        if child.restart_at is not None:
            child.restart_at = time.monotonic()

    def is_dead(self, name: str) -> bool:
        """Whether it was killed and waits to be started again."""
        return name in self.children and self.children[name].restart_at is not None

    def finish(self, name: str) -> None:
        """Ask a process to end; one that does not is killed."""
        child = self.children.pop(name)
        child.process.terminate()
        try:
            child.process.wait(timeout=FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()

    def output(self, name: str) -> str:
        """Standard output of a process since it was last started."""
        return (self.directory / "logs" / f"{name}.out").read_text(encoding="utf-8")

    def __enter__(self) -> Self:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.process.kill()
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=FINISH_TIMEOUT_S)

    def _spawn(self, name: str, command: Sequence[str], forks: bool) -> subprocess.Popen[bytes] | forked.Forked:
        out_path = self.directory / "logs" / f"{name}.out"
        if forks and forked.IS_POSSIBLE:
            return forked.Forked(command, out_path, self._log(name))
        arguments = [*_launcher(), sys.executable, "-m", "diloco", *command]
        with open(out_path, "wb") as out, open(self._log(name), "ab") as log:
            return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True)

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _write_pids(self) -> None:
        """For tests and people that kill one. The file appears whole."""
        partial = self.directory / ".pids.json"
        partial.write_text(json.dumps({child.name: child.process.pid for child in self.children.values()}))
        partial.replace(self.directory / "pids.json")


def _launcher() -> list[str]:
    """Arguments to put before those of a process, so that it ends with this one."""
    if sys.platform != "linux":  # others have no such call
        return []
    return [sys.executable, "-I", "-S", "-c", _DIES_WITH_ITS_PARENT, str(os.getpid())]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
