"""Adoption: how a learner combines its parameters θ with a global fragment Θ that arrives.

The learner has trained for τ steps since it sent the fragment, so θ contains work that Θ does not. The next outer
gradient is measured from Θ, before mixing: the anchor becomes Θ under every rule but Eager.

    Replace            θ ← Θ                             work after the send is discarded
    Mix                θ ← α·θ + (1 − α)·Θ
    KeepDisplacement   θ ← Θ + (θ − θ_sent)              work after the send is kept
    Eager              θ ← OuterOpt(anchor_m, Δ̃_m)      the learner takes the outer step itself, with its newest work
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.choices import UP_TO_1, Choice, Registry, checked
from diloco.core.memory import blocks


class Adopt(Choice):
    """How local and global parameters become the learner's new parameters."""

    needs_origin: ClassVar[bool] = False
    """Whether `adopt` needs `origin`, the parameters as they were when they were last sent or adopted."""
    formula: ClassVar[Any] = None
    """The rule for one element, for compiled loops: from two constants, local, global and origin, all `numpy.float32`,
    to the new parameter."""

    @property
    def constants(self) -> tuple[float, float] | None:
        """The first two arguments of `formula`; None: this rule is not computed by it."""
        return None

    @property
    @abstractmethod
    def keeps_pending(self) -> bool:
        """Whether work done between sending and adopting survives.

        If so, its tokens stay pending and count in the next contribution; if not, they are discarded
        (reason "overlap").
        """

    @abstractmethod
    def adopt(self, local: Tensor, global_: Tensor, origin: Tensor | None = None) -> Tensor:
        """The learner's new parameters, fp32 of the arguments' shape (any, the same for all, all fp32).

        `origin`: the parameters when they were last sent; if nothing was sent since the last adoption, the value then
        adopted. No argument is written to, and the result may be one of them: copy it before changing it.
        """

    def adopt_into(self, own: Tensor, global_: Tensor, origin: Tensor | None = None) -> None:
        """Set `own`, fp32 or not, to `adopt` of itself and the global value, block by block. No `origin`: `own`."""
        origin = own if origin is None else origin
        if own.is_contiguous():  # the blocks of other tensors are whole rows
            own, global_, origin = (each.view(-1) for each in (own, global_, origin))
            is_fp32 = own.device.type == "cpu" and own.dtype == origin.dtype == torch.float32
            if is_fp32 and self.constants and (loops := arithmetic.loops()) is not None:
                loops.adopt(self, self.constants, own, global_, origin)
                return
        for part in blocks(own):
            mine = own[part]
            mine.copy_(self.adopt(mine.float(), global_[part], origin[part].float()))


@dataclass(frozen=True)
class Replace(Adopt):
    """θ ← Θ: take the global value (DiLoCo, arXiv 2311.08105, algorithm 1); τ > 0 local steps are discarded."""

    @property
    def keeps_pending(self) -> bool:
        return False

    def adopt(self, local: Tensor, global_: Tensor, origin: Tensor | None = None) -> Tensor:
        return global_


@dataclass(frozen=True)
class Mix(Adopt):
    """θ ← α·θ + (1 − α)·Θ, in fp32, each product and the sum rounded on its own.

    α = 0 is Replace and α = 1 keeps the local value, both exactly, by rule. Streaming DiLoCo (arXiv 2501.18512,
    algorithm 2, line "θ ← α·θ + (1 − α)·Θ") takes α = 0.5 by default.

    >>> Mix(0.25).adopt(torch.tensor([4.0]), torch.tensor([8.0]))   # [7.0]
    """

    alpha: float = checked(UP_TO_1)

    @staticmethod
    def formula(alpha: Any, beta: Any, local: Any, global_: Any, _origin: Any) -> Any:
        return alpha * local + beta * global_

    @property
    def constants(self) -> tuple[float, float] | None:
        return (self.alpha, 1 - self.alpha) if 0 < self.alpha < 1 else None

    @property
    def keeps_pending(self) -> bool:
        return self.alpha > 0

    def adopt(self, local: Tensor, global_: Tensor, origin: Tensor | None = None) -> Tensor:
        if self.alpha == 0:
            return global_
        if self.alpha == 1:
            return local
        return local.mul(self.alpha).add_(global_.mul(1 - self.alpha))


@dataclass(frozen=True)
class KeepDisplacement(Adopt):
    """θ ← Θ + (θ − θ_sent): the work done while the answer was in flight is added to it (arXiv 2605.20866).

    Its tokens stay pending: the next outer gradient, measured from Θ, contains that work.

    >>> KeepDisplacement().adopt(torch.tensor([4.0]), torch.tensor([8.0]), torch.tensor([5.0]))   # [7.0]
    """

    needs_origin: ClassVar[bool] = True
    constants: ClassVar[tuple[float, float]] = (0.0, 0.0)

    @staticmethod
    def formula(_a: Any, _b: Any, local: Any, global_: Any, origin: Any) -> Any:
        return local - origin + global_

    @property
    def keeps_pending(self) -> bool:
        return True

    def adopt(self, local: Tensor, global_: Tensor, origin: Tensor | None = None) -> Tensor:
        assert origin is not None
        return local.sub(origin).add_(global_)


@dataclass(frozen=True)
class Eager(Adopt):
    """θ ← OuterOpt(anchor_m, Δ̃_m): outer steps that include the learner's own newest work (arXiv 2502.12996).

    Each learner has an anchor and an outer state of its own, and measures from that anchor. `eager_gradient` gives
    Δ̃_m; the result of the step is adopted unchanged.
    """

    @property
    def keeps_pending(self) -> bool:
        return True

    def adopt(self, local: Tensor, global_: Tensor, origin: Tensor | None = None) -> Tensor:
        return global_


def eager_gradient(own: Tensor | None, mean: Tensor | None, added: Tensor | None) -> Tensor | None:
    """Δ̃_m = Δ̄ + s'·Δ_m^(t) − s·Δ_m^(t−H), fp32 flat [n]; arXiv 2502.12996, algorithm 3.

    s' and s are the shares 1 / (live learners) when the learner added each term. It subtracts the same term that it
    added, whatever weight the mean gives to it and even if the mean does not list it. So the terms cancel over the
    rounds, ΣΔ̃_m = ΣΔ̄ + s'·Δ_m^(t), and learners do not drift apart. Before the first mean has arrived Δ̃_m is
    s'·Δ_m^(t). The subtraction precedes the addition, so that a lone learner's older work cancels to the bit.

    Arguments:
        own: s'·Δ_m^(t), this learner's newest outer gradient as decoded from its payload, times its share; None: no
            outer gradient is sent now.
        mean: Δ̄, the merged outer gradient that is due; None: no mean is due.
        added: s·Δ_m^(t−H), the term that the learner added in the round of that mean; None: it added none.
    """
    if mean is None:
        return own
    others = mean if added is None else mean.sub(added)
    return others if own is None else others.add(own)


ADOPTIONS: Registry[Adopt] = Registry("adoption", Replace, Mix, KeepDisplacement, Eager)
