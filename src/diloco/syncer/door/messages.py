"""Conversion between values of the state machines and messages of the wire; the stream of a Watch call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from diloco.core.fragments import Layout
from diloco.errors import LayoutError
from diloco.escaping import read_json
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.values import message_of, value_of
from diloco.protocol.contribution import Contribution, Standing
from diloco.protocol.leases import Ask, DataSet, GroupRules
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Report


def contribution_of(header: pb.PushHeader) -> Contribution:
    """The contribution in a push."""
    tensors = tuple(header.tensors) if header.part else None
    return value_of(Contribution, header, tensors=tensors, routed=tuple(header.routed) or None)


def report_of(request: pb.HeartbeatRequest | pb.LeaveRequest) -> Report:
    """The report in a heartbeat; a Leave has a part of it."""
    report = value_of(Report, request)
    return replace(report, step_s=report.step_s or None)


def ask_of(request: pb.LeaseRequest) -> Ask:
    """The units of data that a learner asks for."""
    groups = value_of(GroupRules, request.groups) if request.HasField("groups") else None
    data = DataSet(request.data_units, request.data_passes, request.data_digest, request.unit_tokens, groups)
    claim = tuple(tuple((it.first, it.stop) for it in each.ranges) for each in request.claim)
    return value_of(Ask, request, data=data, claim=claim)


def standing_message(standing: Standing) -> pb.Standing:
    budget = standing.budget
    return message_of(pb.Standing, standing, budget_tokens=budget.tokens, budget_steps=budget.steps)


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
                lineage, self._lineage = vars(self._lineage), None
                return pb.Notice(welcome=pb.Welcome(lineage=lineage, standing=standing_message(standing)))
            if standing is not None:
                return pb.Notice(standing=standing_message(standing))
            evicted, self._evicted = self._evicted, None
            return None if evicted is None else pb.Notice(evicted=evicted)


def layout_of(text: str) -> Layout:
    """The layout of a learner's model. Raises LayoutError: the text is not a layout."""
    return Layout.from_dict(read_json(text, "the layout", LayoutError, "send Layout.to_dict()"))
