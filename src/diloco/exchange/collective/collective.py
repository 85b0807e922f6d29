"""`Collective`: the learner's side of the exchange. One background thread does all communication, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.core.shards import dealt
from diloco.errors import ConfigError, ExchangeError
from diloco.exchange.base import Event, Exchange, FlatModel, Overview, StartingState, required_method
from diloco.exchange.collective.joining import broadcast, compare, name_of
from diloco.exchange.collective.rounds import Round, ShardedRounds
from diloco.exchange.collective.shards import HeldShard, first_held, restore, state_of
from diloco.exchange.group import Group, require_process_group
from diloco.protocol.contribution import Contribution


@dataclass
class _Offer:
    """A contribution on its way, and how many boundaries this learner had behind it when it was offered."""

    result: Future[Round]
    boundaries: int


class Collective(Exchange):
    """An exchange over a `torch.distributed` process group, of any backend: each of its ranks is one learner.

    All communication runs on one background thread over connections of its own (`exchange.group`), in the order of the
    offers, which the schedule makes the same on every rank. Rank 0's model initialises the run.

    Arguments:
        process_group: whose ranks learn together; None: all ranks.
        timeout_s: how long a learner waits for the slowest of the others before it takes them for lost.

    Raises:
        ConfigError: torch.distributed is not initialised.
        ExchangeError: (from any method but `close`) a learner is gone or silent; names what did not get through.

    Example:
        >>> torch.distributed.init_process_group("gloo")
        >>> learner = diloco.Learner(model, optimizer, method=diloco.DiLoCo(), exchange=diloco.Collective())
    """

    joins_late = False

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> None:
        require_process_group()
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._group: Group
        self._method: Method
        self._fragments: list[HeldShard] = []
        self._rounds: ShardedRounds
        self._worker: ThreadPoolExecutor | None = None
        self._closed = False
        self._failed = False
        self._offers: deque[_Offer] = deque()
        self._heard: deque[tuple[int, int]] = deque()  # boundaries at the offer, run tokens at the offer
        self._boundaries = 0
        self._longest_overlap = 0
        self._run_tokens = 0
        self._num_bytes = {"contributions": 0, "updates": 0, "joins": 0, "control": 0}

    # --- joining ------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        return required_method(given)

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        if self._closed or self._worker is not None:
            raise ConfigError("this exchange was used already; make a new Collective for every Learner.")
        self._group = Group(self._process_group, timeout_s=self._timeout_s)
        self._method = method
        joined = False
        try:
            self._longest_overlap = compare(self._group, layout, method, overlap)
            model = broadcast(self._group, self._num_bytes, layout, initial)
            joined = True
        finally:
            if not joined:
                self._closed = True
                self._group.disconnect()
        shards = dealt((fragment.numel for fragment in layout.fragments), self._group.size)
        self._fragments = [
            first_held(method, fragment, theta, each, self._group.rank)
            for fragment, theta, each in zip(layout.fragments, model.fragments, shards, strict=True)
        ]
        self._rounds = ShardedRounds(self._group, method, self._fragments, self._num_bytes)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="diloco-collective")
        return StartingState(
            name_of(self._group.rank), 1, 0, tuple(held.whole for held in self._fragments), model.static
        )

    # --- the training thread ------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._offers.append(_Offer(self._submit(lambda: self._rounds.make(contribution, payload)), self._boundaries))

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        while self._offers and self._offers[0].result.done():
            round_ = self._offers[0].result.result()  # a failed one stays and is raised again
            self._heard.append((self._offers.popleft().boundaries, round_.run_tokens))
            events.extend(round_.events)
        return events

    def wait(self, timeout_s: float) -> None:
        if not self._offers:
            raise ExchangeError(
                "nothing is on its way, so nothing can arrive; a learner waits only for what it has sent."
            )
        wait([self._offers[0].result], timeout_s)

    def boundary(self) -> bool:
        # All ranks have waited for what was sent as many boundaries ago as the longest of their overlaps has. Counting
        # only that keeps the number the same on every rank, so that all of them stop after the same step when they
        # train up to a number of tokens.
        while self._heard and self._heard[0][0] + self._longest_overlap <= self._boundaries:
            self._run_tokens = self._heard.popleft()[1]
        self._boundaries += 1
        return False

    @property
    def overview(self) -> Overview:
        return Overview(self._group.size, self._run_tokens)

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return dict(self._num_bytes)

    def close(self) -> None:
        """Finish what is on its way (another rank may wait for it), then leave. Never raises what `poll` would."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._group.disconnect()

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        if self._worker is None or self._closed:
            raise ConfigError("this exchange is not open; attach it to a Learner first.")

        def run() -> Any:
            if self._failed:  # the ranks may be at different places now
                raise ExchangeError("an earlier exchange failed, so this one was not tried.")
            self._failed = True
            result = job()
            self._failed = False
            return result

        return self._worker.submit(run)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards, outer state and error feedback. Waits for what is sent."""
        wait([offer.result for offer in self._offers])
        return {
            **state_of(self._group, self._fragments),
            "run_tokens": self._run_tokens,
            "heard": [[tag - self._boundaries, tokens] for tag, tokens in self._heard],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`; every rank loads its own, at the same time.

        Raises:
            CheckpointError: of another world size, rank or model, or the ranks' checkpoints are of different moments.
        """
        self._submit(lambda: self._load(state)).result()
        return True

    def _load(self, state: Mapping[str, Any]) -> None:
        restore(self._group, self._method, self._fragments, state, self._num_bytes)
        self._run_tokens = state["run_tokens"]
        self._heard = deque((self._boundaries + tag, tokens) for tag, tokens in state["heard"])
