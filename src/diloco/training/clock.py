"""The clock of a trainer, and what several trainers in one process share."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from diloco.training.data.corpus import Corpus


@dataclass(frozen=True)
class Clock:
    """The time that a trainer measures by; real time by default.

    Attributes:
        stamp: the time that events carry, in seconds.
        seconds: what durations are differences of.
        stepped_alone: called after every step of a learner that has no exchange, whose time no exchange measures.
    """

    stamp: Callable[[], float] = time.time
    seconds: Callable[[], float] = time.perf_counter
    stepped_alone: Callable[[], None] = lambda: None


@dataclass
class Shared:
    """Loaded once, found once.

    Attributes:
        corpus: what all read from.
        losses: held-out loss of a global model by its digest.
    """

    corpus: Corpus
    losses: dict[Hashable, float] = field(default_factory=dict)
