"""The inner optimizer's state of one learner for another, through the syncer: a joiner's end and a peer's."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from diloco.core.session.requests import Identity
from diloco.errors import CorruptPayloadError, DilocoError, UnreachableError
from diloco.escaping import MAX_REASON, printable
from diloco.exchange.base import PeerState
from diloco.exchange.dialling import Dialler
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.outgoing import Upload

log = logging.getLogger("diloco")

ASK_EVERY_S = 0.5
CHANNEL = "inner"
"""A connection of its own: contributions and updates do not wait for an inner state."""


def peer_state(syncers: Dialler, who: Identity, digest: str, most_bytes: int, timeout_s: float) -> PeerState | str:
    """As `Exchange.peer_state`."""
    give_up_at = time.monotonic() + timeout_s
    reason = ""
    while True:
        try:
            reply = _ask(syncers, who, digest)
            if reply.state == "ready":
                return _fetch(syncers, who, reply, most_bytes)
            if reply.state in ("refused", "none"):
                return printable(reply.reason, MAX_REASON) or "the run has published no version yet"
        except UnreachableError as error:
            reason = f"; {error}"
            syncers.next()
        left_s = give_up_at - time.monotonic()
        if left_s <= 0 or syncers.closing.wait(min(ASK_EVERY_S, left_s)):
            return f"none came within {timeout_s:g} s{reason}"


def _ask(syncers: Dialler, who: Identity, digest: str, *, over: int = 0) -> pb.HealReply:
    request = pb.HealRequest(run=who.run, learner=who.learner, process=who.process, digest=digest, over=over)
    return syncers.call("control", "Heal", request, pb.HealReply)


def _fetch(syncers: Dialler, who: Identity, reply: pb.HealReply, most_bytes: int) -> PeerState | str:
    """The state that is ready; the syncer forgets it then.

    Raises:
        UnreachableError: the connection broke; it is still there.
    """
    peer = printable(reply.peer, MAX_REASON)
    if reply.num_bytes > most_bytes:
        return f"the state of {peer} has {reply.num_bytes} bytes, and this model needs {most_bytes} at most"
    request = pb.PullInnerRequest(run=who.run, learner=who.learner, process=who.process, number=reply.number)
    found: PeerState | str
    try:
        header, content = syncers.download(CHANNEL, "PullInner", request, pb.PullInnerHeader)
        if header.num_bytes != reply.num_bytes or hashlib.sha256(content).hexdigest() != reply.sha256:
            raise CorruptPayloadError(f"the state of {peer} is not the one that it gave the syncer")
        found = PeerState(peer, bytes(content))
    except UnreachableError:
        raise
    except DilocoError as error:
        found = str(error)
    syncers.close_channel(CHANNEL)
    _ask(syncers, who, "", over=reply.number)
    return found


class Sharer:
    """Gives this learner's state where the syncer asks for it; uploads on a thread.

    Arguments:
        who: as which the learner speaks now.
    """

    def __init__(self, syncers: Dialler, who: Callable[[], Identity]) -> None:
        self._syncers, self._who = syncers, who
        self._threads: list[threading.Thread] = []

    def share(self, number: int, digest: str, encode: Callable[[], bytes]) -> None:
        """As `Exchange.share`."""

        def send() -> None:
            content = encode()
            header = self._header(number, digest=digest, num_bytes=len(content))
            with Upload(header, lambda: [memoryview(content)]) as upload:
                self._syncers.upload(CHANNEL, "ShareInner", upload.messages(), pb.ShareReply, heard=upload.heard)

        self._start(number, send)

    def decline(self, number: int, reason: str) -> None:
        """As `Exchange.decline`."""
        header = self._header(number, refusal=printable(reason, MAX_REASON - len("...")))
        refusal = iter([header.SerializeToString()])
        self._start(number, lambda: self._syncers.upload(CHANNEL, "ShareInner", refusal, pb.ShareReply))

    def close(self) -> None:
        """Wait for the threads, whose calls fail once the connection is closed."""
        for thread in self._threads:
            thread.join()

    def _header(self, number: int, *, digest: str = "", num_bytes: int = 0, refusal: str = "") -> pb.ShareHeader:
        who = self._who()
        return pb.ShareHeader(
            run=who.run, learner=who.learner, incarnation=who.incarnation, number=number, digest=digest,
            num_bytes=num_bytes, refusal=refusal, process=who.process,
        )  # fmt: skip

    def _start(self, number: int, send: Callable[[], object]) -> None:
        def upload() -> None:
            try:
                send()
                self._syncers.close_channel(CHANNEL)
            except DilocoError as error:
                log.warning("the inner optimizer's state was not given to a joiner: %s", error)

        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(target=upload, name=f"diloco-inner-{number & 0xFFFF}", daemon=True)
        self._threads.append(thread)
        thread.start()
