"""Operators' orders to a run, and their lasting state.

    evict     end a learner's incarnation; its process rejoins at once, unless the order bans it
    drain     a learner sends its last work, saves and leaves; it may not rejoin
    admit     a drained or banned learner may join again
    pause     close no round and call for no work; learners wait at their next boundary
    resume    continue after `pause`; after `end`, learners may join again
    quorum    the fewest learners in a merge, instead of the method's
    end       drain every learner, as at the end of the run's budget, and admit none

`SyncerCore.steer` takes an order. The lasting state (`Steering`) is part of the run's record, so that it survives a
restart and a takeover by a standby; an order is in force once a record with it is durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from diloco.core.choices import nearest, whole_number
from diloco.errors import ConfigError, DrainedError, NoRoomError

# The number of learners of a run as a function of its steps: the compute pools of DiLoCo's ablation.
#
#     constant            M learners
#     doubling, halving   M / 2 in the first half of the steps and M in the second, or the other way round
#     ramp up, ramp down  1, 2, …, M for equal parts of the steps, or the other way round
#
# DiLoCo, arXiv 2311.08105, "Adaptive compute pool": the result follows the total compute, not its schedule.

PoolSchedule = Literal["constant", "doubling", "halving", "ramp up", "ramp down"]


@dataclass(frozen=True)
class Pool:
    """A compute pool: the number of learners that may train after an inner step.

    A syncer admits no more learners, and drains the newest ones when the pool shrinks (`SyncerCore`).

    Attributes:
        schedule: see above.
        learners: M, its largest size.
        end_step, begin_step: the inner steps of the run after which the schedule ends and begins. Before its beginning
            the pool has its first size, after its end its last.
    """

    schedule: PoolSchedule
    learners: int
    end_step: int
    begin_step: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in get_args(PoolSchedule):
            advice = nearest(str(self.schedule), get_args(PoolSchedule))
            raise ConfigError(f"{self.schedule!r} is not a known pool schedule{advice}")
        whole_number("Pool(learners=…)", self.learners, minimum=1)
        whole_number("Pool(begin_step=…)", self.begin_step, minimum=0)
        whole_number("Pool(end_step=…)", self.end_step, minimum=self.begin_step + 1)
        num_sizes = {"constant": 1, "doubling": 2, "halving": 2}.get(self.schedule, self.learners)
        if self.learners % num_sizes:
            raise ConfigError(
                f"a {self.schedule} pool has half of its {self.learners} learners at times; use an even number."
            )
        if num_sizes > self.num_steps or (self.learners == 1 and self.schedule != "constant"):
            raise ConfigError(
                f"{self.learners} learners over {self.num_steps} steps leave nothing of the schedule "
                f"{self.schedule!r}; use 2 learners or more, and {max(2, num_sizes)} steps or more."
            )

    @property
    def num_steps(self) -> int:
        """The length of the schedule."""
        return self.end_step - self.begin_step

    @property
    def smallest(self) -> int:
        """The smallest size: every schedule is monotonic."""
        return min(self.size(self.begin_step), self.size(self.end_step))

    def size(self, step: int) -> int:
        """Return the largest number of learners after this inner step of the run."""
        at = min(max(step - self.begin_step, 0), self.num_steps - 1)
        if self.schedule in ("halving", "ramp down"):  # mirrors doubling or ramp up in time: the same compute
            at = self.num_steps - 1 - at
        match self.schedule:
            case "constant":
                return self.learners
            case "doubling" | "halving":
                return self.learners if 2 * at >= self.num_steps else self.learners // 2
            case "ramp up" | "ramp down":
                return 1 + at * self.learners // self.num_steps

    def has_shrunk(self, step: int) -> bool:
        """Whether the pool is smaller after this inner step than at its beginning: it never grows again."""
        return self.size(step) < self.size(self.begin_step)

    def require_place(self, learner: str, training: Sequence[str], step: int) -> None:
        """Check that the pool has a place for a learner that joins.

        Arguments:
            training: learners that train, oldest first.

        Raises:
            NoRoomError: it has none now. DrainedError: it will have none.
        """
        others, size = [other for other in training if other != learner], self.size(step)
        if len(others) < size:
            return
        places = (
            f"the run's pool has places for {size} of {self.learners} learners at step {step}, taken by "
            f"{', '.join(others)}"
        )
        if self.has_shrunk(step) and learner not in training[:size]:
            raise DrainedError(f"{places}; it has shrunk, so train without {learner}.")
        raise NoRoomError(f"{places}; {learner} gets one when the pool grows or one of them leaves.")

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Self | None:
        """Read plain values (`RunConfig.pool_values`). Raises ConfigError for an invalid pool."""
        return None if values is None else cls(**values)

    def require(self, at_least: int) -> None:
        """Raise ConfigError if the pool is at times smaller than `at_least`, the learners that a round needs."""
        if self.smallest < at_least:
            raise ConfigError(
                f"the pool has {self.smallest} of {self.learners} learners at times, and a round needs {at_least}; set "
                f"quorum.at_least to {self.smallest} or less."
            )


What = Literal["evict", "drain", "admit", "pause", "resume", "quorum", "end"]

OF_A_LEARNER: frozenset[What] = frozenset({"evict", "drain", "admit"})
"""Orders that name a learner."""


@dataclass(frozen=True)
class Order:
    """An operator's order.

    Attributes:
        learner: its subject; empty: the whole run.
        at_least: of "quorum".
        bans: of "evict": whether the learner may rejoin only after it is admitted.
        reason: for people; may be empty.
    """

    what: What
    learner: str = ""
    at_least: int = 0
    bans: bool = False
    reason: str = ""

    def given(self, by: str) -> str:
        """Return author and reason as the end of a sentence."""
        return f"by {by}" + (f": {self.reason}" if self.reason else "")


@dataclass
class Steering:
    """The lasting state of all orders so far.

    Attributes:
        paused, ended: author and reason, in words; None: the run is not.
        at_least: the fewest learners in a merge; None: the method's.
        out: learners that may no longer take part, each with the reason as a sentence.
    """

    paused: str | None = None
    ended: str | None = None
    at_least: int | None = None
    out: dict[str, str] = field(default_factory=dict)

    def take(
        self, order: Order, by: str, members: Sequence[str], present: Sequence[str], pool: Pool | None,
        *, one_at_a_time: bool,
    ) -> str:  # fmt: skip
        """Apply an order. Return a sentence that describes the effect.

        Arguments:
            by: the operator.
            members: learners that take part; `present`: the members that are not to leave.
            pool: limits the number of learners; None: unlimited.
            one_at_a_time: whether a round has one contribution.

        Raises:
            ConfigError: it cannot be executed.
        """
        why = order.given(by)
        match order.what:
            case "evict" | "drain":
                return self._take_out(order, why, members)
            case "admit":
                if self.out.pop(order.learner, None) is None:
                    names = f"those are {', '.join(sorted(self.out))}" if self.out else "no learner was"
                    raise ConfigError(f"{order.learner!r} was neither drained nor banned; {names}.")
                return f"{order.learner} was admitted {why}; it may join again"
            case "pause":
                self.paused = f"paused {why}"
                return f"the run was {self.paused}"
            case "resume":
                if self.paused is None and self.ended is None:
                    raise ConfigError("the run is neither paused nor ended; there is nothing to resume.")
                self.paused = self.ended = None
                return f"the run was resumed {why}"
            case "quorum":
                self.at_least = _quorum(order.at_least, present, pool, one_at_a_time=one_at_a_time)
                return f"the quorum was set to {self.at_least} {why}"
            case "end":
                self.paused, self.ended = None, f"ended {why}"  # the last contributions are merged
                return f"the run was {self.ended}"

    def _take_out(self, order: Order, why: str, members: Sequence[str]) -> str:
        learner = order.learner
        if learner not in members and not order.bans:
            raise ConfigError(f"no learner {learner!r} takes part; those that do are {', '.join(members) or 'none'}.")
        if order.what == "drain":
            self.out[learner] = f"{learner} was drained {why}"
            return f"{learner} is drained {why}; it sends its last work and leaves"
        said = f"{learner} was evicted {why}"
        if not order.bans:
            return said
        self.out[learner] = said
        return f"{said}; it may not join again before it is admitted"

    def require_admitted(self, learner: str) -> None:
        """Raise DrainedError if an operator has ended the run, or drained or banned this learner."""
        if self.ended is not None:
            raise DrainedError(f"the run was {self.ended}; no learner may join until an admin resumes it.")
        if (why := self.out.get(learner)) is not None:
            raise DrainedError(f"{why}; it may not join before an admin admits it (diloco admin admit {learner}).")

    def takes_out(self, learner: str) -> bool:
        """Whether a member must send its last work and leave."""
        return self.ended is not None or learner in self.out

    def drained(self, training: Sequence[str], pool: Pool | None, step: int) -> list[str]:
        """Of the learners that train, oldest first, those that `takes_out`, and those without a place in the pool."""
        places = len(training) if pool is None else pool.size(step)
        return [name for at, name in enumerate(training) if at >= places or self.takes_out(name)]

    def saved(self) -> dict[str, Any]:
        """Plain values (JSON)."""
        return {"paused": self.paused, "ended": self.ended, "at_least": self.at_least, "out": dict(self.out)}

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> Steering:
        """Read the values of `saved`."""
        return cls(values["paused"], values["ended"], values["at_least"], dict(values["out"]))


def _quorum(at_least: int, present: Sequence[str], pool: Pool | None, *, one_at_a_time: bool) -> int:
    """Return the quorum, if rounds can reach it."""
    if one_at_a_time and at_least > 1:
        raise ConfigError(
            f"the run's outer optimizer takes outer gradients one at a time, and a quorum of {at_least} would wait for "
            "several; use 1."
        )
    if not 1 <= at_least <= max(1, len(present)):
        raise ConfigError(
            f"a quorum of {at_least} is out of reach: {len(present)} learners take part "
            f"({', '.join(sorted(present)) or 'none'}); use 1 to {max(1, len(present))}."
        )
    if pool is not None:
        pool.require(at_least)
    return at_least
