"""`PublishedStore`: the driver's store port over objects and a manifest, as `protocol.publishing` rules.

Like the driver it never blocks: requests to the place are jobs of the worker, and each result is an event. Events of
the store and of the driver come one at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, Protocol

from diloco.core.update import Update
from diloco.errors import DilocoError, StoreError, SwapRefusedError
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.protocol.publishing import (
    RETRY_S,
    Act,
    Change,
    Confirmed,
    Delete,
    List,
    Publisher,
    Read,
    RefuseStart,
    Serve,
    Stand,
    Standing,
    Swap,
)
from diloco.run.objects import Blob, Found, ObjectFormat, Objects
from diloco.run.ports import (
    ClockPort,
    H,
    InitialModel,
    Json,
    MergedRound,
    P,
    RunMethod,
    T,
    Work,
    WorkerPort,
    first_epoch,
)


class StoreHost(Protocol):
    """The process around a store. No method may block, or call the store."""

    def stands(self, standing: Standing, why: str) -> None:
        """The standing has changed."""

    def serve(self, manifest: Manifest) -> None:
        """The run is this process's: load it, then call `PublishedStore.begun`, and begin a driver."""

    def refused(self, error: DilocoError) -> None:
        """The start is refused, or the manifest cannot be read."""

    def saw(self, manifest: Manifest | None) -> None:
        """The manifest was read while another process may serve the run."""

    def waits(self, what: str, error: StoreError) -> None:
        """The place has refused a request, which is tried again until it succeeds."""


@dataclass(eq=False)
class _Try:
    """A request that is repeated until it succeeds."""

    what: str
    kind: Work
    job: Callable[[], Any]
    done: Callable[[Any], None]
    at: float = math.inf
    is_told: bool = False


