"""The actions of `SessionCore`, as plain values: requests to the syncer, and news for the learner.

Tensors stay with the program that executes them. It keeps payloads by (incarnation, fragment, number) of their
contribution, and fetched fragments by (fragment, version).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from diloco.errors import DilocoError
from diloco.protocol.contribution import CallForWork, Contribution, Drained, Hold, Rejection, Settled
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.members import Claim, Report

# --- requests to the syncer: each ends in exactly one event, its own or `failed` --------------------------------------

LaneName = Literal["control", "watch", "receive", "send", "data", "leave"]
"""Requests of one lane are made one at a time."""


@dataclass(frozen=True)
class OfLearner:
    """A request in the name of a learner's process."""

    claim: Claim


@dataclass(frozen=True)
class Describe:
    """Ask, over this control connection, whether the run has a model; then call `described`."""

    lane: ClassVar[LaneName] = "control"

    connection: int


@dataclass(frozen=True)
class Initialise(OfLearner):
    """Upload this learner's model as the run's; then call `initialised`."""

    lane: ClassVar[LaneName] = "receive"


@dataclass(frozen=True)
class Join(OfLearner):
    """Ask for a new incarnation; then call `joined`.

    Attributes:
        claim: with the last incarnation of this process, which must not replace another process; 0: it had none.
    """

    lane: ClassVar[LaneName] = "receive"


@dataclass(frozen=True)
class Fetch(OfLearner):
    """Fetch what follows version `base` of a fragment, decode and verify it; then call `fetched`.

    Attributes:
        fragment: None: the frozen tensors and buffers.
        base: the version held; −1: none, fetch the whole fragment.
        joining: the learner does not hold the whole model yet.
    """

    lane: ClassVar[LaneName] = "receive"

    fragment: int | None
    base: int
    joining: bool = False


@dataclass(frozen=True)
class Watch(OfLearner):
    """Open a stream of notices over this control connection. Call `welcomed`, `heard` and `evicted` for the notices,
    and `failed` or `ended` once the stream is over."""

    lane: ClassVar[LaneName] = "watch"

    connection: int


@dataclass(frozen=True)
class TimedCall(OfLearner):
    """A request over a control connection: it fails after `timeout_s` without an answer."""

    connection: int
    timeout_s: float


@dataclass(frozen=True)
class Beat(TimedCall):
    """Send a heartbeat over this control connection; then call `beaten`, or `failed` after `timeout_s` without an
    answer.

    Attributes:
        claim: the syncer that it names has all contributions of a finished learner.
    """

    lane: ClassVar[LaneName] = "control"

    report: Report


@dataclass(frozen=True)
class Push(OfLearner):
    """Upload a contribution, addressed to this process of the syncer; then call `pushed`."""

    lane: ClassVar[LaneName] = "send"

    contribution: Contribution
    boot: int


@dataclass(frozen=True)
class Lease(TimedCall):
    """Ask over this control connection for units of data; then call `leased`, or `failed` after `timeout_s` without an
    answer."""

    lane: ClassVar[LaneName] = "data"

    ask: Ask


@dataclass(frozen=True)
class Leave(TimedCall):
    """Say goodbye over this control connection; then call `left`, or `failed` after `timeout_s` without an answer.

    Attributes:
        report: as in a heartbeat; no heartbeat may have carried the newest logged values.
    """

    lane: ClassVar[LaneName] = "leave"

    report: Report


# --- the executor's own resources -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CloseConnection:
    """Close a control connection; its open requests fail."""

    connection: int


@dataclass(frozen=True)
class Dial:
    """From now on, make all requests other than control requests to the syncer at this address."""

    address: int


@dataclass(frozen=True)
class Drop:
    """Drop the payload of a contribution: it will not be sent again."""

    contribution: Contribution


@dataclass(frozen=True)
class Warn:
    """Log a warning."""

    text: str


@dataclass(frozen=True)
class Close:
    """The learner has left: close all connections."""


# --- news for the learner, in order -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TellStart:
    """The learner starts as this incarnation, from the fragments that are held now; unread news of an earlier
    incarnation is void.

    Attributes:
        claim: with the versions of these fragments.
        step: the inner step to start from.
        awaited: a round waits for its send after that step, or the run may have gone back to it; a later step of the
            learner's own does not count.
        run_tokens: tokens trained by the run so far.
        reason: why the incarnation before was evicted; None: there was none.
    """

    claim: Claim
    step: int
    awaited: bool
    run_tokens: int
    reason: str | None


@dataclass(frozen=True)
class TellArrival:
    """A version was received. `merged`: the learner's contributions up to this number are in it or an earlier version,
    unless they were rejected."""

    fragment: int
    version: int
    merged: int


@dataclass(frozen=True)
class Fail:
    """A request cannot succeed: raise this error in the learner."""

    error: DilocoError


Request = Describe | Initialise | Join | Fetch | Watch | Beat | Push | Lease | Leave
News = TellStart | TellArrival | CallForWork | Rejection | Grant | Drained | Hold | Settled | Fail
SessionAction = Request | CloseConnection | Dial | Drop | Warn | Close | News
