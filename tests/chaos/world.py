"""The world of a chaos run: its processes, the relays between them, and their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.chaos.leaks import Sampler
from tests.chaos.plan import SYNCER, TWIN, WATCHER, ChaosPlan
from tests.chaos.processes import Family
from tests.chaos.relay import Relay

from diloco.config import RunConfig
from diloco.errors import RunError
from diloco.event_log import EventTail, read_events
from diloco.events import Event, Joined, SyncerStarted
from diloco.exchange.dialling import fetch_status

POLL_S = 0.05
VIEWERS = "viewers"

TWINS = "twins"
"""Directory of the files of second processes of a learner."""

STALE, TRUE = "stale", "syncer-set-aside"
"""`stale-0` is the copy of the state from before the faults, and `stale-1` and so on what became of it when served."""

COMMAND_S = 120.0
"""A command that reads files ends within this time, and as long again as faults happened: `diloco replay` does
all that the syncer did."""


class World:
    """A syncer, learners, and a relay before the syncer for each learner; a context manager.

    Attributes:
        config: of the run.
        family: the processes.
        ways: the relays, by the learner that dials.
        events: of the syncer, since the state was last replaced.
        is_stale: an older copy is in the place of the syncer's state.
        sampler: of a soak.
    """

    def __init__(self, plan: ChaosPlan, config: RunConfig) -> None:
        self.plan, self.config = plan, config
        self.family = Family(plan.directory)
        self.ways: dict[str, Relay] = {}
        self.events: list[Event] = []
        self._num_replaced = self._num_twins = self._num_stale = 0
        self.is_stale = False
        self._num_ends = 0
        self._stack = ExitStack()
        self._run_file = str(plan.directory / "run.toml")
        sample_every_s = min(10.0, plan.seconds / 100)
        self.sampler = Sampler(self.state_dir, self.copies_of(SYNCER), sample_every_s) if plan.soak else None
        self._keys = plan.directory / "keys"
        self._follow()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            where = ("--dir", str(self._keys), "--json")
            self.command("keys", "init", "--run", self.config.run.name, "--host", "127.0.0.1", *where)
            self.command("keys", "add", "learner", *self.plan.names, *where)
            self.command("keys", "add", "viewer", WATCHER, *where)
            stack.enter_context(self.family)
            port = int(self.config.syncer.address.rpartition(":")[2])
            self.ways = {name: stack.enter_context(Relay(port)) for name in self.plan.names}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the syncer and all learners, of which one gives the run its model."""
        self._serve()
        for name in self.plan.names:
            self.family.start(name, partial(self._trains, name))

    def start_viewers(self) -> None:
        """Start the viewers of a soak."""
        self.family.start(VIEWERS, lambda: ["tests.chaos.viewers", str(self.plan.directory)])

    def _trains(self, name: str, *more: str) -> list[str]:
        return [
            "diloco", "train", self._run_file, "--name", name, "--shard", str(self.plan.names.index(name)),
            "--initialise", "if-empty", "--supervised", "--keys", str(self._keys / name),
            "--set", f"syncer.address={self.ways[name].address}", *more,
        ]  # fmt: skip

    def start_twin(self, name: str) -> None:
        """Start a second process with the name of a learner, and files of its own. It is not started again."""
        self._num_twins += 1
        directory = self.plan.directory.absolute() / TWINS / str(self._num_twins)
        command = partial(self._trains, name, "--set", f'run.dir="{directory}"')
        self.family.start(f"{name}{TWIN}", command, once=True)

    @property
    def has_twins(self) -> bool:
        """Whether there is a second process of a learner's name."""
        return any(name.endswith(TWIN) for name in self.family.children)

    def _serve(self) -> None:
        def command() -> list[str]:
            copies = f'syncer.copy_to="{self.copies_of(STALE if self.is_stale else SYNCER)}"'
            return ["diloco", "syncer", self._run_file, "--keys", str(self._keys / SYNCER), "--set", copies]

        self.family.start(SYNCER, command)

    def is_running(self, name: str) -> bool:
        """Whether the process runs."""
        child = self.family.children[name]
        return child.restart_at is None and child.process.poll() is None

    def has_begun(self, name: str) -> bool:
        """Whether the running process has begun to serve, or to train, by the syncer's events."""
        since = max((end.t for end in self.family.ends if end.name == name), default=0.0)
        if name == SYNCER:
            return any(isinstance(each, SyncerStarted) and each.t > since for each in self.events)
        return any(isinstance(each, Joined) and each.learner == name and each.t > since for each in self.events)

    def pid(self, name: str) -> int:
        """Its process id."""
        return self.family.children[name].process.pid

    def look(self) -> None:
        """Restart ended processes, repair a state that no syncer starts on, sample, and read the syncer's events."""
        self.family.watch()
        if self.sampler is not None:
            self.sampler.sample({name: self.pid(name) for name in self.family.children if self.is_running(name)})
        ends, self._num_ends = self.family.ends[self._num_ends :], len(self.family.ends)
        if any(end.name == SYNCER and end.code > 0 for end in ends):
            self.command("syncer", "check", str(self.state_dir), "--repair", "--json")  # as an operator would
        if not self.is_stale:
            self.events += self._tail.read()

    def until(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Look until it holds.

        Raises:
            RunError: it does not in time.
        """
        limit_s *= self.plan.slowness
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise RunError(f"{what} within {limit_s:.0f} s; the logs are in {self.plan.directory / 'logs'}")
            self.look()
            time.sleep(POLL_S)

    def rest(self, seconds: float) -> None:
        """Look for this long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(POLL_S)

    def stop(self, name: str, limit_s: float) -> int:
        """Ask a process to end, and wait for it; returns its exit code. It is not started again.

        Raises:
            RunError: it does not end.
        """
        limit_s *= self.plan.slowness
        child = self.family.children.pop(name)
        child.process.terminate()
        try:
            return child.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            raise RunError(f"{name} did not end within {limit_s:.0f} s of SIGTERM") from None

    def status(self) -> dict[str, Any]:
        """Status of the run."""
        return fetch_status(self.config.syncer.address, run=self.config.run.name, keys=self._keys / WATCHER)

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def state_dir(self) -> Path:
        """State directory of the syncer."""
        return self.config.state_dir

    def copies_of(self, syncer: str) -> Path:
        """Directory of copies of its store."""
        return self.plan.directory.absolute() / ("copies" if syncer == SYNCER else f"copies-{syncer}")

    def command(self, *arguments: str) -> dict[str, Any]:
        """Run `diloco ARGUMENTS` and read what it prints as JSON; {} where it prints none.

        Raises:
            RunError: it does not end in time.
        """
        limit_s = (COMMAND_S + self.plan.seconds) * self.plan.slowness
        try:
            done = subprocess.run(
                [sys.executable, "-m", "diloco", *arguments], capture_output=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"diloco {' '.join(arguments)} has not ended within {limit_s:.0f} s") from None
        said = done.stderr.decode(errors="replace")
        return {"found": json.loads(done.stdout or b"{}"), "exit_code": done.returncode, "said": said}

    def restore(self) -> bool:
        """Put a copy in the place of the state of a syncer that is not running; the old one is kept under another name.
        Returns whether there is a copy."""
        made = self.plan.directory / "restored"
        done = self.command("copy", str(self.copies_of(SYNCER)), str(made), "--json")
        if done["exit_code"] != 0:
            shutil.rmtree(made, ignore_errors=True)
            return False
        self._num_replaced += 1
        self.events += self._tail.read()
        self.state_dir.rename(self.state_dir.with_name(f"{self.state_dir.name}-{self._num_replaced}"))
        made.rename(self.state_dir)
        self._follow()
        return True

    def copy_state(self, limit_s: float) -> None:
        """Keep a copy of the state of the syncer, which is stopped for that.

        Raises:
            RunError: it does not serve again in time.
        """
        child = self.family.children[SYNCER]
        child.process.terminate()
        child.process.wait(limit_s)
        shutil.copytree(self.state_dir, self.stale_dir(0))
        self._serve()

    def stale_dir(self, number: int) -> Path:
        """Directory of an older copy, see `STALE`."""
        return self.state_dir.with_name(f"{STALE}-{number}")

    def stale_dirs(self) -> list[Path]:
        """The older copies that were served."""
        return [self.stale_dir(index + 1) for index in range(self._num_stale)]

    def go_stale(self) -> None:
        """Replace the state of a syncer that does not run by the older copy."""
        self.look()
        self.is_stale = True
        self.state_dir.rename(self.state_dir.with_name(TRUE))
        shutil.copytree(self.stale_dir(0), self.state_dir)
        (self.state_dir / "events.jsonl").unlink()

    @property
    def serves_an_older_copy_since(self) -> float | None:
        """Unix time in seconds; None: it does not yet."""
        path = self.state_dir / "events.jsonl"
        if not self.is_stale or not path.exists():
            return None
        return next((event.t for event in read_events(path) if isinstance(event, SyncerStarted)), None)

    def be_true(self) -> None:
        """Put the state of a syncer that does not run back in its place."""
        self._num_stale += 1
        self.state_dir.rename(self.stale_dir(self._num_stale))
        self.state_dir.with_name(TRUE).rename(self.state_dir)
        self.is_stale = False

    def state_dirs(self) -> Sequence[Path]:
        """All states that there were, the newest at the end."""
        before = [self.state_dir.with_name(f"{self.state_dir.name}-{index + 1}") for index in range(self._num_replaced)]
        return [*before, self.state_dir]

    def _follow(self) -> None:
        self._tail = EventTail(self.state_dir / "events.jsonl")