class PublishedStore(Generic[H, P]):
    """The store of one process.

    Arguments:
        objects: the place.
        format: of its objects.
        publisher: decides about the manifest.
        worker: runs the requests; their ends are events.
        clock: that of the publisher's leases: it includes the time of a suspension.
        host: the process around it.
        before_commit: called on the worker before anything that a commit or an initialisation names is stored: the
            run's journal is made durable.

    Attributes:
        publisher: as above.
        epochs: of the run, the current one last.
    """

    def __init__(
        self, objects: Objects, format_: ObjectFormat[H, P], publisher: Publisher, worker: WorkerPort, clock: ClockPort,
        host: StoreHost, before_commit: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.publisher = publisher
        self.epochs: tuple[Epoch, ...] = ()
        self._objects, self._format, self._worker, self._clock = objects, format_, worker, clock
        self._host, self._before = host, before_commit
        self._run_id = ""
        self._named: dict[int, NamedVersion] = {}  # stored versions that no manifest names yet, by fragment
        self._retries: list[_Try] = []
        self._is_told = False

    # --- the process --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Claim the run, as soon as no other process has it."""
        self._do(self.publisher.start(self._clock.now_s()))

    def begun(self, run_id: str, epochs: Sequence[Epoch]) -> None:
        """A driver begins to serve the claimed run. `epochs`: the current one last; empty: there is no model."""
        self._run_id, self.epochs = run_id, tuple(epochs)

    def promote(self) -> None:
        """Claim the run at once, by an operator's decision."""
        self._do(self.publisher.promote(self._clock.now_s()))

    def release(self) -> None:
        """Give the run up, once its commits are durable."""
        self._do(self.publisher.release(self._clock.now_s()))

    def tick(self) -> None:
        """Time has passed: called at the time given to `ClockPort.wake_at`."""
        now_s = self._clock.now_s()
        due = [each for each in self._retries if each.at <= now_s]
        self._retries = [each for each in self._retries if each.at > now_s]
        for each in due:
            self._submit(each)
        self._do(self.publisher.tick(now_s))

    # --- the driver's port --------------------------------------------------------------------------------------------

    @property
    def is_refusing(self) -> bool:
        """As `ports.StorePort`."""
        return self.publisher.is_retrying or bool(self._retries)

    def initialise(
        self, run: str, method: RunMethod, model: InitialModel[H], done: Callable[[StoreError | None], None]
    ) -> None:
        """As `ports.StorePort`."""
        epochs = (first_epoch(model, self.publisher.epoch),)
        prefixes = [self.publisher.next_name() for _ in range(len(model.fragments) + 2)]

        def put_all() -> list[str]:
            self._before()
            first = (self._format.frozen(run, method, model), self._format.record(None, epochs))
            versions = (self._first(model.run_id, *each) for each in enumerate(model.fragments))
            return [self._put_blob(*each) for each in zip(prefixes, chain(first, versions), strict=True)]

        def put(found: list[str] | StoreError) -> None:
            if isinstance(found, StoreError):
                done(found)
                return
            frozen, record, *held = found
            fragments = tuple((NamedVersion(0, name),) for name in held)
            initial = {
                "run_id": model.run_id, "epoch": epochs[-1].number, "frozen": frozen, "record": record,
                "fragments": fragments,
            }  # fmt: skip
            change = Change(partial(self._initialised, model.run_id, epochs, done), initial=initial)
            assert self.publisher.manifest is not None
            if isinstance(refusal := _or_refusal(change.applied_to(self.publisher.manifest).to_bytes), StoreError):
                done(refusal)  # too many fragments
                return
            self._do(self.publisher.change(self._clock.now_s(), change))

        self._worker.submit("put", None, partial(_or_refusal, put_all), put)

    def _first(self, run_id: str, fragment: int, held: H) -> Blob:
        update = Update(fragment, 0, 0, (), (), 1.0, held.digest, lossless=True)
        return self._format.version(run_id, held, update, 0)

    def _initialised(self, run_id: str, epochs: tuple[Epoch, ...], done: Callable[[StoreError | None], None]) -> None:
        self.begun(run_id, epochs)
        done(None)

    def put(self, merged: MergedRound[H, P], done: Callable[[], None]) -> None:
        """As `ports.StorePort`."""
        update, run_id, names = merged.update, self._run_id, dict[str, str]()
        what = f"version {update.version} of fragment {update.fragment}"
        blobs = {what: partial(self._format.version, run_id, merged.held, update, merged.tokens)}
        if not update.lossless:  # otherwise the version itself is the update
            blobs[f"the update to {what}"] = partial(self._format.update, run_id, update, merged.payload)

        def stored(part: str, name: str) -> None:
            names[part] = name
            if len(names) == len(blobs):
                held, encoded = (names.get(each) for each in (what, f"the update to {what}"))
                assert held is not None
                self._named[update.fragment] = NamedVersion(update.version, held, encoded)
                done()

        for part, blob in blobs.items():  # at the same time
            put = partial(self._put_made, self.publisher.next_name(), blob)
            self._until_done(part, "put", put, partial(stored, part))

    def commit(
        self, versions: Sequence[MergedRound[H, P]], record: Json, pack: Sequence[bytes], done: Callable[[], None]
    ) -> None:
        """As `ports.StorePort`."""
        published = {each.update.fragment: self._named.pop(each.update.fragment) for each in versions}
        prefix, epochs = self.publisher.next_name(), self.epochs
        pack_prefix = self.publisher.next_name() if pack else ""
        groups = record.get("groups") or {}

        def put_record() -> tuple[str, dict[int, str]]:
            self._before()
            packs: dict[int, str] = {}
            if pack and groups["pack"] - 1 in groups["packs"]:
                blob = Blob(hashlib.sha256(b"".join(pack)).hexdigest(), tuple(pack))
                packs = {groups["pack"] - 1: self._put_blob(pack_prefix, blob)}
            return self._put_blob(prefix, self._format.record(record, epochs)), packs

        def stored(found: tuple[str, dict[int, str]]) -> None:
            name, packs = found
            change = Change(
                done, published, name, record["is_over"], packs=packs, live=groups.get("packs"),
                keep=groups.get("keep", 0),
            )  # fmt: skip
            self._do(self.publisher.change(self._clock.now_s(), change))

        self._until_done("the run's record", "put", put_record, stored)

    def _put_made(self, prefix: str, blob: Callable[[], Blob]) -> str:
        return self._put_blob(prefix, blob())

    def _put_blob(self, prefix: str, blob: Blob) -> str:
        name = f"{prefix}-{blob.hash}"
        self._objects.put(name, blob.parts)
        return name

    # --- requests -----------------------------------------------------------------------------------------------------

    def _until_done(self, what: str, kind: Work, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._submit(_Try(what, kind, job, done))

    def _submit(self, it: _Try) -> None:
        def ended(found: Any) -> None:
            if not isinstance(found, StoreError):
                it.done(found)
            elif self.publisher.is_serving:
                if not it.is_told:
                    self._host.waits(it.what, found)
                it.is_told, it.at = True, self._clock.now_s() + RETRY_S
                self._retries.append(it)
            self._plan()

        self._worker.submit(it.kind, None, partial(_or_refusal, it.job), ended)

    def _do(self, acts: Sequence[Act]) -> None:
        """Execute what the publisher wants."""
        for act in acts:
            match act:
                case Read():
                    self._worker.submit("swap", None, partial(_or_refusal, self._objects.manifest), self._was_read)
                case Swap(data=data, token=token):
                    swap = partial(_or_refusal, partial(self._objects.swap, data, token))
                    self._worker.submit("swap", None, swap, self._was_swapped)
                case List():
                    self._until_done("the list of objects", "delete", self._objects.list, self._was_listed)
                case Delete(names=names):  # what cannot be deleted now is left to the next epoch
                    delete = partial(_or_refusal, partial(self._objects.delete, names))
                    self._worker.submit("delete", None, delete, lambda _: None)
                case Confirmed(tickets=tickets):
                    for done in tickets:
                        done()
                case Serve(manifest=manifest):
                    self._host.serve(manifest)
                case Stand(standing=standing, why=why):
                    self._host.stands(standing, why)
                case RefuseStart(error=error):
                    self._host.refused(error)
        self._plan()

    def _was_read(self, found: Found | StoreError | None) -> None:
        now_s = self._clock.now_s()
        if isinstance(found, StoreError):
            self._failed(found)
            return
        self._is_told = False
        try:
            manifest = None if found is None else Manifest.from_bytes(found.data, self._objects.name)
        except StoreError as error:  # damaged, or of another format
            self._do(self.publisher.fail(error))
            return
        is_waiting = self.publisher.standing == "waiting"
        self._do(self.publisher.read(now_s, manifest, None if found is None else found.token))
        if is_waiting:
            self._host.saw(manifest)

    def _was_swapped(self, found: str | StoreError) -> None:
        now_s = self._clock.now_s()
        if isinstance(found, SwapRefusedError):
            self._do(self.publisher.refused(now_s))
        elif isinstance(found, StoreError):
            self._failed(found)
        else:
            self._is_told = False
            self._do(self.publisher.swapped(now_s, found))

    def _was_listed(self, names: list[str]) -> None:
        self._do(self.publisher.listed(self._clock.now_s(), names))

    def _failed(self, error: StoreError) -> None:
        if not self._is_told:
            self._host.waits("the manifest", error)
        self._is_told = True
        self._do(self.publisher.failed(self._clock.now_s()))

    def _plan(self) -> None:
        self._clock.wake_at(min([self.publisher.wake_at, *(each.at for each in self._retries)]))


def _or_refusal(job: Callable[[], T]) -> T | StoreError:
    """The result of a job, or the error of the place."""
    try:
        return job()
    except StoreError as error:
        return error
