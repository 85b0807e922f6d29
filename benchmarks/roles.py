"""The processes of a run of reinforcement learning, which can be killed and frozen, and the account of its groups."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tests.chaos.processes import Family

from benchmarks.processes import until
from diloco.config import RunConfig, load_config
from diloco.demo.plan import free_port
from diloco.errors import UnreachableError
from diloco.exchange.dialling import fetch_status
from diloco.following.stored_status import stored_status
from diloco.protocol.groups import ENDS

SYNCER = "syncer"
STATES = ("waiting", "leased", *ENDS)

STOPPED = (0, 128 + signal.SIGTERM)
"""Exit codes of a process that has done its work, or was told to stop."""


class Roles(Family):
    """A syncer, trainers, rollout workers and reward workers; a context manager that ends them. Nothing is started
    again but by `restart`.

    Arguments:
        directory: of the run, for its state and logs.
        overrides: of the run file, as table.key=value.

    Attributes:
        config: of the run.
        names: of all processes but the syncer.
        spent_s: processor time by role, with child processes, of processes that have ended.
        shown: the last status that a syncer has answered.
        wrong: what does not hold, a sentence each.
    """

    def __init__(
        self, directory: Path, run_file: Path, *, overrides: Sequence[str] = (), rollouts: int = 2, rewards: int = 1
    ) -> None:
        super().__init__(directory)
        address = f"127.0.0.1:{free_port()}"
        own = [*overrides, f'run.dir="{directory}"', f'syncer.address="{address}"', "syncer.page=false"]
        self.config: RunConfig = load_config(run_file, own)
        self._options = (str(run_file.absolute()), *(text for each in own for text in ("--set", each)))
        numbers = {"trainer": self.config.run.learners, "rollout": rollouts, "reward": rewards}
        self.names = [f"{role}-{number}" for role, num in numbers.items() for number in range(num)]
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.shown: dict[str, Any] = {}
        self.wrong: list[str] = []

    def restart(self, name: str) -> None:
        """Start a process by the same command as ever."""
        command = (SYNCER, *self._options) if name == SYNCER else ("rl", role_of(name), *self._options, "--name", name)
        self.start(name, lambda: ("diloco", *command), once=True)

    def watch(self) -> None:
        """Note processes that have ended by themselves; one that has failed is wrong. Call it often."""
        for name, child in self.children.items():
            if child.restart_at is None and _is_dead(child.process.pid):
                self.spent_s[role_of(name)] += _processor_s(child.process.pid)
        known = len(self.ends)
        super().watch()
        for end in self.ends[known:]:
            if end.code or end.name == SYNCER:
                self.wrong.append(f"{end.name} ended by itself with code {end.code}; see logs/{end.name}.log")

    def kill_now(self, name: str) -> None:
        """SIGKILL. The syncer gets it once its store has what it has shown last."""
        if name == SYNCER and self.shown:
            until(lambda: not went_back(self.groups, self.stored()), "what the syncer has shown is not stored")
        its_children = _descendants_s(self.children[name].process.pid)
        self._end(name, signal.SIGKILL)
        self.spent_s[role_of(name)] += its_children  # it has not waited for them

    def stop(self, name: str) -> None:
        """SIGTERM."""
        if (code := self._end(name, signal.SIGTERM)) not in STOPPED:
            self.wrong.append(f"{name} was stopped and ended with code {code}; see logs/{name}.log")

    def _end(self, name: str, number: int) -> int:
        """Send a signal, and wait for the end; then the store of a syncer must be right. Returns the exit code."""
        process = self.children.pop(name).process
        process.send_signal(number)
        until(lambda: _is_dead(process.pid), f"{name} does not end by signal {number}")
        self.spent_s[role_of(name)] += _processor_s(process.pid)
        if name == SYNCER and self.shown:
            self.wrong += violations(self.groups, self.stored())
        return process.wait()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.children[name].process.send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.children[name].process.send_signal(signal.SIGCONT)

    def processor_s(self) -> dict[str, float]:
        """Processor time by role until now."""
        found = self.spent_s.copy()
        for name, child in self.children.items():
            if child.process.returncode is None:
                found[role_of(name)] += _processor_s(child.process.pid) + _descendants_s(child.process.pid)
        return {role: round(seconds, 1) for role, seconds in sorted(found.items())}

    # --- the account --------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> dict[str, Any]:
        """Of the last status; empty: there was none."""
        found: dict[str, Any] = self.shown.get("groups", {})
        return found

    def look(self) -> bool:
        """Check the status, and whether a process has failed; returns whether the syncer has answered."""
        self.watch()
        try:
            status = fetch_status(self.config.syncer.address, run=self.config.run.name)
        except UnreachableError:
            return False
        if status["groups"] is None:  # no trainer has joined
            return False
        before, self.shown = self.groups, status
        self.wrong += violations(before, self.groups)
        return True

    def stored(self) -> dict[str, Any]:
        """The groups in the run's store."""
        found: dict[str, Any] = stored_status(self.config.state_dir)["groups"] or {}
        return found


def role_of(name: str) -> str:
    """The role of a process, or the syncer."""
    return name.partition("-")[0]


def violations(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is wrong with the groups of a status, after those of an earlier one; a sentence each."""
    states = {state: now[state] for state in STATES}
    found = went_back(before, now)
    if sum(states.values()) != now["acknowledged"] or min(states.values()) < 0:
        found.append(f"{now['acknowledged']} groups are acknowledged, and their states are {states}")
    return found


def went_back(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Counts that are lower than before; a sentence each."""
    counts = ("acknowledged", *ENDS)
    lower = [each for each in counts if now.get(each, 0) < before.get(each, 0)]
    return [f"{now.get(each, 0)} groups are {each}, and {before[each]} were before" for each in lower]


def _is_dead(pid: int) -> bool:
    """Whether a child process has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _processor_s(pid: int) -> float:
    """Of a process, also an ended one that was not waited for, and of those that it has waited for."""
    with suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    return 0.0


def _descendants_s(pid: int) -> float:
    with suppress(psutil.Error):
        return sum(_processor_s(each.pid) for each in psutil.Process(pid).children(recursive=True))
    return 0.0
