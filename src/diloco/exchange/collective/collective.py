"""`Collective`: the learner's side of the exchange. One background thread does all communication, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.core.shards import even_shards
from diloco.errors import ConfigError, ExchangeError
from diloco.exchange.base import Event, FlatModel, Overview, StartingState
from diloco.exchange.collective.joining import broadcast, compare, name_of
from diloco.exchange.collective.rounds import Round, ShardedRounds
from diloco.exchange.collective.shards import HeldShard, first_held, restore, state_of
from diloco.exchange.group import Group, require_process_group
from diloco.exchange.peers import PeerExchange
from diloco.protocol.contribution import Budget, Contribution


class Collective(PeerExchange):
    """An exchange over a `torch.distributed` process group, of any backend: each of its ranks is one learner.

    All communication runs on one background thread over connections of its own (`exchange.group`), in the order of the
    offers, which the schedule makes the same on every rank. Rank 0's model initialises the run.

    Arguments:
        process_group: whose ranks are the learners; None: all ranks.
        timeout_s: how long a learner waits for the slowest of the others before it treats them as lost.
        tokens: of all learners together, after which `learner.done` is true on all of them; None: the loop itself knows
            its end.

    Raises:
        ConfigError: torch.distributed is not initialised.
        ExchangeError: (from any method but `close`) a learner is lost or silent; names the operation that failed.

    Example:
        >>> torch.distributed.init_process_group("gloo")
        >>> learner = diloco.Learner(model, optimizer, method=diloco.DiLoCo(), exchange=diloco.Collective())
    """

    joins_late = False

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0, tokens: int | None = None
    ) -> None:
        require_process_group()
        self._budget = Budget(tokens)
        super().__init__(timeout_s, "diloco-collective")
        self._process_group = process_group
        self._group: Group
        self._method: Method
        self._fragments: list[HeldShard] = []
        self._rounds: ShardedRounds
        self._is_open = self._has_failed = False
        self._offered_at: deque[int] = deque()  # boundaries behind this learner at each of the offers
        self._heard: deque[tuple[int, int]] = deque()  # boundaries and run tokens at an offer that was answered
        self._boundaries = 0
        self._longest_overlap = 0
        self._run_tokens = 0

    # --- joining ------------------------------------------------------------------------------------------------------

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        self._group = Group(self._process_group, timeout_s=self._timeout_s)
        self._method = method
        with ExitStack() as undo:
            undo.callback(self._group.disconnect)
            self._longest_overlap = compare(self._group, layout, method, overlap, self.trained)
            model = broadcast(self._group, self._num_bytes, layout, initial)
            undo.pop_all()
        self._is_open = True
        shards = even_shards((fragment.numel for fragment in layout.fragments), self._group.size)
        self._fragments = [
            first_held(method, fragment, theta, each, self._group.rank)
            for fragment, theta, each in zip(layout.fragments, model.fragments, shards, strict=True)
        ]
        self._rounds = ShardedRounds(self._group, method, self._fragments, self._num_bytes)
        return StartingState(
            name_of(self._group.rank), 1, 0, tuple(held.whole for held in self._fragments), model.static
        )

    # --- the training thread ------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._offers.append(self._submit(lambda: self._rounds.make(contribution, payload)))
        self._offered_at.append(self._boundaries)

    def _events_of(self, finished: Round) -> Sequence[Event]:
        self._heard.append((self._offered_at.popleft(), finished.run_tokens))
        return finished.events

    def boundary(self) -> bool:
        # All ranks have waited for the contributions that are at least as old, in boundaries, as the longest of their
        # overlaps. Only these are counted, so that every rank has the same count, and all of them stop after the same
        # step when they train up to a number of tokens.
        while self._heard and self._heard[0][0] + self._longest_overlap <= self._boundaries:
            self._run_tokens = self._heard.popleft()[1]
        self._boundaries += 1
        return False

    @property
    def overview(self) -> Overview:
        return Overview(self._group.size, self._run_tokens, budget=self._budget)

    def close(self) -> None:
        """Finish the rounds in flight, for which other ranks may wait, then leave. Never raises the errors of
        `poll`."""
        if not self._is_open:
            return
        self._is_open = False
        self._worker.shutdown(wait=True)
        self._group.disconnect()

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        if not self._is_open:
            raise ConfigError("this exchange is not open; attach a new one to a Learner.")

        def run() -> Any:
            if self._has_failed:  # the ranks may have diverged
                raise ExchangeError("an earlier exchange failed, so this one was not tried.")
            self._has_failed = True
            result = job()
            self._has_failed = False
            return result

        return self._worker.submit(run)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards, outer state and error feedback. Waits for the rounds in flight."""
        wait(self._offers)
        return {
            **state_of(self._group, self._fragments),
            "run_tokens": self._run_tokens,
            "heard": [[tag - self._boundaries, tokens] for tag, tokens in self._heard],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`; every rank loads its own, at the same time.

        Raises:
            CheckpointError: it is of another world size, rank or model, or the ranks' checkpoints are of different
                steps.
        """
        self._submit(lambda: self._load(state)).result()
        return True

    def _load(self, state: Mapping[str, Any]) -> None:
        restore(self._group, self._method, self._fragments, state, self._num_bytes)
        self._run_tokens = state["run_tokens"]
        self._heard = deque((self._boundaries + tag, tokens) for tag, tokens in state["heard"])
