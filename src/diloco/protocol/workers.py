"""Workers of reinforcement learning: what each has leased.

A rollout worker leases prompts and a reward worker groups, from a pool of free ones by role. A worker states with every
message what it holds and how much more it can take; the answer says what it holds from then on. So a lost message is
repaired by the next one. What a worker drops is free at once, and so is all that a silent worker held. Leases are not
durable: after a restart of the syncer a worker gets back what it holds, unless another one has it.

No clock, socket or tensor is used here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from diloco.errors import PayloadError, StaleIncarnationError
from diloco.protocol.units import Ranges, common, minus, numbers_of, union, units_of

Role = Literal["rollout", "reward", "trainer"]

Key = tuple[Role, str]
"""Role and name of a worker."""

MAX_WORKERS = 1024
"""Workers that are live at once, and whose numbers are kept."""

MAX_REFUSALS, MAX_REASON = 20, 300
"""Newest refusals that are kept for people, and characters of each."""


@dataclass(frozen=True)
class Score:
    """What became of a group, or of a prompt for which none can be generated.

    Attributes:
        rewards: one per completion.
        reason: why it is not used, in a sentence; "": it has rewards. "stale": a trainer has gone beyond it.
    """

    number: int
    rewards: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Work:
    """A worker's message: what it has, and what it asks for.

    Attributes:
        process: a random number of the worker's process; that of a trainer, its incarnation.
        order: ascending with every message of the process.
        digest: of the worker's settings, as `GroupRules.digest`.
        holds: prompts (of a rollout worker) or groups that it has and works on.
        wants: how many more it can take.
        scores: of groups that it is done with; of a rollout worker, the prompts that it can make no group of.
    """

    role: Role
    worker: str
    process: int
    order: int
    digest: str
    holds: tuple[int, ...] = ()
    wants: int = 0
    scores: tuple[Score, ...] = ()


@dataclass
class Worker:
    """A worker that is live.

    Attributes:
        order: of its newest message.
        former: the last processes of its name that have ended.
        versions: those that its last group was made with.
    """

    process: int
    seen_at: float
    order: int = 0
    former: tuple[int, ...] = ()
    holds: set[int] = field(default_factory=set)
    versions: tuple[int, ...] = ()


class Workers:
    """All workers of a run.

    Attributes:
        live: those that were heard of lately.
        free: by role, the prompts or groups that may be leased.
        counts: by worker: "generated", "scored", "refused".
        refusals: the newest ones, each with its worker, for people.
    """

    def __init__(self) -> None:
        self.live: dict[Key, Worker] = {}
        self.free: dict[Role, Ranges] = {"rollout": (), "reward": ()}
        self.counts: dict[Key, Counter[str]] = {}
        self.refusals: list[tuple[str, str]] = []

    # --- live workers -------------------------------------------------------------------------------------------------

    def heard(self, now: float, work: Work) -> Worker | None:
        """The worker of a message; None: a newer one of its process was read before.

        Raises:
            StaleIncarnationError: a newer process works under this name. PayloadError: too many workers.
        """
        key = work.role, work.worker
        worker = self.live.get(key)
        if worker is not None and work.process in worker.former:
            raise StaleIncarnationError(
                f"another process works as {work.role} {work.worker!r} now; give every worker its own name."
            )
        if worker is None or worker.process != work.process:
            if worker is None and len(self.live) >= MAX_WORKERS:
                raise PayloadError(f"the run has {MAX_WORKERS} workers already; stop one of them.")
            former: tuple[int, ...] = ()
            if worker is not None:
                self._release(key, set(worker.holds))
                former = (*worker.former, worker.process)[-4:]
            worker = self.live[key] = Worker(work.process, now, former=former)
        worker.seen_at = now
        if work.order <= worker.order:
            return None
        worker.order = work.order
        return worker

    def tick(self, now: float, lost_s: float) -> None:
        """End the leases of workers that were silent for so long."""
        for key, worker in list(self.live.items()):
            if now >= worker.seen_at + lost_s:  # to the bit, as `wake_at` has it
                self._release(key, set(worker.holds))
                del self.live[key]

    def wake_at(self, lost_s: float) -> float:
        """When `tick` is due."""
        return min((worker.seen_at + lost_s for worker in self.live.values()), default=math.inf)

    # --- leases -------------------------------------------------------------------------------------------------------

    def holds(self, key: Key, numbers: Iterable[int]) -> None:
        """A worker has these: what else it had is free, and it gets those of them that are free."""
        stated = set(numbers)
        self._release(key, self.live[key].holds - stated)
        self.lease(key, common(self.free[key[0]], units_of(stated)))

    def lease(self, key: Key, units: Ranges) -> None:
        """Lease free ones to a worker."""
        self.free[key[0]] = minus(self.free[key[0]], units)
        self.live[key].holds.update(numbers_of(units))

    def _release(self, key: Key, held: set[int]) -> None:
        self.live[key].holds -= held
        self.offer(key[0], held)

    def offer(self, role: Role, numbers: Iterable[int]) -> None:
        """Make these free."""
        self.free[role] = union(self.free[role], units_of(numbers))

    def has(self, role: Role, number: int) -> bool:
        """Whether this one is free or leased."""
        return bool(common(self.free[role], units_of([number]))) or any(number in it.holds for it in self._of(role))

    def end(self, role: Role, number: int) -> None:
        """No worker of this role need do this one."""
        self.free[role] = minus(self.free[role], units_of([number]))
        for worker in self._of(role):
            worker.holds.discard(number)

    def leased(self, role: Role) -> list[int]:
        """All that workers of a role hold."""
        return [number for worker in self._of(role) for number in worker.holds]

    def _of(self, role: Role) -> list[Worker]:
        return [worker for key, worker in self.live.items() if key[0] == role]

    # --- for people ---------------------------------------------------------------------------------------------------

    def refuse(self, key: Key, reason: str) -> None:
        """Count what a worker did wrong, or could not do."""
        self.count(key, "refused")
        self.refusals = [*self.refusals, (f"{key[0]} {key[1]}", reason[:MAX_REASON])][-MAX_REFUSALS:]

    def count(self, key: Key, what: str) -> None:
        """One more."""
        counts = self.counts.pop(key, None) or Counter()
        counts[what] += 1
        self.counts[key] = counts  # the newest last
        if len(self.counts) > MAX_WORKERS:
            del self.counts[next(iter(self.counts))]

    def status(self) -> list[dict[str, Any]]:
        """Plain values for `diloco status`, by worker."""
        return [self._status(key) for key in sorted(self.counts.keys() | self.live)]

    def _status(self, key: Key) -> dict[str, Any]:
        counts, worker = self.counts.get(key, Counter()), self.live.get(key)
        holds, versions = (0, ()) if worker is None else (len(worker.holds), worker.versions)
        return {
            "role": key[0], "name": key[1], "live": worker is not None or key[0] == "trainer",
            **{each: counts[each] for each in ("generated", "scored", "refused")}, "holds": holds, "versions": versions,
        }  # fmt: skip
