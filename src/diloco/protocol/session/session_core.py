"""`SessionCore`: sans-I/O bookkeeping of one learner's session with a syncer.

    events    from the learner, and from time: begin, offered, asked, report, leave, tick
              how a request has ended: described, initialised, joined, fetched, pushed, leased, beaten, left, failed,
              ended
              notices of the syncer: welcomed, heard, evicted
    answers   requests to make and news for the learner: `protocol.session.requests`

    entering → joining → fetching → starting → running → leaving → parting → over
    an evicted learner returns to joining; if the pool has no place for it any more, it is drained until it leaves

An event changes the state of the session (`session.session_state`), and the next requests follow from that state. The
syncer sends its whole `Standing` on every connection and with every heartbeat, so a message that is lost or received
twice changes nothing. A syncer that serves an older state of the run than an earlier one is not followed
(`protocol.lineage`).

This module uses no tensor, clock, socket or thread; `exchange.remote` drives it with threads, and virtual time with a
simulated network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from diloco.errors import (
    AlreadyInitialisedError,
    AuthError,
    CorruptPayloadError,
    DigestError,
    DilocoError,
    DrainedError,
    LineageError,
    NoRoomError,
    RestartedError,
    StaleIncarnationError,
    UnreachableError,
    VersionError,
)
from diloco.protocol.contribution import (
    NOTHING,
    CallForWork,
    Contribution,
    Drained,
    Hold,
    Rejection,
    Settled,
    Standing,
    Verdict,
)
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.lineage import Lineage, refusal
from diloco.protocol.members import Claim, Report
from diloco.protocol.session import requests
from diloco.protocol.session.joining import LEAVE_TIMEOUT_S
from diloco.protocol.session.lanes import Lane
from diloco.protocol.session.session_state import Actions, SessionState
from diloco.protocol.session.transfers import ModelCache, Outbox

ASK_AGAIN_S = 0.3
"""Poll interval while waiting for the run's initial model."""


