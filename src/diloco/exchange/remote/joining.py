"""Becoming part of a run: what its method is, giving it its model, and taking the newest model as a new incarnation."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import Message
from safetensors.torch import load, save

from diloco.core.fragments import Layout
from diloco.errors import AlreadyInitialisedError, DilocoError, NotInitialisedError, StaleIncarnationError
from diloco.exchange.base import Model, Opened
from diloco.exchange.remote.receiving import Receiving
from diloco.exchange.remote.session import Session
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, frames
from diloco.exchange.wire.rpc import HEARTBEAT_S

log = logging.getLogger("diloco")

ASK_AGAIN_S = 0.3
"""Between two looks whether somebody has initialised the run."""


@dataclass(frozen=True)
class Initial:
    """What an initialising learner says of its model: inner steps and tokens it was trained before, and where it came from."""

    step: int
    tokens: int
    source: str


class Joining:
    """Arguments:
    session: whose.
    receiving: gets the model.
    beat: gives a sign of life; returns what the syncer answers.
    initial: set for the learner that gives the run its model.
    timeout_s: how long to wait for a syncer, and for the run to have a model; None: as long as it takes.
    """

    def __init__(
        self, session: Session, receiving: Receiving, beat: Callable[[], pb.HeartbeatReply], *, initial: Initial | None,
        timeout_s: float | None,
    ) -> None:  # fmt: skip
        self._session = session
        self._receiving = receiving
        self._beat = beat
        self._initial = initial
        self._timeout_s = timeout_s

    def describe(self) -> pb.DescribeReply:
        """The run as the syncer describes it."""
        return self._session.retry(
            self._describe_once, waiting_for="the syncer does not answer", give_up_after_s=self._timeout_s
        )

    def _describe_once(self) -> pb.DescribeReply:
        session = self._session
        return session.connection.call("control", "Describe", pb.DescribeRequest(run=session.run), pb.DescribeReply)

    # --- the run's model --------------------------------------------------------------------------------------------------

    def initialise(self, layout: Layout, initial: Callable[[], Model]) -> None:
        """Give the run its model, or wait until somebody has.

        Raises:
            AlreadyInitialisedError: it has one, and this learner was to give it. NotInitialisedError: nobody did in time.
        """
        if self._initial is None:
            self._wait_for_model()
            return
        if self.describe().initialised:
            raise AlreadyInitialisedError(
                f"run {self._session.run!r} has a model already and keeps it; join it without initialise=True."
            )
        model = initial()
        parts = [bytes_of(theta) for theta in model.fragments] + [memoryview(save(dict(model.static)))]
        header = pb.InitialiseHeader(
            run=self._session.run, learner=self._session.learner, layout=json.dumps(layout.to_dict()), source=self._initial.source,
            step=self._initial.step, tokens=self._initial.tokens, part_bytes=[len(part) for part in parts],
        )  # fmt: skip
        self._give(lambda: frames(header, *parts))
        self._session.num_bytes["joins"] += sum(len(part) for part in parts)

    def _give(self, stream: Callable[[], Iterator[bytes]]) -> None:
        """Upload the initial model, again when the syncer was lost on the way and came back without it."""
        lost = False

        def attempt() -> Message:
            nonlocal lost
            if lost:
                found = self._describe_once()
                if found.initialised:  # it was durable; only the answer did not arrive
                    log.warning("the syncer was lost while run %r was given its model, and has it", self._session.run)
                    return found
            lost = True
            return self._session.connection.upload("joins", "Initialise", stream(), pb.InitialiseReply)

        self._session.retry(attempt)

    def _wait_for_model(self) -> None:
        started = time.monotonic()
        said = False
        while not self.describe().initialised:
            if self._timeout_s is not None and time.monotonic() - started > self._timeout_s:
                raise NotInitialisedError(
                    f"run {self._session.run!r} has no model after {self._timeout_s:g} s; start one learner with --initialise."
                )
            if not said:
                log.warning("run %r has no model yet; waiting for the learner that initialises it", self._session.run)
                said = True
            self._session.connection.closing.wait(ASK_AGAIN_S)

    # --- a new incarnation ------------------------------------------------------------------------------------------------

    def join(self) -> Opened:
        """As a new incarnation: everything from the syncer, losslessly.

        Raises:
            StaleIncarnationError: it joins again, and another process has joined by its name meanwhile.
        """
        session = self._session
        request = pb.JoinRequest(
            run=session.run,
            learner=session.learner,
            layout=json.dumps(session.layout.to_dict()),
            process=session.process,
        )
        while True:
            request.again = session.incarnation > 0
            reply = session.retry(lambda: session.connection.call("joins", "Join", request, pb.JoinReply))
            session.incarnation = reply.incarnation
            try:
                opened = self._fetch()
            except StaleIncarnationError:  # given up while it was fetching a large model over a slow link
                continue
            session.connection.close_channel("joins")
            return opened

    def _fetch(self) -> Opened:
        fetched = threading.Event()
        beating = self._session.start("diloco-join-heartbeat", lambda: self._beat_until(fetched))
        try:
            static = self._receiving.fetch_all()
        finally:
            fetched.set()
            beating.join()
        beaten, newest = self._beat(), self._receiving.newest
        return Opened(
            self._session.learner,
            self._session.incarnation,
            beaten.start_step,
            tuple(held.version for held in newest),
            Model(tuple(held.theta for held in newest), load(static)),
            beaten.run_tokens,
            tuple(held.outer_state for held in newest) if self._session.method.outer_at == "learners" else (),
            awaited=beaten.start_step < beaten.step,
        )

    def _beat_until(self, fetched: threading.Event) -> None:
        """While a model is fetched, so that a slow link does not look like death."""
        while not fetched.wait(HEARTBEAT_S):
            try:
                self._beat()
            except DilocoError as error:
                if not self._session.is_closing:
                    log.warning("no sign of life could be given while joining: %s", error)
                return
