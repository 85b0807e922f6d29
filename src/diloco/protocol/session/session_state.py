"""`SessionState`: the state of a learner's session with a syncer, and the requests that follow from it.

Requests belong to lanes (control, watch, receive, send, data), and each lane has at most one under way. Which request
is next follows from the state alone: the phase, the versions held and published, the contributions without a verdict,
and the process of the syncer that acknowledged them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from diloco.protocol.contribution import Standing
from diloco.protocol.leases import Ask
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Report
from diloco.protocol.session import requests
from diloco.protocol.session.heartbeat import ANSWER_CAP_S, ANSWER_OF_SEVERAL_CAP_S, HEARTBEAT_S, SHORTEST_S, Heartbeat
from diloco.protocol.session.joining import Departure, Entrance, Initialises
from diloco.protocol.session.lanes import Lanes
from diloco.protocol.session.requests import SessionAction
from diloco.protocol.session.transfers import ModelCache, Outbox

LEASE_TIMEOUT_S = 30.0
"""For units of data. A connection that has died is found by the heartbeats over it, which end its other calls."""

SessionPhase = Literal[
    "entering", "joining", "fetching", "starting", "running", "leaving", "drained", "parting", "over"
]  # fmt: skip
Actions = list[SessionAction]


class SessionState:
    """The state of one learner in one run.

    Arguments:
        run: its name.
        claim: this learner's, without an incarnation; with the syncer that its checkpoint followed, if any.
        num_fragments: of the model.
        at_least: live learners that the run needs before this one starts.
        reports_every_step: every inner step is reported to the syncer at once.
        heartbeat_s: between two heartbeats while nothing changes; infinite where no message is ever lost.
        shortest_s: between any two heartbeats.
        initialises: whether this learner gives the run its model.
        join_timeout_s: how long to wait for a syncer, and for the run to have a model; None: as long as it takes.
        num_addresses: of syncers, which are tried in turn.
        held: the fragments that this learner holds; None: all of them. Of the others nothing is fetched.

    Attributes:
        run, held: as given.
        phase: as in `session.session_core`.
        seen: the syncer that this learner follows; None: none has been heard yet.
        standing: the newest from the process of the syncer that is followed; None: none yet.
        last_standing: the newest from any process of it.
        wake_at: call `tick` at this time, unless another event precedes it.
    """

    def __init__(
        self,
        run: str,
        claim: Claim,
        num_fragments: int,
        *,
        at_least: int = 1,
        reports_every_step: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        shortest_s: float = SHORTEST_S,
        initialises: Initialises = False,
        join_timeout_s: float | None = None,
        num_addresses: int = 1,
        held: Collection[int] | None = None,
    ) -> None:
        self.run, self.held = run, held
        self._claim = claim  # of the newest incarnation, without its knowledge
        self.phase: SessionPhase = "entering"
        self.seen = claim.seen
        self.standing: Standing | None = None
        self.last_standing: Standing | None = None
        self.wake_at = math.inf
        self._num_fragments, self._at_least = num_fragments, at_least
        self._entrance = Entrance(run, initialises=initialises, timeout_s=join_timeout_s)
        self._is_alone = num_addresses == 1
        self._looks_around = False  # it asks the addresses which syncer serves the run, before it joins
        self._lanes, self._departure = Lanes(num_addresses), Departure()
        self._heartbeat = Heartbeat(
            reports_every_step=reports_every_step, every_s=heartbeat_s, shortest_s=shortest_s,
            answer_cap_s=ANSWER_CAP_S if self._is_alone else ANSWER_OF_SEVERAL_CAP_S,
        )  # fmt: skip
        self._outbox, self._cache = Outbox(num_fragments), ModelCache(num_fragments, held)
        self._ask: Ask | None = None  # a request for units that is not answered
        self._welcome: Standing | None = None  # the first notice of the open stream
        self._has_started = self._has_lost_join = False
        self._reason: str | None = None  # why the incarnation before was evicted
        self._started_in: Lineage | None = None
        self._is_held = False  # whether the learner was told to pause
        self._is_settled = False  # whether it was told that the run has ended
        self._said = set[str]()

    @property
    def claim(self) -> Claim:
        """The claim of the newest incarnation, without versions."""
        return replace(self._claim, seen=self.seen)

    @property
    def _claim_with_versions(self) -> Claim:
        return replace(self.claim, versions=tuple(self._cache.held))

    @property
    def is_away(self) -> bool:
        """Whether a request is being repeated because the syncer was not reached."""
        return self._lanes.is_away

    @property
    def _is_member(self) -> bool:
        """Whether the newest incarnation is a member of the run, as far as is known."""
        return self.phase in ("fetching", "starting", "running", "leaving")

    @property
    def _has_voice(self) -> bool:
        return self.phase in ("running", "leaving")

    def _is_current(self, claim: Claim) -> bool:
        return self._is_member and claim.incarnation == self._claim.incarnation

    def _has_started_as(self, incarnation: int) -> bool:
        """Whether the learner has started as this incarnation, and it is not evicted."""
        return self._has_voice and incarnation == self._claim.incarnation

    def _warn_once(self, what: str, text: str) -> Actions:
        if what in self._said:
            return []
        self._said.add(what)
        return [requests.Warn(text)]

    @property
    def _has_run_gone_back(self) -> bool:
        """Whether the run may be at an earlier step than when this learner started: in a later epoch than that."""
        before, now = self._started_in, self.seen
        return before is not None and now is not None and before.epoch < now.epoch

    # --- the next requests --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Time may have passed: the requests that are due, one per free lane. Sets `wake_at`."""
        lanes, actions = self._lanes, list[SessionAction]()
        self.wake_at = math.inf
        if self.phase in ("drained", "parting", "over"):
            return actions
        if self.phase == "entering" and self._entrance.step == "join":
            self.phase = "joining"
        nexts = (
            self._control_request, self._watch_request, self._receive_request, self._send_request, self._data_request
        )  # fmt: skip
        for lane, next_request in zip(lanes.all, nexts, strict=True):
            if lane.is_free(now) and (request := next_request(now)) is not None:
                lane.is_busy = True
                actions.append(request)
        if self.phase == "leaving":
            actions += self._part(now)
        if self.phase != "parting":
            is_due = self._is_member and not lanes.control.is_busy and not lanes.control.is_stopped
            control_at = max(self._heartbeat.due_at, lanes.control.ready_at) if is_due else math.inf
            self.wake_at = min(lanes.next_at(now), self._departure.next_at, control_at)
        return actions

    def _control_request(self, now: float) -> requests.Request | None:
        connection = self._lanes.connection.number
        if self._looks_around or (self.phase == "entering" and self._entrance.step == "ask"):
            return requests.Describe(connection)
        if not self._is_member or now < self._heartbeat.due_at:
            return None
        self._heartbeat.began(now)
        return requests.Beat(self._claim_with_versions, connection, self._heartbeat.timeout_s, self._report)

    @property
    def _report(self) -> Report:
        """The content of a heartbeat. A learner reports that it has finished, or is blocked, only once the syncer has
        all its contributions: otherwise a round would be closed without those in flight."""
        report = replace(self._heartbeat.report, confirmed=self._outbox.confirmed)
        is_sending = self.seen is not None and self._outbox.next(self.seen.boot) is not None
        return replace(report, finished=False, blocked_with=()) if is_sending else report

    def _watch_request(self, now: float) -> requests.Request | None:
        """A learner with an open stream counts as live, so it opens one once it has a model, and over a connection that
        has carried an answer."""
        connection = self._lanes.connection
        if self.phase not in ("starting", "running", "leaving") or not connection.is_answered:
            return None
        return requests.Watch(self._claim_with_versions, connection.number)

    def _receive_request(self, now: float) -> requests.Request | None:
        match self.phase:
            case "entering" if self._entrance.step == "initialise":
                return requests.Initialise(self.claim)
            case "joining":
                return requests.Join(self.claim)
            case "fetching" | "starting" | "running":
                return self._cache.next(self._claim_with_versions)
        return None

    def _send_request(self, now: float) -> requests.Request | None:
        if not self._has_voice or self.seen is None:
            return None
        c = self._outbox.next(self.seen.boot)
        return None if c is None else requests.Push(self.claim, c, self.seen.boot)

    def _data_request(self, now: float) -> requests.Request | None:
        if self.phase != "running" or self._ask is None:
            return None
        return requests.Lease(self.claim, self._lanes.connection.number, LEASE_TIMEOUT_S, self._ask)

    def _is_sending(self, now: float) -> bool:
        """Whether a contribution is not acknowledged yet."""
        send = self._lanes.send
        return not send.is_stopped and (send.is_busy or self._send_request(now) is not None)

    def _part(self, now: float) -> Actions:
        """Leave once all contributions are acknowledged, the time is over, or the syncer does not answer."""
        departure, is_sending = self._departure, self._is_sending(now)
        # A single heartbeat may be late. While contributions are sent, their answers show whether the syncer answers.
        is_gone = departure.is_silent(now) or (self._lanes.send if is_sending else self._lanes).is_away
        if is_sending and not is_gone and not departure.is_late(now):
            return []
        leave = self._goodbye(now, self.claim, departure.gone_timeout_s if is_gone else departure.timeout_s(now))
        text = f"{self._claim.learner} leaves before its last contribution was acknowledged"
        return [requests.Warn(text), leave] if is_sending else [leave]

    def _say_late(self, now: float) -> Actions:
        """Leave without an incarnation: the newest was evicted, and may have trained more than it had reported."""
        if self._heartbeat.report.all_tokens == 0:
            return self._over()
        departure = self._departure
        timeout_s = departure.gone_timeout_s if self._lanes.is_away else departure.timeout_s(now)
        return [self._goodbye(now, replace(self.claim, incarnation=0), timeout_s)]

    def _goodbye(self, now: float, claim: Claim, timeout_s: float) -> requests.Leave:
        """It is for the syncer that answered last: one late heartbeat makes a learner ask another, which may wait."""
        self.phase, self.wake_at = "parting", math.inf
        self._departure.over_at = now + timeout_s
        return requests.Leave(claim, self._lanes.connection.followed, timeout_s, self._heartbeat.report)

    def _say_elsewhere(self, now: float, leave: requests.Leave) -> requests.Leave | None:
        """The goodbye to the next address, which may have taken over, once each and within the time of the first."""
        left_s, connection = self._departure.over_at - now, leave.connection + 1
        if left_s <= 0 or self._lanes.connection.is_followed(connection):
            return None
        return replace(leave, connection=connection, timeout_s=left_s)

    def _over(self) -> Actions:
        self.phase, self.wake_at = "over", math.inf
        return [requests.Close()]
