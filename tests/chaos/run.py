"""A chaos run from its first process to its last: a stretch without faults, the faults, and recovery."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.facts import Injected, Record
from tests.chaos.faults import INJECTIONS
from tests.chaos.plan import SYNCER, ChaosPlan, Fault, prepare
from tests.chaos.world import POLL_S, VIEWERS, World

from diloco.errors import DilocoError
from diloco.events import Merged

BEGIN_S, SETTLE_S, LEAVE_S = 180.0, 180.0, 60.0
"""Limits on a slow machine: until all learners merge at first, until they do again after the last fault, and until a
process that was asked to has ended."""

WORKS_S = 60.0
"""A fault that has not had its effect ends this long after its time."""

FAULTS, SAMPLED = "faults.jsonl", "sampled.json"

Say = Callable[[str], None]


def run_chaos(plan: ChaosPlan, run_file: Path | None, say: Say) -> Record:
    """Run it; `say` hears what happens.

    Raises:
        ConfigError: the plan cannot be carried out. RunError: the run does not begin. KeyboardInterrupt: all processes
            have been ended, and `say` has heard how far it came.
    """
    config = prepare(plan, run_file)
    faults = plan.faults(config.syncer.lost_floor_s)
    world = World(plan, config)
    trouble = _Trouble(world, faults, say)
    try:
        with world:
            calm = _begin(world, faults, say)
            trouble.run()
            over_at = time.time()
            say(f"{sum(each.hit for each in trouble.injected)} faults injected; until all learners merge again")
            settled, status, exit_codes, failures = _recover(world, over_at)
        say("all processes have ended; checking the state, and replaying")
        served = tuple(world.state_dirs())
        state = world.command("syncer", "check", str(world.state_dir), "--json")["found"]
        replays = tuple(world.command("replay", str(path), "--json") for path in served)
    except KeyboardInterrupt:
        say(
            f"interrupted after {len(trouble.injected)} of {len(faults)} faults; all processes are ended, nothing was "
            f"judged. What they wrote is in {plan.directory}, the faults in {FAULTS} there"
        )
        raise
    finally:
        rows = ({"t": it.began_at, "ended": it.ended_at, "hit": it.hit, **vars(it.fault)} for it in trouble.injected)
        (plan.directory / FAULTS).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    curves = {} if world.sampler is None else world.sampler.curves
    if curves:
        (plan.directory / SAMPLED).write_text(json.dumps(curves), encoding="utf-8")
    return Record(
        plan, config.syncer.lost_floor_s, calm, (calm[1], over_at), tuple(trouble.injected), tuple(world.family.ends),
        settled, status, exit_codes, state, replays, served, tuple(world.stale_dirs()), failures, curves,
    )  # fmt: skip


def _begin(world: World, faults: Sequence[Fault], say: Say) -> tuple[float, float]:
    """Start the processes, and let all learners train undisturbed; returns from when to when."""
    plan = world.plan
    world.start()
    say(f"{len(faults)} faults are planned; starting a syncer and {plan.learners} learners")
    _until_all_merge(world, BEGIN_S)
    if any(fault.kind == "stale copy" for fault in faults):
        world.copy_state(BEGIN_S)
        say("a copy of the state is kept; until all learners merge again")
        _until_all_merge(world, BEGIN_S)
    if plan.soak:
        world.start_viewers()
    calm_at = time.time()
    say(f"all learners merge; {plan.calm_s:g} s without faults")
    world.rest(plan.calm_s)
    return calm_at, time.time()


def _recover(world: World, since: float) -> tuple[bool, dict[str, Any], dict[str, int], tuple[str, ...]]:
    """All learners merge again; then they leave, the syncer tells its status, and ends. Returns `settled`, `status`,
    `exit_codes` and `failures` of a `Record`."""
    settled = False
    try:
        _until_all_merge(world, SETTLE_S, since)
        settled = True
        codes = {VIEWERS: world.stop(VIEWERS, LEAVE_S)} if world.plan.soak else {}
        codes |= {name: world.stop(name, LEAVE_S) for name in world.plan.names}
        status = world.status()
        codes[SYNCER] = world.stop(SYNCER, LEAVE_S)
    except DilocoError as error:
        return settled, {}, {}, (str(error),)
    return settled, status, codes, ()


def _until_all_merge(world: World, limit_s: float, since: float | None = None) -> None:
    """Wait until every learner has work in two versions of a fragment that were merged after `since`, or from now on:
    the first of them can have been sent by a process that was killed, whose successor has yet to join."""
    begin = time.time() if since is None else since

    def all_merge() -> bool:
        merges = [event for event in world.events if isinstance(event, Merged) and event.t > begin]
        versions = {(name, event.fragment, event.version) for event in merges for name in event.contributors}
        num_merged = Counter((name, fragment) for name, fragment, _ in versions)
        return {name for (name, _), num in num_merged.items() if num >= 2}.issuperset(world.plan.names)

    world.until(all_merge, "not all learners have merged", limit_s)


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

    def __init__(self, world: World, faults: Sequence[Fault], say: Say) -> None:
        self._world, self._say = world, say
        self._waiting = list(faults)
        self._open: list[_Open] = []
        self.injected: list[Injected] = []

    def run(self) -> None:
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

    def _begin(self, fault: Fault, now_s: float) -> None:
        at, injection = time.time(), INJECTIONS[fault.kind]
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
        is_felt = injection.way is None or injection.num_touched(self._world, fault) > each.num_touched
        if each.hit:
            injection.end(self._world, fault)
        self.injected.append(Injected(fault, each.began_at, time.time(), each.hit and is_felt))
