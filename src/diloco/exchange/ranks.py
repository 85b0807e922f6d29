"""A job of several ranks (DDP) as one learner: rank 0 exchanges, and all ranks do the same at the same boundary.

Every rank runs the same `Learner` on the same `LearnerCore`. Only rank 0 touches the wrapped exchange; what it answers,
events and errors alike, is broadcast as JSON and tensors over connections of its own. A step without news costs one
all-reduce of five numbers: the step's tokens, the size of the news, the tokens of the whole run, the number of live
learners and this one's pace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.core.contribution import CallForWork, Contribution, Drained, Rejected
from diloco.core.fragments import Layout
from diloco.core.held import HeldFragment
from diloco.core.method import Method
from diloco.core.session.requests import Report
from diloco.core.update import Update
from diloco.errors import CheckpointError, ConfigError, DilocoError
from diloco.exchange.base import Arrived, Event, Exchange, Model, Opened, Overview, Rejoined
from diloco.exchange.group import Group, error_of, to_bytes, to_tensor

TIMEOUT_S = 24 * 3600.0
"""How long ranks wait for rank 0, which may itself wait for the slowest learner. A dead rank is noticed at once.
"""

Said = tuple[dict[str, Any], list[Tensor]]


class Ranks(Exchange):
    """Makes the ranks of a process group one learner of `exchange`, which only rank 0 uses. `Learner` adds it for DDP.

    Arguments:
        exchange: on every rank one that was made in the same way; those of other ranks than 0 are never opened.
        process_group: the ranks of the job; None: all.

    Raises:
        Whatever the wrapped exchange raises on rank 0, on every rank.
        ExchangeError: a rank of this learner is gone.
    """

    def __init__(self, exchange: Exchange, process_group: dist.ProcessGroup | None) -> None:
        self._group = Group(process_group, timeout_s=TIMEOUT_S)
        self._first = self._group.rank == 0
        self._exchange = exchange
        self.gradients = exchange.gradients
        self.sends = self._first
        self._news: list[Event] = []
        self._failure: DilocoError | None = None
        self._message = _QUIET  # the news as they will be broadcast
        self._announced: int | None = None  # size of the message, where all ranks know it already
        self._overview = Overview()
        self._closed = False

    # --- joining ------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        theirs = self._group.gather_values(None if given is None else given.to_dict(), "the method given to each rank")
        for rank, values in enumerate(theirs):
            if values != theirs[0]:
                raise ConfigError(
                    f"rank {rank} of this learner was given another method than rank 0; give all the same."
                )
        said, _ = self._decide("the run's method", lambda: (self._exchange.method(given).to_dict(), []))
        return Method.from_dict(said)

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], Model], *, overlap: int | None = None
    ) -> Opened:
        def join() -> Said:
            tensors: list[Tensor] = []
            return _out(self._exchange.open(layout, method, initial, overlap=overlap), tensors), tensors

        opened: Opened = _in(*self._decide("the run's model", join))
        self._overview = replace(self._overview, run_tokens=opened.run_tokens)
        return opened

    # --- one boundary -------------------------------------------------------------------------------------------------

    def sum_tokens(self, tokens: int) -> int:
        self._collect_news()
        it = self._exchange.overview if self._first else Overview(num_live=0)
        run_tokens_plus_1 = 0 if it.run_tokens is None else it.run_tokens + 1
        numbers = [tokens, len(self._message.raw), run_tokens_plus_1, it.num_live, it.sync_every or 0, int(it.drained)]
        total, self._announced, run_tokens_plus_1, num_live, sync_every, drained = self._group.sum(
            numbers, "the tokens of a step"
        )
        run_tokens = run_tokens_plus_1 - 1 if run_tokens_plus_1 else None
        self._overview = Overview(num_live, run_tokens, sync_every or None, bool(drained))
        return total

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._on_first(lambda: self._exchange.offer(contribution, payload))

    def poll(self) -> Sequence[Event]:
        if self._announced is None:
            self._collect_news()
            [self._announced] = self._group.sum([len(self._message.raw)], "the size of the news")
        num_bytes, self._announced = self._announced, None
        if num_bytes == 0:
            return ()
        message, self._message, self._news = self._message, _QUIET, []
        said, tensors = self._broadcast(message, num_bytes, "the news", self._failure)
        return [_in(event, tensors) for event in said["events"]]

    def wait(self) -> None:
        if not self._news:
            self._on_first(self._exchange.wait)  # the other ranks wait in the next poll

    def report(self, report: Report) -> None:
        self._on_first(lambda: self._exchange.report(report))

    def stepped(self) -> None:
        self._on_first(self._exchange.stepped)

    def boundary(self) -> bool:
        self._on_first(self._exchange.boundary)  # news of this very moment can wait for the next boundary
        return False

    @property
    def overview(self) -> Overview:
        return self._overview

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return self._exchange.num_bytes if self._first else {}

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped exchange's, on rank 0; every rank calls it. A checkpoint of rank 0 serves all ranks."""
        state = self._exchange.state_dict() if self._first else {}
        [empty] = self._group.sum([int(self._first and not state)], "whether the exchange has state")
        return state if self._first or empty else {"rank": self._group.rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        def load() -> Said:
            if set(state) == {"rank"}:
                raise CheckpointError(f"the checkpoint is of rank {state['rank']} of its learner; give rank 0 its own.")
            loaded = self._exchange.load_state_dict(state)
            return {"loaded": loaded, "run_tokens": self._exchange.overview.run_tokens}, []

        said, _ = self._decide("the loading of a checkpoint", load)
        self._overview = replace(self._overview, run_tokens=said["run_tokens"])
        return bool(said["loaded"])

    def close(self) -> None:
        """Rank 0 leaves the run; all ranks disconnect from each other."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._first:
                self._exchange.close()
        finally:
            self._group.disconnect()

    # --- rank 0 and the others ----------------------------------------------------------------------------------------

    def _on_first(self, call: Callable[[], object]) -> None:
        """Rank 0 alone makes the call; an error is raised by the next poll, on every rank."""
        if self._first and self._failure is None:
            try:
                call()
            except DilocoError as error:
                self._failure = error

    def _collect_news(self) -> None:
        """Rank 0 asks the exchange for what has happened, and puts it into a message for all."""
        self._on_first(lambda: self._news.extend(self._exchange.poll()))
        if self._failure is not None:
            self._message = _Message.of({}, [], self._failure)
        elif self._news:
            tensors: list[Tensor] = []
            self._message = _Message.of({"events": [_out(event, tensors) for event in self._news]}, tensors)

    def _decide(self, what: str, decide: Callable[[], Said]) -> Said:
        """What rank 0 decides, or the error that it meets, on every rank."""
        message, failure = _QUIET, None
        if self._first:
            try:
                message = _Message.of(*decide())
            except DilocoError as error:
                message, failure = _Message.of({}, [], error), error
        [num_bytes] = self._group.sum([len(message.raw)], what)
        return self._broadcast(message, num_bytes, what, failure)

    def _broadcast(self, message: _Message, num_bytes: int, what: str, failure: DilocoError | None) -> Said:
        """Rank 0's message, of a size that all ranks know, on every rank. An error in it is raised."""
        raw = to_tensor(message.raw) if self._first else torch.empty(num_bytes, dtype=torch.uint8)
        self._group.broadcast(raw, what)
        values = json.loads(to_bytes(raw))
        if values["error"] is not None:
            raise failure if failure is not None else error_of(*values["error"])
        tensors = message.tensors if self._first else [_empty(*spec) for spec in values["tensors"]]
        for tensor in tensors:
            self._group.broadcast(tensor, what)
        return values["said"], tensors


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Message:
    """What rank 0 says: JSON with plain values, an error or the shapes of the tensors that follow it."""

    raw: bytes
    tensors: list[Tensor]

    @staticmethod
    def of(said: dict[str, Any], tensors: Sequence[Tensor], error: DilocoError | None = None) -> _Message:
        specs = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        told = None if error is None else [type(error).__name__, str(error)]
        raw = json.dumps({"said": said, "error": told, "tensors": specs}).encode()
        return _Message(raw, [tensor.contiguous() for tensor in tensors])


_QUIET = _Message(b"", [])


def _empty(shape: list[int], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


_KINDS = {
    kind.__name__: kind for kind in (Arrived, CallForWork, Rejected, Rejoined, Drained, Opened, HeldFragment, Update)
}


def _out(value: Any, tensors: list[Tensor]) -> Any:
    """A value as JSON can say it; its tensors are appended to `tensors`, and their places stand for them."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case Mapping():
            return {"mapping": {key: _out(each, tensors) for key, each in value.items()}}
        case tuple():
            return [_out(each, tensors) for each in value]
        case None | bool() | int() | float() | str():
            return value
    name = type(value).__name__
    assert name in _KINDS
    return {name: {key: _out(each, tensors) for key, each in vars(value).items()}}


def _in(said: Any, tensors: Sequence[Tensor]) -> Any:
    """What `_out` was given."""
    match said:
        case {"tensor": place}:
            return tensors[place]
        case {"mapping": values}:
            return {key: _in(each, tensors) for key, each in values.items()}
        case list():
            return tuple(_in(each, tensors) for each in said)
        case dict():
            [(name, values)] = said.items()
            return _KINDS[name](**{key: _in(each, tensors) for key, each in values.items()})
    return said
