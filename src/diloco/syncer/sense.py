"""What a learner says is checked for sense before a number of it is added.

The bounds are orders of magnitude beyond any training, since what they are to catch (an overflow, a sign, a unit) is that far off; none
could tell a learner that trained on alone for days, or from a checkpoint, from one that lies. What a message says twice must agree. Each
check raises PayloadError, with one sentence for the sender.
"""

from __future__ import annotations

import math

from diloco.core.contribution import OVERLAP
from diloco.core.layout import Layout
from diloco.errors import CorruptPayloadError, PayloadError
from diloco.exchange.wire import syncer_pb2 as pb

MAX_AHEAD = 10**8
"""Inner steps by which a message may move a run: a hundred a second for eleven days, unheard. A bound on the step itself could be reached
by one learner, and then all others, who start at the run's step, would be refused."""

MAX_INITIAL_STEP = 10**10
"""Inner steps that a model was trained for before the run."""

MAX_TOKENS = 10**15
"""Tokens that one incarnation of a learner trains, and that a model was trained on before."""

MAX_STEP_S = 10.0**6
"""Seconds that an inner step takes: eleven days."""

MAX_NAME = 200
"""Characters of a learner's name, or of the place where a model came from."""

MAX_STATIC_ELEMENT_BYTES, MAX_STATIC_HEADER_BYTES = 16, 4096
"""What a tensor that training leaves alone takes, by element, and besides."""


def check_name(learner: str) -> None:
    """A learner has a name that fits into a line."""
    if not learner or len(learner) > MAX_NAME or not learner.isprintable():
        raise PayloadError(
            f"a learner cannot be called {learner[:MAX_NAME]!r}; use 1 to {MAX_NAME} printable characters, unique in the run."
        )


def check_heartbeat(request: pb.HeartbeatRequest, num_fragments: int, run_step: int) -> None:
    """`run_step`: the highest inner step known. Versions newer than the run's are those of a syncer that was put back to an earlier state;
    they are shown and no more."""
    who = request.learner
    _within(who, "inner steps", request.step, run_step + MAX_AHEAD)
    _within(who, "trained tokens", request.tokens, MAX_TOKENS)
    if not (math.isfinite(request.step_s) and 0 <= request.step_s <= MAX_STEP_S):
        raise PayloadError(f"{who!r} says that an inner step takes {request.step_s} s, which is no duration of a step.")
    if len(request.versions) > num_fragments:
        raise PayloadError(
            f"{who!r} has versions of {len(request.versions)} fragments, and the run has {num_fragments}."
        )


def check_push(header: pb.PushHeader, run_step: int) -> None:
    """Of itself; whether its round and base fit is the state machine's to say."""
    who = header.learner
    _within(who, "inner steps", header.step, run_step + MAX_AHEAD)
    _within(who, "steps of work", header.steps, header.step)
    _within(who, "trained tokens", header.trained, MAX_TOKENS)
    _within(
        who,
        "tokens, those discarded included",
        header.tokens + sum(it.tokens for it in header.discarded),
        header.trained,
    )
    reasons = [it.reason for it in header.discarded]
    if reasons not in ([], [OVERLAP]):
        raise PayloadError(
            f"{who!r} discards tokens as {', '.join(map(repr, reasons))}; a learner discards as {OVERLAP!r}, once."
        )
    if list(header.tensors) != sorted(set(header.tensors)):
        raise PayloadError(f"{who!r} trains the tensors {list(header.tensors)}; name each once, in ascending order.")


def check_leave(request: pb.LeaveRequest) -> None:
    """A goodbye."""
    _within(request.learner, "trained tokens", request.tokens, MAX_TOKENS)


def check_initial(header: pb.InitialiseHeader, layout: Layout) -> None:
    """What is said of an initial model, and how large it is, before room is made for it.

    Raises:
        CorruptPayloadError: not the size that its layout needs.
    """
    _within(header.learner, "inner steps before the run", header.step, MAX_INITIAL_STEP)
    _within(header.learner, "tokens before the run", header.tokens, MAX_TOKENS)
    if len(header.source) > MAX_NAME:
        raise PayloadError(f"the source of the model has {len(header.source)} characters; use at most {MAX_NAME}.")
    sizes, expected = list(header.part_bytes), [4 * fragment.numel for fragment in layout.fragments]
    if sizes[:-1] != expected:
        raise CorruptPayloadError(f"the model has parts of {sizes[:-1]} bytes and its layout needs {expected}.")
    most = MAX_STATIC_HEADER_BYTES + sum(
        MAX_STATIC_HEADER_BYTES + MAX_STATIC_ELEMENT_BYTES * spec.numel for spec in layout.static
    )
    if not sizes or sizes[-1] > most:
        raise CorruptPayloadError(
            f"the {len(layout.static)} static tensors of the model come as {sizes[-1:]} bytes, and take at most {most}."
        )


def _within(who: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise PayloadError(
            f"{who!r} says {number} {what}, where there can be {most} at most; nothing of it was counted."
        )
