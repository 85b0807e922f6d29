"""Fetching what the syncer publishes: decoded, verified, and told in order. Everything here runs on one thread, the receiver."""

from __future__ import annotations

import logging
import threading

from safetensors.torch import load

from diloco.core.held import Advanced, HeldFragment, advance
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, StaleIncarnationError, VersionError
from diloco.exchange.base import Arrived
from diloco.exchange.remote.sending import Sending
from diloco.exchange.remote.session import Session, Worker
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import tensor_of

log = logging.getLogger("diloco")


class Receiving:
    """The newest global fragments, and how to get newer ones.

    Attributes:
        newest: per fragment; only the receiver replaces them. With outer states where the outer optimizer is on the
            learners.
        worker: the receiver.
    """

    def __init__(self, session: Session, sending: Sending) -> None:
        self._session = session
        self._sending = sending
        self.newest: list[HeldFragment] = []
        self.worker = Worker(session, "diloco-receive")
        self._wanted: dict[int, int] = {}
        self._lock = threading.Lock()

    def want(self, fragment: int, version: int, incarnation: int) -> None:
        """Any thread: have the fragment fetched until it is at `version` or newer."""
        if incarnation != self._session.incarnation or version <= self.newest[fragment].version:
            return
        with self._lock:
            is_asked_for = fragment in self._wanted
            self._wanted[fragment] = max(version, self._wanted.get(fragment, 0))
        if not is_asked_for:
            self.worker.submit(lambda: self._catch_up(fragment))

    def _catch_up(self, fragment: int) -> None:
        with self._lock:
            version = self._wanted.pop(fragment)
        session, incarnation = self._session, self._session.incarnation
        while self.newest[fragment].version < version:
            try:
                arrived = self._fetch_next(fragment)
            except StaleIncarnationError as error:
                session.given_up(incarnation, str(error))
                return
            self._sending.merged(fragment, arrived.merged_round)
            session.inbox.tell(arrived, incarnation)

    def _fetch_next(self, fragment: int) -> Arrived:
        """The next version, or the newest as a whole where that cannot be had or is not what the syncer published."""
        held = self.newest[fragment]
        header, buffer = self._pull(self._request(fragment, base=held.version), "updates")
        try:
            advanced = self._advance(held, header, buffer)
        except (VersionError, CorruptPayloadError) as error:
            log.error("%s; fetching it whole", error)
            header, buffer = self._pull(self._request(fragment, base=-1), "updates")
            advanced = self._advance(held, header, buffer)
        new = self.newest[fragment] = advanced.held
        starts_again = self._session.method.outer_at == "learners" and header.lossless
        return Arrived(
            _update(header), new.theta, header.merged_round, advanced.mean, new.outer_state if starts_again else None
        )

    def _advance(self, held: HeldFragment, header: pb.PullHeader, buffer: memoryview) -> Advanced:
        """Raises as `core.held.advance`."""
        if header.lossless:
            return Advanced(whole_of(header, buffer, held.theta.numel()))
        return advance(self._session.method, held, _update(header), tensor_of(buffer))

    def fetch_all(self) -> bytes:
        """As a joiner: every fragment whole, into `newest`; returns the static tensors as a safetensors file."""
        fragments = self._session.layout.fragments
        pulled = [self._pull(self._request(it.index, base=-1, joining=True), "joins") for it in fragments]
        newest = [whole_of(*reply, it.numel) for it, reply in zip(fragments, pulled, strict=True)]
        _, static = self._pull(self._request(None, base=-1, joining=True), "joins")
        self.newest = newest
        return bytes(static)

    def _request(self, fragment: int | None, *, base: int, joining: bool = False) -> pb.PullRequest:
        """None: the static tensors."""
        session = self._session
        request = pb.PullRequest(
            run=session.run, learner=session.learner, incarnation=session.incarnation, base=base, joining=joining
        )
        if fragment is None:
            request.static = True
        else:
            request.fragment = fragment
        return request

    def _pull(self, request: pb.PullRequest, channel: str) -> tuple[pb.PullHeader, memoryview]:
        header, buffer = self._session.retry(lambda: self._session.connection.pull(channel, request))
        self._session.num_bytes[channel] += len(buffer)
        return header, buffer


def whole_of(header: pb.PullHeader, buffer: memoryview, num_elements: int) -> HeldFragment:
    """A version that was sent losslessly, in the memory of the buffer; with its outer state, where that was sent too.

    Raises:
        CorruptPayloadError, DigestError: it is not what the syncer published.
    """
    num_theta_bytes = header.num_bytes - header.outer_bytes
    outer_state = load(bytes(buffer[num_theta_bytes:])) if header.outer_bytes else {}
    return HeldFragment.received(_update(header), tensor_of(buffer[:num_theta_bytes]), num_elements, outer_state)


def _update(header: pb.PullHeader) -> Update:
    return Update(
        header.fragment, header.base, header.version, tuple(header.contributors), tuple(header.weights), header.scale,
        header.digest, header.lossless,
    )  # fmt: skip
