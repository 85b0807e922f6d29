"""The requests before a learner trains: describe the run, initialise it, and join it."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from safetensors.torch import save

from diloco.core.fragments import Layout
from diloco.errors import AuthError, DilocoError, NoRoomError, StandbyError, UnreachableError
from diloco.exchange.base import FlatModel
from diloco.exchange.dialling import Dialler
from diloco.exchange.remote.messages import request_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.outgoing import OutgoingUpload
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.lineage import Lineage
from diloco.protocol.session import requests
from diloco.protocol.session.joining import Initialises
from diloco.protocol.session.lanes import Lane

log = logging.getLogger("diloco")

R = TypeVar("R")


@dataclass(frozen=True)
class Initial:
    """The origin of the model that initialises a run.

    Attributes:
        step, tokens: inner steps and tokens that it was trained on before the run.
        source: a description for people.
        seen: the lineage that its checkpoint followed; None: it belongs to no run.
        initialises: as `initialise` of `connect`.
    """

    step: int
    tokens: int
    source: str
    seen: Lineage | None = None
    initialises: Initialises = True


def describe(dialler: Dialler, run: str, timeout_s: float | None) -> pb.DescribeReply:
    """The description of the run by a syncer that serves it, whose address becomes number 0. Raises as `answer`."""

    def ask() -> pb.DescribeReply:
        reply = dialler.current.call("control", "Describe", pb.DescribeRequest(run=run), pb.DescribeReply)
        dialler.expect_answers_within(reply.lost_floor_s)
        dialler.start_here()
        return reply

    return answer(dialler, timeout_s, ask)


def answer(dialler: Dialler, timeout_s: float | None, ask: Callable[[], R]) -> R:
    """Wait for a syncer that serves the run, and return its answer.

    Raises:
        UnreachableError: none answered within `timeout_s` (None: no limit), or the connection is being closed.
        AuthError: every syncer refuses this learner, apart from standbys.
    """
    lane, began_at = Lane(), time.monotonic()
    last_round: deque[DilocoError] = deque(maxlen=dialler.num_addresses)
    while True:
        try:
            return ask()
        except (UnreachableError, NoRoomError, AuthError) as error:
            now = time.monotonic()
            last_round.append(error)
            refusal = next((each for each in last_round if isinstance(each, AuthError)), None)
            if refusal and sum(isinstance(it, AuthError | StandbyError) for it in last_round) == dialler.num_addresses:
                raise refusal from None
            if dialler.closing.is_set() or (timeout_s is not None and now - began_at >= timeout_s):
                raise
            if (text := lane.failed(now, error)) is not None:
                log.warning(text)
            dialler.next()
            dialler.closing.wait(lane.ready_at - now)


class Entry:
    """Initialises a run, and joins it.

    Arguments:
        run: its name.
        initial: of the model, in the learner that initialises the run; else None.
        model: that model; its fragments may be this rank's shards.
        parts: returns the bytes of the model, fragment by fragment, and then those of its static tensors, which are
            its second argument.
        overlap: the learner's own τ; None: the method's.
        held: the fragments that it holds; None: all.
        is_dealt: whether it was dealt its groups of experts.
        tokens_per_step: as in `connect`.

    Attributes:
        num_bytes: bytes sent.
        resumed_bytes: bytes of the model that a resumed upload did not send again.
    """

    def __init__(
        self, dialler: Dialler, run: str, layout: Layout, initial: Initial | None, model: FlatModel | None,
        parts: Callable[[FlatModel, memoryview], Iterator[memoryview]], *, overlap: int | None,
        held: tuple[int, ...] | None, is_dealt: bool, tokens_per_step: int | None,
    ) -> None:  # fmt: skip
        self.num_bytes = self.resumed_bytes = 0
        self._parts, self._has_uploaded = parts, False
        self._dialler, self._run, self._layout, self._initial, self._model = dialler, run, layout, initial, model
        self._overlap, self._held, self._is_dealt, self._tokens_per_step = overlap, held, is_dealt, tokens_per_step

    def initialise(self, call: requests.Initialise) -> None:
        """Upload the run's first model. Raises as `Connection.upload`, and AlreadyInitialisedError."""
        assert self._initial is not None
        model = self._model
        assert model is not None
        static = memoryview(save(dict(model.static)))
        sizes = [*(4 * fragment.numel for fragment in self._layout.fragments), len(static)]
        header = request_of(
            pb.InitialiseHeader, self._run, call.claim, self._initial, layout=json.dumps(self._layout.to_dict()),
            part_bytes=sizes, resumes=self._has_uploaded,
        )  # fmt: skip
        self._has_uploaded = True
        with OutgoingUpload(header, lambda: self._parts(model, static)) as upload:
            try:
                self._dialler.current.upload(
                    "joins", "Initialise", upload.messages(), pb.InitialiseReply, heard=upload.heard
                )
            finally:
                self.resumed_bytes += upload.resumed_bytes
        self.num_bytes = sum(sizes)

    def join(self, call: requests.Join) -> pb.JoinReply:
        """Join as a new incarnation. Raises as `Connection.call`, and StaleIncarnationError, LayoutError."""
        claim, self._model = call.claim, None  # the run has been initialised
        request = request_of(
            pb.JoinRequest, self._run, claim, layout=json.dumps(self._layout.to_dict()), after=claim.incarnation,
            overlap=self._overlap, held=self._held, dealt=self._is_dealt, tokens_per_step=self._tokens_per_step,
        )  # fmt: skip
        return self._dialler.current.call("joins", "Join", request, pb.JoinReply)


def model_parts(model: FlatModel, static: memoryview) -> Iterator[memoryview]:
    """The bytes of a model that this process holds whole."""
    for theta in model.fragments:
        yield bytes_of(theta)
    yield static
