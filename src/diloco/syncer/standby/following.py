"""A standby's end of the connection to its first: it keeps what it is sent, and confirms it."""

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
from diloco.protocol.pair.endpoints import StandbyEnd
from diloco.protocol.pair.values import Hello, StandbyConnection
from diloco.syncer.standby.pairing import Pairing
from diloco.syncer.standby.replica import Replica, ReplicatedState

log = logging.getLogger("diloco.syncer")

CHANNEL = "standby"

DIAL_S = 1.0
"""Between two tries to reach the first."""

FENCED_DIAL_S = 5.0
"""Between two words to a syncer that has lost the run."""

WORD_S = 0.5
"""Between two words while there is nothing to confirm."""

STUCK_S = 20.0
"""The disk has this long for one step; then the first hears nothing more."""

MAX_STATE_BYTES = 1 << 30


@dataclass(frozen=True)
class DialledConnection:
    """What the standby shows to its first: as `Connection`."""

    keys: Keys | None = None
    insecure: bool = False


class _Words:
    """What goes up: the hello, then which commit is durable here, now and then, as long as the disk moves."""

    def __init__(self, hello: pb.FollowHello) -> None:
        self._hello = hello
        self._confirmed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.moved_at = time.monotonic()
        self.is_waiting = True  # for the first, and not for the disk

    def confirm(self, number: int) -> None:
        """This commit is durable."""
        self._confirmed.put(number)

    def end(self) -> None:
        """Nothing follows."""
        self._confirmed.put(None)

    def __iter__(self) -> Iterator[bytes]:
        yield self._hello.SerializeToString()
        newest = 0
        while True:
            try:
                said = self._confirmed.get(timeout=WORD_S)
            except queue.Empty:
                if not self.is_waiting and time.monotonic() - self.moved_at > STUCK_S:
                    continue
                said = newest
            if said is None:
                return
            newest = said
            yield pb.FollowAck(serial=newest).SerializeToString()


class Following:
    """Dials the other syncer until it is closed: to follow it, or to say that it has lost the run.

    Arguments:
        run: its name.
        pairing: hosts what decides; its `other` is the address.
        let_go: called before a syncer that has served the run becomes a standby: ends its driver.
        failed: told what the thread failed with that it should not have.
    """

    def __init__(
        self, run: str, store: Replica, pairing: Pairing, shown: DialledConnection, *, let_go: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        assert pairing.other is not None
        self._run_name, self._store, self._pairing = run, store, pairing
        self._end = StandbyEnd(pairing.core)
        self._let_go, self._failed = let_go, failed
        self._connection = Connection(
            pairing.other, keys=shown.keys, insecure=shown.insecure, stall_floor_s=pairing.patience_s
        )
        self._closing = threading.Event()
        self._said = ""
        self.has_fenced = threading.Event()
        """The other syncer has heard that this one serves the run."""
        self._thread = threading.Thread(target=self._dial, name="syncer-following", daemon=True)

    def start(self) -> None:
        """Dial."""
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._closing.set()
        self._connection.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _dial(self) -> None:
        while not self._closing.is_set():
            wait_s = DIAL_S
            try:
                wait_s = FENCED_DIAL_S if self.once() else DIAL_S
                self._said = ""
            except DilocoError as error:
                if not self._closing.is_set() and str(error) != self._said:
                    self._said = str(error)
                    log.warning("the other syncer at %s: %s", self._pairing.other, error)
            except BaseException as error:
                log.critical("following the other syncer failed", exc_info=error)
                self._failed(error)
                return
            self._connection.close_channel(CHANNEL)
            self._closing.wait(wait_s)

    def once(self) -> bool:
        """One connection, until it ends; returns whether the other one has heard that this one serves the run.

        Raises:
            DilocoError: why it has ended.
        """
        pairing = self._pairing
        hello = pairing.event(lambda _: self._end.hello())
        words = _Words(_message(self._run_name, hello))
        try:
            with closing(self._connection.follow(CHANNEL, iter(words))) as stream:
                first = _part(stream)
                if first is None:
                    return False
                if first.fenced:
                    self.has_fenced.set()
                    return True
                pairing.event(lambda now: self._end.concede(now, hello.base))
                pairing.knows_of(first.epoch)
                self._let_go()
                link = pairing.event(lambda now: self._end.linked(now, hello.contents, first.boot))
                try:
                    self._follow(link, stream, words)
                finally:
                    pairing.unlink(link)
                return False
        finally:
            words.end()

    def _follow(self, link: StandbyConnection, stream: Iterator[bytes], words: _Words) -> None:
        while not link.is_over and (part := _part(stream)) is not None:
            self._heard(link, part)
            if part.file:
                words.is_waiting, words.moved_at = False, time.monotonic()
                self._store.receive(part.file, part.sha256, self._moving(link, words, part, stream))
            elif part.HasField("serial"):
                if part.num_bytes > MAX_STATE_BYTES:
                    raise CorruptPayloadError(f"a state of {part.num_bytes} bytes is none.")
                text = b"".join(verified(stream, part.num_bytes))
                words.is_waiting, words.moved_at = False, time.monotonic()
                self._take(link, ReplicatedState.from_json(text), part.epoch)
                words.confirm(part.serial)
            words.is_waiting = True
        if not link.is_over:
            raise UnreachableError("the first has ended the connection; dialling again.")

    def _heard(self, link: StandbyConnection, part: pb.FollowPart) -> None:
        self._pairing.event(lambda now: self._end.heard(now, link, part.lag_versions, part.lag_bytes))

    def _take(self, link: StandbyConnection, state: ReplicatedState, epoch: int) -> None:
        electorate = frozenset(state.electorate)
        self._pairing.event(lambda now: self._end.take(now, link, electorate, epoch, lambda: self._store.take(state)))

    def _moving(
        self, link: StandbyConnection, words: _Words, part: pb.FollowPart, stream: Iterator[bytes]
    ) -> Iterator[bytes]:
        for chunk in verified(stream, part.num_bytes):
            words.moved_at = time.monotonic()
            self._heard(link, part)
            yield chunk


def _part(stream: Iterator[bytes]) -> pb.FollowPart | None:
    message = next(stream, None)
    return None if message is None else parse(pb.FollowPart, message)


def _message(run: str, hello: Hello) -> pb.FollowHello:
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
