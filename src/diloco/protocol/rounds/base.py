"""The interfaces of rounds: a way of calling rounds is a value in `core.quorum` and two halves.

    SyncerRounds    the syncer's half: assigns contributions to rounds, and decides when a round is closed
    LearnerRounds   the learner's half: what to send, what to wait for, what to adopt

`SyncerCore` and `LearnerCore` hold what all ways share, and name none of them. Each half holds its own state, and
returns it as plain values for saving. A new way of calling rounds is a value in `core.quorum`, one file with these two
classes, and one line in `protocol.rounds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from diloco.core.quorum import Quorum
from diloco.core.schedule import Schedule
from diloco.core.weights import merge_weights
from diloco.protocol.accounting import Accounting
from diloco.protocol.contribution import Contribution
from diloco.protocol.in_flight import FragmentWork, InFlight
from diloco.protocol.members import Deadlines, Member

Phase = Literal["open", "merging", "storing"]


class MethodAnswers(Protocol):
    """The answers of a Method that the state machines follow."""

    @property
    def quorum(self) -> Quorum: ...
    @property
    def weight(self) -> str: ...
    @property
    def partial(self) -> str: ...
    @property
    def wait(self) -> bool: ...
    @property
    def adopt(self) -> Any: ...
    @property
    def outer(self) -> Any: ...
    def schedule(self, num_fragments: int) -> Schedule: ...


@dataclass(frozen=True)
class Rules:
    """The part of a Method that the state machines need. It reaches no tensor code.

    Attributes:
        quorum, schedule, weight, partial, wait: as in `Method`.
        keeps_pending: whether adoption keeps the work done since the send.
        one_at_a_time: whether the outer optimizer takes outer gradients one at a time.
    """

    quorum: Quorum
    schedule: Schedule
    weight: str = "uniform"
    partial: str = "full"
    wait: bool = True
    keeps_pending: bool = False
    one_at_a_time: bool = False

    @classmethod
    def of(cls, method: MethodAnswers, num_fragments: int) -> Self:
        """Of a method, for a model that was cut into `num_fragments` fragments.

        Raises:
            ConfigError: the method has another number of offsets.
        """
        return cls(
            method.quorum, method.schedule(num_fragments), method.weight, method.partial, method.wait,
            method.adopt.keeps_pending, method.outer.one_at_a_time,
        )  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What to do with an open round.

    Attributes:
        merge: learner ids whose contributions are merged now, in merge order; None while waiting.
        wait_until: when the first missing learner is evicted, or the grace window ends, in seconds of the caller's
            clock; None: no deadline.
        reason: one sentence for `diloco status`.
    """

    merge: tuple[str, ...] | None
    wait_until: float | None
    reason: str


@dataclass(frozen=True)
class ClosedRound:
    """A round that takes no more contributions.

    Attributes:
        number: the version that it starts from.
        contributions: in merge order: by learner, and the late ones of a learner before its newest.
        step: the earliest inner step after which one of them was sent.
        members: the learners of the round.
        closed_at: when it was closed, in seconds.
        refused: contributions that the method's screen has refused, once the round is merged.
    """

    number: int
    contributions: tuple[Contribution, ...]
    step: int
    members: frozenset[str]
    closed_at: float
    refused: tuple[Contribution, ...] = ()

    def weights(self, rule: str) -> list[float]:
        """One weight per learner, in merge order, from the sum of its contributions to the round."""
        by_learner: dict[str, list[Contribution]] = {}
        for c in self.contributions:
            by_learner.setdefault(c.learner, []).append(c)
        each = list(by_learner.values())
        return merge_weights(
            rule,
            [sum(c.tokens for c in own) for own in each],
            [sum(c.steps for c in own) for own in each],
            [max(self.number - c.base for c in own) for own in each],
        )


@dataclass
class FragmentState:
    """One fragment at the syncer.

    Attributes:
        version: the published version.
        step: the inner step of the round that produced it.
        phase: of the next round: "open", "merging" (tensor work under way) or "storing".
        closing: the next round, once it is closed.
    """

    version: int
    step: int
    phase: Phase = "open"
    closing: ClosedRound | None = None


class RunView(Protocol):
    """The part of `SyncerCore` that the syncer's half reads."""

    rules: Rules
    deadlines: Deadlines
    members: dict[str, Member]
    fragments: list[FragmentState]
    accounting: Accounting
    step: int

    @property
    def at_least(self) -> int:
        """K: of the quorum, unless an operator has set another."""


