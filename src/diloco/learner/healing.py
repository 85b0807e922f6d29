"""A learner that joins a run under way, and has no inner optimizer's state of its own, heals; and gives its own state
to another one that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from diloco.core.healing import Heal, Healed
from diloco.errors import ConfigError, CorruptPayloadError, PayloadError
from diloco.exchange.base import Exchange, PeerState
from diloco.learner.inner_state import InnerState, clear
from diloco.learner.models import require_hooks
from diloco.learner.pieces import Gather
from diloco.learner.rewarm import Rewarm


class Healing:
    """The healing of one learner.

    Arguments:
        heal: how; None: it does not.
        optimizers: that train the model.
        parameters: by their names in the layout.
        exchange: with the other learners.
        rewarm: of the learning rate.
        gather: which piece of each parameter is here.

    Raises:
        ConfigError: it cannot heal so.
    """

    def __init__(
        self,
        heal: Heal | None,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, Tensor],
        exchange: Exchange,
        rewarm: Rewarm,
        gather: Gather,
    ) -> None:
        self._heal, self._optimizers = heal, optimizers
        self._exchange, self._rewarm = exchange, rewarm
        self._found: PeerState | str = ""
        self._inner: InnerState | None = None
        if heal is None:
            return
        if heal.rewarm_steps:
            for optimizer in optimizers:
                require_hooks(optimizer)
        if heal.source == "peer":
            if not exchange.relays:
                raise ConfigError(
                    "a peer's inner state needs a syncer that relays it (diloco.connect); use Heal(source='global')."
                )
            self._inner = exchange.each("the inner optimizers", lambda: _checked(optimizers, parameters, gather))

    def prepare(self) -> None:
        """Before the learner joins: ask for a peer's state, where it is to have one. Blocks."""
        if self._heal is not None and self._inner is not None:
            inner = self._inner
            self._found = self._exchange.peer_state(inner.digest, inner.most_bytes, self._heal.timeout_s)

    def begin(self) -> Healed | None:
        """The learner has joined a run under way: begin with the peer's state, or afresh; None: it does not heal."""
        heal, found, reason = self._heal, self._found, ""
        if heal is None:
            return None
        clear(self._optimizers)
        if self._inner is not None and isinstance(found, PeerState):
            try:
                read = partial(self._inner.read, found.content)
                states = self._exchange.each("the reading of a peer's inner state", read)
                self._exchange.each("the taking of a peer's inner state", partial(self._inner.take, states))
                return Healed("peer", 0, found.peer)
            except CorruptPayloadError as error:
                clear(self._optimizers)  # another rank may have taken its part
                reason = str(error)
        elif isinstance(found, str):
            reason = found
        self._found = ""
        self._rewarm.begin(heal.rewarm_steps)
        return Healed("global", heal.rewarm_steps, reason=reason)


def _checked(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Tensor], gather: Gather
) -> InnerState:
    """It has learnt what a peer's state is checked against; raises ConfigError where it cannot."""
    inner = InnerState(optimizers, parameters, gather)
    _ = inner.made
    return inner


class Sharing:
    """Gives this learner's inner state where the syncer asks for it.

    Arguments:
        as `Healing`.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, Tensor],
        exchange: Exchange,
        gather: Gather,
    ) -> None:
        self._optimizers, self._parameters, self._exchange = optimizers, parameters, exchange
        self._gather = gather
        self._answered = 0

    def look(self) -> None:
        """At a boundary: answer a request that stands. The state is copied to the host here; a thread of the exchange
        does the rest."""
        number = self._exchange.overview.inner_wanted if self._exchange.relays else 0
        if number in (0, self._answered):
            return
        self._answered = number
        try:
            inner = InnerState(self._optimizers, self._parameters, self._gather)
            digest, snapshot = inner.digest, inner.snapshot()
        except (ConfigError, PayloadError) as error:
            self._exchange.decline(number, str(error))
        else:
            self._exchange.share(number, digest, snapshot)