class SessionCore(SessionState):
    """The events of one learner's session with the syncer of one run."""

    # --- the learner, and time ----------------------------------------------------------------------------------------

    def begin(self, now: float) -> Actions:
        """Begin to enter the run."""
        self._entrance.begin(now)
        return self.tick(now)

    def offered(self, now: float, c: Contribution) -> Actions:
        """A new contribution. It is dropped if its incarnation was evicted."""
        if not self._has_started_as(c.incarnation):
            return [requests.Drop(c)]
        self._outbox.add(c)
        return self.tick(now)

    def asked(self, now: float, incarnation: int, ask: Ask) -> Actions:
        """The learner asks for units of data, one request at a time. Ignored if the incarnation was evicted."""
        if not self._has_started_as(incarnation):
            return []
        self._ask = ask
        return self.tick(now)

    def report(self, now: float, incarnation: int, report: Report) -> Actions:
        """Set the content of the next heartbeats. Of an evicted incarnation, only its trained tokens count."""
        if not self._has_started_as(incarnation):
            self._heartbeat.trained_earlier(report.all_tokens)
            return []
        self._heartbeat.reported(report)
        return self.tick(now)

    def restored(self, versions: Sequence[int]) -> None:
        """The run was taken back to a checkpoint, from which the learner has these versions of the fragments."""
        self._cache.restored(versions)
        self.seen = None

    def leave(self, now: float, *, timeout_s: float = LEAVE_TIMEOUT_S) -> Actions:
        """The learner takes no more steps and leaves; the last action is `Close`. `timeout_s`: how long it waits
        until a syncer that answers has its contributions, and at most as long again for the answer to its goodbye."""
        if not self._is_member:
            if self.phase in ("joining", "drained"):
                self._departure.begin(now, timeout_s)
                return self._say_late(now)
            return self._over() if self.phase == "entering" else []
        self.phase = "leaving"
        self._departure.begin(now, timeout_s)
        self._heartbeat.leave(now)
        return self.tick(now)

    # --- becoming part of the run -------------------------------------------------------------------------------------

    def described(
        self, now: float, describe: requests.Describe, lineage: Lineage, *, initialised: bool
    ) -> Actions:  # fmt: skip
        """The syncer has told whether the run has a model."""
        begins = self.phase == "entering" and not initialised and bool(self._entrance.initialises)
        if not begins and (error := refusal(self.seen, lineage)) is not None:
            return self.failed(now, describe, error)
        actions: Actions = [*self._lanes.answered(describe)]
        self._looks_around = False
        self._departure.heard(now)
        if self.phase != "entering":
            return actions + self.tick(now)
        if (error := self._entrance.described(now, has_model=initialised)) is not None:
            return actions + self._fail(self._lanes.control, error)
        if self._entrance.step == "ask":
            self._lanes.control.ready_at = now + ASK_AGAIN_S
            text = f"run {self.run!r} has no model yet; waiting for the learner that initialises it"
            actions += self._warn_once("no model", text)
        return actions + self.tick(now)

    def initialised(self, now: float) -> Actions:
        """The run was initialised with this learner's model."""
        self._lanes.receive.ended()
        self._entrance.uploaded()
        return self.tick(now)

    def joined(self, now: float, join: requests.Join, lineage: Lineage, incarnation: int) -> Actions:
        """The learner has a new incarnation, which holds no model yet."""
        if (error := refusal(self.seen, lineage)) is not None:
            return self.failed(now, join, error)
        self._lanes.receive.ended()
        self._looks_around = False
        if self.phase == "joining":
            self._follow(lineage)
            self.phase, self._claim = "fetching", replace(self._claim, incarnation=incarnation)
            self._heartbeat.plan(now)
        return self.tick(now)

    def _start(self) -> Actions:
        """Start once the syncer counts the learner as live and enough learners are live.

        The learner starts from the step of its welcome: by the time that it hears of the others, they may have begun. A
        learner that an open round waits for starts at once, since learners that have finished do not return.
        """
        welcome, standing = self._welcome, self.standing
        if self.phase != "starting" or welcome is None or standing is None:
            return []
        is_awaited = welcome.start_step < welcome.step
        is_missed = is_awaited and standing.num_live > 1
        at_least = standing.at_least or self._at_least
        is_over = standing.budget.is_spent(standing.run_tokens, welcome.start_step)
        if not self._has_started and standing.num_live < at_least and not is_missed and not is_over:
            text = f"{standing.num_live} of at least {at_least} learners are live; waiting for the others"
            return self._warn_once("quorum", text)
        text = f"run {self.run!r} has a model, at step {standing.step}; {self._claim.learner} uses it, not its own"
        said = [requests.Warn(text)] if not self._has_started and self._entrance.adopts else []
        reason = self._reason if self._has_started else None
        self.phase, self._has_started = "running", True
        is_awaited |= self._has_run_gone_back
        self._started_in, self._is_held, self._is_settled = self.seen, False, False
        return [
            *said,
            requests.TellStart(self._claim_with_versions, welcome.start_step, is_awaited, standing.run_tokens, reason),
            *self._tell(standing),
        ]

    def _join_again(self, now: float, reason: str) -> Actions:
        """This incarnation was evicted, and its contributions are void."""
        if self.phase == "leaving":
            return self._say_late(now)
        self.phase, self._reason = "joining", reason
        drops = [requests.Drop(c) for c in self._outbox.contributions]
        self._outbox, self._cache = Outbox(self._num_fragments), ModelCache(self._num_fragments, self.held)
        self._welcome = self._ask = None
        self._heartbeat.start_over()
        return [*drops, requests.Warn(f"{self._claim.learner} was evicted ({reason}) and joins again")]

    # --- the model and the contributions ------------------------------------------------------------------------------

    def distrusts(self, lineage: Lineage) -> DilocoError | None:
        """The error if the learner must not use a part fetched from this syncer; None: it follows that syncer."""
        return refusal(self.seen, lineage)

    def fetched(
        self, now: float, fetch: requests.Fetch, lineage: Lineage, version: int, verdicts: Iterable[Verdict] = ()
    ) -> Actions:  # fmt: skip
        """A part was received at this version, decoded and verified, from a syncer that is not distrusted, with
        verdicts on contributions to it."""
        self._lanes.receive.ended()
        if not self._is_current(fetch.claim):
            return self.tick(now)
        self._follow(lineage)
        self._cache.fetched(fetch, version)
        actions = self._take(verdicts)
        if self.phase == "fetching" and self._cache.is_complete:
            self.phase = "starting"
            self._heartbeat.urge()
        elif self.phase == "running" and fetch.fragment is not None:
            merged = self._outbox.merged_in(fetch.fragment, version)
            actions.append(requests.TellArrival(fetch.fragment, version, merged))
        return actions + self._settle() + self.tick(now)

    def pushed(self, now: float, push: requests.Push) -> Actions:
        """A contribution was acknowledged by the process of the syncer that it was addressed to."""
        self._lanes.send.ended()
        if self._is_current(push.claim):
            self._outbox.acknowledged(push.contribution, push.boot)
            if self._heartbeat.report.finished or self._heartbeat.report.blocked_with:
                self._heartbeat.urge()
        return self.tick(now)

    def leased(self, now: float, lease: requests.Lease, grant: Grant) -> Actions:
        """A request for units of data was answered."""
        self._lanes.data.ended()
        if not self._is_current(lease.claim):
            return self.tick(now)
        if not grant.number:  # of groups, too few are free
            self._lanes.data.pause(now)
            return self.tick(now)
        self._ask = None
        return [grant, *self.tick(now)]

    # --- answers and notices of the syncer ----------------------------------------------------------------------------

    def beaten(
        self, now: float, beat: requests.Beat, lineage: Lineage, standing: Standing, *, is_suspended: bool = False
    ) -> Actions:  # fmt: skip
        """A heartbeat was answered by this syncer. `is_suspended`: the syncer does not reach its store, so that it
        publishes and acknowledges nothing now. Another syncer may have taken over: the next heartbeat asks there."""
        if (error := refusal(self.seen, lineage)) is not None:
            return self.failed(now, beat, error)
        self._heartbeat.ended(now)
        self._heartbeat.plan(now, starting=self.phase == "starting")
        if not is_suspended:
            self._said.discard("suspended")
        actions: Actions = []
        if is_suspended and not self._is_alone:
            self._lanes.control.is_busy = False
            actions += self._lanes.connection.failed(beat.connection)
        else:
            actions += self._lanes.answered(beat)
        if is_suspended:
            text = "the syncer does not reach its store; training goes on, and contributions wait for it"
            actions += self._warn_once("suspended", text)
        return actions + self._hear(now, beat.claim, lineage, standing)

    def welcomed(self, now: float, watch: requests.Watch, lineage: Lineage, standing: Standing) -> Actions:
        """The first notice of a stream: from now on the syncer counts the learner as live."""
        if refusal(self.seen, lineage) is not None:
            return [*self._lanes.connection.failed(watch.connection)]
        self._lanes.watch.reset()
        if self._is_current(watch.claim):
            self._welcome = standing
        return self._hear(now, watch.claim, lineage, standing)

    def heard(self, now: float, watch: requests.Watch, lineage: Lineage, standing: Standing) -> Actions:
        """A later notice of a stream, from the syncer that opened it: the standing has changed."""
        return self._hear(now, watch.claim, lineage, standing) if refusal(self.seen, lineage) is None else []

    def evicted(self, now: float, watch: requests.Watch, reason: str, *, replaced: bool) -> Actions:
        """The syncer has evicted this incarnation. `replaced`: a newer incarnation took its place.

        The newer one belongs to another process, unless an earlier join request of this process was lost to it but
        reached the syncer. In that case the learner joins again, which the syncer grants to the same process only.
        """
        if not self._is_current(watch.claim):
            return []
        if replaced and self.phase != "leaving" and not self._has_lost_join:
            text = (
                f"another process has joined run {self.run!r} as {self._claim.learner!r}; give every "
                "learner its own name, or pass ranks= to Learner where the processes are ranks of one learner."
            )
            for lane in self._lanes.all:
                lane.is_stopped = True
            return [requests.Fail(StaleIncarnationError(text))]
        return self._join_again(now, reason) + self.tick(now)

    def ended(self, now: float, watch: requests.Watch) -> Actions:
        """The syncer has closed a stream of notices."""
        self._lanes.watch.is_busy, self._welcome = False, None
        self._lanes.watch.pause(now)
        return self.tick(now)

    def left(self, now: float) -> Actions:
        """The syncer has acknowledged the goodbye."""
        return self._over()

    def _hear(self, now: float, claim: Claim, lineage: Lineage, standing: Standing) -> Actions:
        self._departure.heard(now)
        if not self._is_current(claim):
            return self.tick(now)
        self._follow(lineage)
        if self.standing is None or self.standing.order <= standing.order:  # answers and notices overtake each other
            self.standing = self.last_standing = standing
            self._cache.published(standing.versions)
        actions = self._take(standing.verdicts)
        actions += self._tell(self.standing) if self.phase == "running" else self._start()
        return actions + self._settle() + self.tick(now)

    def _settle(self) -> Actions:
        """Tell the learner whether a version may follow those that it was told of, when that changes."""
        standing, was_settled = self.standing, self._is_settled
        if self.phase == "running" and standing is not None:
            self._is_settled = standing.settled and self._cache.has(standing.versions)
        return [Settled(self._is_settled)] if self._is_settled != was_settled else []

    def _follow(self, lineage: Lineage) -> None:
        """Follow a syncer; one that was started later may lack contributions that an earlier one acknowledged."""
        if lineage == self.seen:
            return
        self.seen, self.standing = lineage, None
        self._lanes.send.reset()
        if self._heartbeat.report.finished:  # the last heartbeat was addressed to another process
            self._heartbeat.urge()

    def _take(self, verdicts: Iterable[Verdict]) -> Actions:
        actions: Actions = []
        for verdict, contribution in self._outbox.take(verdicts):
            actions.append(requests.Drop(contribution))
            if verdict.reason is not None:
                actions.append(Rejection(verdict.fragment, verdict.number, verdict.reason))
        return actions

    def _tell(self, standing: Standing) -> Actions:
        """The new calls for the learner, and whether it is to pause."""
        calls = [CallForWork(fragment, version) for fragment, version in self._cache.called(standing.calls)]
        was_held, self._is_held = self._is_held, standing.paused
        return [*calls, Hold(standing.paused)] if was_held != standing.paused else [*calls]

    # --- failures -----------------------------------------------------------------------------------------------------

    def failed(self, now: float, request: requests.Request, error: DilocoError) -> Actions:
        """A request has failed: it is repeated, this incarnation is evicted, or the learner fails."""
        if isinstance(request, requests.Leave):
            if isinstance(error, StaleIncarnationError) and request.claim.incarnation:
                return self._say_late(now)  # the notice of its eviction was lost
            if isinstance(error, UnreachableError) and (again := self._say_elsewhere(now, request)) is not None:
                return [again]
            return [requests.Warn(f"{self._claim.learner} left without the syncer's answer: {error}"), *self._over()]
        if self.phase == "drained":
            return []
        lane = self._lanes.of(request)
        lane.is_busy = False
        if isinstance(request, requests.Beat):
            self._heartbeat.ended(now)
            self._heartbeat.urge()
        elif isinstance(request, requests.Watch):
            self._welcome = None
        return self._mend(now, request, lane, error) + self.tick(now)

    def _mend(self, now: float, request: requests.Request, lane: Lane, error: DilocoError) -> Actions:
        match request, error:
            case requests.Describe(), UnreachableError() | LineageError() if self._gives_up(now):
                return self._fail(lane, error)
            case requests.Describe() | requests.Beat() | requests.Watch() | requests.Lease(), AuthError() if (
                not self._lanes.connection.is_followed(request.connection)
            ):  # another syncer refuses the learner; the followed one may be back
                return self._lanes.failed(now, request, error)
            case _, UnreachableError() | NoRoomError() | LineageError():
                if isinstance(error, UnreachableError):  # the request may have reached the syncer
                    if isinstance(request, requests.Initialise):
                        self._entrance.lost()
                    self._has_lost_join |= isinstance(request, requests.Join)
                if isinstance(request, requests.Join) and not isinstance(error, NoRoomError):
                    self._looks_around = not self._is_alone
                return self._lanes.failed(now, request, error)
            case requests.Join(), DrainedError() if self._has_started:
                self.phase = "drained"
                return [requests.Warn(str(error)), Drained()]
            case requests.Initialise(), AlreadyInitialisedError() if self._entrance.refused():
                return []
            case requests.Push(boot=boot), RestartedError():
                if self.seen is not None and boot == self.seen.boot:
                    lane.pause(now)
                    self._heartbeat.urge()  # its answer names the new process
                return []
            case requests.Fetch(fragment=int(fragment), base=base), VersionError() | CorruptPayloadError() if (
                base != NOTHING
            ):
                if self._is_current(request.claim):
                    self._cache.distrust(fragment)
                return [requests.Warn(f"{error}; fetching the whole fragment")]
            case requests.Fetch(base=base), VersionError() if base == NOTHING and not isinstance(error, DigestError):
                lane.pause(now)  # ranks of this learner received different versions: one was published in between
                return []
            case (
                requests.Fetch() | requests.Watch() | requests.Beat() | requests.Push() | requests.Lease(),
                StaleIncarnationError(),
            ):
                return self._join_again(now, str(error)) if self._is_current(request.claim) else []
        return self._fail(lane, error)

    def _gives_up(self, now: float) -> bool:
        """Whether the time to join the run is over."""
        return not self._has_started and self._entrance.is_late(now)

    def _fail(self, lane: Lane, error: DilocoError) -> Actions:
        lane.is_stopped = True
        return [requests.Fail(error)]
