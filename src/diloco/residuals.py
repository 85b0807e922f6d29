"""A learner's error feedback: what an encoding lost goes into the next contribution, if and only if this one is merged."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.core.codecs import compress
from diloco.core.method import Method


@dataclass
class Tentative:
    """A contribution whose merge is not known yet, and the fragment's residual before it was encoded."""

    fragment: int
    round: int
    encoded: bool = False
    merged: bool = False
    rolled_back: bool = False
    before: Tensor | None = None


class Residuals:
    """One residual per fragment, advanced when a contribution is encoded, put back when it turns out not to be merged.

    `encode` runs on an exchange's thread, for one contribution of a fragment at a time and in the order of `offered`, and the rest on
    the training thread; the lock is never held while encoding. Residuals are fp32 on the host and never changed in place. Without
    error feedback contributions are encoded and nothing is kept.
    """

    def __init__(self, method: Method, num_fragments: int) -> None:
        self._codec = method.up
        self._keep = method.error_feedback
        self._residuals: list[Tensor | None] = [None] * num_fragments
        self._open: dict[tuple[int, int], Tentative] = {}
        self._lock = threading.Lock()

    def offered(self, fragment: int, round_: int) -> Tentative:
        """A contribution to this round is on its way; pass the answer to `encode`."""
        tentative = Tentative(fragment, round_)
        if self._keep:
            with self._lock:
                self._open[fragment, round_] = tentative
        return tentative

    def encode(self, tentative: Tentative, outer_gradient: Tensor) -> Tensor:
        """Encode Δ + e; the new e is tentative until `commit`."""
        if not self._keep:
            return self._codec.encode(outer_gradient)
        fragment = tentative.fragment
        with self._lock:
            start = self._residuals[fragment]
        payload, after = compress(self._codec, outer_gradient, start)
        with self._lock:
            if tentative.rolled_back:  # it was refused before it was encoded
                return payload
            before = self._residuals[fragment]
            tentative.before, tentative.encoded = before, True
            self._residuals[fragment] = after if before is start else _moved(after, start, before)
        return payload

    def commit(self, fragment: int, round_: int) -> None:
        """The contribution to this round was merged."""
        with self._lock:
            tentative = self._open.get((fragment, round_))
            if tentative is None:
                return
            tentative.merged = True
            earlier = self._open.get((fragment, round_ - 1))
            if earlier is None:  # else the residual still depends on what becomes of that one
                self._forget_merged(fragment, round_)
                self._forget_merged(fragment, round_ + 1)

    def roll_back(self, fragment: int, round_: int) -> None:
        """It was not: the residual is as before, to the bit; a later contribution that is still on its way keeps what it added."""
        with self._lock:
            tentative = self._open.pop((fragment, round_), None)
            if tentative is None:
                return
            tentative.rolled_back = True
            if not tentative.encoded:
                return
            later = self._open.get((fragment, round_ + 1))
            if later is None or not later.encoded:
                self._residuals[fragment] = tentative.before
                return
            residual = self._residuals[fragment]
            assert residual is not None
            self._residuals[fragment] = _moved(residual, later.before, tentative.before)
            later.before = tentative.before
            self._forget_merged(fragment, round_ + 1)

    def _forget_merged(self, fragment: int, round_: int) -> None:
        tentative = self._open.get((fragment, round_))
        if tentative is not None and tentative.merged:
            del self._open[fragment, round_]

    def state_dict(self) -> dict[str, Any]:
        """Residuals as they are once everything sent is merged; `Learner.state_dict` waits for the answers first."""
        with self._lock:
            return {str(f): residual for f, residual in enumerate(self._residuals) if residual is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        with self._lock:
            self._residuals = [
                state[str(f)].to(torch.float32, copy=True) if str(f) in state else None
                for f in range(len(self._residuals))
            ]
            self._open.clear()


def _moved(residual: Tensor, from_: Tensor | None, to: Tensor | None) -> Tensor:
    """The residual that was reached from `from_`, had it started at `to`; None stands for zeros."""
    if from_ is not None:
        residual = residual.sub(from_)
    return residual if to is None else residual.add(to)
