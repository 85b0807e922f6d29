"""Error feedback of a learner: the residual, which is the encoding error of contributions, is added to the next one.

If a contribution is not merged, the residual is rolled back to its value from before that encoding.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.core.method import Method
from diloco.learner.device import Displacement


@dataclass(eq=False)
class TentativeResidual:
    """A contribution that is neither merged nor rejected yet, and the fragment's residual from before its encoding."""

    fragment: int
    number: int
    encoded: bool = False
    merged: bool = False
    rolled_back: bool = False
    before: Tensor | None = None


class ErrorFeedback:
    """One residual per fragment, advanced when a contribution is encoded and rolled back if it is not merged.

    Residuals are flat fp32 host tensors and never changed in place. The method's `error_feedback` is their decay, True
    being 1. Without it, contributions are encoded and no residual is kept.

    `encode` runs on a thread of the exchange, for one contribution of a fragment at a time, in the order of `offered`.
    All other methods run on the training thread. The lock is never held while encoding.
    """

    def __init__(self, method: Method, num_fragments: int) -> None:
        methods = [method.for_fragment(fragment) for fragment in range(num_fragments)]
        self._codecs = [each.up for each in methods]
        self._decays = [float(each.error_feedback) for each in methods]
        self._residuals: list[Tensor | None] = [None] * num_fragments
        # By fragment, in the order of `offered`. A merged one is kept until all earlier ones are merged or rejected.
        self._open: list[list[TentativeResidual]] = [[] for _ in range(num_fragments)]
        self._lock = threading.Lock()

    def offered(self, fragment: int, number: int) -> TentativeResidual:
        """Register the contribution with this number. Its encoding takes the returned value (`encode`)."""
        tentative = TentativeResidual(fragment, number)
        if self._decays[fragment]:
            with self._lock:
                self._open[fragment].append(tentative)
        return tentative

    def encode(self, tentative: TentativeResidual, outer_gradient: Displacement) -> Tensor:
        """Encode Δ + decay · e, where e is the fragment's residual; the new e is tentative until `commit`.

        Arguments:
            outer_gradient: Δ.

        Returns:
            The payload, uint8 on the host.
        """
        fragment = tentative.fragment
        codec, decay = self._codecs[fragment], self._decays[fragment]
        if not decay:
            return outer_gradient.encode(codec)
        with self._lock:
            start = self._residuals[fragment]
        payload, after = outer_gradient.compress(codec, start, decay)
        with self._lock:
            if tentative.rolled_back:  # it was rejected before it was encoded
                return payload
            before = self._residuals[fragment]
            tentative.before, tentative.encoded = before, True
            self._residuals[fragment] = after if before is start else _moved(after, start, before, decay)
        return payload

    def commit(self, fragment: int, number: int) -> None:
        """The contribution with this number was merged: its residual stays."""
        with self._lock:
            for tentative in self._open[fragment]:
                if tentative.number == number:
                    tentative.merged = True
            self._forget_merged(fragment)

    def roll_back(self, fragment: int, number: int) -> None:
        """The contribution with this number was not merged: the residual is as before it, to the bit.

        The changes by later contributions in flight remain.
        """
        with self._lock:
            chain = self._open[fragment]
            rejected = next((tentative for tentative in chain if tentative.number == number), None)
            if rejected is None:
                return
            rejected.rolled_back = True
            left, self._residuals[fragment] = self._without(fragment, [rejected])
            for tentative, before in left:
                tentative.before = before
            self._open[fragment] = [tentative for tentative in chain if tentative is not rejected]
            self._forget_merged(fragment)

    def _without(
        self, fragment: int, removed: Sequence[TentativeResidual]
    ) -> tuple[list[tuple[TentativeResidual, Tensor | None]], Tensor | None]:
        """The residuals as they would be if the `removed` contributions had never been encoded.

        Returns:
            Every other encoded contribution with the residual before it, and the residual after the last one.
        """
        encoded = [tentative for tentative in self._open[fragment] if tentative.encoded]
        newest = self._residuals[fragment]
        if not encoded:
            return [], newest
        residual, left, decay = encoded[0].before, [], self._decays[fragment]
        for tentative, after in zip(encoded, [*(each.before for each in encoded[1:]), newest], strict=True):
            if tentative in removed:
                continue
            left.append((tentative, residual))
            residual = after if residual is tentative.before else _moved(after, tentative.before, residual, decay)
        return left, residual

    def _forget_merged(self, fragment: int) -> None:
        chain = self._open[fragment]
        while chain and chain[0].merged:
            chain.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """The committed residuals, by fragment: a contribution in flight counts as not merged.

        A resumed learner never receives that contribution's verdict. Over a syncer, the contribution belongs to an
        earlier incarnation. Over other exchanges its work becomes pending, and is encoded again from the residual
        before it.
        """
        with self._lock:
            committed = [
                self._without(fragment, [tentative for tentative in chain if not tentative.merged])[1]
                for fragment, chain in enumerate(self._open)
            ]
        return {str(f): residual for f, residual in enumerate(committed) if residual is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        with self._lock:
            self._residuals = [
                state[str(f)].to(torch.float32, copy=True) if str(f) in state else None
                for f in range(len(self._residuals))
            ]
            self._open = [[] for _ in self._residuals]


def _moved(after: Tensor | None, start: Tensor | None, other_start: Tensor | None, decay: float) -> Tensor:
    """The residual after an encoding that began at `start`, had it begun at `other_start`; None is zeros."""
    assert after is not None  # a contribution was encoded
    if start is not None:
        after = after.sub(start.mul(decay))
    return after if other_start is None else after.add(other_start.mul(decay))
