"""How contributions reach the other learners: one protocol, in one process, over a process group or over the internet.

    method(given)            the run's method
    open(layout, …)          join the run with this model; returns the state that the learner starts from
    offer(contribution, …)   send a contribution; returns at once
    poll()                   the events since the last poll
    wait()                   block until `poll` has an event
    boundary()               the learner has handled its events; returns whether more follow at the same boundary
    close()

An exchange owns its threads and its copy of the newest global fragments. It encodes, sends, receives and decodes on its
own threads: `offer` takes the payload as a function, which the exchange calls when it needs the bytes, and `Arrived`
carries the decoded fragment.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Self

from torch import Tensor

from diloco.core.fragments import Experts, Layout
from diloco.core.global_fragment import AppliedUpdate, GlobalFragment
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.lanes import CommandLanes
from diloco.protocol.contribution import Budget, CallForWork, Contribution, Drained, Hold, Rejection, Settled, Standing
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Report
from diloco.protocol.session.requests import TellStart


@dataclass(frozen=True)
class FlatModel:
    """A learner's own model: one flat fp32 host vector per fragment, and the tensors that training does not change. In
    a learner of several ranks the vectors are this rank's shards."""

    fragments: tuple[Tensor, ...]
    static: Mapping[str, Tensor]


@dataclass(frozen=True)
class StartingState:
    """The state of the run that a learner starts from.

    Attributes:
        learner, incarnation: the learner's name and incarnation in the run.
        step: the inner step to start from (the run's, for a late joiner).
        awaited: a round waits for this learner's send after that step, however many steps it has taken itself.
        fragments: the global model; with outer states where the outer optimizer is on the learners. Those that the
            learner does not hold are `GlobalFragment.nothing`.
        static: the tensors that training does not change.
        run_tokens: tokens trained by the run so far.
    """

    learner: str
    incarnation: int
    step: int
    fragments: tuple[GlobalFragment, ...]
    static: Mapping[str, Tensor]
    run_tokens: int = 0
    awaited: bool = False

    @classmethod
    def of(cls, start: TellStart, fragments: Sequence[GlobalFragment | None], static: Mapping[str, Tensor]) -> Self:
        """A session's start, with the fragments that were fetched for it."""
        claim, held = start.claim, tuple(it or GlobalFragment.nothing(index) for index, it in enumerate(fragments))
        return cls(claim.learner, claim.incarnation, start.step, held, static, start.run_tokens, start.awaited)

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return tuple(held.version for held in self.fragments)


@dataclass(frozen=True)
class Arrived:
    """A published version, decoded and verified; its tensors are flat fp32 on the host and never changed again.

    Attributes:
        update: the published update.
        held: the new version, bare, with one exception: where the outer optimizer is on the learners, a version that
            was fetched whole, without its mean, has its outer state.
        merged: this learner's contributions up to this number are merged in this version or an earlier one, unless
            they were rejected; 0: none is merged.
        mean: the merged outer gradient of this version, where the outer optimizer is on the learners.
    """

    update: Update
    held: GlobalFragment
    merged: int
    mean: Tensor | None = None

    @classmethod
    def of(cls, update: Update, advanced: AppliedUpdate, merged: int) -> Self:
        """The arrival of an update that was applied."""
        held = advanced.held if advanced.mean is None else advanced.held.bare
        return cls(update, held, merged, advanced.mean)


@dataclass(frozen=True)
class Rejoined:
    """This learner was evicted and has rejoined: it starts from `opened`, and its earlier contributions are void."""

    opened: StartingState
    reason: str


@dataclass(frozen=True)
class Overview:
    """The state of the run in the newest message that a learner has received.

    Attributes:
        num_live: learners that take part.
        run_tokens: tokens trained by the whole run; None: they are not counted.
        sync_every: where learners push at a pace of their own, inner steps to this one's next push; None: the method's
            H.
        drained: the run has no place for this learner any more; it must finish and leave.
        budget: when the run ends, as far as the exchange knows.
        dealt: the groups of experts that the learner is to hold; none: its set is fixed.
    """

    num_live: int = 1
    run_tokens: int | None = None
    sync_every: int | None = None
    drained: bool = False
    budget: Budget = Budget()
    dealt: tuple[int, ...] = ()

    @classmethod
    def of(cls, standing: Standing | None) -> Overview:
        """From a syncer's message; None: none was received."""
        if standing is None:
            return cls(run_tokens=0)
        return cls(
            standing.num_live, standing.run_tokens, standing.sync_every, standing.drained, standing.budget,
            standing.dealt,
        )  # fmt: skip


