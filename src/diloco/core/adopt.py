"""Adoption: what a learner does with a global fragment that arrives.

The learner has trained for τ steps since it sent the fragment, so its parameters θ hold work that the global value Θ
does not have. The anchor becomes Θ whatever is adopted: the next outer gradient is measured from Θ, before mixing.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.values import Choice, choice_from_dict, fraction
from diloco.errors import LayoutError


class Adopt(Choice):
    """How local and global parameters become the learner's new parameters."""

    @property
    @abstractmethod
    def keeps_pending(self) -> bool:
        """Whether work done between sending and adopting survives.

        If so, its tokens stay pending and count in the next contribution; if not, they are discarded
        (reason "overlap").
        """

    @abstractmethod
    def adopt(self, local: Tensor, global_: Tensor) -> Tensor:
        """The learner's new parameters, fp32 of the arguments' shape (any, the same for both, both fp32).

        Neither argument is written to, and the result may be one of them: copy it before changing it. Raises
        LayoutError when the arguments do not fit each other.
        """


@dataclass(frozen=True)
class Replace(Adopt):
    """θ ← Θ: take the global value (DiLoCo, arXiv 2311.08105, algorithm 1); τ > 0 local steps are discarded."""

    @property
    def keeps_pending(self) -> bool:
        return False

    def adopt(self, local: Tensor, global_: Tensor) -> Tensor:
        _check_fit(local, global_)
        return global_


@dataclass(frozen=True)
class Mix(Adopt):
    """θ ← α·θ + (1 − α)·Θ, in fp32, each product and the sum rounded on its own.

    α = 0 is Replace and α = 1 keeps the local value, both exactly, by rule. Streaming DiLoCo (arXiv 2501.18512,
    algorithm 2, line "θ ← α·θ + (1 − α)·Θ") takes α = 0.5 by default.

    >>> Mix(0.25).adopt(torch.tensor([4.0]), torch.tensor([8.0]))   # [7.0]
    """

    alpha: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", fraction("Mix(alpha=…)", self.alpha, below_one=False))

    @property
    def keeps_pending(self) -> bool:
        return self.alpha > 0

    def adopt(self, local: Tensor, global_: Tensor) -> Tensor:
        _check_fit(local, global_)
        if self.alpha == 0:
            return global_
        if self.alpha == 1:
            return local
        return local.mul(self.alpha).add_(global_.mul(1 - self.alpha))


ADOPTIONS: tuple[type[Adopt], ...] = (Replace, Mix)


def adopt_from_dict(values: Mapping[str, object]) -> Adopt:
    """Read back `Adopt.to_dict()`, e.g. `{"type": "Mix", "alpha": 0.5}`. Raises ConfigError naming a typo."""
    return choice_from_dict("adoption", ADOPTIONS, values)


def _check_fit(local: Tensor, global_: Tensor) -> None:
    if local.dtype != torch.float32 or global_.dtype != torch.float32 or local.shape != global_.shape:
        raise LayoutError(
            f"adoption takes two float32 tensors of one shape, not {tuple(local.shape)} {local.dtype}"
            f" and {tuple(global_.shape)} {global_.dtype}."
        )
