"""The standby's end of its connection to the first: it stores each state that it receives, and confirms it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from diloco.errors import CorruptPayloadError, DilocoError, UnreachableError
from diloco.exchange.connection import Connection
from diloco.exchange.key_pair import Keys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import parse, verified
from diloco.protocol.pair.endpoints import StandbyEndpoint
from diloco.protocol.pair.values import Hello, StandbyConnection
from diloco.syncer.standby.pairing import Pairing
from diloco.syncer.standby.replica import Replica, ReplicatedState

log = logging.getLogger("diloco.syncer")

CHANNEL = "standby"

DIAL_S = 1.0
"""Between two tries to reach the first."""

FENCED_DIAL_S = 5.0
"""Between two calls to a fenced syncer."""

KEEPALIVE_S = 0.5
"""Between two acknowledgements without a new commit."""

STUCK_S = 20.0
"""Acknowledgements stop when the disk takes longer than this for one step."""

MAX_STATE_BYTES = 1 << 30


@dataclass(frozen=True)
class StandbyCredentials:
    """The credentials of a standby at its first, as in `Connection`."""

    keys: Keys | None = None
    insecure: bool = False


class _Upstream:
    """The messages to the first: the hello, then the newest durable commit, repeatedly while the disk makes
    progress."""

    def __init__(self, hello: pb.FollowHello) -> None:
        self._hello = hello
        self._confirmed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.moved_at = time.monotonic()
        self.is_waiting = True  # for the first, not for the disk

    def confirm(self, number: int) -> None:
        """Acknowledge a commit that is durable here."""
        self._confirmed.put(number)

    def end(self) -> None:
        """End the messages."""
        self._confirmed.put(None)

    def __iter__(self) -> Iterator[bytes]:
        yield self._hello.SerializeToString()
        newest = 0
        while True:
            try:
                number = self._confirmed.get(timeout=KEEPALIVE_S)
            except queue.Empty:
                if not self.is_waiting and time.monotonic() - self.moved_at > STUCK_S:
                    continue
                number = newest
            if number is None:
                return
            newest = number
            yield pb.FollowAck(serial=newest).SerializeToString()


class Following:
    """Dials the other syncer until it is closed: to follow it, or to tell it that it is fenced.

    Arguments:
        run: its id.
        pairing: hosts the pair core, whose `other` is the address.
        end_driver: ends this syncer's driver; called before a syncer that has served the run becomes a standby.
        failed: called with an unexpected error of the thread.
    """

    def __init__(
        self, run: str, store: Replica, pairing: Pairing, shown: StandbyCredentials, *, end_driver: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        core = pairing.core
        assert core.other is not None
        self._run_name, self._store, self._pairing = run, store, pairing
        self._end = StandbyEndpoint(core)
        self._end_driver, self._failed = end_driver, failed
        self._connection = Connection(
            core.other, keys=shown.keys, insecure=shown.insecure, stall_floor_s=core.silence_s
        )
        self._closing = threading.Event()
        self._logged = ""
        self.has_fenced = threading.Event()
        """Set when the other syncer has answered that it is fenced."""
        self._thread = threading.Thread(target=self._dial, name="syncer-following", daemon=True)

    def start(self) -> None:
        """Start to dial."""
        self._thread.start()

    def close(self) -> None:
        """End the connection, and stop."""
        self._closing.set()
        self._connection.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _dial(self) -> None:
        while not self._closing.is_set():
            wait_s = DIAL_S
            try:
                wait_s = FENCED_DIAL_S if self.once() else DIAL_S
                self._logged = ""
            except DilocoError as error:
                if not self._closing.is_set() and str(error) != self._logged:
                    self._logged = str(error)
                    log.warning("the other syncer at %s: %s", self._pairing.core.other, error)
            except BaseException as error:
                log.critical("following the other syncer failed", exc_info=error)
                self._failed(error)
                return
            self._connection.close_channel(CHANNEL)
            self._closing.wait(wait_s)

    def once(self) -> bool:
        """Serve one connection until it ends; returns whether the other syncer has answered that it is fenced.

        Raises:
            DilocoError: the reason for its end.
        """
        pairing = self._pairing
        hello = pairing.event(lambda _: self._end.hello())
        upstream = _Upstream(_hello(self._run_name, hello))
        try:
            with closing(self._connection.follow(CHANNEL, iter(upstream))) as stream:
                first = _part(stream)
                if first is None:
                    return False
                if first.fenced:
                    self.has_fenced.set()
                    return True
                pairing.event(lambda now: self._end.concede(now, hello.base))
                pairing.note_epoch(first.epoch)
                self._end_driver()
                link = pairing.event(lambda now: self._end.linked(now, hello.contents, first.boot))
                try:
                    self._follow(link, stream, upstream)
                finally:
                    pairing.unlink(link)
                return False
        finally:
            upstream.end()

    def _follow(self, link: StandbyConnection, stream: Iterator[bytes], upstream: _Upstream) -> None:
        while not link.is_over and (part := _part(stream)) is not None:
            self._heard(link, part)
            if part.file:
                upstream.is_waiting, upstream.moved_at = False, time.monotonic()
                self._store.receive(part.file, part.sha256, self._received(link, upstream, part, stream))
            elif part.HasField("serial"):
                if part.num_bytes > MAX_STATE_BYTES:
                    raise CorruptPayloadError(f"a state of {part.num_bytes} bytes is above {MAX_STATE_BYTES}.")
                text = b"".join(verified(stream, part.num_bytes))
                upstream.is_waiting, upstream.moved_at = False, time.monotonic()
                self._apply(link, ReplicatedState.from_json(text), part.epoch)
                upstream.confirm(part.serial)
            upstream.is_waiting = True
        if not link.is_over:
            raise UnreachableError("the first has ended the connection; dialling again.")

    def _heard(self, link: StandbyConnection, part: pb.FollowPart) -> None:
        self._pairing.event(lambda now: self._end.heard(now, link, part.lag_versions, part.lag_bytes))

    def _apply(self, link: StandbyConnection, state: ReplicatedState, epoch: int) -> None:
        electorate = frozenset(state.electorate)
        self._pairing.event(lambda now: self._end.take(now, link, electorate, epoch, lambda: self._store.apply(state)))

    def _received(
        self, link: StandbyConnection, upstream: _Upstream, part: pb.FollowPart, stream: Iterator[bytes]
    ) -> Iterator[bytes]:
        for chunk in verified(stream, part.num_bytes):
            upstream.moved_at = time.monotonic()
            self._heard(link, part)
            yield chunk


def _part(stream: Iterator[bytes]) -> pb.FollowPart | None:
    message = next(stream, None)
    return None if message is None else parse(pb.FollowPart, message)


def _hello(run: str, hello: Hello) -> pb.FollowHello:
    it = hello.contents
    held = [
        pb.HeldFile(fragment=fragment, version=version, sha256=sha256)
        for fragment, (version, sha256) in sorted(it.held.items())
    ]
    return pb.FollowHello(
        run=run, boot=hello.boot, is_first=hello.is_first, epoch=hello.epoch, base=hello.base,
        num_published=it.num_published, stays=hello.stays, run_id=it.run_id, held=held, files=sorted(it.files),
        serves=hello.serves,
    )  # fmt: skip
