"""A learner's conversion between values of the state machines and messages of the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import ConfigError, LayoutError, PayloadError, translated
from diloco.escaping import MALFORMED, MAX_REASON, printable, read_json
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import OTHER_VERSION
from diloco.protocol.contribution import Budget, Contribution, Standing, Verdict
from diloco.protocol.leases import Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Report
from diloco.protocol.session import requests
from diloco.protocol.units import Ranges


def push_header(run: str, push: requests.Push) -> pb.PushHeader:
    """The header of a contribution's payload, without the payload's size."""
    c: Contribution = push.contribution
    return pb.PushHeader(
        run=run,
        learner=c.learner,
        process=push.claim.process,
        incarnation=c.incarnation,
        fragment=c.fragment,
        number=c.number,
        round=c.round,
        base=c.base,
        tokens=c.tokens,
        steps=c.steps,
        trained=c.trained,
        step=c.step,
        discarded=[pb.Discard(reason=reason, tokens=tokens) for reason, tokens in c.discarded],
        part=c.tensors is not None,
        tensors=c.tensors,
        boot=push.boot,
        units=_units(c.units),
        overwritten=_units(c.overwritten),
        routed=c.routed,
    )


def pull_request(run: str, fetch: requests.Fetch) -> pb.PullRequest:
    """The request for a part of the model."""
    request = pb.PullRequest(
        **_claimed(run, fetch.claim), base=fetch.base, joining=fetch.joining, versions=_versions(fetch.claim)
    )
    if fetch.fragment is None:
        request.static = True
    else:
        request.fragment = fetch.fragment
    return request


def heartbeat_request(run: str, beat: requests.Beat) -> pb.HeartbeatRequest:
    """The request of a heartbeat."""
    report = beat.report
    return pb.HeartbeatRequest(
        **_claimed(run, beat.claim),
        **_progress(report),
        steps=report.steps,
        step_s=report.step_s or 0.0,
        waiting=report.waiting,
        finished=report.finished,
        blocked_with=report.blocked_with,
        versions=_versions(beat.claim),
        confirmed=report.confirmed,
    )


def _claimed(run: str, claim: Claim) -> dict[str, Any]:
    """The fields that all requests of a member have."""
    return {
        "run": run, "learner": claim.learner, "process": claim.process, "incarnation": claim.incarnation,
        "seen": lineage_message(claim.seen),
    }  # fmt: skip


def _versions(claim: Claim) -> list[int]:
    return [max(version, 0) for version in claim.versions]


def _progress(report: Report) -> dict[str, Any]:
    """The fields of a report that both heartbeats and the request to leave have."""
    evaluation = None if report.evaluation is None else pb.Evaluation(**asdict(report.evaluation))
    return {
        "step": report.step, "tokens": report.tokens, "earlier_tokens": report.earlier_tokens,
        "blocked_s": report.blocked_s, "training_loss": report.training_loss, "evaluation": evaluation,
    }  # fmt: skip


def lease_request(run: str, lease: requests.Lease) -> pb.LeaseRequest:
    """The request for units of data."""
    ask = lease.ask
    return pb.LeaseRequest(
        **_claimed(run, lease.claim),
        number=ask.number,
        num_units=ask.num_units,
        data_units=ask.data.num_units,
        data_passes=ask.data.passes,
        data_digest=ask.data.digest,
        unit_tokens=ask.data.unit_tokens,
        claim=[pb.UnitSet(ranges=_units(units)) for units in ask.claim],
    )


def grant_of(number: int, reply: pb.LeaseReply) -> Grant:
    """The grant for the request with this number."""
    units, claimed = (tuple((it.first, it.stop) for it in each) for each in (reply.units, reply.claimed))
    return Grant(number, units, claimed)


def _units(units: Ranges) -> list[pb.Units]:
    return [pb.Units(first=first, stop=stop) for first, stop in units]


def watch_request(run: str, watch: requests.Watch) -> pb.WatchRequest:
    """The request for a stream of notices."""
    return pb.WatchRequest(**_claimed(run, watch.claim), versions=_versions(watch.claim))


def lineage_message(seen: Lineage | None) -> pb.Lineage | None:
    """The lineage that a learner has followed."""
    return None if seen is None else pb.Lineage(run_id=seen.run_id, epoch=seen.epoch, boot=seen.boot)


def method_of(description: pb.DescribeReply) -> Method:
    """The run's method. Raises PayloadError: this version does not know the described method."""
    values = read_json(description.method, "the method of the run", PayloadError, OTHER_VERSION)
    with translated((ConfigError, *MALFORMED), PayloadError, "the method of the run cannot be read", OTHER_VERSION):
        return Method.from_dict(values)


def layout_of(description: pb.DescribeReply) -> Layout:
    """The layout of the run's model. Raises PayloadError: the description has no valid layout."""
    values = read_json(description.layout, "the layout of the run", PayloadError, OTHER_VERSION)
    with translated((LayoutError, *MALFORMED), PayloadError, "the layout of the run cannot be read", OTHER_VERSION):
        return Layout.from_dict(values)


def lineage_of(message: pb.Lineage) -> Lineage:
    """The lineage that a syncer serves."""
    return Lineage(message.run_id, message.epoch, message.boot)


def leave_request(run: str, leave: requests.Leave) -> pb.LeaveRequest:
    """The request to leave the run."""
    return pb.LeaveRequest(**_claimed(run, leave.claim), **_progress(leave.report))


def standing_of(message: pb.Standing) -> Standing:
    """The syncer's state as it concerns a learner."""
    return Standing(
        message.step,
        message.start_step,
        message.run_tokens,
        message.num_live,
        message.sync_every or None,
        tuple(message.versions),
        tuple((call.fragment, call.version) for call in message.calls),
        verdicts_of(message.verdicts),
        message.drained,
        message.order,
        message.paused,
        message.at_least,
        message.settled,
        Budget(message.budget_tokens or None, message.budget_steps or None),
    )


def verdicts_of(messages: Iterable[pb.Verdict]) -> tuple[Verdict, ...]:
    """The verdicts on contributions."""
    return tuple(Verdict(each.fragment, each.number, _reason(each), each.version) for each in messages)


def _reason(verdict: pb.Verdict) -> str | None:
    return printable(verdict.reason, MAX_REASON) if verdict.HasField("reason") else None


def update_of(header: pb.PullHeader) -> Update:
    """A published version."""
    return Update(
        header.fragment,
        header.base,
        header.version,
        tuple(header.contributors),
        tuple(header.weights),
        header.scale,
        printable(header.digest, MAX_REASON),
        header.lossless,
    )
