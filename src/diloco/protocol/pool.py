"""The number of learners of a run as a function of its steps: the compute pools of DiLoCo's ablation.

    constant            M learners
    doubling, halving   M / 2 in the first half of the steps and M in the second, or the other way round
    ramp up, ramp down  1, 2, …, M for equal parts of the steps, or the other way round

DiLoCo, arXiv 2311.08105, "Adaptive compute pool": the result follows the total compute, not its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from diloco.core.choices import nearest, whole_number
from diloco.errors import ConfigError

PoolSchedule = Literal["constant", "doubling", "halving", "ramp up", "ramp down"]


@dataclass(frozen=True)
class Pool:
    """A compute pool: how many learners may train after an inner step.

    A syncer admits no learner beyond that, and drains the newest ones where the pool shrinks (`SyncerCore`).

    Attributes:
        schedule: see above.
        learners: M, the most that it has.
        end_step, begin_step: the inner steps of the run after which the schedule ends and begins. Before it begins the
            pool has its first size, and after it has ended its last.
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
        """The fewest learners at any time: every schedule only grows or only shrinks."""
        return min(self.size(self.begin_step), self.size(self.end_step))

    def size(self, step: int) -> int:
        """The most learners that train after this inner step of the run."""
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
        """Whether the pool has fewer places after this inner step than it had: it never gets them back."""
        return self.size(step) < self.size(self.begin_step)

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Self | None:
        """From plain values (`RunConfig.pool_values`). Raises ConfigError for a pool that cannot be."""
        return None if values is None else cls(**values)

    def require(self, at_least: int) -> None:
        """Raise ConfigError where the pool is at times too small for a round, which needs `at_least` learners."""
        if self.smallest < at_least:
            raise ConfigError(
                f"the pool has {self.smallest} of {self.learners} learners at times, and a round needs {at_least}; set "
                f"quorum.at_least to {self.smallest} or less."
            )
