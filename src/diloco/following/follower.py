"""Versions of a run's global model, one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from diloco.closing import Closing
from diloco.core.global_fragment import GlobalFragment, apply_update
from diloco.core.layout import Layout, named_tensors
from diloco.errors import ConfigError, LineageError, NotInitialisedError, StoppedError, VersionError
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.wire.tensors import tensors_of
from diloco.following.sources import Place, RunSource, open_source
from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.protocol.records import progress_of
from diloco.store.objects import read_manifest, repeated
from diloco.store.reading import OUTER, READERS, RECORD, Frozen, ObjectReader, require_one_run

log = logging.getLogger("diloco")


@dataclass(frozen=True, eq=False)
class FollowedModel:
    """The global model of a run at one moment: each fragment's newest version then, as one manifest names them.

    A method with several fragments publishes them one at a time, so that at every moment some are newer than others:
    those that a learner would have received by then. No fragment is from another moment, and each has the published
    digest.

    Attributes:
        run, run_id: name and id of the run.
        epoch: of the syncer that has published it.
        versions, digests: of each fragment.
        step: the highest inner step of a learner at that moment.
        tokens: trained by the run at that moment.
        layout: names, shapes and dtypes of the fragments' tensors.
        thetas: of each fragment, fp32 [n], not to be changed.
        static: parameters and buffers that training does not change.
    """

    run: str
    run_id: str
    epoch: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    step: int
    tokens: int
    layout: Layout = field(repr=False)
    thetas: tuple[Tensor, ...] = field(repr=False)
    static: dict[str, Tensor] = field(repr=False)

    @property
    def number(self) -> int:
        """Versions of fragments that were published until then: with one fragment, the model's version."""
        return sum(self.versions)

    def describe(self) -> dict[str, Any]:
        """Plain values, without the tensors."""
        return {
            "run": self.run, "run_id": self.run_id, "epoch": self.epoch, "number": self.number,
            "versions": list(self.versions), "digests": list(self.digests), "step": self.step, "tokens": self.tokens,
        }  # fmt: skip

    def __str__(self) -> str:
        versions, num = f"version {self.number}", len(self.versions)
        of = "" if num == 1 else f" of {num} fragments"
        return f"{versions}{of}, step {self.step:,}, {self.tokens:,} tokens"

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name, in the parameters' dtypes, without a base that every learner loads itself. They may
        share memory with `thetas`."""
        return named_tensors(self.layout, self.thetas) | self.static


class Follower(Closing, Iterator[FollowedModel]):
    """An iterator over versions of a run's global model; a context manager. See `follow`.

    Arguments:
        source: where it reads; closed with this.
        run: its name; another run is refused.
        every, poll_s: as in `follow`.

    Attributes:
        closing: set once this is being closed.
    """

    def __init__(self, source: RunSource, run: str, *, every: int = 1, poll_s: float = 1.0) -> None:
        if every < 1:
            raise ConfigError(f"every={every} is not a number of versions; use 1 or more.")
        self._source, self._run, self._every, self._poll_s = source, run, every, poll_s
        self.closing = threading.Event()
        self._frozen: Frozen | None = None
        self._held: dict[int, tuple[str, GlobalFragment]] = {}  # with the name of its object
        self._shown: Manifest | None = None
        self._is_over = False  # no version follows the one that was shown last
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __next__(self) -> FollowedModel:
        """The next version, the newest one at this moment.

        Raises:
            StopIteration: the run has ended, or this was closed. ConfigError: the store has another run.
            LineageError: it has a second run of this name. DamagedObjectError, DigestError: a version is not what was
            published. AuthError: the keys do not permit reading.
        """
        is_waiting = False
        try:
            while not self.closing.is_set():
                try:
                    if (model := self.newer()) is not None:
                        return model
                except NotInitialisedError as error:
                    if not is_waiting:
                        log.info("waiting: %s", error)
                    is_waiting = True
                if self._is_over:
                    break
                self.closing.wait(self._poll_s)
        except StoppedError:
            if not self.closing.is_set():
                raise
        raise StopIteration

    def newer(self) -> FollowedModel | None:
        """The newest version; None: it is not `every` versions newer than the last one.

        Raises:
            NotInitialisedError: the run has no model yet. Others as `__next__`.
        """
        return repeated(self._newer)

    def _newer(self) -> FollowedModel | None:
        manifest, shown = read_manifest(self._source), self._shown
        if manifest.run != self._run:
            raise ConfigError(f"{self._source.name} holds run {manifest.run!r}, not {self._run!r}; name that run.")
        if shown is not None and self._frozen is not None:
            if manifest.run_id != shown.run_id:
                raise LineageError(
                    f"{self._source.name} serves another run {self._run!r} than before, with id {manifest.run_id}; "
                    "start this follower again to read it."
                )
            require_one_run(self._frozen, manifest, self._source.name)
            is_newer = (manifest.epoch, manifest.serial) > (shown.epoch, shown.serial)
            if not is_newer or _num_newer(manifest, shown) < (1 if manifest.is_over else self._every):
                self._is_over = manifest.is_over
                return None
        model = self._read(manifest)
        self._shown = manifest
        return model

    def _read(self, manifest: Manifest) -> FollowedModel:
        assert manifest.frozen is not None
        assert manifest.record is not None
        with ObjectReader(self._source) as reader, ThreadPoolExecutor(READERS) as readers:
            frozen = self._frozen or reader.frozen(manifest.frozen)
            require_one_run(frozen, manifest, self._source.name)
            self._frozen = frozen
            record, _ = reader.record(manifest.record, len(manifest.fragments))
            with reader.checked(manifest.record, RECORD):
                step, tokens = (0, 0) if record is None else progress_of(record)

            def hold(index: int) -> GlobalFragment:
                versions = manifest.fragments[index]
                held = self._advanced(reader, frozen, index, versions)
                self._held[index] = versions[0].held, held  # kept, also where another fragment cannot be read
                return held

            fragments = tuple(readers.map(hold, range(len(manifest.fragments))))
        return FollowedModel(
            manifest.run, manifest.run_id, manifest.epoch, manifest.versions, tuple(it.digest for it in fragments),
            max(step, frozen.step), frozen.tokens + tokens, frozen.layout, tuple(it.theta for it in fragments),
            tensors_of(frozen.static, "the static tensors") if frozen.static else {},
        )  # fmt: skip

    def _advanced(
        self, reader: ObjectReader, frozen: Frozen, index: int, versions: Sequence[NamedVersion]
    ) -> GlobalFragment:
        """The newest of these versions, from the one that is held where their updates lead there."""
        name, held = self._held.get(index, ("", None))
        if name == versions[0].held and held is not None:
            return held
        missing = [] if held is None else [it for it in reversed(versions) if it.version > held.version]
        if held is not None and missing and missing[0].version == held.version + 1 and all(it.update for it in missing):
            method, places = frozen.method.for_fragment(index), frozen.layout.fragments[index].tensors
            try:
                for each in missing:
                    assert each.update is not None
                    update, payload = reader.update(each.update, index, each.version)
                    with reader.checked(each.update, f"the update of fragment {index} to version {each.version}"):
                        held = apply_update(method, held, update, payload, places).held
                return held
            except VersionError as error:  # the run went back to an older version, and on from there
                log.info("fragment %d is read whole: %s", index, error)
        steps = frozen.method.outer_at == "learners"  # then holders of a version take the outer step, too
        return reader.version(versions[0], index, frozen, lambda key: steps and key.startswith(OUTER))[0]

    # --- the end ------------------------------------------------------------------------------------------------------

    def call(self, callback: Callable[[FollowedModel], None]) -> None:
        """Call with each version on a thread, until the run ends, this is closed, or the callback raises."""

        def run() -> None:
            try:
                for model in self:
                    callback(model)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                self._failure = error

        self._thread = threading.Thread(target=run, name="diloco-follower", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread of `call`; returns whether it has ended. Raises the error that ended it."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        if self._failure is not None:
            raise self._failure
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """End the iteration, from any thread. Idempotent."""
        self.closing.set()
        self._source.close()


def _num_newer(manifest: Manifest, than: Manifest) -> int:
    """How many versions were published between two manifests; a fragment that went back has at least one."""
    pairs = ((new[0], old[0]) for new, old in zip(manifest.fragments, than.fragments, strict=True))
    return sum(max(1, new.version - old.version) for new, old in pairs if new.held != old.held)


def follow(
    source: Place, *, run: str, keys: AnyKeys | None = None, insecure: bool = False, every: int = 1,
    callback: Callable[[FollowedModel], None] | None = None, poll_s: float = 1.0, patience_s: float | None = None,
) -> Follower:  # fmt: skip
    """Follow a run: iterate over versions of its global model, from now on.

        for model in diloco.follow("syncer.example.org:7700", run="demo", keys="keys/eye"):
            serve(model.state_dict())

    Each is consistent (`FollowedModel`) and checked by its digests. The first one is read whole; later ones are made
    from the updates that learners receive, of 4 bits where the method has them. A follower that is slower than the run
    gets the newest version each time. No learner waits for it; its bytes share the syncer's link. Reading goes on where
    it was cut off.

    Arguments:
        source: "host:port" of the run's syncer, which needs keys of the role viewer (several addresses with commas
            between them); or its store without a syncer: a directory, or the URL of a bucket.
        run: the name of the run.
        keys: as in `connect`.
        insecure: as in `connect`.
        every: versions of fragments between two models, at least. With P fragments, P of them change a whole model.
        callback: called with each model on a thread of its own; `Follower.wait` waits for its end and raises its error.
        poll_s: pause between two looks for a newer version.
        patience_s: how long the source may not answer before its error is raised; None: without limit. That of a store
            that has never answered is raised at once.

    Raises:
        ConfigError: an argument is invalid. StoreError: the store is of another format.
    """
    opened = open_source(source, run, keys=keys, insecure=insecure, patience_s=patience_s)
    follower = Follower(opened, run, every=every, poll_s=poll_s)
    if callback is not None:
        follower.call(callback)
    return follower


def newest_model(
    source: Place, *, run: str, keys: AnyKeys | None = None, insecure: bool = False
) -> FollowedModel:  # fmt: skip
    """The run's newest global model.

    Raises:
        NotInitialisedError: the run has no model yet. UnreachableError, StoreError: the source does not answer. Others
            as `follow` and `Follower.__next__`.
    """
    with Follower(open_source(source, run, keys=keys, insecure=insecure), run) as follower:
        model = follower.newer()
    assert model is not None
    return model
