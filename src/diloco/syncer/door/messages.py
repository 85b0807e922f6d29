"""Conversion between values of the state machines and messages of the wire; the stream of a Watch call."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from diloco.core.fragments import Layout
from diloco.errors import LayoutError
from diloco.escaping import read_json
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.contribution import Contribution, Standing, Verdict
from diloco.protocol.leases import Ask, DataSet, Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Evaluation, Report
from diloco.protocol.steering import Order, What
from diloco.protocol.units import Ranges


def contribution_of(header: pb.PushHeader) -> Contribution:
    """The contribution in a push."""
    return Contribution(
        header.learner, header.incarnation, header.fragment, header.number, header.round, header.base, header.tokens,
        header.steps, header.trained, tuple((discard.reason, discard.tokens) for discard in header.discarded),
        step=header.step, tensors=tuple(header.tensors) if header.part else None, units=_units(header.units),
        overwritten=_units(header.overwritten), routed=tuple(header.routed) or None,
    )  # fmt: skip


def claim_of(
    request: pb.HeartbeatRequest | pb.LeaseRequest | pb.LeaveRequest | pb.WatchRequest | pb.PullRequest,
) -> Claim:
    """The claim of the learner that calls."""
    versions = () if isinstance(request, pb.LeaseRequest | pb.LeaveRequest) else tuple(request.versions)
    return Claim(request.learner, request.incarnation, request.process, seen_of(request), versions)


def report_of(request: pb.HeartbeatRequest | pb.LeaveRequest) -> Report:
    """The report in a heartbeat; a Leave has a part of it."""
    evaluation = request.evaluation
    report = Report(
        step=request.step, tokens=request.tokens, earlier_tokens=request.earlier_tokens,
        training_loss=request.training_loss if request.HasField("training_loss") else None,
        evaluation=Evaluation(evaluation.loss, evaluation.run_tokens) if request.HasField("evaluation") else None,
        blocked_s=request.blocked_s,
    )  # fmt: skip
    if isinstance(request, pb.LeaveRequest):
        return report
    return replace(
        report, step_s=request.step_s or None, waiting=request.waiting, finished=request.finished, steps=request.steps,
        blocked_with=tuple(request.blocked_with), confirmed=tuple(request.confirmed),
    )  # fmt: skip


def lineage_message(lineage: Lineage) -> pb.Lineage:
    return pb.Lineage(run_id=lineage.run_id, epoch=lineage.epoch, boot=lineage.boot)


def seen_of(
    message: pb.JoinRequest
    | pb.HeartbeatRequest
    | pb.LeaseRequest
    | pb.LeaveRequest
    | pb.WatchRequest
    | pb.PullRequest
    | pb.InitialiseHeader,
) -> Lineage | None:
    """The lineage that a learner has followed so far."""
    seen = message.seen
    return Lineage(seen.run_id, seen.epoch, seen.boot) if message.HasField("seen") else None


def ask_of(request: pb.LeaseRequest) -> Ask:
    """The units of data that a learner asks for."""
    data = DataSet(request.data_units, request.data_passes, request.data_digest, request.unit_tokens)
    return Ask(request.number, request.num_units, data, tuple(_units(each.ranges) for each in request.claim))


def order_of(request: pb.SteerRequest) -> Order:
    """An operator's order."""
    what = cast("What", request.order)  # checked by the driver
    return Order(what, request.learner, request.at_least, request.bans, request.reason)


def lease_reply(grant: Grant) -> pb.LeaseReply:
    units, claimed = ([pb.Units(first=it[0], stop=it[1]) for it in each] for each in (grant.units, grant.claimed))
    return pb.LeaseReply(units=units, claimed=claimed)


def _units(ranges: Iterable[pb.Units]) -> Ranges:
    return tuple((each.first, each.stop) for each in ranges)


def standing_message(standing: Standing) -> pb.Standing:
    return pb.Standing(
        step=standing.step, start_step=standing.start_step, run_tokens=standing.run_tokens, num_live=standing.num_live,
        sync_every=standing.sync_every or 0, versions=standing.versions,
        calls=[pb.Call(fragment=fragment, version=version) for fragment, version in standing.calls],
        verdicts=[verdict_message(verdict) for verdict in standing.verdicts], drained=standing.drained,
        order=standing.order, paused=standing.paused, at_least=standing.at_least, settled=standing.settled,
        budget_tokens=standing.budget.tokens or 0, budget_steps=standing.budget.steps or 0,
    )  # fmt: skip


def verdict_message(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(fragment=verdict.fragment, number=verdict.number, reason=verdict.reason, version=verdict.version)


class WatchStream:
    """The notices of one Watch call, as `ports.ConnectionPort`. A standing that was not sent yet is replaced by the
    next.

    Arguments:
        lineage: that the driver serves.
    """

    def __init__(self, lineage: Lineage) -> None:
        self._lineage: Lineage | None = lineage  # until the welcome is sent
        self._standing: Standing | None = None
        self._evicted: pb.Evicted | None = None
        self._has_ended = False
        self._changed = threading.Condition()

    def standing(self, standing: Standing) -> None:
        """As `ports.ConnectionPort`."""
        with self._changed:
            self._standing = standing
            self._changed.notify()

    def evicted(self, reason: str, *, replaced: bool) -> None:
        """As `ports.ConnectionPort`."""
        with self._changed:
            self._evicted = pb.Evicted(reason=reason, replaced=replaced)
            self._changed.notify()

    def end(self) -> None:
        """As `ports.ConnectionPort`."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def notices(self) -> Iterator[pb.Notice]:
        """The notices until the end of the call."""
        while (notice := self._next()) is not None:
            yield notice

    def _next(self) -> pb.Notice | None:
        with self._changed:
            self._changed.wait_for(lambda: self._standing or self._evicted or self._has_ended)
            standing, self._standing = self._standing, None
            if standing is not None and self._lineage is not None:
                lineage, self._lineage = lineage_message(self._lineage), None
                return pb.Notice(welcome=pb.Welcome(lineage=lineage, standing=standing_message(standing)))
            if standing is not None:
                return pb.Notice(standing=standing_message(standing))
            evicted, self._evicted = self._evicted, None
            return None if evicted is None else pb.Notice(evicted=evicted)


def layout_of(text: str) -> Layout:
    """The layout of a learner's model. Raises LayoutError: the text is not a layout."""
    return Layout.from_dict(read_json(text, "the layout", LayoutError, "send Layout.to_dict()"))
