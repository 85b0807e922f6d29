"""A learner's error feedback: what an encoding lost goes into the next contribution, if and only if this one is merged."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.core.codecs import compress
from diloco.core.method import Method


@dataclass(eq=False)
class Tentative:
    """A contribution whose merge is not known yet, and the fragment's residual before it was encoded."""

    fragment: int
    round: int
    encoded: bool = False
    merged: bool = False
    rolled_back: bool = False
    before: Tensor | None = None


class ErrorFeedback:
    """One residual per fragment, advanced when a contribution is encoded, put back when it turns out not to be merged.

    `encode` runs on an exchange's thread, for one contribution of a fragment at a time and in the order of `offered`, and the rest on
    the training thread; the lock is never held while encoding. Residuals are fp32 on the host and never changed in place. The method's
    `error_feedback` is their decay, True being 1; without it contributions are encoded and nothing is kept.
    """

    def __init__(self, method: Method, num_fragments: int) -> None:
        self._codec = method.up
        self._decay = float(method.error_feedback)
        self._keep = self._decay > 0
        self._residuals: list[Tensor | None] = [None] * num_fragments
        # By fragment, in the order of `offered`; a merged one stays until those before it are settled, which it builds on.
        self._open: list[list[Tentative]] = [[] for _ in range(num_fragments)]
        self._lock = threading.Lock()

    def offered(self, fragment: int, round_: int) -> Tentative:
        """A contribution to this round is on its way; pass the answer to `encode`."""
        tentative = Tentative(fragment, round_)
        if self._keep:
            with self._lock:
                self._open[fragment].append(tentative)
        return tentative

    def encode(self, tentative: Tentative, outer_gradient: Tensor) -> Tensor:
        """Encode Δ + decay · e; the new e is tentative until `commit`."""
        if not self._keep:
            return self._codec.encode(outer_gradient)
        fragment = tentative.fragment
        with self._lock:
            start = self._residuals[fragment]
        payload, after = compress(self._codec, outer_gradient, start, self._decay)
        with self._lock:
            if tentative.rolled_back:  # it was refused before it was encoded
                return payload
            before = self._residuals[fragment]
            tentative.before, tentative.encoded = before, True
            self._residuals[fragment] = after if before is start else self._moved(after, start, before)
        return payload

    def commit(self, fragment: int, round_: int) -> None:
        """The contribution to this round was merged."""
        with self._lock:
            for tentative in self._open[fragment]:
                if tentative.round == round_:
                    tentative.merged = True
            self._forget_merged(fragment)

    def roll_back(self, fragment: int, round_: int) -> None:
        """It was not: the residual is as before, to the bit; later contributions that are still on their way keep what they added."""
        with self._lock:
            chain = self._open[fragment]
            refused = next((tentative for tentative in chain if tentative.round == round_), None)
            if refused is None:
                return
            refused.rolled_back = True
            left, self._residuals[fragment] = self._without(fragment, [refused])
            for tentative, before in left:
                tentative.before = before
            self._open[fragment] = [tentative for tentative in chain if tentative is not refused]
            self._forget_merged(fragment)

    def _without(
        self, fragment: int, refused: Sequence[Tentative]
    ) -> tuple[list[tuple[Tentative, Tensor | None]], Tensor | None]:
        """Had these never been sent: every other encoded contribution with the residual before it, and the residual after all of them."""
        encoded = [tentative for tentative in self._open[fragment] if tentative.encoded]
        newest = self._residuals[fragment]
        if not encoded:
            return [], newest
        residual, left = encoded[0].before, []
        for tentative, after in zip(encoded, [*(each.before for each in encoded[1:]), newest], strict=True):
            if tentative in refused:
                continue
            left.append((tentative, residual))
            residual = after if residual is tentative.before else self._moved(after, tentative.before, residual)
        return left, residual

    def _forget_merged(self, fragment: int) -> None:
        chain = self._open[fragment]
        while chain and chain[0].merged:
            chain.pop(0)

    def _moved(self, after: Tensor | None, start: Tensor | None, other_start: Tensor | None) -> Tensor:
        """The residual after an encoding that began at `start`, had it begun at the other one; None stands for zeros."""
        assert after is not None  # something was encoded
        if start is not None:
            after = after.sub(start.mul(self._decay))
        return after if other_start is None else after.add(other_start.mul(self._decay))

    def state_dict(self) -> dict[str, Any]:
        """Residuals as they were last committed: only an update that lists a contribution commits its residual, so one whose merge is
        not known yet counts as not merged.

        A resumed learner does not hear of it any more. Where the exchange's state is in the checkpoint, the contribution is not: its
        work is pending again, and is encoded again with the residual from before. Over a syncer it belongs to an earlier incarnation.
        """
        with self._lock:
            committed = [
                self._without(fragment, [tentative for tentative in chain if not tentative.merged])[1]
                for fragment, chain in enumerate(self._open)
            ]
        return {str(f): residual for f, residual in enumerate(committed) if residual is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        with self._lock:
            self._residuals = [
                state[str(f)].to(torch.float32, copy=True) if str(f) in state else None
                for f in range(len(self._residuals))
            ]
            self._open = [[] for _ in self._residuals]
