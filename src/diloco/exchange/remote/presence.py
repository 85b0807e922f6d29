"""Signs of life, and hearing what the syncer has to say. A thread for each; both go over the control connection only."""

from __future__ import annotations

import logging
import threading
import time

from diloco.core import quorum
from diloco.errors import DilocoError, ExchangeError, StaleIncarnationError
from diloco.exchange.base import Called, Report
from diloco.exchange.patience import TIMES, Patience
from diloco.exchange.remote.receiving import Receiving
from diloco.exchange.remote.sending import Sending
from diloco.exchange.remote.session import Session
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import HEARTBEAT_S

log = logging.getLogger("diloco")

ANSWER_FLOOR_S, ANSWER_CAP_S = 1.2, 30.0
"""How long the answer to a sign of life may take before the control connection is dialled anew. With the time between two signs of
life it is well within what a syncer gives a learner to come back whose connection broke (`Deadlines.reconnect_floor_s`): it may have
broken at the syncer's end only. A link on which answers take long gets more time for them, and notices later."""

AWAY_AFTER_S = 4.0
"""A syncer that was not heard of for this long is not waited for when the learner leaves."""

WATCH_AGAIN_S = 0.2

SHORTEST_S = 0.05
"""Between two signs of life, however quickly the learner takes its steps."""


class Presence:
    """Tells the syncer that this learner lives, and takes its notices.

    Attributes:
        run_tokens: tokens trained by the run, as last heard.
        num_live: learners that take part, as last heard.
        sync_every: inner steps between two of this learner's pushes, as last heard; 0: the method's.
        welcome: the newest of the syncer's, once it counts on this learner, and the incarnation that it is for.
    """

    def __init__(self, session: Session, sending: Sending, receiving: Receiving) -> None:
        self._session = session
        self._sending = sending
        self._receiving = receiving
        self._patience = Patience(ANSWER_FLOOR_S, ANSWER_CAP_S)
        self._now = threading.Event()
        self._answered_at = time.monotonic()
        self._report = Report()
        self._is_away = False
        self._is_void = False
        self._tells_steps = False
        self._lock = threading.Lock()
        self.run_tokens = 0
        self.num_live = 1
        self.sync_every = 0
        self.welcome: tuple[int, pb.Welcome] | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """From here on the learner is heard and hears."""
        self._tells_steps = isinstance(self._session.method.quorum, quorum.Called)
        self._threads = [
            self._session.start("diloco-watch", self._watch_forever),
            self._session.start("diloco-heartbeat", self._beat_forever),
        ]

    def report(self, report: Report) -> None:
        """What the learner says of itself from now on. Its first tokens are told at once, and that it has finished; so is every step,
        where steps decide when the syncer calls."""
        with self._lock:
            if self._is_void:
                return
            is_first = (self._report.tokens == 0 and report.tokens > 0) or report.finished
            is_news = self._tells_steps and report.step > self._report.step
            self._report = report
        if is_first or is_news:
            self._now.set()

    def start_over(self) -> None:
        """The incarnation is given up: what its learner says is void until it has heard of that (`resume`)."""
        with self._lock:
            self._is_void, self._report = True, Report(step=self._report.step, finished=self._report.finished)

    def resume(self) -> None:
        """The learner speaks as the new incarnation."""
        with self._lock:
            self._is_void = False

    @property
    def is_answered(self) -> bool:
        """Whether the syncer was heard of lately."""
        return time.monotonic() - self._answered_at < AWAY_AFTER_S

    def close(self) -> None:
        """After the connection."""
        self._now.set()
        for thread in self._threads:
            thread.join()

    # --- signs of life ----------------------------------------------------------------------------------------------------

    def beat(self) -> pb.HeartbeatReply:
        """One sign of life, again until it is answered.

        Raises:
            StaleIncarnationError: this incarnation was given up.
        """
        reply = self._session.retry(self._beat_once)
        self.run_tokens, self.num_live, self.sync_every = reply.run_tokens, reply.live, reply.sync_every
        return reply

    def _beat_once(self) -> pb.HeartbeatReply:
        session = self._session
        incarnation = session.incarnation  # before the report: an old one's report must not be a new one's
        report = self._report
        request = pb.HeartbeatRequest(
            run=session.run, learner=session.learner, incarnation=incarnation, step=report.step, tokens=report.tokens,
            step_s=report.step_s or 0.0, waiting=report.waiting, finished=report.finished,
            versions=[held.version for held in self._receiving.newest],
        )  # fmt: skip
        started, limit_s = time.monotonic(), self._patience.limit_s
        try:
            reply = session.connection.call("control", "Heartbeat", request, pb.HeartbeatReply, timeout_s=limit_s)
        finally:  # at most twice as long the next time: one connection that has died does not make the link a slow one
            self._patience.paused(min(time.monotonic() - started, 2 * limit_s / TIMES))
        self._answered_at = time.monotonic()
        return reply

    def _beat_forever(self) -> None:
        session = self._session
        while not session.is_closing:
            self._now.wait(HEARTBEAT_S)
            self._now.clear()
            beaten_at = time.monotonic()
            incarnation = session.incarnation
            try:
                reply = self.beat()
            except StaleIncarnationError as error:
                session.given_up(incarnation, str(error))
                continue
            for fragment, version in enumerate(reply.versions):  # a notice may have been lost
                self._receiving.want(fragment, version, incarnation)
            session.connection.closing.wait(max(0.0, beaten_at + SHORTEST_S - time.monotonic()))

    # --- notices ----------------------------------------------------------------------------------------------------------

    def _watch_forever(self) -> None:
        session = self._session
        while not session.is_closing:
            incarnation = session.incarnation
            request = pb.WatchRequest(run=session.run, learner=session.learner, incarnation=incarnation)
            try:
                for notice in session.connection.watch(request):
                    self._take(notice, incarnation)
            except StaleIncarnationError as error:
                session.given_up(incarnation, str(error))
            except ExchangeError:
                if not (self._is_away or session.is_closing):
                    log.warning("lost the connection to the syncer at %s; trying again", session.connection.address)
                self._is_away = True
            session.connection.closing.wait(WATCH_AGAIN_S)

    def _take(self, notice: pb.Notice, incarnation: int) -> None:
        session = self._session
        match notice.WhichOneof("what"):
            case "welcome":
                session.boot = notice.welcome.boot
                self.welcome, self._is_away = (incarnation, notice.welcome), False
                session.inbox.wake()
                self._sending.offer_again()
            case "published":
                self._receiving.want(notice.published.fragment, notice.published.version, incarnation)
            case "called":
                session.inbox.tell(Called(notice.called.fragment, notice.called.version), incarnation)
            case "rejected":
                it = notice.rejected
                self._sending.rejected(it.fragment, it.round, it.reason, incarnation)
            case "evicted":
                if notice.evicted.replaced:
                    session.inbox.fail(
                        StaleIncarnationError(
                            f"another process has joined run {session.run!r} as {session.learner!r}; give every learner its own name."
                        )
                    )
                else:
                    session.given_up(incarnation, notice.evicted.reason)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def say_goodbye(self, timeout_s: float) -> None:
        """Leave the run. A syncer that is away is not waited for."""
        session = self._session
        request = pb.LeaveRequest(
            run=session.run, learner=session.learner, incarnation=session.incarnation, tokens=self._report.tokens
        )
        try:
            session.connection.call("control", "Leave", request, pb.LeaveReply, timeout_s=timeout_s)
        except DilocoError as error:
            log.warning("%s left without the syncer's answer: %s", session.learner, error)
