"""One way of calling rounds: the value that a Method holds, and its two halves, which the state machines ask.

    Quorum          the value: its parameters, and which other answers of a Method go with it
    SyncerRounds    the syncer's half: which round a contribution goes into, when a round is closed and what is in it
    LearnerRounds   the learner's half: what is sent and waited for, what is adopted, what an adoption settles

`SyncerCore` and `LearnerCore` keep what all ways have in common and name none of them. A half keeps the state that only
it needs, and gives it as plain values to be saved. A new way of calling rounds is one file with these three classes,
and one line in `core.rounds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from diloco.core.choices import Choice, whole_number
from diloco.core.contribution import Contribution
from diloco.core.in_flight import FragmentWork, InFlight
from diloco.core.members import Deadlines, Member
from diloco.core.schedule import Schedule

Phase = Literal["open", "merging", "storing"]


class Answers(Protocol):
    """The answers of a Method that a way of calling rounds may contradict."""

    @property
    def overlap(self) -> int: ...
    @property
    def wait(self) -> bool: ...
    @property
    def partial(self) -> str: ...
    @property
    def outer_at(self) -> str: ...
    @property
    def keeps_overlap(self) -> bool: ...


@dataclass(frozen=True)
class Quorum(Choice):
    """How rounds are called, and which learners must be in one.

    Attributes:
        at_least: K ≥ 1, the fewest learners that a round is merged with.
    """

    has_own_overlaps: ClassVar[bool] = False
    """Whether learners may overlap different numbers of steps, each its own."""

    reports_every_step: ClassVar[bool] = False
    """Whether the syncer has to hear of every inner step at once."""

    at_least: int = 1

    def __post_init__(self) -> None:
        whole_number(f"{type(self).__name__}(at_least=…)", self.at_least, minimum=1)

    @property
    @abstractmethod
    def needs_syncer(self) -> str | None:
        """Why a process group, whose members all follow the schedule, cannot run it; None: it can."""

    @abstractmethod
    def contradictions(self, answers: Answers) -> Iterable[tuple[bool, str]]:
        """Options that would have no effect, or not theirs, with this way of calling rounds: whether they are set, and
        why not to."""

    @abstractmethod
    def syncer_rounds(self, run: Run) -> SyncerRounds:
        """The syncer's half, for a run whose state machine is `run`."""

    @abstractmethod
    def learner_rounds(self, rules: Rules, fragments: Sequence[FragmentWork], step: int) -> LearnerRounds:
        """The learner's half, for a learner that starts from inner step `step`."""


@dataclass(frozen=True)
class Rules:
    """What the state machines know of a Method; there is no tensor code behind it.

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


@dataclass(frozen=True)
class Decision:
    """What to do with an open round.

    Attributes:
        merge: learner ids whose contributions are merged now, in merge order; None while waiting.
        wait_until: when a learner that is waited for would be evicted, or the grace window ends, in seconds of the
            caller's clock; None if no deadline runs.
        reason: one sentence, for people.
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
        members: the learners that the round had.
        closed_at: when, in seconds.
        refused: contributions that the method's screen has left out, once it is merged.
    """

    number: int
    contributions: tuple[Contribution, ...]
    step: int
    members: frozenset[str]
    closed_at: float
    refused: tuple[Contribution, ...] = ()


@dataclass
class FragmentState:
    """One fragment as the syncer sees it.

    Attributes:
        version: published.
        step: the inner step of the round that the version came from.
        phase: of the round that follows the version: "open", "merging" (tensor work under way) or "storing".
        closing: that round, once it is closed.
    """

    version: int
    step: int
    phase: Phase = "open"
    closing: ClosedRound | None = None


class Run(Protocol):
    """What the syncer's half sees of `SyncerCore`."""

    rules: Rules
    deadlines: Deadlines
    members: dict[str, Member]
    fragments: list[FragmentState]
    step: int

    def pending_tokens(self, learner: str, fragment: int) -> int:
        """Tokens whose work on a fragment is on its way into the global model."""


