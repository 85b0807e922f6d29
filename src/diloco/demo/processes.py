"""The demo's processes: a killed process is restarted, a failed process ends the demo.

They are forked from a process that has imported torch and transformers, since these imports take seconds of processor
time in each process.
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

from diloco.closing import Closing
from diloco.errors import RunError

IMPORTS = (
    "diloco.training.loop", "diloco.exchange.remote", "diloco.syncer.server",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip

RESTART_AFTER_S = 1.0
"""Delay of a restart, as in a service manager; it makes the absence visible."""

STOPPED = 128 + signal.SIGTERM
"""Exit code of a supervised learner that was stopped by a signal."""

END_TIMEOUT_S = 60.0
TAIL_LINES = 15


@dataclass(frozen=True)
class Kill:
    """A process that a signal ended, and that is restarted. `t` is Unix time in seconds."""

    name: str
    t: float


@dataclass
class Child:
    """One process of the demo.

    Attributes:
        serves: the process never ends by itself.
        restart_after_s: restart it so long after a signal has ended it; None: its end by a signal is a failure.
        restart_at: monotonic time of the restart, while it is down.
    """

    command: tuple[str, ...]
    process: BaseProcess
    serves: bool
    restart_after_s: float | None
    restart_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether its work is finished."""
        return self.process.exitcode == 0 and not self.serves


@dataclass
class DemoProcesses(Closing):
    """All processes of one demo. Leaving the context ends them; they also end if the demo is killed.

    Each has its own session, so that Ctrl-C in the terminal reaches only the demo.

    Attributes:
        imports: modules that all have, beside `IMPORTS`.
        kills: the kills so far.
    """

    directory: Path
    imports: tuple[str, ...] = ()
    children: dict[str, Child] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    def start(self, name: str, *command: str, serves: bool = False, restart_after_s: float | None = None) -> None:
        """Run `diloco` with these arguments; standard output and error go to `logs/`.

        The first call waits for the imports.
        """
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        # After these imports a fork is safe on Linux only.
        is_linux = sys.platform == "linux"
        context = multiprocessing.get_context("forkserver") if is_linux else multiprocessing.get_context("spawn")
        context.set_forkserver_preload([*IMPORTS, *self.imports])
        out, log = logs / f"{name}.out", logs / f"{name}.log"
        log.touch()
        process = context.Process(target=_run, args=(command, out, log))
        process.start()
        self.children[name] = Child(command, process, serves, restart_after_s)
        # For tests and users that kill a process; written atomically.
        partial = self.directory / ".pids.json"
        partial.write_text(json.dumps({name: child.process.pid for name, child in self.children.items()}))
        partial.replace(self.directory / "pids.json")

    def watch(self) -> None:
        """Restart killed processes; call it often.

        Raises:
            RunError: a process failed; the message quotes the end of its log.
        """
        for name, child in self.children.items():
            code = child.process.exitcode
            if code is None or child.done:
                continue
            if child.restart_after_s is None or (code > 0 and code != STOPPED):
                raise self._failure(name, code)
            now = time.monotonic()
            if child.restart_at is None:
                child.restart_at = now + child.restart_after_s
                self.kills.append(Kill(name, time.time()))
            elif now >= child.restart_at:
                self.start(name, *child.command, serves=child.serves, restart_after_s=child.restart_after_s)

    def are_done(self, *names: str) -> bool:
        """Whether all these processes have finished their work."""
        return all(self.children[name].done for name in names)

    def stop(self, name: str) -> None:
        """Terminate a serving process, unless it was killed, and wait for its end.

        Raises:
            RunError: it fails or does not end in time.
        """
        child = self.children.pop(name)
        process = child.process
        if child.restart_at is not None:
            return
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
        """Standard output of a process since its last start."""
        return (self.directory / "logs" / f"{name}.out").read_text(encoding="utf-8")

    def close(self) -> None:
        """End all processes."""
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
    """Kill this process when the demo ends for any reason."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