Call = Literal[
    "step", "finish", "global_state_dict", "global_model", "state_dict", "distributed_state_dict", "load_state_dict"
]  # fmt: skip
"""Methods of a learner in which all of its ranks take part."""


@dataclass(frozen=True)
class Interrupted:
    """The learner must stop waiting (`Exchange.interrupt`)."""


Event = Arrived | CallForWork | Rejection | Rejoined | Grant | Drained | Hold | Settled | Interrupted


class Exchange(ABC):
    """The interface between one learner and the others of its run."""

    gradients = True
    """Whether gradients can be exchanged (`Method.exchanged == "gradients"`) besides outer gradients."""

    has_syncer = False
    """Whether there is a syncer: it leases units of the run's data (`ask`), and tells when the run has ended
    (`Settled`)."""

    joins_late = True
    """Whether a learner can join a run under way without a checkpoint."""

    remind_after_s = 10.0
    """Seconds that a learner is blocked before it warns, with the reason; it warns again at doubled times."""

    dials_out = False
    """Whether each process that opens it becomes a learner, whatever torch.distributed it is part of."""

    _is_taken = False

    trained: Sequence[tuple[int, ...] | None] = ()
    """Per fragment, the indices of the tensors that the learner trains; None: all of them."""

    held: tuple[int, ...] | None = None
    """The indices of the fragments that the learner holds; None: all."""

    is_dealt = False
    """Whether the syncer has dealt the groups of experts that the learner holds (`deal`), and may deal it others
    (`Overview.dealt`)."""

    has_whole = True
    """Whether the learner has the whole model, from which it can initialise the run."""

    def take(
        self, trained: Sequence[tuple[int, ...] | None], held: tuple[int, ...] | None = None, *, has_whole: bool = True
    ) -> None:
        """Mark this exchange as one learner's, before `open`; the arguments as the attributes.

        Raises:
            ConfigError: it is another learner's.
        """
        if self._is_taken:
            raise ConfigError("this exchange belongs to another Learner already; make a new one for every learner.")
        self._is_taken, self.trained, self.held, self.has_whole = True, trained, held, has_whole

    def method(self, given: Method | None) -> Method:
        """The run's method: the given one, unless the run has its own.

        Raises:
            ConfigError: none was given and the run has none, or the two differ (names the difference).
        """
        if given is None:
            raise ConfigError(
                "no method was given and this exchange has none; pass method=diloco.DiLoCo(…) to Learner."
            )
        return given

    def deal(self, method: Method, size: int) -> tuple[int, ...]:
        """Ask the syncer, before the model is built, which groups of experts a learner is to hold that holds so many.

        Raises:
            PayloadError: the run's method makes fewer groups. DrainedError: the run has no place for this learner.
            ConfigError: there is no syncer.
        """
        raise ConfigError(
            f"{type(self).__name__} has no syncer that could deal {size} groups of experts; name the experts that this "
            "learner holds."
        )

    @abstractmethod
    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        """Join the run.

        Arguments:
            layout: of the run's whole model.
            initial: returns this learner's own model; called only if this learner initialises the run. Raises
                ConfigError if the learner has only a part of it.
            overlap: this learner's own τ; None: the method's.

        Raises:
            LayoutError: the other learners have another model; names the first tensor that differs.
        """

    @abstractmethod
    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        """Send a contribution; never blocks on the network.

        `payload()` returns the encoded bytes (uint8). It is called at most once, and in the order of the offers.
        """

    def ask(self, ask: Ask) -> None:
        """Request units of the run's data, one request at a time; returns at once. `poll` returns the answer, a
        `Grant`, or `Rejoined`, which voids the request."""
        raise NotImplementedError(f"{type(self).__name__} leases no data: {ask}")

    @abstractmethod
    def poll(self) -> Sequence[Event]:
        """The events since the last poll, in order. Raises the error of a background thread."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Block until `poll` has an event, or `timeout_s` have passed."""

    def interrupt(self, after_s: float) -> None:  # noqa: B027  (others wait in torch, or in virtual time)
        """End all waiting after this time, from any thread or a signal handler: joining raises StoppedError, and a
        learner that has joined receives `Interrupted`. `close` then leaves the run within less than a second, or
        without the syncer's answer."""

    def report(self, report: Report) -> None:  # noqa: B027  (an exchange without heartbeats has nothing to do)
        """The learner's newest state, for heartbeats; never blocks."""

    def rejoined(self, incarnation: int) -> None:  # noqa: B027  (an exchange without a syncer has no evictions)
        """The learner has started over after `Rejoined`: from now on it reports as this incarnation. Until then it
        reports as the evicted one, also if that event was polled and waits for other ranks."""

    def stepped(self) -> None:  # noqa: B027  (only virtual time needs it)
        """The learner has computed an inner step and is at its boundary; in virtual time, blocks until the step has
        ended."""

    def boundary(self) -> bool:
        """The learner has handled its events. Returns whether more follow at this boundary: then poll again."""
        return False

    @property
    def now_s(self) -> float:
        """The clock of steps and of waiting, in seconds since an arbitrary moment."""
        return time.monotonic()

    @property
    def overview(self) -> Overview:
        """The newest overview of the run."""
        return Overview()

    @property
    def obstacles(self) -> str:
        """Possible reasons why an answer is missing, as a phrase for warnings."""
        return f"{self.overview.num_live} learner(s) take part"

    def sum_over_ranks(self, number: int, call: Call = "step") -> int:
        """The sum of a number over all ranks of this learner, each of which makes the same call. Afterwards all of them
        have the same `overview`."""
        return number

    def sums_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        """The sum over all ranks of this learner of each number, at a boundary or while it attaches."""
        return list(numbers)

    def meet(self, call: Call) -> None:  # noqa: B027  (one rank waits for no other)
        """A barrier of this learner's ranks before the collective part of a call. Raises ConfigError on all of them if
        the ranks make different calls."""

    @property
    def rank(self) -> tuple[int, int]:
        """This process's rank in its learner, and the number of ranks."""
        return 0, 1

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Payload bytes by kind ("contributions", "updates", "joins", "control") that this learner has sent and
        received."""
        return {}

    @property
    def resumed_bytes(self) -> int:
        """Bytes that resumed transfers did not send again."""
        return 0

    @property
    def lineage(self) -> Lineage | None:
        """The lineage of the syncer that this process follows; None: it follows none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state that only this exchange has: tensors and plain values, possibly nested in dicts."""
        return {}

    def require_rank(self, saved: Sequence[int], step: int) -> None:
        """Raises CheckpointError unless a learner's checkpoint is of this `rank`, and of the same step on all ranks."""
        if tuple(saved) != self.rank:
            raise CheckpointError(wrong_rank(saved, self.rank))

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`. Returns False and loads nothing if the other learners have trained on and the run
        is not at the saved versions."""
        if state:
            raise ConfigError(
                "this checkpoint was written over another kind of exchange; resume it over the same kind."
            )
        return True

    @abstractmethod
    def close(self) -> None:
        """Leave the run and release threads and connections. Idempotent."""


class ShardedExchange(Exchange):
    """An exchange in which every rank of a learner sends and receives its own shard of each fragment.

    Every rank calls `divide` first; then rank 0 calls `open`, and the other ranks call `follow` instead.
    """

    @abstractmethod
    def divide(self, lanes: CommandLanes) -> None:
        """This process is one of several ranks."""

    @abstractmethod
    def follow(self, layout: Layout, method: Method, initial: Callable[[], FlatModel]) -> None:
        """On other ranks than 0: execute rank 0's commands from now on. `initial` is called as on rank 0."""

    @abstractmethod
    def fetched(self, fragment: int, version: int, incarnation: int | None = None) -> AppliedUpdate:
        """Take this rank's shard of a version that all ranks have fetched; once, in the order of the events.

        `incarnation`: the one that starts from it; None: the one that started last received it.
        """


def require_experts_trained(
    method: Method, layout: Layout, learners: Sequence[Sequence[tuple[int, ...] | None]]
) -> None:
    """Raise ConfigError if the method cuts the model into experts, and no learner trains some of them.

    `learners`: `Exchange.trained` of all.
    """
    for fragment in layout.fragments if isinstance(method.fragments, Experts) else ():
        of_all = [trained[fragment.index] for trained in learners]
        found = None if None in of_all else set(chain.from_iterable(each or () for each in of_all))
        for index, place in enumerate(fragment.tensors):
            if found is not None and index not in found and (expert := Experts.expert_of(place.spec)) is not None:
                raise ConfigError(
                    f"no learner trains expert {expert} ({place.spec.name!r}), which would stay as it was initialised; "
                    "name it in trains_experts or holds_experts of one, under [train] in its run file."
                )


def wrong_rank(saved: Sequence[int], here: tuple[int, int]) -> str:
    """The error text for a checkpoint of another rank."""
    return (
        f"the checkpoint is of rank {saved[0]} of {saved[1]} of its learner, and this is rank {here[0]} of {here[1]}; "
        "give every rank its own, as many as before."
    )