class SyncerRounds(ABC):
    """The syncer's half. It is asked under one rule: after each event `update`, then `decision` of the open fragments."""

    @abstractmethod
    def answer(self, now: float, c: Contribution) -> str | None:
        """Take a contribution that is new into a round; or the reason why it is rejected."""

    @abstractmethod
    def update(self, now: float) -> set[str]:
        """Members or the time have changed. Returns the learners that are called for work now."""

    @abstractmethod
    def open_fragments(self) -> list[int]:
        """The fragments that `decision` has something to say of, in order: their version is followed by an open round."""

    @abstractmethod
    def decision(self, now: float, fragment: int) -> Decision | None:
        """What becomes of the open round that follows the fragment's version; None: there is none."""

    @abstractmethod
    def close(self, now: float, fragment: int) -> ClosedRound:
        """Close the round that `decision` said is to be merged."""

    @abstractmethod
    def stored(self, now: float, fragment: int, closed: ClosedRound) -> None:
        """The closed round's version is durable."""

    def left_out(self, fragment: int) -> Sequence[tuple[Contribution, str]]:
        """Contributions, with the reason, that are rejected when the version of the fragment's closed round is stored."""
        return ()

    @abstractmethod
    def abandoned(self, fragment: int, closed: ClosedRound) -> Sequence[Contribution]:
        """The closed round has no result; the fragment stays at its version. Returns what is rejected besides the
        round's contributions."""

    @abstractmethod
    def round_of(self, fragment: int) -> tuple[Sequence[str], Sequence[str]]:
        """Contributors and members of the open round that follows the fragment's version."""

    def scale(self, fragment: int, closed: ClosedRound, weights: Sequence[float]) -> float:
        """What the merged outer gradient is multiplied by. `weights`: of the closed round's learners."""
        return 1.0

    def heard(self, member: Member, steps: int) -> bool:
        """A member has reported, and taken this many more steps. Returns whether that may change a round."""
        return True

    def joined(self, learner: str) -> None:  # noqa: B027 - only some halves keep something of a learner
        """A new incarnation."""

    def removed(self, learner: str) -> None:  # noqa: B027
        """It left or was evicted."""

    def start_step(self, learner: str) -> int | None:
        """The inner step that a learner starts from which has not trained yet; None: the run's."""
        return None

    def sync_every(self, learner: str) -> int | None:
        """Inner steps between two pushes of this learner; None: the method's H."""
        return None

    def calls(self, learner: str) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of the calls for work that the learner has not answered."""
        return ()

    def lacks_learners(self, fragment: int) -> int | None:
        """How many have contributed to the fragment's open round, where that is not enough and it waits for no member."""
        return None

    def ends(self, now: float) -> Sequence[float]:
        """When open rounds are decided anew though nothing else happens, in seconds."""
        return ()

    def saved(self) -> dict[str, Any]:
        """Its state as plain values (JSON), apart from that of members (`saved_of`) and from open rounds, whose
        contributions are sent again."""
        return {}

    def restore(self, values: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `saved`."""

    def saved_of(self, learner: str) -> dict[str, Any]:
        """Its state of one member, as plain values (JSON)."""
        return {}

    def restore_of(self, learner: str, values: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `saved_of`."""


class LearnerRounds(ABC):
    """The learner's half. `fragments` are the learner's books of its fragments, which the halves read and `LearnerCore`
    writes."""

    @abstractmethod
    def due(self, step: int) -> Sequence[int]:
        """The fragments to send after inner step `step`, in order."""

    @abstractmethod
    def round_of(self, fragment: int) -> int | None:
        """The round that the next contribution is meant for; None: none can be sent now, and the work stays pending."""

    @abstractmethod
    def waiting(self, step: int) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of every answer that is due, not here, and waited for."""

    @abstractmethod
    def adoption(self, fragment: int, step: int) -> int | None:
        """The version to adopt at the boundary after inner step `step`, of those received; None: none."""

    @abstractmethod
    def settles(self, flight: InFlight, version: int) -> bool:
        """Whether adopting `version` settles a contribution in flight."""

    def sent(self, fragment: int, step: int, sync_every: int | None) -> None:  # noqa: B027 - only some halves note it
        """A contribution has gone out. `sync_every`: inner steps to this learner's next push, where it has a pace of
        its own."""

    def called(self, fragment: int, version: int) -> bool:
        """The syncer calls for work on a fragment that is at this version. Returns whether to send now."""
        return False

    def listed(self, fragment: int) -> None:  # noqa: B027
        """A version that is here has work of this learner that was in flight."""

    def rejected(self, fragment: int, flight: InFlight, reason: str) -> bool:
        """A contribution was rejected. Returns whether the answer to its round is waited for all the same."""
        return False

    def keeps_own(self, fragment: int, version: int) -> bool:
        """Whether the learner goes on from its own parameters when it adopts this version."""
        return False

    def adopted(self, fragment: int, step: int, *, overwritten: bool) -> None:  # noqa: B027
        """A version was adopted. `overwritten`: the work since the send was discarded with that."""

    def newest(self, fragment: int) -> int:
        """The newest version that stands for the fragment's global model here."""
        return self.fragments[fragment].version

    def answer_to(self, flight: InFlight) -> int | None:
        """The version that answers a contribution in flight; None: it is not known, and a learner that continues from a
        checkpoint does not hear of it."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Its state as plain values (JSON)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict`."""

    fragments: Sequence[FragmentWork]
