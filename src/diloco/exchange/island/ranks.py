"""A job of several ranks as one learner: rank 0 exchanges, and all ranks do the same at the same boundary.

Every rank runs the same `Learner` on the same `LearnerCore`, each with its shard of every fragment (`core.shards`): it
keeps that shard's anchor, encodes it, and adopts it. Only rank 0 uses the wrapped exchange. It collects the other
ranks' encoded shards on a background thread, and broadcasts its events and errors as JSON and tensors. A step without
events costs one all-reduce of a few numbers: the step's tokens, the size of the events, the tokens of the whole run,
the number of live learners, this one's sync interval, whether it is drained, and the call of each rank.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.core.shards import Shards, even_shards
from diloco.errors import CheckpointError, ConfigError, DilocoError
from diloco.exchange.base import (
    Call,
    Event,
    Exchange,
    FlatModel,
    Interrupted,
    Overview,
    ShardedExchange,
    StartingState,
    wrong_rank,
)
from diloco.exchange.group import TEXT_CHARACTERS, Group, as_bytes, attempt, error_of, error_values
from diloco.exchange.island.rank_messages import Fetched, Message, share
from diloco.exchange.lanes import CommandLane, CommandLanes
from diloco.protocol.contribution import Budget, Contribution
from diloco.protocol.leases import Ask
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Report

T = TypeVar("T")

TIMEOUT_S = 24 * 3600.0
"""How long ranks wait for rank 0, which may itself wait for the slowest learner. A dead rank is noticed at once.
"""

CHECK_EVERY_S = 0.2
"""Interval at which waiting ranks exchange messages: another rank than 0 may have been interrupted."""

CALLS: tuple[Call, ...] = get_args(Call)

NUM_SUMS = 8
"""Numbers that are summed over the ranks at a step."""

_WANTS_SHARDS = -1
"""In place of a message's size: rank 0 requests every rank's shard of the model."""


class Ranks(Exchange):
    """Makes the ranks of a process group one learner of `exchange`, which only rank 0 uses. `Learner` adds it.

    Arguments:
        exchange: constructed in the same way on every rank; only rank 0's is opened.
        ranks: the ranks of the job.

    Attributes:
        group: connects the ranks, for the training thread.

    Raises:
        The errors of rank 0's exchange, on every rank.
        ExchangeError: a rank of this learner is lost.
    """

    def __init__(self, exchange: Exchange, ranks: dist.ProcessGroup | DeviceMesh) -> None:
        self.group = Group(ranks, timeout_s=TIMEOUT_S)
        self._first = self.group.rank == 0
        self._exchange = exchange
        self.gradients, self.remind_after_s = exchange.gradients, exchange.remind_after_s
        self.has_syncer = exchange.has_syncer
        self._background = [Group(ranks, timeout_s=TIMEOUT_S) for _ in range(2)]
        self._sharded = exchange if isinstance(exchange, ShardedExchange) else None
        if self._sharded is not None:
            self._sharded.divide(CommandLanes(*map(CommandLane, self._background)))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="diloco-ranks")
        self._shards: tuple[Shards, ...] = ()
        self._method: Method
        self._events: list[Event] = []
        self._failure: DilocoError | None = None
        self._message = Message()  # the events, as the next poll broadcasts them
        self._announced: int | None = None  # size of the message, if all ranks know it already
        self._is_interrupted = False  # this rank
        self._overview = Overview()
        self._closed = False

    @property
    def _fetched(self) -> Fetched | None:
        return None if self._sharded is None else self._sharded.fetched

    @property
    def rank(self) -> tuple[int, int]:
        return self.group.rank, self.group.size

    def each(self, what: str, make: Callable[[], T]) -> T:
        """The result of `make` on this rank; an error of one rank is raised on every rank.

        Raises:
            DilocoError: this rank's own error, or else that of the first rank with one.
        """
        made, own = attempt(make)
        for rank, refusal in enumerate(self.group.gather_values(error_values(own), what)):
            if refusal is not None:
                raise own or error_of(refusal[0], f"rank {rank} of this learner: {refusal[1]}")
        return cast("T", made)

    def require_same(self, what: str, given: object) -> None:
        """Raise the same error on every rank if one of them was given another value than rank 0."""
        given_to = self.group.gather_values(given, f"the {what} given to each rank")
        for rank, values in enumerate(given_to):
            if values != given_to[0]:
                raise ConfigError(
                    f"rank {rank} of this learner was given another {what} than rank 0; give all ranks the same."
                )

    # --- joining ------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        self.require_same("method", None if given is None else given.to_dict())
        method = self._decide("the run's method", lambda: json.dumps(self._exchange.method(given).to_dict()))
        return Method.from_dict(json.loads(method))

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        self._shards = even_shards((fragment.numel for fragment in layout.fragments), self.group.size)
        self._method = method

        def whole() -> FlatModel:
            self.group.sum([_WANTS_SHARDS], "the run's model")
            return self._whole(initial())

        def join() -> StartingState:
            return self._exchange.open(layout, method, initial if self._sharded else whole, overlap=overlap)

        if self._sharded is not None and not self._first:
            self._sharded.follow(layout, method, initial)
        opened: StartingState = self._decide("the run's model", join, assist=lambda: self._whole(initial()))
        self.sum_over_ranks(0)
        return opened

    def _whole(self, mine: FlatModel) -> FlatModel:
        """On rank 0 the whole model, joined from every rank's shards."""
        fragments = []
        for index, (part, shards) in enumerate(zip(mine.fragments, self._shards, strict=True)):
            sizes = [4 * (run.stop - run.start) for run in map(shards.elements, range(self.group.size))]
            joined = self.group.collect(as_bytes(part), sizes, f"fragment {index} of this learner's model")
            fragments.append(joined.view(torch.float32))
        return FlatModel(tuple(fragments), mine.static)

    # --- one boundary -------------------------------------------------------------------------------------------------

    def sum_over_ranks(self, number: int, call: Call = "step") -> int:
        self._collect_events()
        it = self._exchange.overview if self._first else Overview(num_live=0)
        run_tokens_plus_1 = 0 if it.run_tokens is None else it.run_tokens + 1
        numbers = [
            number, len(self._message.raw), run_tokens_plus_1, it.num_live, it.sync_every or 0, int(it.drained),
            it.budget.tokens or 0, it.budget.steps or 0,
        ]  # fmt: skip
        total, self._announced, run_tokens_plus_1, num_live, sync_every, drained, *ends = self._meet(call, numbers)
        run_tokens = run_tokens_plus_1 - 1 if run_tokens_plus_1 else None
        budget = Budget(*(end or None for end in ends))
        self._overview = Overview(num_live, run_tokens, sync_every or None, bool(drained), budget)
        return total

    def sums_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        return self.group.sum(numbers, "the tokens routed to each expert")

    def meet(self, call: Call) -> None:
        self._meet(call, [0] * NUM_SUMS)

    def _meet(self, call: Call, numbers: list[int]) -> list[int]:
        """The sum over ranks of each number. Raises ConfigError if the ranks make different calls."""
        calls = [int(call == each) for each in CALLS]
        sums = self.group.sum([*numbers, *calls], f"learner.{call}()", remind_after_s=self.remind_after_s)
        called = {each: num for each, num in zip(CALLS, sums[NUM_SUMS:], strict=True) if num}
        if len(called) > 1:
            counts = " and ".join(f"{each}() on {num}" for each, num in called.items())
            raise ConfigError(
                f"the {self.group.size} ranks of this learner called different methods at the same point, {counts} of "
                "them, and each rank has a part of the learner; call all of these on every rank, in the same order."
            )
        return sums[:NUM_SUMS]

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        if self._sharded is not None:
            if self._first:
                self._on_first(lambda: self._exchange.offer(contribution, payload))
            else:
                self._exchange.offer(contribution, payload)
            return
        joined = self._worker.submit(self._joined, contribution, payload)
        self._on_first(lambda: self._exchange.offer(contribution, joined.result))

    def _joined(self, c: Contribution, payload: Callable[[], Tensor]) -> Tensor:
        """On rank 0 the payload of a contribution, joined from the shards that each rank encodes."""
        what, group = f"the contribution of fragment {c.fragment}", self._background[0]
        part, error = attempt(payload)
        for frame in group.gather_frames({"error": error_values(error, TEXT_CHARACTERS)}, what):
            if frame["error"] is not None:
                raise error_of(*frame["error"]) from error
        codec, shards = self._method.for_fragment(c.fragment).up, self._shards[c.fragment]
        return group.collect(part, [0] * group.size if c.is_empty else shards.sizes_bytes(codec), what)

    def poll(self) -> Sequence[Event]:
        interrupted: list[Event] = []
        if self._announced is None:
            self._collect_events()
            sizes = [len(self._message.raw), int(self._is_interrupted)]
            self._announced, num_interrupted = self.group.sum(sizes, "the size of the events")
            interrupted = [Interrupted()] if num_interrupted else []
        num_bytes, self._announced = self._announced, None
        if num_bytes == 0:
            return interrupted
        message, self._message, self._events = self._message, Message(), []
        events: Sequence[Event] = self._share(message, num_bytes, "the events", self._failure)
        return [*events, *interrupted]

    def ask(self, ask: Ask) -> None:
        self._on_first(lambda: self._exchange.ask(ask))

    def wait(self, timeout_s: float) -> None:
        if not self._events:  # the other ranks wait in the next poll
            self._on_first(lambda: self._exchange.wait(min(timeout_s, CHECK_EVERY_S)))

    def interrupt(self, after_s: float) -> None:
        if self._first:
            self._exchange.interrupt(after_s)
            return
        timer = threading.Timer(after_s, self._interrupt)
        timer.daemon = True
        timer.start()

    def _interrupt(self) -> None:
        self._is_interrupted = True

    def report(self, report: Report) -> None:
        self._on_first(lambda: self._exchange.report(report))

    def rejoined(self, incarnation: int) -> None:
        self._on_first(lambda: self._exchange.rejoined(incarnation))

    def stepped(self) -> None:
        self._on_first(self._exchange.stepped)

    def boundary(self) -> bool:
        self._on_first(self._exchange.boundary)  # further events wait for the next boundary
        return False

    @property
    def overview(self) -> Overview:
        return self._overview

    @property
    def lineage(self) -> Lineage | None:
        return self._exchange.lineage

    @property
    def obstacles(self) -> str:
        return self._exchange.obstacles if self._first else super().obstacles

    @property
    def resumed_bytes(self) -> int:
        return self._exchange.resumed_bytes if self._first or self._sharded is not None else 0

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return self._exchange.num_bytes if self._first or self._sharded is not None else {}

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped exchange's state on rank 0; every rank calls it and saves the result."""
        state = self._exchange.state_dict() if self._first else {}
        [empty] = self.group.sum([int(self._first and not state)], "whether the exchange has state")
        return state if self._first or empty else {"rank": self.group.rank}

    def require_rank(self, saved: Sequence[int], step: int) -> None:
        """Raise the same error on every rank if the checkpoint of one does not fit."""
        checkpoints = self.group.gather_values([list(saved), step], "the ranks of the checkpoints")
        for rank, (theirs, _) in enumerate(checkpoints):
            if tuple(theirs) != (rank, self.group.size):
                raise CheckpointError(wrong_rank(theirs, (rank, self.group.size)))
        if len(steps := sorted({each for _, each in checkpoints})) > 1:
            raise CheckpointError(
                f"the checkpoints of this learner's ranks are of steps {steps}; give every rank its own of one step."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        def load() -> dict[str, Any]:
            return {
                "loaded": self._exchange.load_state_dict(state), "run_tokens": self._exchange.overview.run_tokens
            }  # fmt: skip

        result = self._decide("the loading of a checkpoint", load)
        self._overview = replace(self._overview, run_tokens=result["run_tokens"])
        return bool(result["loaded"])

    def disconnect(self) -> None:
        """Disconnect from the other ranks, whose next operation fails, without having joined the run."""
        for group in (self.group, *self._background):
            group.disconnect()

    def close(self) -> None:
        """Rank 0 leaves the run; all ranks disconnect from each other."""
        if self._closed:
            return
        self._closed = True
        self.group.disconnect()  # a rank that trains on gets an error
        try:
            if self._first or self._sharded is not None:
                self._exchange.close()
            self._worker.shutdown(wait=True)
        finally:
            self.disconnect()

    # --- rank 0 and the others ----------------------------------------------------------------------------------------

    def _on_first(self, call: Callable[[], object]) -> None:
        """Make a call on rank 0 only; the next poll raises its error, on every rank."""
        if self._first and self._failure is None:
            _, self._failure = attempt(call)

    def _collect_events(self) -> None:
        """On rank 0: poll the exchange, and put its events into a message for all ranks."""
        self._on_first(lambda: self._events.extend(self._exchange.poll()))
        if self._failure is not None:
            self._message = Message.of(error=self._failure)
        elif self._events:
            self._message = Message.of(self._events, fetched=self._fetched is not None)

    def _decide(self, what: str, decide: Callable[[], Any], assist: Callable[[], object] = lambda: None) -> Any:
        """The result of `decide` on rank 0, or its error, on every rank.

        `assist`: is called on the other ranks whenever rank 0 requests their shards for it.
        """
        message, failure = Message(), None
        if self._first:
            decided, failure = attempt(decide)
            message = Message.of(decided, failure, fetched=self._fetched is not None)
        while (num_bytes := self.group.sum([len(message.raw)], what)[0]) == _WANTS_SHARDS:
            assist()
        return self._share(message, num_bytes, what, failure)

    def _share(self, message: Message, num_bytes: int, what: str, failure: DilocoError | None) -> Any:
        return share(self.group, message, num_bytes, self._shards, what, failure, self._fetched)
