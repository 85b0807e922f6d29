"""How a learner without a checkpoint of its own begins in a run that is under way: with what inner optimizer.

Its inner optimizer begins afresh, or has the state of a healthy learner's, which the syncer relays since learners only
dial out (`state_relay`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from diloco.core.choices import positive, whole_number
from diloco.errors import ConfigError

Source = Literal["global", "peer"]

REWARM_STEPS = 5
"""Default. In studies/healing.py 5 steps cost nothing and 60 cost 0.01 nats per byte."""

INNER_ELEMENT_BYTES, INNER_TENSOR_BYTES = 16, 4096
"""What an inner optimizer's state takes at most, by parameter (AdamW's two moments in fp32 are 8 bytes, AMSGrad's three
are 12), and by tensor besides."""


@dataclass(frozen=True)
class Heal:
    """How a learner heals that joins a run with the run's model, and without the inner optimizer's state of its own.

    Attributes:
        source: "global": the inner optimizer begins afresh, as of a new run, with a short re-warm-up. "peer": it has
            the state of a healthy learner's, where one answers in time; otherwise as "global".
        rewarm_steps: inner steps over which a fresh optimizer's learning rate grows linearly to the schedule's; 0: it
            has that at once.
        timeout_s: how long to wait for a peer's state, in seconds.

    Raises:
        ConfigError: an unknown source, or a number that cannot be.
    """

    source: Source = "global"
    rewarm_steps: int = REWARM_STEPS
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ConfigError(f"Heal(source={self.source!r}) is no source; use 'global' or 'peer'.")
        whole_number("rewarm_steps", self.rewarm_steps, 0)
        positive("timeout_s", self.timeout_s)


@dataclass(frozen=True)
class Healed:
    """How a learner has healed.

    Attributes:
        source: whose inner optimizer's state it has: "global": none, it begins afresh.
        rewarm_steps: of its re-warm-up; 0: it has none.
        peer: the learner that it has the state of; None: of none.
        reason: why it has no peer's state, though it asked for one; "": it has, or did not ask.
    """

    source: Source
    rewarm_steps: int
    peer: str | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        """For a log."""
        if self.source == "peer":
            how = f"with the inner optimizer's state of {self.peer}"
        elif self.rewarm_steps:
            how = f"with a fresh inner optimizer and a re-warm-up of {self.rewarm_steps} steps"
        else:
            how = "with a fresh inner optimizer"
        why = f" (it has no peer's state: {self.reason})" if self.reason else ""
        return f"the run's model, {how}{why}"
