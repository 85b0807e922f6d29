"""A rank's part of a round: from its own displacement to the new version on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from diloco.core.global_fragment import apply_update, close
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import DilocoError
from diloco.exchange.base import Arrived, Event
from diloco.exchange.collective.joining import agree, name_of
from diloco.exchange.collective.shards import HeldShard
from diloco.exchange.group import FRAME_BYTES, Group, attempt, split
from diloco.exchange.peers import merge_inputs, require_same_digest
from diloco.protocol.contribution import OUTLIER, Contribution, Rejection


@dataclass(frozen=True)
class Round:
    """A finished round: the learner's events, and the tokens that all learners had trained when they contributed."""

    events: tuple[Event, ...]
    run_tokens: int


class ShardedRounds:
    """Runs rounds one after the other, in the same order on every rank.

    Arguments:
        group: the ranks.
        method: of the run.
        fragments: this rank's state of each; advanced by every round.
        num_bytes: bytes by kind; the bytes sent and received are added.
    """

    def __init__(self, group: Group, method: Method, fragments: Sequence[HeldShard], num_bytes: dict[str, int]) -> None:
        self._group, self._method = group, method
        self._fragments = fragments
        self._num_bytes = num_bytes

    def make(self, c: Contribution, payload: Callable[[], Tensor]) -> Round:
        """Run one round of a fragment.

        Raises:
            ExchangeError: a rank is lost or silent, or is at another point of the run.
            DigestError: the ranks have different bits.
            DilocoError: the error of any rank, raised on all ranks.
        """
        held, method = self._fragments[c.fragment], self._method.for_fragment(c.fragment)
        place = f"of fragment {c.fragment} in round {c.round}"
        encoded, error = attempt(payload)
        contributions = self._greet(c, held, place, error)
        parts = self._scatter(held.shards.sizes_bytes(method.up), contributions, encoded, f"the contribution {place}")
        mine = merge_inputs(self._method, contributions, parts, c.round, held.places, held.tensors)
        closed, error = attempt(lambda: close(method, held.own, mine, held.places))
        outcome = {"refused": [] if closed is None else list(closed.refused)}
        outcomes = agree(self._group, self._num_bytes, f"the merge {place}", outcome, error)
        refused = {learner for frame in outcomes for learner in frame["refused"]}
        answer = self._gather(held.shards.sizes_bytes(method.down), closed.payload, f"the merge {place}")
        advanced = apply_update(method, held.whole, closed.update, answer, held.all_places, verify=False)
        update = replace(_without(closed.update, refused), digest=advanced.held.digest)
        results = agree(self._group, self._num_bytes, f"the result {place}", {"digest": update.digest})
        require_same_digest(c.fragment, update.version, _digests(results))
        held.take(advanced.held, closed.held)
        new, mean = advanced.held.bare, advanced.mean
        events: tuple[Event, ...] = (Arrived(update, new, c.number, mean),)
        if name_of(self._group.rank) in refused:
            events = (Rejection(c.fragment, c.number, OUTLIER), Arrived(update, new, c.number - 1, mean))
        return Round(events, sum(each.trained for each in contributions))

    def _greet(self, c: Contribution, held: HeldShard, place: str, error: DilocoError | None) -> list[Contribution]:
        """Return every rank's contribution, after checking that all ranks have the same version.

        `error`: this rank's error in encoding; None: it had none.
        """
        values = {
            "base": c.base, "tokens": c.tokens, "steps": c.steps, "trained": c.trained, "digest": held.whole.digest,
            "part": c.tensors is not None or c.routed is not None,
        }  # fmt: skip
        frames = agree(self._group, self._num_bytes, f"the contribution {place}", values, error)
        require_same_digest(c.fragment, held.whole.version, _digests(frames))
        parts = self._parts(c, place) if any(frame["part"] for frame in frames) else [(None, None)] * len(frames)
        return [
            Contribution(name_of(rank), 1, c.fragment, c.number, c.round, frame["base"], frame["tokens"],
                         frame["steps"], frame["trained"], step=c.step, tensors=tensors, routed=routed)
            for (rank, frame), (tensors, routed) in zip(enumerate(frames), parts, strict=True)
        ]  # fmt: skip

    def _parts(self, c: Contribution, place: str) -> list[tuple[tuple[int, ...] | None, ...]]:
        """`Contribution.tensors` and `routed` of each rank."""
        parts = self._group.gather_values([c.tensors, c.routed], f"the tensors that are trained {place}")
        sizes = [len(json.dumps(each)) + FRAME_BYTES for each in parts]
        self._num_bytes["control"] += sizes[self._group.rank] * (self._group.size - 2) + sum(sizes)
        return [tuple(None if each is None else tuple(each) for each in part) for part in parts]

    def _scatter(self, sizes: list[int], every: Sequence[Contribution], payload: Tensor, what: str) -> list[Tensor]:
        """Send part r of the payload, of size r, to rank r; return the parts of this rank's shard from all ranks.
        Empty contributions have no bytes."""
        rank = self._group.rank
        received_bytes = [0 if each.is_empty else sizes[rank] for each in every]
        if every[rank].is_empty:
            sizes = [0] * len(sizes)
        received = self._group.all_to_all(payload, sizes, received_bytes, what)
        self._num_bytes["contributions"] += sum(sizes) - sizes[rank] + sum(received_bytes) - received_bytes[rank]
        return split(received, received_bytes)

    def _gather(self, sizes: Sequence[int], part: Tensor, what: str) -> Tensor:
        """The whole answer, joined from every rank's part, of these sizes."""
        joined = self._group.gather(part, sizes, what)
        self._num_bytes["updates"] += part.numel() * (self._group.size - 1) + sum(sizes) - part.numel()
        return joined


def _digests(frames: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Each learner's digest of a version."""
    return {name_of(rank): frame["digest"] for rank, frame in enumerate(frames)}


def _without(update: Update, refused: Collection[str]) -> Update:
    """Remove the learners that the owner of any shard has refused."""
    kept = [pair for pair in zip(update.contributors, update.weights, strict=True) if pair[0] not in refused]
    learners, weights = tuple(learner for learner, _ in kept), tuple(weight for _, weight in kept)
    return replace(update, contributors=learners, weights=weights)
