"""The world of a chaos run: its processes, the relays between them, and their files."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.chaos.leaks import Sampler
from tests.chaos.plan import PAIR, SERVES, STANDBY, SYNCER, TWIN, WATCHER, ChaosPlan, Fault
from tests.chaos.processes import Family
from tests.chaos.relay import Relay

from diloco.config import RunConfig
from diloco.demo.plan import free_port
from diloco.errors import RunError
from diloco.event_log import EventTail, read_events
from diloco.events import Event, Joined, StandingChanged, SyncerStarted
from diloco.exchange.dialling import fetch_status

POLL_S = 0.05
OPERATOR, VIEWERS = "operator", "viewers"

TWINS = "twins"
"""Directory of the files of second processes of a learner."""

STALE, TRUE = "stale", "syncer-set-aside"
"""`stale-0` is the copy of the state from before the faults, and `stale-1` and so on what became of it when served."""

COMMAND_S = 120.0
"""A command that reads files ends within this time, and as long again as faults happened: `diloco replay` does
all that the syncer did."""


class World:
    """One or two syncers, learners, and a relay before each syncer for each process that dials it; a context manager.

    Attributes:
        config: of the run.
        family: the processes.
        ways: the relays, by the process that dials and the syncer.
        events: of the syncers, since the state was last replaced.
        stands: how each of two syncers has last said that it stands.
        parted: ways that the first is cut off from, also where another fault of the same way ends.
        first: the syncer that serves the run, or was the last to.
        is_stale: an older copy is in the place of the syncer's state.
        sampler: of a soak.
    """

    def __init__(self, plan: ChaosPlan, config: RunConfig) -> None:
        self.plan, self.config = plan, config
        self.family = Family(plan.directory)
        self.ways: dict[tuple[str, str], Relay] = {}
        self.events: list[Event] = []
        self.stands: dict[str, StandingChanged] = {}
        self.first = SYNCER
        self.parted = set[Relay]()
        self._ports = {name: free_port() for name in plan.syncers}
        self._ports[SYNCER] = int(config.syncer.address.rpartition(":")[2])
        self._num_replaced = self._num_twins = self._num_stale = 0
        self.is_stale = False
        self._num_ends = 0
        self._stack = ExitStack()
        self._run_file = str(plan.directory / "run.toml")
        sample_every_s = min(10.0, plan.seconds / 100)
        self.sampler = Sampler(self.state_dir, self.backups_of(SYNCER), sample_every_s) if plan.soak else None
        self._keys = plan.directory / "keys"
        self._follow()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            where = ("--dir", str(self._keys), "--json")
            self.command("keys", "init", "--run", self.config.run.name, "--host", "127.0.0.1", *where)
            self.command("keys", "add", "learner", *self.plan.names, *where)
            for role, name in (("viewer", WATCHER), ("admin", OPERATOR), ("standby", STANDBY)):
                self.command("keys", "add", role, name, *where)
            stack.enter_context(self.family)
            for syncer, port in self._ports.items():
                for name in (*self.plan.names, *self.plan.syncers):
                    if name != syncer:
                        self.ways[name, syncer] = stack.enter_context(Relay(port))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first syncer and all learners, of which one gives the run its model."""
        self._serve(SYNCER)
        for name in self.plan.names:
            self.family.start(name, partial(self._trains, name))

    def start_viewers(self) -> None:
        """Start the viewers of a soak."""
        self.family.start(VIEWERS, lambda: ["tests.chaos.viewers", str(self.plan.directory)])

    def _trains(self, name: str, *more: str) -> list[str]:
        return [
            "diloco", "train", self._run_file, "--name", name, "--shard", str(self.plan.names.index(name)),
            "--initialise", "if-empty", "--supervised", "--keys", str(self._keys / name),
            "--set", f"syncer.address={self._addresses(name)}", *more,
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

    def pair_up(self, limit_s: float) -> None:
        """Start the standby; then the first again, which knows the other one's address from now on.

        Raises:
            RunError: they are no pair in time.
        """
        self._serve(STANDBY, follows=SYNCER)
        self.until(lambda: self.is_paired, "the two syncers are no pair", limit_s)
        child = self.family.children[SYNCER]
        child.process.terminate()
        child.process.wait(limit_s)
        self.stands.clear()
        self._serve(SYNCER, follows=STANDBY)
        self.until(lambda: self.is_paired, "the two syncers are no pair again", limit_s)

    def _serve(self, name: str, follows: str | None = None) -> None:
        def command() -> list[str]:
            backups = f'syncer.backup="{self.backups_of(STALE if self.is_stale else name)}"'
            return [
                "diloco", "syncer", self._run_file, "--keys", str(self._keys / name), "--address", self.address(name),
                "--state-dir", str(self.state_dir_of(name)), "--set", backups,
                *(() if follows is None else ("--follow", self.ways[name, follows].address)),
            ]  # fmt: skip

        self.family.start(name, command)

    def address(self, syncer: str) -> str:
        """Of a syncer, without a relay."""
        return f"127.0.0.1:{self._ports[syncer]}"

    def _addresses(self, learner: str) -> str:
        return ",".join(self.ways[learner, syncer].address for syncer in self.plan.syncers)

    # --- two syncers --------------------------------------------------------------------------------------------------

    @property
    def other(self) -> str:
        """The other one of the two."""
        return STANDBY if self.first == SYNCER else SYNCER

    @property
    def is_paired(self) -> bool:
        """Whether one syncer serves and the other one has every version; also where there is one only."""
        if not self.plan.standby:
            return True
        each = sorted((stands.standing, stands.epoch) for stands in self.stands.values())
        return [standing for standing, _ in each] == ["following", "paired"] and each[0][1] == each[1][1]

    def aimed(self, fault: Fault) -> Fault:
        """The fault, its target replaced by the process that has that part now."""
        names = {SYNCER: self.first, STANDBY: self.other}
        return replace(fault, target=names.get(fault.target, fault.target))

    def ways_of(self, target: str) -> list[Relay]:
        """All ways of a learner, or those between two syncers."""
        if target == PAIR:
            return [self.ways[SYNCER, STANDBY], self.ways[STANDBY, SYNCER]]
        return [self.ways[target, syncer] for syncer in self.plan.syncers]

    def is_running(self, name: str) -> bool:
        """Whether the process runs."""
        child = self.family.children[name]
        return child.restart_at is None and child.process.poll() is None

    def has_begun(self, name: str) -> bool:
        """Whether the running process has begun to serve, or to train, by the syncer's events; a standby always has."""
        since = max((end.t for end in self.family.ends if end.name == name), default=0.0)
        begun = {
            SYNCER: (each.t for each in self.events if isinstance(each, SyncerStarted)),
            STANDBY: iter([math.inf]),
        }
        joined = (each.t for each in self.events if isinstance(each, Joined) and each.learner == name)
        return max(begun.get(name, joined), default=0.0) > since

    def pid(self, name: str) -> int:
        """Its process id."""
        return self.family.children[name].process.pid

    def look(self) -> None:
        """Restart ended processes, repair a state that no syncer starts on, sample, and read the syncers' events."""
        self.family.watch()
        if self.sampler is not None:
            self.sampler.sample({name: self.pid(name) for name in self.family.children if self.is_running(name)})
        ends, self._num_ends = self.family.ends[self._num_ends :], len(self.family.ends)
        if any(end.name == SYNCER and end.code > 0 for end in ends) and not self.plan.standby:
            self.command("syncer", "check", str(self.state_dir), "--repair", "--json")  # as an operator would
        for name, tail in self._tails.items() if not self.is_stale else ():
            events = tail.read()
            self.events += events
            for event in events:
                if isinstance(event, StandingChanged):
                    self.stands[name] = event
        serving = [name for name, each in self.stands.items() if each.standing in SERVES]
        self.first = max(serving, key=lambda name: self.stands[name].epoch, default=self.first)

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
        """Status of the run, from the syncer that serves it."""
        return fetch_status(self.address(self.first), run=self.config.run.name, keys=self._keys / WATCHER)

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def state_dir(self) -> Path:
        """State directory of the only syncer."""
        return self.state_dir_of(SYNCER)

    def state_dir_of(self, syncer: str) -> Path:
        """State directory of a syncer."""
        return self.config.state_dir if syncer == SYNCER else self.config.state_dir.with_name(syncer)

    def backups_of(self, syncer: str) -> Path:
        """Directory of its backups."""
        return self.plan.directory.absolute() / ("backups" if syncer == SYNCER else f"backups-{syncer}")

    def promote(self, syncer: str) -> bool:
        """`diloco syncer promote --force`; returns whether it succeeded."""
        done = self.command(
            "syncer", "promote", self.address(syncer), "--run", self.config.run.name,
            "--keys", str(self._keys / OPERATOR), "--force", "--json",
        )  # fmt: skip
        return bool(done["exit_code"] == 0)

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
        """Put the newest backup in the place of the state of a syncer that is not running; the old one is kept under
        another name. Returns whether there is a backup."""
        made = self.plan.directory / "restored"
        done = self.command("syncer", "restore", str(self.config.syncer.backup), str(made), "--json")
        if done["exit_code"] != 0:
            shutil.rmtree(made, ignore_errors=True)
            return False
        self._num_replaced += 1
        self.events += self._tails[SYNCER].read()
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
        self._serve(SYNCER)

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

    def state_dirs(self) -> Sequence[tuple[str, Path]]:
        """All states that there were, each with its syncer's name; that of the syncer that serves the run at the
        end."""
        before = [self.state_dir.with_name(f"{self.state_dir.name}-{index + 1}") for index in range(self._num_replaced)]
        names = sorted(self.plan.syncers, key=lambda name: name == self.first)
        return [*((SYNCER, path) for path in before), *((name, self.state_dir_of(name)) for name in names)]

    def _follow(self) -> None:
        self._tails = {name: EventTail(self.state_dir_of(name) / "events.jsonl") for name in self.plan.syncers}
