"""A learner's exchange with a syncer over the internet.

The learner dials out to one address and one port. Four threads keep the training thread free: one encodes and sends (`sending`), one
receives and decodes (`receiving`), one watches for notices and one says that the learner is alive (`presence`). Losing the syncer
is not an error: everything is tried again until it is back, and what was sent and not yet published is offered again. Being given up
by the syncer means joining as a new incarnation (`joining`) and starting from the newest model.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from diloco.core.contribution import Contribution
from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.errors import ConfigError, ExchangeError, StaleIncarnationError
from diloco.exchange.base import Event, Exchange, Model, Opened, Rejoined, Report
from diloco.exchange.connection import Connection
from diloco.exchange.remote.joining import Initial, Joining
from diloco.exchange.remote.presence import Presence
from diloco.exchange.remote.receiving import Receiving
from diloco.exchange.remote.sending import Sending
from diloco.exchange.remote.session import Session
from diloco.exchange.wire import syncer_pb2 as pb

log = logging.getLogger("diloco")

LEAVE_TIMEOUT_S = 10.0
"""What `close` waits at most for a syncer that answers to take what is on its way and to hear goodbye."""

GONE_TIMEOUT_S = 1.0
"""The same for one that does not answer."""

LOOK_AGAIN_S = 0.2
"""Between two looks whether enough learners are there to begin."""


def connect(
    address: str, *, run: str, token: str | None = None, learner: str | None = None, ca: str | Path | None = None,
    insecure: bool = False, initialise: bool = False, initial_step: int = 0, initial_tokens: int = 0, source: str = "learner",
    join_timeout_s: float | None = None,
) -> Remote:  # fmt: skip
    """An exchange with the syncer at `address`. Nothing is dialled before a `Learner` takes it.

    Arguments:
        address: "host:port" of the syncer.
        run: the run's name; a syncer that serves another refuses.
        token: bearer token with the role learner.
        learner: this learner's id, unique in the run and the same after a restart; default: the host's name.
        ca: PEM file of the authority that signed the syncer's certificate. None: the system's authorities; plain text only to a
            loopback address or with `insecure`.
        insecure: plain text to another machine, on purpose.
        initialise: give the run this learner's model. Exactly one learner does so, once.
        initial_step, initial_tokens: what that model was trained on before (a warm start).
        source: for people: where that model came from.
        join_timeout_s: how long to wait for a syncer to answer, and for the run to have a model; None: as long as it takes.

    Raises:
        ConfigError: an address or a combination that cannot be.
    """
    return Remote(
        Connection(address, token=token, ca=ca, insecure=insecure),
        run=run,
        learner=learner or socket.gethostname(),
        initial=Initial(initial_step, initial_tokens, source) if initialise else None,
        join_timeout_s=join_timeout_s,
    )


class Remote(Exchange):
    """One learner's end of a run that a syncer serves; `connect` makes it."""

    gradients = False

    def __init__(
        self, connection: Connection, *, run: str, learner: str, initial: Initial | None = None, join_timeout_s: float | None = None
    ) -> None:  # fmt: skip
        self._session = Session(connection, run=run, learner=learner)
        self._session.given_up = self._given_up
        self._sending = Sending(self._session)
        self._receiving = Receiving(self._session, self._sending)
        self._presence = Presence(self._session, self._sending, self._receiving)
        self._joining = Joining(
            self._session, self._receiving, self._presence.beat, initial=initial, timeout_s=join_timeout_s
        )
        self._closing = threading.Lock()
        self._closed = False

    # --- joining ----------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        method = Method.from_dict(json.loads(self._joining.describe().method))
        if given is not None and (difference := given.difference(method)):
            raise ConfigError(
                f"the method given (here) is not run {self._session.run!r}'s (there): {difference}; pass method=None to take the run's."
            )
        return method

    def open(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> Opened:
        self._session.layout, self._session.method = layout, method
        self._joining.initialise(layout, initial)
        opened = self._joining.join()
        self._session.inbox.start_over(self._session.incarnation)
        self._presence.start()
        return self._wait_for_start(opened, method.quorum.at_least)

    def _wait_for_start(self, opened: Opened, at_least: int) -> Opened:
        """Until the syncer counts on this learner and the quorum is there; returns what to start from.

        A learner that is given up while it waits joins again, like any other, and starts as the new incarnation. It starts from where
        it was welcome: by the time that it hears of the others, they may have begun.
        """
        session, inbox, said = self._session, self._session.inbox, False
        while True:
            inbox.wait_until(lambda: self._presence.welcome is not None)
            incarnation = session.incarnation
            try:
                beaten = self._presence.beat()
            except StaleIncarnationError as error:
                self._given_up(incarnation, str(error))
            else:
                if (again := inbox.take_rejoined()) is not None:
                    opened = again
                    self._presence.resume()
                welcome_for, welcome = self._presence.welcome or (0, pb.Welcome())
                if beaten.live >= at_least and opened.incarnation == welcome_for == incarnation == session.incarnation:
                    return replace(opened, step=welcome.step, awaited=welcome.awaited)
                if not said and beaten.live < at_least:
                    log.warning("%d of at least %d learners are here; waiting for the others", beaten.live, at_least)
                    said = True
            inbox.wait_until(lambda: False, LOOK_AGAIN_S)

    def _given_up(self, incarnation: int, reason: str) -> None:
        """The syncer has given this incarnation up: join again, on the receiver, once; not, where it is leaving anyway."""
        if self._closed:
            return
        self._receiving.worker.submit(lambda: self._rejoin(incarnation, reason))

    def _rejoin(self, incarnation: int, reason: str) -> None:
        session = self._session
        if incarnation != session.incarnation:
            return
        log.warning("%s was given up (%s) and joins again", session.learner, reason)
        self._presence.start_over()
        opened = self._joining.join()
        self._sending.start_over()
        session.inbox.start_over(session.incarnation, Rejoined(opened, reason))

    # --- the protocol -----------------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._sending.offer(contribution, payload)

    def poll(self) -> Sequence[Event]:
        events = self._session.inbox.take()
        if any(isinstance(event, Rejoined) for event in events):
            self._presence.resume()
        return events

    def wait(self) -> None:
        self._session.inbox.wait()

    def report(self, report: Report) -> None:
        self._presence.report(report)

    @property
    def run_tokens(self) -> int | None:
        return self._presence.run_tokens

    @property
    def num_live(self) -> int:
        return self._presence.num_live

    @property
    def sync_every(self) -> int | None:
        return self._presence.sync_every or None

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return dict(self._session.num_bytes)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._session.incarnation:
            self._part()
        self._session.connection.close()
        self._session.inbox.fail(ExchangeError("this learner's exchange was closed; connect again to train on."))
        self._sending.worker.close()
        self._receiving.worker.close()
        self._presence.close()

    def _part(self) -> None:
        """Let what is on its way arrive, then leave; neither is waited for when the syncer does not answer."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        if not self._sending.worker.wait_until_idle(LEAVE_TIMEOUT_S, or_else=lambda: not self._is_there()):
            log.warning("%s leaves while a contribution is still on its way", self._session.learner)
        left_s = deadline - time.monotonic() if self._is_there() else 0.0
        self._presence.say_goodbye(max(GONE_TIMEOUT_S, left_s))

    def _is_there(self) -> bool:
        return self._presence.is_answered and not self._session.connection.is_away
