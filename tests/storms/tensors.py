"""The numbers that a learner of a storm trains, by the package's own codecs, error feedback and adoption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tests.chaos.versions import BrokenInvariantError
from torch import Tensor

from diloco.learner.device import DeviceQueue, Displacement
from diloco.learner.error_feedback import ErrorFeedback

if TYPE_CHECKING:
    from tests.storms.plans import Plan

    from diloco.core.global_fragment import GlobalFragment
    from diloco.protocol.in_flight import Send


EPSILON = 2.0**-23
"""Of fp32."""


def _are_close(a: Tensor, b: Tensor, rounding: float) -> bool:
    """As `torch.allclose` with 1e-3 and 1e-3, which takes long for a few numbers. `rounding`: by how much more they may
    differ."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return all(abs(x - y) <= 1e-3 + rounding + 1e-3 * abs(y) for x, y in pairs)


class StormTensors:
    """Of one incarnation of a learner.

    Arguments:
        trains: per fragment the indices of the tensors that it trains; None: all.
        held: its fragments; None: one that it does not hold.

    Attributes:
        received: versions that are here and not adopted, by fragment and version.
    """

    def __init__(
        self, plan: Plan, trains: Sequence[tuple[int, ...] | None], held: Sequence[GlobalFragment | None]
    ) -> None:  # fmt: skip
        self._plan, self._method, self.trains = plan, plan.method, trains
        self.received: dict[tuple[int, int], Tensor] = {}
        self._anchors = [torch.empty(0) if each is None else each.theta for each in held]
        self._thetas = [each.clone() for each in self._anchors]
        self._origins = list(self._thetas)  # the parameters when they were sent or adopted last
        self._residuals = ErrorFeedback(plan.method, len(held))
        self._lost: dict[tuple[int, int], Tensor] = {}  # in encoding, by fragment and number
        self._committed: list[Tensor | None] = [None] * len(held)
        self._rounding = [0.0] * len(held)  # of sums with changes that are far larger than what encoding loses

    def step(self, change: float) -> None:
        """An inner step."""
        for theta, trains, fragment in zip(self._thetas, self.trains, self._plan.layout.fragments, strict=True):
            if not theta.numel():
                continue
            if trains is None:
                theta += change
            for index in trains or ():
                theta[fragment.tensors[index].elements] += change

    def encode(self, send: Send) -> Tensor:
        """The payload of a contribution."""
        fragment = send.fragment
        change, tentative = (
            self._anchors[fragment] - self._thetas[fragment],
            self._residuals.offered(fragment, send.number),
        )
        if self.trains[fragment] == ():
            return torch.empty(0, dtype=torch.uint8)
        displacement = Displacement(DeviceQueue(change.device), change, None, None, ())
        payload = self._residuals.encode(tentative, displacement)
        if self._method.for_fragment(fragment).error_feedback:
            up = self._method.for_fragment(fragment).up
            self._lost[fragment, send.number] = change - up.decode(payload, change.numel())
            self._rounding[fragment] += EPSILON * max(map(abs, change.tolist()))
        if self._method.adopt.needs_origin:
            self._origins[fragment] = self._thetas[fragment].clone()
        return payload

    def merged(self, fragment: int, number: int) -> None:
        """A contribution is merged: what its encoding lost is in the next one."""
        self._residuals.commit(fragment, number)
        if (lost := self._lost.pop((fragment, number), None)) is not None:
            before = self._committed[fragment]
            self._committed[fragment] = lost if before is None else lost + self._method.error_feedback * before
            self._check_residual(fragment)

    def not_merged(self, fragment: int, number: int) -> None:
        """A contribution was rejected, or its round was missed: it is as if it had never been encoded."""
        self._residuals.roll_back(fragment, number)
        if self._lost.pop((fragment, number), None) is not None:
            self._check_residual(fragment)

    def _check_residual(self, fragment: int) -> None:
        """It is what merged contributions have lost, also where others are in flight."""
        lost, rounding = self._committed[fragment], self._rounding[fragment]
        kept = [self._residuals.state_dict().get(str(fragment))]
        if all(each != fragment for each, _ in self._lost):
            kept.append(self._residuals._residuals[fragment])  # where the next encoding begins
        for each in kept:
            is_right = lost is each if lost is None or each is None else _are_close(each, lost, rounding)
            if not is_right:  # a tensor takes long to print
                raise BrokenInvariantError(f"residual of fragment {fragment}: {each}; what is merged lost {lost}")

    def adopt(self, fragment: int, version: int, *, keeps_own: bool) -> None:
        """A version becomes the anchor, and the parameters follow it."""
        new, own = self.received[fragment, version], self._thetas[fragment]
        if not keeps_own:
            own = self._method.adopt.adopt(own, new, self._origins[fragment]).clone()
        self._anchors[fragment], self._thetas[fragment] = new, own
        self._origins[fragment] = own.clone() if self._method.adopt.needs_origin else own
        self.received = {key: value for key, value in self.received.items() if key[0] != fragment or key[1] > version}

    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"received": dict(self.received), "residuals": self._residuals.state_dict()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from `saved`."""
        self.received = dict(saved["received"])
        self._residuals.load_state_dict(saved["residuals"])
        self._committed = [saved["residuals"].get(str(f)) for f in range(len(self._committed))]
