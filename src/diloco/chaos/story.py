"""A chaos run from its first process to its last: a stretch without faults, the faults, a stretch to come back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.chaos.faults import INJECTIONS
from diloco.chaos.plan import ChaosPlan, prepare
from diloco.chaos.schedule import Fault
from diloco.chaos.world import POLL_S, World
from diloco.demo.processes import End
from diloco.errors import DilocoError
from diloco.events import Merged

BEGIN_S, SETTLE_S, LEAVE_S = 180.0, 180.0, 60.0
"""Limits on a slow machine: until all learners merge at first, until they do again after the last fault, and until a
process that was asked to has ended."""

WORKS_S = 60.0
"""A fault that has not done what it is for ends this long after its time."""

FAULTS = "faults.jsonl"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Injected:
    """A fault as it happened. Unix times in seconds; `hit`: there was something to hit."""

    fault: Fault
    began_at: float
    ended_at: float
    hit: bool


@dataclass(frozen=True)
class Told:
    """All that there is to judge.

    Attributes:
        calm, troubled: Unix times in seconds, from and to.
        ends: processes that ended and were started again, by what they had been sent or by themselves.
        settled: after the last fault all learners have merged again.
        status: of the run, after its learners had left.
        states: what `diloco syncer check` says of each syncer's state at the end.
        replays: what `diloco replay` says of each state that was served, the oldest first.
        repaired: what `diloco syncer check --repair` has said, each time.
        state_dirs: as `World.state_dirs`.
        stale_dirs: older copies that were served.
        failures: what stopped the run before its end.
    """

    plan: ChaosPlan
    lost_s: float
    calm: tuple[float, float]
    troubled: tuple[float, float]
    injected: tuple[Injected, ...]
    ends: tuple[End, ...]
    settled: bool
    settled_at: float
    status: dict[str, Any]
    exit_codes: dict[str, int]
    states: dict[str, dict[str, Any]]
    replays: tuple[dict[str, Any], ...]
    repaired: tuple[dict[str, Any], ...]
    state_dirs: tuple[tuple[str, Path], ...]
    stale_dirs: tuple[Path, ...]
    failures: tuple[str, ...]


def tell(plan: ChaosPlan, run_file: Path | None, say: Say) -> Told:
    """Run it; `say` hears what happens.

    Raises:
        ConfigError: the plan cannot be carried out. RunError: the run does not begin. KeyboardInterrupt: all processes
            have been ended, and `say` has heard what there is.
    """
    config = prepare(plan, run_file)
    faults = plan.faults(config.syncer.lost_floor_s)
    world = World(plan, config)
    trouble = _Trouble(world, faults, say)
    try:
        with world:
            calm = _begin(world, faults, say)
            injected = trouble.run()
            over_at = time.time()
            say(f"{sum(each.hit for each in injected)} faults injected; until all learners merge again")
            after = _come_back(world, over_at)
        say("all processes have ended; checking the state, and replaying")
        served = tuple(world.state_dirs())
        states = {
            name: world.command("syncer", "check", str(world.state_dir_of(name)), "--json")["found"]
            for name in plan.syncers
        }
        replays = tuple(world.command("replay", str(path), "--json") for _, path in served)
    except KeyboardInterrupt:
        _write_faults(plan.directory / FAULTS, trouble.injected)
        say(
            f"interrupted after {len(trouble.injected)} of {len(faults)} faults; all processes are ended, nothing was "
            f"judged. What they wrote is in {plan.directory}, the faults in {FAULTS} there"
        )
        raise
    _write_faults(plan.directory / FAULTS, injected)
    return Told(
        plan, config.syncer.lost_floor_s, calm, (calm[1], over_at), tuple(injected), tuple(world.family.ends),
        after.settled, after.at, after.status, after.exit_codes, states, replays, tuple(world.repaired), served,
        tuple(world.stale_dirs()), after.failures,
    )  # fmt: skip


def _begin(world: World, faults: tuple[Fault, ...], say: Say) -> tuple[float, float]:
    """Start the processes, and let all learners train undisturbed; returns from when to when."""
    plan = world.plan
    world.start()
    say(f"{len(faults)} faults are planned; starting a syncer and {plan.learners} learners")
    began = time.time()
    world.until(lambda: _all_merge(world, began), "not all learners have merged", BEGIN_S)
    if plan.standby:
        world.pair_up(BEGIN_S)
        paired_at = time.time()
        say("the standby has every version; until all learners merge with the pair")
        world.until(lambda: _all_merge(world, paired_at), "not all learners have merged", BEGIN_S)
    if any(fault.kind == "stale copy" for fault in faults):
        world.copy_state(BEGIN_S)
        copied_at = time.time()
        say("a copy of the state is kept; until all learners merge again")
        world.until(lambda: _all_merge(world, copied_at), "not all learners have merged", BEGIN_S)
    calm_at = time.time()
    say(f"all learners merge; {plan.calm_s:g} s without faults")
    world.rest(plan.calm_s)
    return calm_at, time.time()


@dataclass(frozen=True)
class _After:
    """What came after the last fault, as in `Told`. `at`: Unix time in seconds, when it was settled or given up."""

    settled: bool
    at: float
    status: dict[str, Any]
    exit_codes: dict[str, int]
    failures: tuple[str, ...]


def _come_back(world: World, since: float) -> _After:
    """All learners merge again; then they leave, the syncer says where the tokens are, and ends."""
    at = None
    try:
        world.until(lambda: _all_merge(world, since), "after the faults not all learners have merged", SETTLE_S)
        world.until(lambda: world.is_paired, "after the faults the two syncers are no pair", SETTLE_S)
        at = time.time()
        codes = {name: world.stop(name, LEAVE_S) for name in world.plan.names}
        status = world.status()
        for name in sorted(world.plan.syncers, key=lambda name: name != world.first):
            codes[name] = world.stop(name, LEAVE_S)
    except DilocoError as error:
        return _After(at is not None, at or time.time(), {}, {}, (str(error),))
    return _After(True, at, status, codes, ())


def _all_merge(world: World, since: float) -> bool:
    """Whether every learner has work in a version since then."""
    merges = (event for event in world.events if isinstance(event, Merged) and event.t > since)
    merged = {name for event in merges for name in event.contributors}
    return merged.issuperset(world.plan.names)


@dataclass(frozen=True)
class _Open:
    """A fault that has begun. `until_s`: of the faults' time. `num_touched`: as `Injection.num_touched` was before."""

    fault: Fault
    began_at: float
    until_s: float
    hit: bool
    num_touched: int


