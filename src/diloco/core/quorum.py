"""How rounds are called, and which learners a round needs: values that a Method holds.

A **round** of a fragment merges contributions into its next version. It is opened

    AllLive   by the schedule; every learner that trains contributes   DiLoCo, Streaming DiLoCo, eager updates
    Called    by the syncer: K answers, then a grace window            Decoupled DiLoCo, arXiv 2604.21428
    Pushed    by each learner, after H of its own steps                asynchronous local SGD, arXiv 2401.09135

The state machines of each value, the syncer's half and the learner's, are one file in `protocol.rounds`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Literal

from diloco.core.choices import BELOW_1, FROM_0, FROM_1, UP_TO_1, Choice, Registry, checked, one_of, positive
from diloco.errors import ConfigError


@dataclass(frozen=True)
class Quorum(Choice):
    """How rounds are called, and which learners a round needs.

    Attributes:
        at_least: K ≥ 1, the fewest learners that a round is merged with.
    """

    reports_every_step: ClassVar[bool] = False
    """Whether learners report each inner step when it is taken."""

    at_least: int = checked(FROM_1, 1)

    @property
    def needs_syncer(self) -> str | None:
        """Why learners cannot make its rounds by themselves, over a group, and what to do; None: they can."""
        return f"{type(self).__name__} needs a syncer; use AllLive over a group."


@dataclass(frozen=True)
class AllLive(Quorum):
    """A scheduled round merges when every learner that trained when it opened has contributed, left or been evicted.

    Attributes:
        at_least: never merge fewer contributions than this. With 1, a lone survivor continues by itself; with a higher
            number it waits for others instead of silently becoming a solo run. Learners that ended at the round's step
            or a later one count: they will not contribute again. So do learners that are past that step where all
            learners wait for each other.
        drop: probability with which a contribution is left out, to study unreliable links; its learner continues from
            its own parameters and is measured from the new global model next (DiLoCo, arXiv 2311.08105, section 3.1). A
            round keeps at least `at_least` contributions.
        drop_seed: the seed of these draws, each a function of the seed, the learner, the fragment and the round.
    """

    drop: float = checked(BELOW_1, 0.0)
    drop_seed: int = checked(FROM_0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_seed and not self.drop:
            raise ConfigError(
                f"AllLive(drop_seed={self.drop_seed}) has no effect with drop=0; set drop, or leave drop_seed out."
            )

    @property
    def needs_syncer(self) -> str | None:
        return (
            "AllLive(drop=…) needs a syncer that drops contributions; use run_local or a syncer." if self.drop else None
        )

    def drops(self, learner: str, fragment: int, round_: int) -> bool:
        """Whether this contribution is left out."""
        if self.drop == 0:
            return False
        drawn = hashlib.sha256(f"{self.drop_seed}/{learner}/{fragment}/{round_}".encode()).digest()
        return int.from_bytes(drawn[:8], "big") < self.drop * 2**64


Late = Literal["merge", "drop"]


@dataclass(frozen=True)
class Called(Quorum):
    """The syncer calls for contributions; it merges once K learners have answered and the grace window is over.

    After the K-th answer the round stays open for

        grace = min(cap, max(0, γ·(τ·ξ_step − ξ_quorum − ξ_sync)))

    with moving averages ξ_step of the median live learner's step time, ξ_quorum of the time until the K-th answer, and
    ξ_sync of the time of a synchronisation without its grace window. So the window takes what an overlap of τ steps
    leaves over. Before these times are measured, the window is `grace_cap_s`. The round closes at once when every live
    learner has answered. Decoupled DiLoCo, arXiv 2604.21428.

    Attributes:
        at_least: K; fewer where fewer learners are live.
        grace: γ, 0 to 1; 0: merge as soon as K have answered.
        grace_cap_s: the longest grace window.
        late: the fate of an answer that arrives after its round was closed: "merge" puts it into the next round, "drop"
            rejects it as "late".
    """

    reports_every_step: ClassVar[bool] = True

    grace: float = checked(UP_TO_1, 0.8)
    grace_cap_s: float = checked(positive, 10.0)
    late: Late = checked(one_of("merge", "drop"), "merge")

    def grace_s(self, slack_s: float | None) -> float:
        """The length of the grace window; `slack_s` is τ·ξ_step − ξ_quorum − ξ_sync, None before it is measured."""
        if self.grace == 0:
            return 0.0
        return self.grace_cap_s if slack_s is None else min(self.grace_cap_s, max(0.0, self.grace * slack_s))


@dataclass(frozen=True)
class Pushed(Quorum):
    """Learners push after H of their own steps; a round merges as soon as K have pushed, without grace.

    Asynchronous local SGD, arXiv 2401.09135, is K = 1.

    Attributes:
        at_least: K; fewer where fewer learners are live.
        late: the fate of work that was measured from an older version than the newest: "merge", or "drop" (counted).
        dynamic_steps: each learner takes ⌊v/v_max · H⌋ inner steps between two pushes, v its measured speed (DyLU, same
            paper).
    """

    late: Late = checked(one_of("merge", "drop"), "merge")
    dynamic_steps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.dynamic_steps) is not bool:
            raise ConfigError(f"Pushed(dynamic_steps={self.dynamic_steps!r}) is not a truth value; use true or false.")


QUORUMS: Registry[Quorum] = Registry("quorum", AllLive, Called, Pushed)
