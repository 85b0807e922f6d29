"""The calls of workers of reinforcement learning: what they have and want, and groups of completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import grpc

from diloco.errors import DilocoError, PayloadError
from diloco.escaping import MAX_REASON, printable
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import MAX_GROUP_BYTES, CompletionGroup, hash_of
from diloco.exchange.wire.rpc import MAX_MESSAGE_BYTES
from diloco.exchange.wire.values import message_of, value_of
from diloco.protocol.groups import Assigned, Group, Made
from diloco.protocol.leases import GroupRules
from diloco.protocol.workers import Score, Work
from diloco.run.validation import MAX_GROUPS
from diloco.syncer.door.admission import Call, Kind
from diloco.syncer.door.open_calls import CallGuard
from diloco.syncer.hosting import HostedDriver, SyncerDriver
from diloco.syncer.keys.certificates import Caller

ROLES: Mapping[str, Literal["rollout", "reward", "learner"]] = {
    "rollout": "rollout", "reward": "reward", "trainer": "learner",
}  # fmt: skip
"""The role of the keys that a worker's role needs."""


@dataclass
class WorkerCalls:
    """Handlers of these calls.

    Arguments:
        host: as in `Service.driver`.
        guard: wraps the handlers.
    """

    host: Callable[[], HostedDriver]
    guard: CallGuard

    def handlers(self) -> Mapping[str, tuple[Kind, Call]]:
        """By method."""
        return {
            "Work": self.guard.unary("Work", self.work, pb.WorkRequest, "work", MAX_MESSAGE_BYTES),
            "Groups": self.guard.unary("Groups", self.groups, pb.GroupsRequest, "groups", MAX_MESSAGE_BYTES),
        }

    def work(self, caller: Caller, request: pb.WorkRequest, context: grpc.ServicerContext) -> pb.WorkReply:
        if (role := ROLES.get(request.role)) is None:
            raise PayloadError(f"{printable(request.role, 20)!r} is not a role of a worker; use {', '.join(ROLES)}.")
        self.guard.admit(context, caller, request, role, "groups")
        work, hosted = value_of(Work, request, worker=request.learner), self.host()
        answer: Assigned = hosted.wait_for(lambda driver, done: driver.work(work, done), context)
        packs = dict(hosted.manifest.packs)
        groups = [_place(group, packs[group.pack]) for group in answer.groups if group.pack in packs]
        return pb.WorkReply(numbers=answer.numbers, groups=groups, why=answer.why, versions=answer.versions)

    def groups(self, caller: Caller, request: pb.GroupsRequest, context: grpc.ServicerContext) -> pb.GroupsReply:
        self.guard.admit(context, caller, request, "rollout", "groups")
        hosted = self.host()
        rules = hosted.ask(lambda driver: driver.core.groups.rules)
        if rules is None:
            raise PayloadError("no trainer has joined the run yet, so it accepts no groups; ask for prompts first.")
        if len(request.groups) > MAX_GROUPS:
            raise PayloadError(f"{len(request.groups)} groups in one call are too many; send at most {MAX_GROUPS}.")
        made, data = [_checked(each, rules) for each in request.groups], [each.data for each in request.groups]

        def receive(driver: SyncerDriver, done: Callable[[Sequence[Score]], None]) -> None:
            driver.made(request.learner, request.process, made, data, done)

        refused = hosted.wait_for(receive, context)
        return pb.GroupsReply(refused=[message_of(pb.GroupScore, each) for each in refused])


def _checked(sent: pb.MadeGroup, rules: GroupRules) -> Made:
    """The description of a group, with what is wrong with its bytes."""
    data = sent.data
    made = value_of(Made, sent, num_bytes=len(data), digest=hash_of(data), num_tokens=0)
    try:
        if len(data) > MAX_GROUP_BYTES:
            raise PayloadError(f"it has {len(data)} bytes; send at most {MAX_GROUP_BYTES}.")
        group = CompletionGroup.from_bytes(data)
        group.check(rules)
        if (group.number, group.task, group.versions, group.weights) != (
            made.number, made.task, made.versions, made.weights
        ):  # fmt: skip
            raise PayloadError("it is another group than its header describes.")
    except DilocoError as error:
        return replace(made, fault=printable(str(error), MAX_REASON))
    return replace(made, num_tokens=group.tokens.numel())


def _place(group: Group, name: str) -> pb.GroupPlace:
    return message_of(
        pb.GroupPlace, group.made, object=name, start=group.start, rewards=group.rewards, worker=group.worker
    )
