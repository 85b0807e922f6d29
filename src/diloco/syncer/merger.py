"""The worker that closes rounds: tensor work, then disk, then visibility. One thread, so versions follow each other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass

from diloco.core.held import Closed, close
from diloco.core.merges import encoded_of
from diloco.core.rounds import Action, Merge
from diloco.core.update import Update
from diloco.errors import PayloadError, StoreError
from diloco.syncer.journal import Journal
from diloco.syncer.spool import Slot, Spool
from diloco.syncer.state import RunState
from diloco.syncer.store import Store

log = logging.getLogger("diloco.syncer")

RETRY_S = 2.0
"""Between two tries to store a version on a disk that refuses."""


@dataclass(frozen=True)
class _Result:
    """A closed round that is not visible yet."""

    action: Merge
    closed: Closed
    merge_s: float

    @property
    def update(self) -> Update:
        return self.closed.update

    @property
    def tokens(self) -> int:
        return sum(c.tokens for c in self.action.contributions if c.learner not in self.closed.refused)


class Merger:
    """Arguments:
    carry_out: carries out what the state machine answers; called under the run's lock.
    """

    def __init__(
        self, state: RunState, store: Store, spool: Spool, journal: Journal, *, carry_out: Callable[[Iterable[Action]], None]
    ) -> None:  # fmt: skip
        self._state = state
        self._store = store
        self._spool = spool
        self._journal = journal
        self._carry_out = carry_out
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="syncer-merge")
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        """What ended the worker."""

    def merge(self, action: Merge, slots: Sequence[Slot]) -> None:
        """Close a round, soon. `slots` hold the contributions' bytes, and are released."""
        self.submit(lambda: self._close(action, slots))

    def submit(self, job: Callable[[], None]) -> None:
        """Something else to do on the worker; nothing more once it is stopping: that is for whoever serves the run next."""
        with self._state.lock:
            if not self._stopping.is_set():
                self._worker.submit(job).add_done_callback(self._note_failure)

    def drain(self) -> None:
        """Wait for what has been started."""
        self._worker.submit(lambda: None).result()

    def stop(self) -> None:
        """Finish what has been started, but do not wait for a disk that refuses."""
        with self._state.lock:
            self._stopping.set()
        self._worker.shutdown(wait=True)

    def save_roster(self) -> None:
        """Who is here must survive a crash, or the first to come back would merge alone."""
        with self._state.durable:
            with self._state.lock:
                roster, ledgers = self._state.roster(), self._state.core.books.durable_ledgers()
            try:
                self._store.save_roster(roster, ledgers)
            except StoreError as error:
                self._journal.roster_not_stored(error)

    def _close(self, action: Merge, slots: Sequence[Slot]) -> None:
        result = self._merge(action, slots)
        if result is None:
            return
        with self._state.lock:
            self._carry_out(self._state.core.merged(action.fragment, result.closed.refused))
            members = set(self._state.core.fragments[action.fragment].rounds[action.round].members)
        self._journal.merged(action, result.update, members, result.merge_s)
        self._publish(result)

    def _merge(self, action: Merge, slots: Sequence[Slot]) -> _Result | None:
        """The tensor work; None where a contribution turned out to be unusable."""
        method, f, started = self._state.method, action.fragment, time.monotonic()
        held, places = self._state.model.fragments[f], self._state.model.layout.fragments[f].tensors
        encoded = encoded_of(action.contributions, action.weights, [slot.tensor for slot in slots], action.round)
        try:
            closed = close(method, held, encoded, places, action.scale)
        except PayloadError as error:
            with self._state.lock:
                self._carry_out(self._state.core.abandoned(time.monotonic(), f, "not finite"))
            self._journal.abandoned(action, error)
            return None
        finally:
            encoded.clear()
            for slot in slots:
                self._spool.release(slot)
        return _Result(action, closed, time.monotonic() - started)

    def _publish(self, result: _Result) -> None:
        """Durable before visible. A disk that refuses is tried again until it has room or the syncer stops."""
        started, has_failed = time.monotonic(), False
        while (error := self._try_to_publish(result)) is not None:
            if not has_failed:
                self._journal.waits_for_disk(result.update, error)
            has_failed = True
            if self._stopping.wait(RETRY_S):
                return
        persist_s = time.monotonic() - started
        with self._state.lock:
            num_live = len(self._state.core.members)
        self._journal.published(
            result.update, num_live, result.closed.payload.numel(), merge_s=result.merge_s, persist_s=persist_s
        )

    def _try_to_publish(self, result: _Result) -> StoreError | None:
        with self._state.durable:
            try:
                self._write(result)
            except StoreError as error:
                return error
            self._show(result)
            return None

    def _write(self, result: _Result) -> None:
        with self._state.lock:
            ledgers, roster, state = (
                deepcopy(self._state.core.books.ledgers),
                self._state.roster(),
                self._state.to_save(),
            )
        self._store.publish(
            result.update, result.closed.held, tokens=result.tokens, ledgers=ledgers, roster=roster, state=state
        )

    def _show(self, result: _Result) -> None:
        """It is durable: everybody may see it."""
        f = result.update.fragment
        with self._state.lock:
            actions = self._state.core.stored(time.monotonic(), f)
            self._state.model.take(result.closed, self._state.merged_rounds(f))
            self._carry_out(actions)

    def _note_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            log.critical("the merge thread failed", exc_info=error)
            self.failure = error
