"""Where a follower reads: a syncer, or the store of a run without one. Both have the same objects and manifest.

A syncer answers with its newest confirmed manifest, and with ranges of objects; where its store is a bucket, with URLs
from which they can be read for a while.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from diloco.errors import ConfigError, DilocoError, StoppedError, StoreError, UnreachableError
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import dialler, found
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.run.objects import Found, Readable
from diloco.store.objects import is_url, open_store
from diloco.store.reading import NOT_WHOLE

log = logging.getLogger("diloco")

T = TypeVar("T")

Place = str | os.PathLike[str]

READ_BYTES = 4 << 20
"""Of one request to a syncer; a request that was cut off is made again."""

LANES = 2
"""Requests to a syncer at once, each on a connection of its own."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class SyncerSource:
    """The syncer of a run, as a viewer sees it.

    Arguments:
        addresses: "host:port", or several with commas between them.
        run: its name.
        keys, insecure: as in `connect`.

    Raises:
        ConfigError: an invalid address, or keys that cannot be used.
    """

    def __init__(self, addresses: str, run: str, *, keys: AnyKeys | None = None, insecure: bool = False) -> None:
        self.name = addresses
        self._run, self._syncers = run, dialler(addresses, keys=keys, insecure=insecure)
        self._finding = threading.Lock()
        self._lanes: queue.SimpleQueue[str] = queue.SimpleQueue()
        for lane in range(LANES):
            self._lanes.put(f"reads {lane}")

    def manifest(self) -> Found:
        """As `Readable`.

        Raises:
            As `dialling.found`.
        """
        request = pb.ManifestRequest(run=self._run)
        reply = self.answer(lambda syncer: syncer.call("control", "Manifest", request, pb.ManifestReply))
        return Found(reply.manifest, "")

    def get(self, name: str, start: int = 0, stop: int | None = None) -> memoryview | bytes:
        """As `Readable`. Raises as `dialling.found` and `Connection.pull`."""
        if stop is not None and stop - start <= READ_BYTES:
            return self._read(name, start, stop)
        whole, first, num_bytes = bytearray(), start, READ_BYTES
        while num_bytes == READ_BYTES:
            part = self._read(name, first, first + READ_BYTES if stop is None else min(first + READ_BYTES, stop))
            whole += part
            num_bytes, first = len(part), first + len(part)
        return memoryview(whole)

    def _read(self, name: str, start: int, stop: int) -> memoryview:
        request = pb.PullRequest(run=self._run, object=pb.ObjectRange(name=name, start=start, stop=stop))
        lane = self._lanes.get()
        try:
            return self.answer(lambda syncer: syncer.pull(lane, request, method="Read")[1])
        finally:
            self._lanes.put(lane)

    def answer(self, ask: Callable[[Connection], T]) -> T:
        """The answer of the syncer that serves the run: of the one before, or else of the one that is found."""
        asked = self._syncers.current
        try:
            return ask(asked)
        except UnreachableError:
            with self._finding:
                if self._syncers.current is asked:
                    found(self._syncers, self._run)
            return ask(self._syncers.current)

    def close(self) -> None:
        """Hang up; calls that wait fail."""
        self._syncers.close()


class RunSource:
    """Objects and a manifest of a run, as `Readable`. Any thread may call any method. Calls are repeated, with growing
    pauses, while the place does not answer.

    Arguments:
        place: a store, served or not, or a syncer.
        patience_s: after so long its error is raised; None: no limit. At once where a store has never answered: it may
            be misnamed, or the credentials wrong.

    Once it is being closed, calls that fail raise StoppedError.
    """

    def __init__(self, place: Readable, patience_s: float | None = 0.0) -> None:
        self.name = place.name
        self._closing = threading.Event()
        self._place, self._patience_s = place, patience_s
        self._has_answered = isinstance(place, SyncerSource)

    def manifest(self) -> Found | None:
        """As `Readable`."""
        found = until_answered(self._place.manifest, self._closing, self._patience_s if self._has_answered else 0.0)
        self._has_answered = True
        return found

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        """As `Readable`."""
        return until_answered(lambda: self._place.get(name, start, stop), self._closing, self._patience_s)

    def close(self) -> None:
        """Hang up; calls that wait fail."""
        self._closing.set()
        if isinstance(self._place, SyncerSource):
            self._place.close()


def until_answered(call: Callable[[], T], closing: threading.Event, patience_s: float | None = None) -> T:
    """The result of a call that is repeated while the other side does not answer.

    Raises:
        StoppedError: `closing` was set. Others as the call, and after `patience_s` that it was not reached.
    """
    began_at, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return call()
        except DilocoError as error:
            if closing.is_set():
                raise StoppedError("this follower was closed.") from error
            if isinstance(error, NOT_WHOLE) or not isinstance(error, UnreachableError | StoreError):
                raise
            if patience_s is not None and time.monotonic() - began_at + pause_s > patience_s:
                raise
            if pause_s == FIRST_PAUSE_S:
                log.warning("trying again: %s", error)
            closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def is_address(place: Place) -> bool:
    """Whether this is a syncer's address, and not the place of a store."""
    text = os.fspath(place)
    return not is_url(text) and re.search(r"^unix:|:\d+(,|$)", text) is not None and not Path(text).exists()


def open_source(
    place: Place, run: str, *, keys: AnyKeys | None = None, insecure: bool = False, patience_s: float | None = 0.0
) -> RunSource:
    """The source with this path, URL or address. `patience_s`: as `RunSource`'s.

    Raises:
        ConfigError: it is none of them, or `keys` were given for a store. StoreError: as `open_store`.
    """
    text = os.fspath(place)
    if is_address(place):
        return RunSource(SyncerSource(text, run, keys=keys, insecure=insecure), patience_s)
    if keys is not None or insecure:
        raise ConfigError(f"{text} is a store, which takes no keys of the run; drop them, or give a syncer's address.")
    if not is_url(text) and not Path(text).is_dir():
        raise ConfigError(f"there is no store in {text}; give a directory, a bucket's URL or a syncer's host:port.")
    return RunSource(open_store(text), patience_s)
