"""Handing in contributions, and again where the syncer was lost before it published them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from diloco.core.contribution import Contribution
from diloco.errors import StaleIncarnationError
from diloco.exchange.base import Rejected
from diloco.exchange.remote.session import Session, Worker
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, frames


@dataclass
class _Offer:
    """What was handed in and is not settled. `boot`: the syncer's process that has acknowledged it; 0: none has."""

    contribution: Contribution
    payload: Tensor
    boot: int = 0


class Sending:
    """Contributions that are on their way or not yet published.

    Attributes:
        worker: the sender; encodes and uploads, in the order of the offers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._offers: dict[tuple[int, int], _Offer] = {}  # by fragment and round
        self._lock = threading.Lock()
        self.worker = Worker(session, "diloco-send")

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        """Encode and hand in; returns at once."""
        self.worker.submit(lambda: self._send(contribution, payload))

    def offer_again(self) -> None:
        """A syncer is there: it may be a new process that knows only what was published."""
        self.worker.submit(self._push_again)

    def merged(self, fragment: int, round_: int) -> None:
        """What was offered up to this round is published."""
        with self._lock:
            for key in [key for key in self._offers if key[0] == fragment and key[1] <= round_]:
                del self._offers[key]

    def rejected(self, fragment: int, round_: int, reason: str, incarnation: int) -> None:
        """It will not be merged."""
        with self._lock:
            offer = self._offers.get((fragment, round_))
            if offer is not None and offer.contribution.incarnation == incarnation:
                del self._offers[fragment, round_]
        self._session.inbox.tell(Rejected(fragment, round_, reason), incarnation)

    def start_over(self) -> None:
        """A new incarnation: what the old one sent is void."""
        with self._lock:
            self._offers.clear()

    def _send(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        offer = _Offer(contribution, payload())
        with self._lock:
            if contribution.incarnation != self._session.incarnation:
                return  # given up meanwhile; the learner is told with `Rejoined`
            self._offers[contribution.fragment, contribution.round] = offer
        self._push(offer)

    def _push_again(self) -> None:
        with self._lock:
            offers = [offer for offer in self._offers.values() if offer.boot != self._session.boot]
        for offer in offers:
            if offer.contribution.incarnation == self._session.incarnation:
                self._push(offer)

    def _push(self, offer: _Offer) -> None:
        session, c = self._session, offer.contribution
        header = pb.PushHeader(
            run=session.run, learner=c.learner, incarnation=c.incarnation, fragment=c.fragment, round=c.round, base=c.base,
            tokens=c.tokens, steps=c.steps, trained=c.trained, step=c.step, num_bytes=offer.payload.numel(),
            discarded=[pb.Discard(reason=reason, tokens=tokens) for reason, tokens in c.discarded],
            part=c.tensors is not None, tensors=c.tensors,
        )  # fmt: skip

        def attempt() -> pb.PushReply:
            if not self._is_open(offer):  # taken the last time; only the answer was lost
                return pb.PushReply(accepted=True)
            stream = frames(header, bytes_of(offer.payload))
            return session.connection.upload("contributions", "Push", stream, pb.PushReply)

        # Counted before it goes out: its version may be here, and the run over, before the acknowledgement is.
        session.num_bytes["contributions"] += offer.payload.numel()
        try:
            reply = session.retry(attempt)
        except StaleIncarnationError as error:
            session.given_up(c.incarnation, str(error))
            return
        offer.boot = session.boot
        if not reply.accepted:
            self.rejected(c.fragment, c.round, reply.reason, c.incarnation)

    def _is_open(self, offer: _Offer) -> bool:
        """Whether nothing was heard of what became of it."""
        with self._lock:
            return self._offers.get((offer.contribution.fragment, offer.contribution.round)) is offer
