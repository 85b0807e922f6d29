"""Fetching what the syncer publishes: decoded, verified, and told in order. Everything here runs on one thread, the receiver."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load
from torch import Tensor

from diloco.core.fragments import digest
from diloco.core.update import Update, advance
from diloco.errors import DigestError, StaleIncarnationError
from diloco.exchange.base import Arrived
from diloco.exchange.remote.sending import Sending
from diloco.exchange.remote.session import Session, Worker
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import tensor_of

log = logging.getLogger("diloco")


@dataclass(frozen=True)
class Holding:
    """A global fragment, flat fp32; with its outer state, where the outer optimizer is on the learners."""

    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]


class Receiving:
    """The newest global fragments, and how to get newer ones.

    Attributes:
        newest: per fragment; only the receiver replaces them.
        worker: the receiver.
    """

    def __init__(self, session: Session, sending: Sending) -> None:
        self._session = session
        self._sending = sending
        self.newest: list[Holding] = []
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
            new, mean = self._decode(fragment, held, header, buffer)
        except DigestError as error:
            log.error("%s; fetching it whole", error)
            header, buffer = self._pull(self._request(fragment, base=-1), "updates")
            new, mean = self._decode(fragment, held, header, buffer)
        self.newest[fragment] = new
        starts_again = self._session.method.outer_at == "learners" and header.lossless
        return Arrived(_update(header), new.theta, header.merged_round, mean, new.outer_state if starts_again else None)

    def _decode(
        self, fragment: int, held: Holding, header: pb.PullHeader, buffer: memoryview
    ) -> tuple[Holding, Tensor | None]:
        """What a reply brings, and the merged outer gradient where it brings that.

        Raises:
            DigestError: it is not what the syncer published.
        """
        if header.lossless:
            num_theta_bytes = header.num_bytes - header.outer_bytes
            outer_state = load(bytes(buffer[num_theta_bytes:])) if header.outer_bytes else {}
            new, mean = Holding(header.version, tensor_of(buffer[:num_theta_bytes], torch.float32), outer_state), None
        else:
            advanced = advance(self._session.method, held.theta, held.outer_state, tensor_of(buffer))
            new, mean = Holding(header.version, advanced.theta, advanced.outer_state), advanced.mean
        if new.theta.numel() != self._session.layout.fragments[fragment].numel or digest(new.theta) != header.digest:
            raise DigestError(
                f"version {header.version} of fragment {fragment} is not what the syncer published (digest {header.digest[:12]}); "
                "check both machines' memory and disks."
            )
        return new, mean

    def fetch_all(self) -> bytes:
        """As a joiner: every fragment whole, into `newest`; returns the static tensors as a safetensors file."""
        fragments = self._session.layout.fragments
        pulled = [self._pull(self._request(it.index, base=-1, joining=True), "joins") for it in fragments]
        nothing = Holding(-1, torch.empty(0), {})
        newest = [self._decode(it.index, nothing, *reply)[0] for it, reply in zip(fragments, pulled, strict=True)]
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


def _update(header: pb.PullHeader) -> Update:
    return Update(
        header.fragment, header.base, header.version, tuple(header.contributors), tuple(header.weights), header.scale,
        header.digest, header.lossless,
    )  # fmt: skip
