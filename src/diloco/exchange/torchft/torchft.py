"""`TorchFT`: the learner's side of the exchange. One background thread does all communication, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from torch import Tensor

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.errors import CheckpointError
from diloco.exchange.base import FlatModel, Overview, StartingState
from diloco.exchange.group import to_bytes, to_tensor
from diloco.exchange.peers import PeerExchange, require_no_syncer
from diloco.exchange.torchft.elastic_rounds import ElasticRounds
from diloco.exchange.torchft.quorum import QuorumClient
from diloco.exchange.torchft.run_copy import Copy
from diloco.protocol.contribution import Contribution


class TorchFT(PeerExchange):
    """An exchange over torchft's managed process group; each process is one learner.

    Arguments:
        replica: this learner's name, unique and the same after a restart. Contributions are merged in the order of the
            names.
        lighthouse: address of the `torchft_lighthouse`, "http://host:port". A run starts with as many learners as its
            `min_replicas`.
        host: name or address at which the other learners reach this machine.
        timeout_s: how long a learner waits for the slowest of the others before it treats them as lost.

    Raises:
        ConfigError: torchft is not installed (`pip install "diloco[torchft]"`), or a method that needs a syncer.
        ExchangeError: (from any method but `close`) no quorum within `timeout_s`.

    Example:
        >>> exchange = TorchFT("a", lighthouse=url, host="10.0.0.5")
        >>> learner = diloco.Learner(model, optimizer, method=diloco.DiLoCo(), exchange=exchange)
    """

    gradients = False
    dials_out = True

    def __init__(self, replica: str, *, lighthouse: str, host: str, timeout_s: float = 600.0) -> None:
        super().__init__(timeout_s, "diloco-torchft")
        self._quorum = QuorumClient(replica, lighthouse, host, timeout_s)
        self._replica = replica
        self._copy = Copy()
        self._rounds: ElasticRounds

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        require_no_syncer(method)
        copy = self._copy
        copy.begin(initial(), method)
        self._rounds = ElasticRounds(
            self._replica, self._quorum, copy, layout, method, self._timeout_s, self._num_bytes
        )
        self._quorum.start()
        self._worker.submit(self._rounds.join).result()
        steps = method.outer_at == "learners"
        fragments = tuple(replace(held, residual=None) if steps else held.bare for held in copy.fragments)
        return StartingState(self._replica, 1, copy.step, fragments, copy.static)

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._offers.append(self._worker.submit(self._rounds.make, contribution, payload))

    @property
    def overview(self) -> Overview:
        group = self._quorum.group
        return Overview() if group is None else Overview(group.size)

    def state_dict(self) -> dict[str, Any]:
        """Return fragments, outer state and error feedback, the same on every member. Waits for the rounds in
        flight."""
        wait(self._offers)
        return {"run": to_tensor(self._copy.as_bytes()), "step": self._copy.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`. A member with an older state, or none, is healed in the next round.

        Raises:
            CheckpointError: it was written over another kind of exchange.
        """
        if set(state) != {"run", "step"}:
            raise CheckpointError(
                "this checkpoint was written over another kind of exchange; resume it over the same kind."
            )
        self._worker.submit(self._load, state).result()
        return True

    def _load(self, state: Mapping[str, Any]) -> None:
        self._copy.load(to_bytes(state["run"]))
        self._copy.step = max(self._copy.step, state["step"])

    def close(self) -> None:
        """Finish the contributions in flight, then leave; the others continue without this learner."""
        if self._quorum.closing.is_set():
            return
        wait(self._offers)
        self._quorum.closing.set()
        self._worker.shutdown(wait=True)
        self._quorum.close()
