"""What `Collective` and `TorchFT` share: learners that merge among themselves, without a syncer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from diloco.core.layout import Placement
from diloco.core.merges import Encoded
from diloco.core.method import Method
from diloco.core.weights import merge_weights
from diloco.errors import ConfigError, DigestError, ExchangeError
from diloco.exchange.base import Event, Exchange
from diloco.protocol.contribution import Contribution
from diloco.run.tensor_jobs import encoded_of


class PeerExchange(Exchange):
    """An exchange of which one background thread does all communication, in the order of the offers."""

    def __init__(self, timeout_s: float, thread_name: str) -> None:
        self._timeout_s = timeout_s
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._offers: deque[Future[Any]] = deque()
        self._num_bytes = {"contributions": 0, "updates": 0, "joins": 0, "control": 0}

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        while self._offers and self._offers[0].done():
            events.extend(self._events_of(self._offers[0].result()))  # a failed round stays and is raised again
            self._offers.popleft()
        return events

    def _events_of(self, finished: Any) -> Sequence[Event]:
        """The events of a finished round, as the background thread returned it."""
        events: Sequence[Event] = finished
        return events

    def wait(self, timeout_s: float) -> None:
        if not self._offers:
            raise ExchangeError("no contribution is in flight, so no update can arrive; a learner waits for its own.")
        wait([self._offers[0]], timeout_s)

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return dict(self._num_bytes)


def require_no_syncer(method: Method) -> None:
    """Raise ConfigError for a method that needs a syncer."""
    if not method.wait:
        raise ConfigError("wait=False needs a syncer, whose answers learners need not block on; use wait=True.")
    if (why := method.quorum.needs_syncer) is not None:
        raise ConfigError(why)


def merge_inputs(
    method: Method, contributions: Sequence[Contribution], payloads: Sequence[Tensor], round_: int,
    places: Sequence[Placement], tensors: range | None = None,
) -> list[Encoded]:  # fmt: skip
    """One weighted input of the merge for each contribution. `places`, `tensors`: as in `encoded_of`."""
    weights = merge_weights(
        method.weight, [each.tokens for each in contributions], [each.steps for each in contributions],
        [round_ - each.base for each in contributions],
    )  # fmt: skip
    return encoded_of(contributions, weights, payloads, round_, places, tensors)


def require_same_digest(fragment: int, version: int, digests: Mapping[str, str]) -> None:
    """Raise DigestError unless all learners, by name, hold the same bits of a version."""
    (first, digest), *others = digests.items()
    for learner, theirs in others:
        if theirs != digest:
            raise DigestError(
                f"{first} and {learner} hold version {version} of fragment {fragment} with different bits (digests "
                f"{digest[:12]} and {theirs[:12]}); start all learners again from one checkpoint."
            )