class SyncerRounds(ABC):
    """The syncer's half. After each event, `SyncerCore` calls `update`, then `decision` for all `open_fragments`."""

    @abstractmethod
    def admit(self, now: float, c: Contribution) -> str | None:
        """Assign a new contribution to a round. Returns the reason if it is rejected, else None."""

    def update(self, now: float) -> set[str]:
        """Members or the time have changed. Returns the learners that have a new call."""
        return set()

    @abstractmethod
    def open_fragments(self) -> list[int]:
        """The fragments that have an open round after their version, in ascending order."""

    @abstractmethod
    def decision(self, now: float, fragment: int) -> Decision | None:
        """The decision on the open round that follows the fragment's version; None: there is none."""

    @abstractmethod
    def close(self, now: float, fragment: int) -> ClosedRound:
        """Close the open round of a fragment, after `decision` has called for its merge."""

    def stored(self, now: float, fragment: int, closed: ClosedRound) -> None:  # noqa: B027
        """The closed round's version is durable."""

    def left_out(self, fragment: int) -> Sequence[tuple[Contribution, str]]:
        """(contribution, reason) of those to reject once the fragment's closed round is stored."""
        return ()

    @abstractmethod
    def abandoned(self, fragment: int, closed: ClosedRound) -> Sequence[tuple[Contribution, str]]:
        """The closed round has no result; the fragment keeps its version. Returns (contribution, reason) of other
        contributions to reject."""

    @abstractmethod
    def roster(self, fragment: int) -> tuple[Sequence[str], Sequence[str]]:
        """Contributors and members of the open round that follows the fragment's version."""

    def scale(self, fragment: int, closed: ClosedRound, weights: Sequence[float]) -> float:
        """The factor of the merged outer gradient. `weights`: one per contributor of the closed round."""
        return 1.0

    def heard(self, member: Member, steps: int) -> bool:
        """A member has reported `steps` more inner steps. Returns whether that may change a round."""
        return True

    def joined(self, learner: str) -> None:  # noqa: B027 - only some halves keep something of a learner
        """A new incarnation."""

    def removed(self, learner: str) -> None:  # noqa: B027
        """The learner left or was evicted."""

    def start_step(self, learner: str) -> int | None:
        """The inner step at which a learner that has not trained yet starts; None: the run's."""
        return None

    def sync_every(self, learner: str) -> int | None:
        """Inner steps between two pushes of this learner; None: the method's H."""
        return None

    def calls(self, learner: str) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of the open calls that the learner has not answered."""
        return ()

    def lacks_learners(self, fragment: int) -> int | None:
        """The number of contributors, if the fragment's open round has too few and waits for no member; else None."""
        return None

    def ends(self, now: float) -> Sequence[float]:
        """Times, in seconds, at which open rounds must be decided again even without an event."""
        return ()

    def was_suspended(self, seconds: float) -> None:  # noqa: B027
        """The syncer process was suspended for this long: move the times from which durations are measured."""

    def saved(self, storing: Collection[int]) -> dict[str, Any]:
        """State as plain values (JSON), without members (`saved_of`) and open rounds (their contributions are sent
        again). `storing`: fragments whose closed rounds count as published."""
        return {}

    def restore(self, values: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `saved`."""

    def saved_of(self, learner: str) -> dict[str, Any]:
        """State of one member, as plain values (JSON)."""
        return {}

    def restore_of(self, learner: str, values: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `saved_of`."""


class LearnerRounds(ABC):
    """The learner's half. `LearnerCore` owns and changes `fragments`; this half only reads them."""

    @abstractmethod
    def due(self, step: int) -> Sequence[int]:
        """The fragments to send after inner step `step`, in order."""

    @property
    def sends_together(self) -> bool:
        """Whether there are inner steps after which all fragments are sent, whatever answers come when."""
        return False

    @abstractmethod
    def next_round(self, fragment: int) -> int | None:
        """The round of the fragment's next contribution; None: none can be sent now, and the work stays pending."""

    def waiting(self, step: int) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of every answer that is due, not received, and blocks the learner."""
        return ()

    @abstractmethod
    def adoption(self, fragment: int, step: int) -> int | None:
        """The received version to adopt after inner step `step`; None: none."""

    def completes(self, flight: InFlight, version: int) -> bool:
        """Whether adopting `version` completes a contribution in flight: the learner expects no other answer to it."""
        return flight.listed

    def sent(self, fragment: int, step: int, sync_every: int | None) -> None:  # noqa: B027 - only some halves note it
        """A contribution was sent. `sync_every`: inner steps to this learner's next push; None: the method's H."""

    def called(self, fragment: int, version: int) -> bool:
        """The syncer calls for a contribution to a fragment at this version. Returns whether to send now."""
        return False

    def listed(self, fragment: int) -> None:  # noqa: B027
        """A received version contains a contribution that was in flight."""

    def rejected(self, fragment: int, flight: InFlight, reason: str) -> bool:
        """A contribution was rejected. Returns whether the learner still waits for the version of its round."""
        return False

    def keeps_own(self, fragment: int, version: int) -> bool:
        """Whether adopting this version leaves the learner's parameters unchanged."""
        return False

    def adopted(self, fragment: int, step: int, *, overwritten: bool) -> None:  # noqa: B027
        """A version was adopted. `overwritten`: the adoption discarded the work since the send."""

    def newest(self, fragment: int) -> int:
        """The newest version that counts as the global fragment."""
        return self.fragments[fragment].version

    def answer_to(self, flight: InFlight) -> int | None:
        """The version that will answer a contribution in flight; None: not known beforehand."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Its state as plain values (JSON)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict`."""

    fragments: Sequence[FragmentWork]
