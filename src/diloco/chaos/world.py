"""The processes of a chaos run, the proxies between them, and their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from diloco.chaos.plan import WATCHER, ChaosPlan
from diloco.chaos.proxy import Relay
from diloco.chaos.schedule import SYNCER
from diloco.config import RunConfig
from diloco.demo.processes import Family
from diloco.errors import DilocoError, RunError
from diloco.events import Event, EventTail

POLL_S = 0.05
COMMAND_S = 120.0
"""A command that looks after files ends within this time."""


class World:
    """A syncer, learners, and a proxy before the syncer for each of them; a context manager.

    Attributes:
        config: of the run.
        family: the processes.
        ways: the proxy of each learner.
        events: of the syncer, since its state was last replaced.
        repaired: what `diloco syncer check --repair` has said, each time.
    """

    def __init__(self, plan: ChaosPlan, config: RunConfig) -> None:
        self.plan, self.config = plan, config
        self.family = Family(plan.directory)
        self.ways: dict[str, Relay] = {}
        self.events: list[Event] = []
        self.repaired: list[dict[str, Any]] = []
        self._num_replaced = 0
        self._num_ends = 0
        self._stack = ExitStack()
        self._run_file = str(plan.directory / "run.toml")
        self._keys = plan.directory / "keys"
        self._follow()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            learners = [argument for name in self.plan.names for argument in ("--learner", name)]
            self.command(
                "keys", "new", str(self._keys), "--run", self.config.run.name, "--host", "127.0.0.1", *learners,
                "--viewer", WATCHER, "--json",
            )  # fmt: skip
            stack.enter_context(self.family)
            for name in self.plan.names:
                self.ways[name] = stack.enter_context(Relay(int(self.config.syncer.address.rpartition(":")[2])))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the syncer and all learners. The first learner gives the run its model."""
        serve = ["syncer", self._run_file, "--keys", str(self._keys / SYNCER)]
        self.family.start(SYNCER, serve, serves=True, supervised=True)
        for index, name in enumerate(self.plan.names):
            command = [
                "train", self._run_file, "--name", name, "--shard", str(index), "--supervised", "--json",
                "--keys", str(self._keys / name), "--set", f"syncer.address={self.ways[name].address}",
            ]  # fmt: skip
            self.family.start(name, [*command, "--initialise"] if index == 0 else command, supervised=True, serves=True)

    def is_running(self, name: str) -> bool:
        """Whether the process is there."""
        child = self.family.children[name]
        return child.restart_at is None and child.process.poll() is None

    def pid(self, name: str) -> int:
        """Of the process that is there."""
        return self.family.children[name].process.pid

    def look(self) -> None:
        """Start again what has ended, repair what no syncer starts on, and read the syncer's events."""
        self.family.watch()
        ends, self._num_ends = self.family.ends[self._num_ends :], len(self.family.ends)
        if any(end.name == SYNCER and end.code > 0 for end in ends):
            self._repair()
        self.events += self._tail.read()

    def until(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Look until it holds.

        Raises:
            RunError: it does not in time.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise RunError(f"{what} within {limit_s:.0f} s; the logs are in {self.plan.directory / 'logs'}")
            self.look()
            time.sleep(POLL_S)

    def rest(self, seconds: float) -> None:
        """Look for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(POLL_S)

    def stop(self, name: str, limit_s: float) -> int:
        """Ask a process to end, and wait for it; returns its exit code. It is not started again.

        Raises:
            RunError: it does not end.
        """
        child = self.family.children.pop(name)
        child.process.terminate()
        try:
            return child.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            raise RunError(f"{name} did not end within {limit_s:.0f} s of SIGTERM") from None

    def status(self) -> dict[str, Any]:
        """Of the run, from its syncer."""
        from diloco.exchange.remote import fetch_status

        return fetch_status(self.config.syncer.address, run=self.config.run.name, keys=self._keys / WATCHER)

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def state_dir(self) -> Path:
        """Of the syncer."""
        return self.config.state_dir

    def command(self, *arguments: str) -> dict[str, Any]:
        """Run `diloco ARGUMENTS` and read what it prints as JSON; {} where it prints none.

        Raises:
            RunError: it does not end in time.
        """
        try:
            done = subprocess.run(
                [sys.executable, "-m", "diloco", *arguments], capture_output=True, timeout=COMMAND_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"diloco {' '.join(arguments)} has not ended within {COMMAND_S:.0f} s") from None
        found: Any = json.loads(done.stdout or b"{}")
        return {"found": found, "exit_code": done.returncode, "said": done.stderr.decode(errors="replace")}

    def restore(self) -> bool:
        """Put the newest backup in the place of the state of a syncer that is not running; the old one is kept under
        another name. Returns whether there is a backup."""
        made = self.plan.directory / "restored"
        done = self.command("syncer", "restore", str(self.config.syncer.backup), str(made), "--json")
        if done["exit_code"] != 0:
            shutil.rmtree(made, ignore_errors=True)
            return False
        self._num_replaced += 1
        self.events += self._tail.read()
        self.state_dir.rename(self.state_dir.with_name(f"{self.state_dir.name}-{self._num_replaced}"))
        made.rename(self.state_dir)
        self._follow()
        return True

    def state_dirs(self) -> Sequence[Path]:
        """All states that syncers have served, the oldest first."""
        before = [self.state_dir.with_name(f"{self.state_dir.name}-{index + 1}") for index in range(self._num_replaced)]
        return [*before, self.state_dir]

    def _follow(self) -> None:
        self._tail = EventTail(self.state_dir / "events.jsonl")

    def _repair(self) -> None:
        """As an operator would, where a syncer does not start."""
        try:
            said = self.command("syncer", "check", str(self.state_dir), "--repair", "--json")
        except DilocoError as error:
            said = {"found": {}, "exit_code": 1, "said": str(error)}
        self.repaired.append(said)
