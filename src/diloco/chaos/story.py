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
        ConfigError: the plan cannot be carried out. RunError: the run does not begin.
    """
    config = prepare(plan, run_file)
    faults = plan.faults(config.syncer.lost_floor_s)
    failures: list[str] = []
    with World(plan, config) as world:
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
        trouble_at = time.time()
        injected = _Trouble(world, faults, say).run()
        over_at = time.time()
        say(f"{sum(each.hit for each in injected)} faults injected; until all learners merge again")
        settled = False
        status: dict[str, Any] = {}
        codes: dict[str, int] = {}
        try:
            world.until(lambda: _all_merge(world, over_at), "after the faults not all learners have merged", SETTLE_S)
            world.until(lambda: world.is_paired, "after the faults the two syncers are no pair", SETTLE_S)
            settled = True
            settled_at = time.time()
            codes, status = _end(world)
        except DilocoError as error:
            settled_at = time.time()
            failures.append(str(error))
    say("all processes have ended; checking the state, and replaying")
    served = tuple(world.state_dirs())
    states = {
        name: world.command("syncer", "check", str(world.state_dir_of(name)), "--json")["found"]
        for name in plan.syncers
    }
    replays = tuple(world.command("replay", str(path), "--json") for _, path in served)
    told = Told(
        plan, config.syncer.lost_floor_s, (calm_at, trouble_at), (trouble_at, over_at), tuple(injected),
        tuple(world.family.ends), settled, settled_at, status, codes, states, replays, tuple(world.repaired),
        served, tuple(world.stale_dirs()), tuple(failures),
    )  # fmt: skip
    _write_faults(plan.directory / "faults.jsonl", injected)
    return told


def _end(world: World) -> tuple[dict[str, int], dict[str, Any]]:
    """Learners leave, then the syncer says where the tokens are, and ends."""
    codes = {name: world.stop(name, LEAVE_S) for name in world.plan.names}
    status = world.status()
    for name in sorted(world.plan.syncers, key=lambda name: name != world.first):
        codes[name] = world.stop(name, LEAVE_S)
    return codes, status


def _all_merge(world: World, since: float) -> bool:
    """Whether every learner has work in a version since then."""
    merges = (event for event in world.events if isinstance(event, Merged) and event.t > since)
    merged = {name for event in merges for name in event.contributors}
    return merged.issuperset(world.plan.names)


class _Trouble:
    """The faults, one after the other and several at a time."""

    def __init__(self, world: World, faults: tuple[Fault, ...], say: Say) -> None:
        self._world, self._say = world, say
        self._waiting = list(faults)
        self._open: list[tuple[Fault, float, float, bool]] = []
        self._injected: list[Injected] = []

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
        return self._injected

    def _begin(self, fault: Fault, now_s: float) -> None:
        at, fault = time.time(), self._world.aimed(fault)
        hit = INJECTIONS[fault.kind].begin(self._world, fault)
        self._open.append((fault, at, now_s + fault.seconds, hit))
        if hit:
            self._say(f"{now_s:7.1f} s  {fault.kind}: {fault.target}, {fault.seconds:.1f} s")

    def _is_over(self, each: tuple[Fault, float, float, bool], now_s: float) -> bool:
        fault, began_at, until_s, hit = each
        if now_s < until_s:
            return False
        worked = not hit or INJECTIONS[fault.kind].has_worked(self._world, fault, began_at)
        return worked or now_s > until_s + WORKS_S

    def _end(self, each: tuple[Fault, float, float, bool]) -> None:
        fault, began_at, _, hit = each
        self._open.remove(each)
        INJECTIONS[fault.kind].end(self._world, fault)
        self._injected.append(Injected(fault, began_at, time.time(), hit))


def _write_faults(path: Path, injected: list[Injected]) -> None:
    rows = ({"t": each.began_at, "ended": each.ended_at, "hit": each.hit, **vars(each.fault)} for each in injected)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
