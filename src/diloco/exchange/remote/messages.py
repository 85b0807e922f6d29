"""A learner's conversion between values of the state machines and messages of the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import ConfigError, PayloadError, translated
from diloco.escaping import MALFORMED, MAX_REASON, printable, read_json
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import OTHER_VERSION
from diloco.exchange.wire.values import M, message_of, value_of
from diloco.protocol.contribution import Budget, Standing, Verdict
from diloco.protocol.members import Claim
from diloco.protocol.session import requests


def request_of(kind: type[M], run: str, claim: Claim, /, *values: object, **more: object) -> M:
    """A request of a learner, with the fields of its claim and of these values."""
    known = replace(claim, versions=tuple(max(version, 0) for version in claim.versions))
    return message_of(kind, known, *values, run=run, **more)


def heartbeat_request(run: str, beat: requests.Beat) -> pb.HeartbeatRequest:
    """The report of a learner; a version that it does not hold is sent as 0."""
    blocked_with = tuple(max(version, 0) for version in beat.report.blocked_with)
    return request_of(pb.HeartbeatRequest, run, beat.claim, replace(beat.report, blocked_with=blocked_with))


def push_header(run: str, push: requests.Push) -> pb.PushHeader:
    """The header of a contribution's payload, without the payload's size."""
    c = push.contribution
    return message_of(
        pb.PushHeader, c, run=run, process=push.claim.process, part=c.tensors is not None, boot=push.boot
    )  # fmt: skip


def pull_request(run: str, fetch: requests.Fetch) -> pb.PullRequest:
    """The request for a part of the model."""
    static = True if fetch.fragment is None else None
    return request_of(pb.PullRequest, run, fetch.claim, fetch, static=static)


def lease_request(run: str, lease: requests.Lease) -> pb.LeaseRequest:
    """The request for units of data."""
    ask, data = lease.ask, lease.ask.data
    claim = [pb.UnitSet(ranges=[pb.Units(first=first, stop=stop) for first, stop in units]) for units in ask.claim]
    return request_of(
        pb.LeaseRequest, run, lease.claim, ask, claim=claim, data_units=data.num_units, data_passes=data.passes,
        data_digest=data.digest, unit_tokens=data.unit_tokens, groups=data.groups,
    )  # fmt: skip


def method_of(description: pb.DescribeReply) -> Method:
    """The run's method. Raises PayloadError: this version does not know the described method."""
    values = read_json(description.method, "the method of the run", PayloadError, OTHER_VERSION)
    with translated((ConfigError, *MALFORMED), PayloadError, "the method of the run cannot be read", OTHER_VERSION):
        return Method.from_dict(values)


def standing_of(message: pb.Standing) -> Standing:
    """The syncer's state as it concerns a learner."""
    budget = Budget(message.budget_tokens or None, message.budget_steps or None)
    sync_every, verdicts = message.sync_every or None, verdicts_of(message.verdicts)
    return value_of(Standing, message, sync_every=sync_every, verdicts=verdicts, budget=budget)


def verdicts_of(messages: Iterable[pb.Verdict]) -> tuple[Verdict, ...]:
    """The verdicts on contributions."""
    return tuple(value_of(Verdict, each, reason=_reason(each)) for each in messages)


def _reason(verdict: pb.Verdict) -> str | None:
    return printable(verdict.reason, MAX_REASON) if verdict.HasField("reason") else None


def update_of(header: pb.PullHeader) -> Update:
    """A published version."""
    return value_of(Update, header, digest=printable(header.digest, MAX_REASON))
