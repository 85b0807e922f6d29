"""The calls of a syncer as one of a pair: learners' votes, its standby, its operator; and the journal of its
standing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from diloco import events
from diloco.core.method import Method
from diloco.event_log import EventLog
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.lineage import Lineage
from diloco.protocol.succession import Ballot, ElectorVote, Proposal, Standing, elector
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.standby.following import Following
from diloco.syncer.standby.leading import Leading
from diloco.syncer.standby.pairing import Pairing

log = logging.getLogger("diloco.syncer")

FENCED_S = 5.0
"""A promotion waits this long until the other syncer is fenced."""


class PairCalls:
    """Handlers of Vote, Follow and Promote, and the pair's part of heartbeats.

    Arguments:
        pairing: makes the decisions.
        leading: answers a standby.
        following: the connection to the other syncer; None: its address is not known.
        serves: whether this syncer has a driver.
    """

    def __init__(
        self, pairing: Pairing, leading: Leading, following: Following | None, serves: Callable[[], bool]
    ) -> None:
        self._pairing, self._leading, self._following, self._serves = pairing, leading, following, serves

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.Proposal | None:
        """Count a heartbeat as a message to the pair, of silence 0; returns the proposal to vote on."""
        return None if self._pairing.core.is_single else self._heard(request, 0.0)

    def vote(self, request: pb.VoteRequest) -> pb.VoteReply:
        """Take the vote of a learner whose syncer is silent."""
        return pb.VoteReply(proposal=self._heard(request, request.silent_s), serves=self._serves())

    def _heard(self, request: pb.HeartbeatRequest | pb.VoteRequest, silent_s: float) -> pb.Proposal | None:
        if not request.HasField("seen"):
            return None
        seen = Lineage(request.seen.run_id, request.seen.epoch, request.seen.boot)
        ballot = Ballot(request.promised.epoch, request.promised.boot) if request.HasField("promised") else None
        word = ElectorVote(elector(request.learner, request.process), seen, ballot, silent_s)
        return _message(self._pairing.heard(request.learner, word))

    def follow(
        self, hello: pb.FollowHello, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """As `Leading.follow`."""
        return self._leading.follow(hello, messages, context)

    def promote(self, request: pb.PromoteRequest) -> pb.PromoteReply:
        """Promote this syncer on an operator's order; raises as `Pairing.promote`."""
        epoch, versions = self._pairing.promote(force=request.force)
        following = self._following
        is_fenced = False
        if following is not None:
            following.has_fenced.clear()
            is_fenced = following.has_fenced.wait(FENCED_S)
        return pb.PromoteReply(epoch=epoch, versions=versions, fenced=is_fenced)

    def status(self) -> dict[str, Any] | None:
        """As `Pairing.status`."""
        return self._pairing.status()

    def idle_status(self, run: str, method: Method) -> dict[str, Any]:
        """The status that this syncer reports while it does not serve the run."""
        return {
            "run": run, "run_id": "", "epoch": self._pairing.succession.epoch, "method": method.to_dict(),
            "initialised": False, "cut": "", "step": 0, "tokens": 0, "initial_tokens": 0, "spooled_bytes": 0,
            "waits_for": None, "steering": None, "learners": {}, "fragments": [], "newest_merge": None, "data": None,
        }  # fmt: skip


class StandingJournal:
    """Writes changes of a syncer's standing to its log, its events and its metrics."""

    def __init__(self, events_log: EventLog, metrics: SyncerMetrics) -> None:
        self._events, self._metrics = events_log, metrics

    def standing_changed(self, standing: Standing, epoch: int, why: str) -> None:
        """As `StandingObserver`."""
        log.warning("this syncer is %s, epoch %d: %s", standing, epoch, why)
        self._events.append(events.StandingChanged(standing=standing, epoch=epoch, why=why))
        self._metrics.standing_changed(standing, takes_over=standing == "installing" or why.startswith("promoted"))

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        """As `StandingObserver`."""
        self._metrics.set_standby_lag(versions=versions, num_bytes=num_bytes, seconds=seconds)


def _message(proposal: Proposal | None) -> pb.Proposal | None:
    if proposal is None:
        return None
    ballot = pb.Ballot(epoch=proposal.ballot.epoch, boot=proposal.ballot.boot)
    return pb.Proposal(ballot=ballot, base=proposal.base)
