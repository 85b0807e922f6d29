"""Who calls a merge, who must be in it, and why it is not called yet.

    AllLive   the schedule calls: a round merges when everybody who trains has contributed          (DiLoCo, Streaming, eager)
    Called    the syncer calls a fragment's turn: K answers, then an adaptive grace window         (Decoupled DiLoCo)
    Pushed    learners push on their own schedule: a round merges as soon as K have                (asynchronous local SGD)

`decide()` and `decide_open()` are pure functions: the time, one open round and the learners come in; either the learners to merge or
a time to look again comes out, each with a sentence that says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from diloco.core.choices import Choice, choice_from_dict, fraction, positive, whole_number
from diloco.errors import ConfigError

Late = Literal["merge", "drop"]

EMA = 0.2
"""Weight of the newest measurement in the moving averages that size the grace window."""


@dataclass(frozen=True)
class Quorum(Choice):
    """Who calls a merge, and who must be in it."""

    scheduled: ClassVar[bool]
    """Whether every learner contributes to every round, after the inner steps that the schedule names."""

    at_least: int = 1

    def __post_init__(self) -> None:
        whole_number(f"{type(self).__name__}(at_least=…)", self.at_least, minimum=1)


@dataclass(frozen=True)
class AllLive(Quorum):
    """A scheduled round merges when every healthy learner that was there when it opened has contributed, or is gone.

    Attributes:
        at_least: never merge fewer contributions than this. 1 lets a lone survivor go on by itself; a higher number makes it
            wait for others instead of silently becoming a solo run.
        drop: probability with which a contribution is left out, to study unreliable links; its learner goes on from its own
            parameters and is measured from the new global model next (DiLoCo, arXiv 2311.08105, section 3.1). Never drops below
            `at_least`.
        drop_seed: which ones are left out: a function of it, the learner, the fragment and the round.
    """

    scheduled: ClassVar[bool] = True

    drop: float = 0.0
    drop_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drop", fraction("AllLive(drop=…)", self.drop, below_one=True))
        whole_number("AllLive(drop_seed=…)", self.drop_seed, minimum=0)
        if self.drop_seed and not self.drop:
            raise ConfigError(
                f"AllLive(drop_seed={self.drop_seed}) draws what drop leaves out, and drop is 0; set drop."
            )

    def drops(self, learner: str, fragment: int, round_: int) -> bool:
        """Whether this contribution is one of those that are left out."""
        if self.drop == 0:
            return False
        drawn = hashlib.sha256(f"{self.drop_seed}/{learner}/{fragment}/{round_}".encode()).digest()
        return int.from_bytes(drawn[:8], "big") < self.drop * 2**64


@dataclass(frozen=True)
class Called(Quorum):
    """The syncer calls a fragment's turn; it merges when K learners have answered and the grace window is over.

    Once K answers are there, the round stays open for

        grace = min(cap, max(0, γ·(τ·ξ_step − ξ_quorum − ξ_sync)))

    with ξ moving averages of the median live learner's step time, of the time K answers take to come, and of the time a
    synchronisation takes without the grace itself: what an overlap of τ steps leaves over. Before these are known, `grace_cap_s`.
    It closes at once when every live learner has answered. Decoupled DiLoCo, arXiv 2604.21428.

    Attributes:
        at_least: K; fewer where fewer learners are live.
        grace: γ, 0 to 1; 0: merge as soon as K have answered.
        grace_cap_s: the longest grace window.
        late: what happens to an answer that came after its round was closed: "merge" puts it into the next one, "drop" discards
            it, counted.
    """

    scheduled: ClassVar[bool] = False

    grace: float = 0.8
    grace_cap_s: float = 10.0
    late: Late = "merge"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "grace", fraction("Called(grace=…)", self.grace, below_one=False))
        object.__setattr__(self, "grace_cap_s", positive("Called(grace_cap_s=…)", self.grace_cap_s))
        _check_late(self)

    def grace_s(self, overlap: int, pace: Pace) -> float:
        """The length of the grace window."""
        if self.grace == 0:
            return 0.0
        if pace.step_s is None or pace.quorum_s is None or pace.sync_s is None:
            return self.grace_cap_s
        slack = overlap * pace.step_s - (pace.quorum_s + pace.sync_s)
        return min(self.grace_cap_s, max(0.0, self.grace * slack))


@dataclass(frozen=True)
class Pushed(Quorum):
    """Learners push after H own steps; a round merges as soon as K learners have pushed, and nobody is asked or waited for.

    Asynchronous local SGD, arXiv 2401.09135, is K = 1.

    Attributes:
        at_least: K; fewer where fewer learners are live.
        late: what happens to work that was measured from an older version than the one it would be merged into: "merge" or "drop"
            (counted).
    """

    scheduled: ClassVar[bool] = False

    late: Late = "merge"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_late(self)


def _check_late(quorum: Called | Pushed) -> None:
    if quorum.late not in ("merge", "drop"):
        raise ConfigError(f"{type(quorum).__name__}(late={quorum.late!r}) is unknown; use 'merge' or 'drop'.")


QUORUMS: tuple[type[Quorum], ...] = (AllLive, Called, Pushed)


def quorum_from_dict(values: Mapping[str, object]) -> Quorum:
    """Read back a quorum written by `to_dict`."""
    return choice_from_dict("quorum", QUORUMS, values)


@dataclass
class Pace:
    """Moving averages of what a synchronisation takes, in seconds; None: not measured yet."""

    step_s: float | None = None
    quorum_s: float | None = None
    sync_s: float | None = None

    def measured(
        self, *, step_s: float | None = None, quorum_s: float | None = None, sync_s: float | None = None
    ) -> None:
        """Take new measurements in."""
        for name, value in (("step_s", step_s), ("quorum_s", quorum_s), ("sync_s", sync_s)):
            if value is not None:
                old = getattr(self, name)
                setattr(self, name, value if old is None else (1 - EMA) * old + EMA * value)


@dataclass(frozen=True)
class Decision:
    """What to do with an open round.

    Attributes:
        merge: learner ids whose contributions are merged now, in merge order; None while waiting.
        wait_until: when a learner that is waited for would be given up, or the grace window ends, in seconds of the caller's
            clock; None if no deadline runs.
        reason: one sentence, for people.
    """

    merge: tuple[str, ...] | None
    wait_until: float | None
    reason: str


def decide(
    now: float,
    contributed: Collection[str],
    members: Collection[str],
    deadlines: Mapping[str, float],
    quorum: Quorum,
) -> Decision:
    """Merge a scheduled round, or say whom it waits for.

    Arguments:
        now: seconds of the caller's clock.
        contributed: learners whose contribution to the round was acknowledged.
        members: learners the round waits for; evicted and departed ones have been taken out.
        deadlines: for each live learner, when it is given up if nothing more is heard of it.
        quorum: the method's rule.

    Returns:
        A `Decision`; contributions are merged in learner-id order whatever order they came in.
    """
    missing = sorted(set(members) - set(contributed))
    if missing:
        first = min(missing, key=lambda learner: deadlines[learner])
        names = ", ".join(missing)
        return Decision(
            None,
            deadlines[first],
            f"waiting for {names}; {first} is given up in {max(0.0, deadlines[first] - now):.1f} s",
        )
    if len(contributed) < quorum.at_least:
        return Decision(None, None, f"{len(contributed)} of at least {quorum.at_least} learners have contributed")
    return Decision(tuple(sorted(contributed)), None, f"all {len(contributed)} learners of the round have contributed")


def decide_open(
    now: float,
    contributed: Collection[str],
    fresh: Collection[str],
    members: Collection[str],
    quorum: Quorum,
    *,
    quorum_at: float | None,
    grace_s: float,
) -> Decision:
    """Merge a round that nobody blocks on, or say what it waits for.

    Arguments:
        now: seconds of the caller's clock.
        contributed: learners with work in the round, late work included.
        fresh: those of them that answered this round's call, or pushed since it opened.
        members: live learners that train.
        quorum: the method's rule.
        quorum_at: when the K-th fresh contribution came; None: it has not.
        grace_s: how long the round stays open after that.
    """
    needed = min(quorum.at_least, max(1, len(members)))
    missing = sorted(set(members) - set(fresh))
    merge = tuple(sorted(contributed))
    if not contributed:
        return Decision(None, None, f"nobody has contributed; {needed} of {len(members)} are needed")
    if not missing:
        return Decision(merge, None, f"all {len(members)} live learners have contributed")
    names = ", ".join(missing)
    if len(fresh) < needed or quorum_at is None:
        return Decision(None, None, f"{len(fresh)} of {needed} have contributed; {names} may still")
    ends_at = quorum_at + grace_s
    if now < ends_at:
        left_s = ends_at - now
        return Decision(
            None, ends_at, f"{len(fresh)} have contributed; the grace window is open for {names} for {left_s:.2f} s"
        )
    after = f"{grace_s:.2f} s of grace" if grace_s else "no grace"
    return Decision(merge, None, f"{len(fresh)} have contributed, {needed} were needed; after {after} without {names}")