class _Trouble:
    """The faults, one after the other and several at a time.

    Attributes:
        injected: those that are over.
    """

    def __init__(self, world: World, faults: tuple[Fault, ...], say: Say) -> None:
        self._world, self._say = world, say
        self._waiting = list(faults)
        self._open: list[_Open] = []
        self.injected: list[Injected] = []

    def run(self) -> list[Injected]:
        """Until the last one is over."""
        began = time.monotonic()
        while self._waiting or self._open:
            now_s = time.monotonic() - began
            while self._waiting and self._waiting[0].at_s <= now_s:
                self._begin(self._waiting.pop(0), now_s)
            for each in [each for each in self._open if self._is_over(each, now_s)]:
                self._end(each)
            self._world.look()
            time.sleep(POLL_S)
        return self.injected

    def _begin(self, fault: Fault, now_s: float) -> None:
        at, fault = time.time(), self._world.aimed(fault)
        injection = INJECTIONS[fault.kind]
        num_touched = injection.num_touched(self._world, fault)
        hit = injection.begin(self._world, fault)
        self._open.append(_Open(fault, at, now_s + fault.seconds, hit, num_touched))
        if hit:
            self._say(f"{now_s:7.1f} s  {fault.kind}: {fault.target}, {fault.seconds:.1f} s")

    def _is_over(self, each: _Open, now_s: float) -> bool:
        if now_s < each.until_s:
            return False
        worked = not each.hit or INJECTIONS[each.fault.kind].has_worked(self._world, each.fault, each.began_at)
        return worked or now_s > each.until_s + WORKS_S

    def _end(self, each: _Open) -> None:
        fault, injection = each.fault, INJECTIONS[each.fault.kind]
        self._open.remove(each)
        is_felt = injection.ways is None or injection.num_touched(self._world, fault) > each.num_touched
        injection.end(self._world, fault)
        self.injected.append(Injected(fault, each.began_at, time.time(), each.hit and is_felt))


def _write_faults(path: Path, injected: list[Injected]) -> None:
    rows = ({"t": each.began_at, "ended": each.ended_at, "hit": each.hit, **vars(each.fault)} for each in injected)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
