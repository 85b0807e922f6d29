"""A learner's error feedback: what an encoding lost goes into the next contribution, if and only if this one is merged."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.core.codecs import compress
from diloco.core.method import Method


class Residuals:
    """One residual per fragment, advanced when a contribution is encoded, put back when it turns out not to be merged.

    `encode` runs on an exchange's thread and the rest on the training thread, hence the lock. Without error feedback it encodes
    and keeps nothing.
    """

    def __init__(self, method: Method, num_fragments: int) -> None:
        self._codec = method.up
        self._keep = method.error_feedback
        self._residuals: list[Tensor | None] = [None] * num_fragments
        self._before: dict[tuple[int, int], Tensor | None] = {}
        self._lock = threading.Lock()

    def encode(self, fragment: int, round_: int, outer_gradient: Tensor) -> Tensor:
        """Encode Δ + e; the new e is tentative until `commit`."""
        if not self._keep:
            return self._codec.encode(outer_gradient)
        with self._lock:
            before = self._residuals[fragment]
            payload, after = compress(self._codec, outer_gradient, before)
            self._before[fragment, round_] = before
            self._residuals[fragment] = after
        return payload

    def commit(self, fragment: int, round_: int) -> None:
        """The contribution to this round was merged."""
        with self._lock:
            self._before.pop((fragment, round_), None)

    def roll_back(self, fragment: int, round_: int) -> None:
        """It was not: its residual is as before, and a later one that is still on its way keeps what it added."""
        with self._lock:
            if (fragment, round_) not in self._before:
                return
            before = self._before.pop((fragment, round_))
            later = (fragment, round_ + 1)
            if later in self._before:
                mine = self._before[later]
                added = self._residuals[fragment]
                if added is not None and mine is not None:
                    self._residuals[fragment] = added - mine if before is None else added + (before - mine)
                self._before[later] = before
            else:
                self._residuals[fragment] = before

    def reset(self) -> None:
        """A new incarnation starts without."""
        with self._lock:
            self._residuals = [None] * len(self._residuals)
            self._before.clear()

    def state_dict(self) -> dict[str, Any]:
        """Residuals as they would be if everything sent is merged; `Learner.state_dict` waits for the answers first."""
        with self._lock:
            return {str(f): residual.clone() for f, residual in enumerate(self._residuals) if residual is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        with self._lock:
            self._residuals = [
                state[str(f)].to(torch.float32) if str(f) in state else None for f in range(len(self._residuals))
            ]
            self._before.clear()
