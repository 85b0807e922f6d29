"""The demo's processes: one that is killed is started again, one that fails by itself ends the demo.

They are forked from a process that has imported what they need: importing torch and transformers takes some seconds of
processor time, which each of them would spend again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

from diloco.errors import RunError

IMPORTS = (
    "diloco.training.loop", "diloco.exchange.remote", "diloco.syncer.server",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip

RESTART_AFTER_S = 1.0
"""As a service manager would: not at once, so that a person sees the process missing."""

STOPPED = 128 + signal.SIGTERM
"""Exit code of a supervised learner that a signal has stopped."""

END_TIMEOUT_S = 20.0
TAIL_LINES = 15


@dataclass(frozen=True)
class Kill:
    """A process died by a signal and was started again. `t` is Unix time in seconds."""

    name: str
    t: float


@dataclass
class Child:
    """One process of the demo.

    Attributes:
        serves: it never ends by itself.
        restarts: it is started again where a signal has ended it.
        restart_at: on the monotonic clock, while it is dead.
    """

    command: tuple[str, ...]
    process: BaseProcess
    serves: bool
    restarts: bool
    restart_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether its work ended in good order."""
        return self.process.exitcode == 0 and not self.serves


@dataclass
class Family:
    """All processes of one demo. Leaving the context ends them; they also end with a demo that is killed.

    They have sessions of their own, so that a Ctrl-C in the terminal reaches the demo alone.

    Attributes:
        kills: of processes that were started again.
    """

    directory: Path
    children: dict[str, Child] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    def start(self, name: str, *command: str, serves: bool = False, restarts: bool = False) -> None:
        """Run `diloco` with these arguments; standard output and error go to `logs/`.

        The first one waits until the imports are done.
        """
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        # After these imports a fork is safe on Linux only.
        is_linux = sys.platform == "linux"
        context = multiprocessing.get_context("forkserver") if is_linux else multiprocessing.get_context("spawn")
        context.set_forkserver_preload([*IMPORTS])
        out, log = logs / f"{name}.out", logs / f"{name}.log"
        log.touch()
        process = context.Process(target=_run, args=(command, out, log))
        process.start()
        self.children[name] = Child(command, process, serves, restarts)
        # For tests and people that kill one. The file appears whole.
        partial = self.directory / ".pids.json"
        partial.write_text(json.dumps({name: child.process.pid for name, child in self.children.items()}))
        partial.replace(self.directory / "pids.json")

    def watch(self) -> None:
        """Start again what was killed; call it often.

        Raises:
            RunError: a process failed by itself; shows the end of its log.
        """
        for name, child in self.children.items():
            code = child.process.exitcode
            if code is None or child.done:
                continue
            if not child.restarts or (code > 0 and code != STOPPED):
                raise self._failure(name, code)
            now = time.monotonic()
            if child.restart_at is None:
                child.restart_at = now + RESTART_AFTER_S
                self.kills.append(Kill(name, time.time()))
            elif now >= child.restart_at:
                self.start(name, *child.command, serves=child.serves, restarts=True)

    def are_done(self, *names: str) -> bool:
        """Whether the work of all of them ended in good order."""
        return all(self.children[name].done for name in names)

    def stop(self, name: str) -> None:
        """Ask a process that serves to end, and wait for it. Raises RunError: it does not, or fails."""
        process = self.children.pop(name).process
        process.terminate()
        process.join(END_TIMEOUT_S)
        if process.exitcode != 0:
            process.kill()
            raise self._failure(name, process.exitcode)

    def _failure(self, name: str, code: int | None) -> RunError:
        log = self.directory / "logs" / f"{name}.log"
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
        return RunError(f"{name} failed with exit code {code}; the end of {log} says why:\n{tail}")

    def output(self, name: str) -> str:
        """Standard output of a process since it was last started."""
        return (self.directory / "logs" / f"{name}.out").read_text(encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.process.kill()
        for child in self.children.values():
            child.process.join(END_TIMEOUT_S)


def _run(command: tuple[str, ...], out: Path, log: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    for path, flags, number in ((out, os.O_TRUNC, 1), (log, os.O_APPEND, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = command
    runpy.run_module("diloco", run_name="__main__", alter_sys=True)


def _end_with(parent: BaseProcess) -> None:
    """End this process when the demo ends, by whatever."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
