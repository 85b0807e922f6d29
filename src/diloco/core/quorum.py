"""Who must be in a merge, and why it is not called yet.

`decide()` is a pure function: the time, one open round and the learners come in; either the learners to merge or a time to look
again comes out, each with a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from diloco.core.values import Choice, choice_from_dict, whole_number


@dataclass(frozen=True)
class AllLive(Choice):
    """A scheduled round merges when every healthy learner that was there when it opened has contributed, or is gone.

    Attributes:
        at_least: never merge fewer contributions than this. 1 lets a lone survivor go on by itself; a higher number makes it
            wait for others instead of silently becoming a solo run.
    """

    at_least: int = 1

    def __post_init__(self) -> None:
        whole_number("AllLive(at_least=…)", self.at_least, minimum=1)


def quorum_from_dict(values: Mapping[str, object]) -> AllLive:
    """Read back a quorum written by `to_dict`."""
    return choice_from_dict("quorum", (AllLive,), values)


@dataclass(frozen=True)
class Decision:
    """What to do with an open round.

    Attributes:
        merge: learner ids whose contributions are merged now, in merge order; None while waiting.
        wait_until: when a learner that is waited for would be given up, in seconds of the caller's clock; None if no deadline runs.
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
    quorum: AllLive,
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
