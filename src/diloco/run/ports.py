"""The ports of a driver: clock, connections, spool, jobs, store, worker, observer. Tensors are opaque values to the
driver.

Jobs block. The worker runs them asynchronously, and ends each with one call of `done`, which is an event of the driver
like any other; the store answers in the same way. No port may call the driver from within a call of the driver.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, cast

from diloco.core.update import Update
from diloco.errors import NoRoomError, PayloadError, StoreError
from diloco.protocol.actions import Action, Evict, MergeRound, Reject
from diloco.protocol.contribution import Contribution, Standing
from diloco.protocol.leases import Leases
from diloco.protocol.lineage import Epoch
from diloco.protocol.rounds.base import MethodAnswers
from diloco.protocol.steering import Order
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.units import Ranges

log = logging.getLogger("diloco")

# --- values -----------------------------------------------------------------------------------------------------------


class FragmentVersion(Protocol):
    """A fragment at a version: `core.global_fragment.GlobalFragment`, or its stand-in where there are no tensors."""

    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...


class FragmentLayout(Protocol):
    """The tensors of a fragment."""

    @property
    def numel(self) -> int: ...
    @property
    def tensors(self) -> Sequence[object]: ...


class ModelLayout(Protocol):
    """How a model is cut: `core.layout.Layout`."""

    @property
    def fragments(self) -> Sequence[FragmentLayout]: ...
    def first_difference(self, other: Any, own: str = ..., others: str = ...) -> str | None: ...
    def to_dict(self) -> Mapping[str, object]: ...
    def digest(self) -> str: ...


class RunMethod(MethodAnswers, Protocol):
    """The part of a Method that a driver needs."""

    @property
    def dealing(self) -> tuple[int, int, int]: ...
    def with_own_overlap(self, overlap: int) -> Any: ...
    def difference(self, other: Any, own: str, others: str) -> str | None: ...
    def cut_in_words(self, layout: Any) -> str: ...
    def experts_of(self, layout: Any) -> Sequence[Sequence[int]]: ...
    def to_dict(self) -> dict[str, Any]: ...


H = TypeVar("H", bound=FragmentVersion)
"""A fragment at a version."""
S = TypeVar("S")
"""Room for the payload of a contribution."""
P = TypeVar("P")
"""The payload of an update."""

Json = Mapping[str, Any]
"""Plain values."""


@dataclass(frozen=True)
class InitialModel(Generic[H]):
    """The model that a run begins with.

    Attributes:
        fragments: at version 0.
        static: a safetensors file with the frozen parameters and buffers.
        learner, source: the learner that uploads it, and its origin ("seed 17", a checkpoint's name).
        run_id, epoch: as in `protocol.lineage`: drawn for this model, and 1; if it continues a run whose state was
            lost, the id of that run, and an epoch later than all of its own.
        step, tokens: inner steps and tokens trained before the run.
    """

    layout: ModelLayout
    fragments: tuple[H, ...]
    static: bytes
    learner: str
    source: str
    run_id: str
    step: int = 0
    tokens: int = 0
    epoch: int = 1


def first_epoch(model: InitialModel[Any], claimed: int = 1) -> Epoch:
    """The epoch in which a run is initialised. `claimed`: the one that its syncer has claimed."""
    return Epoch(max(model.epoch, claimed), (0,) * len(model.fragments))


@dataclass(frozen=True)
class MergedRound(Generic[H, P]):
    """A closed round: the fragment's new version, and the update that leads to it.

    Attributes:
        num_bytes: of the payload.
        refused: learners whose contributions the method's screen refused.
        merge_s: seconds of tensor work.
    """

    action: MergeRound
    update: Update
    held: H
    payload: P
    num_bytes: int
    refused: tuple[str, ...] = ()
    merge_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Trained tokens whose work is merged."""
        return sum(c.tokens for c in self.action.contributions if c.learner not in self.refused)


@dataclass(frozen=True)
class SavedRun(Generic[H]):
    """A run as it was last made durable.

    Attributes:
        fragments: the newest version of each.
        contributors: of those versions.
        static, source, step, tokens, run_id: as in `InitialModel`.
        epochs: the starts on this state, the last one at the end.
        record: the newest of `SyncerCore.saved`; None: the run was only initialised.
    """

    run: str
    method: RunMethod
    layout: ModelLayout
    fragments: tuple[H, ...]
    contributors: tuple[tuple[str, ...], ...]
    static: bytes
    source: str
    step: int
    tokens: int
    run_id: str
    epochs: tuple[Epoch, ...]
    record: Json | None

    def begun(self, number: int | None = None) -> SavedRun[H]:
        """The run as the next driver serves it: in this epoch, which was claimed; None: in the next one."""
        versions = tuple(fragment.version for fragment in self.fragments)
        return replace(self, epochs=(*self.epochs, Epoch(number or self.epochs[-1].number + 1, versions)))


# --- ports ------------------------------------------------------------------------------------------------------------


class ClockPort(Protocol):
    """Time."""

    def now_s(self) -> float:
        """Seconds; never less than before."""

    def wake_at(self, at_s: float) -> None:
        """Call `Driver.tick` at this time at the latest; an earlier `wake_at` is void. Infinite: no call is needed."""


class ConnectionPort(Protocol):
    """One connection to a learner. Messages on it may be lost with it."""

    def standing(self, standing: Standing) -> None:
        """Send the standing. It replaces an earlier one that is not sent yet."""

    def evicted(self, reason: str, *, replaced: bool) -> None:
        """Send a notice of the incarnation's eviction; only `end` follows. `replaced`: a newer one took its place."""

    def end(self) -> None:
        """End the stream after the earlier notices."""


class SpoolPort(Protocol[S]):
    """Room for the payloads of contributions."""

    @property
    def held_bytes(self) -> int:
        """In memory at the moment."""

    def allocate(self, num_bytes: int) -> S:
        """Allocate room for a payload. It returns at once: room on a disk is made when the slot is first used.

        Raises:
            NoRoomError: there is no room now, as far as is known without blocking.
        """

    def release(self, slot: S) -> None:
        """The payload is not needed any more."""


S_contra = TypeVar("S_contra", contravariant=True)


class JobsPort(Protocol[H, S_contra, P]):
    """Tensor work: `run.tensor_jobs.TensorJobs`, or its stand-in where there are no tensors."""

    def contribution_bytes(self, fragment: int, num_elements: int) -> int:
        """Bytes of a contribution to a fragment, of this many elements."""

    def check(self, slot: S_contra, fragment: int, num_elements: int) -> PayloadError | None:
        """The error in the payload of a contribution to a fragment, of this many elements (0: it is empty); None: there
        is none."""

    def close(
        self, action: MergeRound, layout: Any, held: H, slots: Sequence[S_contra]
    ) -> MergedRound[H, P] | PayloadError:
        """Merge a round's contributions into the next version of a fragment, or return why there is no usable result.
        `slots`: one per contribution of the action.

        `held` may be closed in place: a driver uses it only to answer fetches, and again for the next round if this
        one is refused. The next round of the fragment begins after this version is durable.
        """


class StorePort(Protocol[H, P]):
    """Makes a run durable. No call blocks: each is answered by one call of `done`, an event of the driver. What the
    store refuses is tried again until it succeeds."""

    @property
    def is_refusing(self) -> bool:
        """Whether the store has refused the last request, which is tried again."""

    def initialise(
        self, run: str, method: RunMethod, model: InitialModel[H], done: Callable[[StoreError | None], None]
    ) -> None:
        """Version 0 of every fragment. It is not tried again if the store refused it as a whole: `done` gets the
        error."""

    def put(self, merged: MergedRound[H, P], done: Callable[[], None]) -> None:
        """Store a version, which `commit` will name."""

    def commit(
        self, versions: Sequence[MergedRound[H, P]], record: Json, pack: Sequence[bytes], done: Callable[[], None]
    ) -> None:
        """Publish versions that were `put`, together with the record that belongs to them. One commit at a time.

        `pack`: groups of reinforcement learning that are new in the record, in the order of its newest pack.
        """


Work = Literal["check", "close", "put", "swap", "delete"]
T = TypeVar("T")


class WorkerPort(Protocol):
    """Runs jobs outside of the driver. Jobs that close rounds are run one after the other, and so are swaps."""

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run a job, and call `done` with its result. `fragment`: the job's fragment; None: not a single one."""


class Observer(Protocol):
    """Is notified of every event of a run, such as `diloco.syncer.journal.Journal`."""

    def initialised(self, model: InitialModel[Any], cut: str) -> None:
        """The run was initialised. `cut`: how its method cut the model, in words."""

    def joined(self, learner: str, incarnation: int, step: int, experts: Ranges | None) -> None:
        """A new incarnation has joined. `experts`: that it holds; None: the whole model."""

    def left(self, learner: str, incarnation: int, tokens: int) -> None:
        """A learner has left."""

    def evicted(self, action: Evict) -> None:
        """An incarnation was evicted or replaced."""

    def steered(self, order: Order, by: str, said: str) -> None:
        """An operator has given an order. `said`: its effect, in a sentence."""

    def contributed(self, c: Contribution, num_bytes: int) -> None:
        """A contribution was accepted."""

    def rejected(self, action: Reject) -> None:
        """A contribution will not be merged."""

    def abandoned(self, action: MergeRound, error: PayloadError) -> None:
        """A round has no usable result."""

    def merged(self, merged: MergedRound[Any, Any], experts: Sequence[Ranges]) -> None:
        """The outer step was taken. `experts`: of a group of experts, those that each contributor trains."""

    def published(self, merged: MergedRound[Any, Any], num_live: int, persist_s: float) -> None:
        """A version is visible. `num_live`: members that hold its fragment."""

    def data_moved(self, leases: Leases) -> None:
        """Of leased data, a pass is complete, or units were returned."""

    def waits_for_room(self, error: NoRoomError) -> None:
        """There is no room for contributions now; their learners repeat them."""

    def sent_back(self, c: Contribution) -> None:
        """A contribution was refused for lack of room."""

    def was_suspended(self, late_s: float) -> None:
        """The process was suspended for this long."""

    def state_changed(self, core: SyncerCore) -> None:
        """The state of the run, at every tick."""


class RecorderPort(Protocol):
    """Journals the events of a driver, such as `run.journal.recorder.Recorder`."""

    def event(self, name: str, method: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a method of the driver with these arguments, and journal the call."""

    def decided(self, actions: Sequence[Action]) -> None:
        """The driver executes these actions within the event that is under way."""


D = TypeVar("D")
Q = ParamSpec("Q")
R = TypeVar("R")

_MARK = "is_event"


def event(method: Callable[Concatenate[D, Q], R]) -> Callable[Concatenate[D, Q], R]:
    """Mark a method of a driver that changes it: a recorder journals its calls with time and arguments.

    Every public method of `Driver` is marked, or changes nothing. The driver has its recorder as `_recorder`, once it
    was given its ports.
    """
    signature = inspect.signature(method)
    gives_ports = "ports" in signature.parameters

    @functools.wraps(method)
    def happens(self: D, *args: Q.args, **kwargs: Q.kwargs) -> R:
        recorder = None if gives_ports else getattr(self, "_recorder")  # noqa: B009
        if recorder is None and not gives_ports:
            return method(self, *args, **kwargs)
        arguments: dict[str, Any] = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        recorder = arguments["ports"].recorder if gives_ports else recorder
        if recorder is None:
            return method(self, *args, **kwargs)
        answer: R = recorder.event(method.__name__, functools.partial(method, self), arguments)
        return answer

    setattr(happens, _MARK, True)
    return cast("Callable[Concatenate[D, Q], R]", happens)


def is_event(method: object) -> bool:
    """Whether a method is marked."""
    return getattr(method, _MARK, False) is True


class NullObserver(Observer):
    """Keeps nothing."""


W = TypeVar("W")


def only_watching(watcher: W) -> W:
    """What watches a run (a log, metrics, an observer) with methods that never raise, as it must not stop the run: the
    first failure of each method is logged with its traceback."""
    return cast("W", _Guarded(watcher))


class _Guarded:
    def __init__(self, watcher: object) -> None:
        self._watcher = watcher
        self._failed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watcher, name)
        if not callable(found):
            return found

        def guarded(*values: Any, **named: Any) -> None:
            try:
                found(*values, **named)
            except Exception:  # a failing watcher must not stop the state machine
                if name not in self._failed:
                    self._failed.add(name)
                    watcher = type(self._watcher).__name__
                    log.exception("%s.%s failed; the run continues, and this is logged only once", watcher, name)

        return guarded


@dataclass(frozen=True)
class Ports(Generic[H, S, P]):
    """A driver's world. `recorder`: journals its events; None: they are not kept."""

    clock: ClockPort
    spool: SpoolPort[S]
    jobs: JobsPort[H, S, P]
    store: StorePort[H, P]
    worker: WorkerPort
    observer: Observer
    recorder: RecorderPort | None = None
