"""Outer optimizers: the step of the global model along a merged outer gradient.

The outer gradient Δ = anchor − θ is subtracted, as a gradient is: Θ ← Θ − lr·(…Δ…), with the sign and the momentum
convention of `torch.optim`. An optimizer is a frozen value and its state an argument and a result, so a step is a pure
function: its arguments do not change, and it can be discarded, repeated, or stored beside the parameters that it
produced.

All arithmetic is elementwise over flat fp32 vectors: steps of the shards of a fragment give the bits of a step of the
whole. Every multiply and add is rounded on its own (no `alpha=`, lerp or addcmul, which a processor may fuse), and
divisors are tensors (a GPU multiplies by the reciprocal of a number): the same inputs give the same bits on any
device.

DiLoCo (arXiv 2311.08105, algorithm 1 and section 3.1) compares the three and takes Nesterov.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.choices import BELOW_1, FROM_1, UP_TO_1, Choice, Registry, checked, positive
from diloco.core.memory import blocks, new_like
from diloco.errors import ConfigError, LayoutError

State = dict[str, Tensor]


class Outer(Choice):
    """An optimizer of the global parameters, as explicit state in, state out."""

    one_at_a_time: ClassVar[bool] = False
    """Whether a step takes the outer gradient of a single learner, never the merge of several."""

    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the state's vectors; the first one is a decaying sum or mean of outer gradients."""
    counts: ClassVar[bool] = False
    """Whether the state has the number of steps."""
    formula: ClassVar[Any] = None
    """Of an optimizer with one vector and no count, its step of one element for compiled loops: from two constants,
    parameter, outer gradient and state, all `numpy.float32`, to the new parameter and state."""

    @property
    def constants(self) -> tuple[float, float]:
        """The first two arguments of `formula`."""
        raise NotImplementedError

    def init(self, num_elements: int) -> State:
        """The state before the first step: `vectors`, flat fp32 of shape (num_elements,), and "step", 0-dimensional."""
        step = {"step": torch.zeros((), dtype=torch.int64)} if self.counts else {}
        return {name: torch.zeros(num_elements) for name in self.vectors} | step

    @abstractmethod
    def step_block(self, state: Mapping[str, Tensor], params: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        """`step` on one block of elements: the formula alone. No argument is checked or written to."""

    def step(
        self, state: Mapping[str, Tensor], params: Tensor, delta: Tensor, *,
        out: Tensor | None = None, new_state: State | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """One outer step, block by block.

        `params` (Θ) and `delta` (the merged outer gradient Δ) are flat fp32 vectors of one length, `state` comes from
        `init` or the step before. Returns the new parameters and the new state; the arguments do not change. The new
        parameters are written into `out` if it is given, which may be `delta` itself; the new state into `new_state` if
        it is given, of the shapes of `state`.
        Raises LayoutError when lengths or dtypes do not fit.
        """
        require_fit(self, state, params=params, delta=delta, out=out)
        new = new_like(params) if out is None else out
        if new_state is None:
            new_state = {name: new_like(each) for name, each in state.items()}
        require_fit(self, new_state, params=params)
        if self.formula is not None and params.device.type == "cpu" and (loops := arithmetic.loops()) is not None:
            (name,) = self.vectors
            loops.outer_step(self, params, delta, state[name], new, new_state[name])
            return new, new_state
        for part in blocks(params):
            state_part = {name: each[part] if each.dim() else each for name, each in state.items()}
            new[part], new_state_part = self.step_block(state_part, params[part], delta[part])
            for name, each in new_state_part.items():
                new_state[name][part if each.dim() else ...] = each
        return new, new_state

    def average(self, params: Tensor, delta: Tensor) -> Tensor:
        """The step of averaged elements (`core.averaged`): Θ − Δ."""
        return params.sub(delta)

    def momentum_of(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """The decaying sum or mean of outer gradients in a state, fp32 [num_elements]; None if this optimizer keeps
        none."""
        return state[self.vectors[0]] if self.vectors else None


@dataclass(frozen=True)
class SGD(Outer):
    """Θ ← Θ − lr·Δ.

    With lr = 1 the new parameters are the mean of the learners' parameters: FedAvg, local SGD. Stateless.

    >>> new, state = SGD(lr=0.5).step({}, torch.tensor([1.0]), torch.tensor([1.0]))   # new is [0.5], state is {}
    """

    lr: float = checked(positive)

    def step_block(self, state: Mapping[str, Tensor], params: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        return _descend(params, delta.mul(self.lr)), {}


@dataclass(frozen=True)
class Nesterov(Outer):
    """SGD with Nesterov momentum, torch's convention (no dampening), the outer optimizer of DiLoCo.

        buf ← μ·buf + Δ          (buf is 0 at first, so the first step sets it to Δ)
        Θ   ← Θ − lr·(Δ + μ·buf)

    State: "momentum", fp32 of the parameters' shape. Defaults as in DiLoCo (arXiv 2311.08105): lr 0.7, momentum 0.9;
    Streaming DiLoCo uses lr 0.4.

    >>> outer = Nesterov(lr=0.5, momentum=0.5)
    >>> new, state = outer.step(outer.init(1), torch.tensor([1.0]), torch.tensor([1.0]))   # new is [0.25]
    """

    vectors: ClassVar[tuple[str, ...]] = ("momentum",)

    lr: float = checked(positive, 0.7)
    momentum: float = checked(BELOW_1, 0.9)

    @staticmethod
    def formula(mu: Any, lr: Any, theta: Any, delta: Any, momentum: Any) -> Any:
        momentum = mu * momentum + delta
        return theta - lr * (mu * momentum + delta), momentum

    @property
    def constants(self) -> tuple[float, float]:
        return self.momentum, self.lr

    def step_block(self, state: Mapping[str, Tensor], params: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        new, momentum = self.formula(*self.constants, params, delta, state["momentum"])
        return new, {"momentum": momentum}


@dataclass(frozen=True)
class DelayedNesterov(Outer):
    """Nesterov momentum for outer gradients that arrive one at a time (arXiv 2401.09135, algorithm 3).

    On the s-th outer gradient, with N = `buffer`, usually the number of learners:

        buf ← buf + Δ
        s mod N = 0:   m ← μ·m + buf/N;  Θ ← Θ − lr·((1 − cN + c)·μ·m + Δ/N);  buf ← 0
        otherwise:     Θ ← Θ − lr·(c·μ·m + Δ/N)

    so that N outer gradients move the model as far as one synchronous outer step, with one momentum step and not N. A c
    in [0, 1/N] spreads the momentum over the steps. With N = 1 and c = 0 it is `Nesterov`.

    State: "momentum" and "buffer", fp32 of the parameters' shape, and "step", a 0-dimensional int64.
    """

    one_at_a_time: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = ("momentum", "buffer")
    counts: ClassVar[bool] = True

    lr: float = checked(positive, 0.7)
    momentum: float = checked(BELOW_1, 0.9)
    buffer: int = checked(FROM_1, 1)
    c: float = checked(UP_TO_1, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c > 1 / self.buffer:
            raise ConfigError(f"DelayedNesterov(c={self.c}) exceeds 1/buffer = {1 / self.buffer:g}; lower it.")

    def step_block(self, state: Mapping[str, Tensor], params: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        num = torch.tensor(float(self.buffer), device=params.device)
        step = int(state["step"]) + 1
        momentum, gathered, share = state["momentum"], state["buffer"].add(delta), self.c
        if step % self.buffer == 0:
            momentum = momentum.mul(self.momentum).add_(gathered.div_(num))
            gathered, share = torch.zeros_like(gathered), 1 - self.c * self.buffer + self.c
        direction = momentum.mul(share * self.momentum).add_(delta.div(num))
        return _descend(params, direction.mul_(self.lr)), {
            "momentum": momentum,
            "buffer": gathered,
            "step": torch.tensor(step),
        }

    def average(self, params: Tensor, delta: Tensor) -> Tensor:
        """Θ − Δ/N: each outer gradient is that of one of N learners."""
        return params.sub(delta.div(torch.tensor(float(self.buffer), device=params.device)))


def _betas(name: str, value: object) -> tuple[float, float]:
    match value:
        case [beta1, beta2]:  # a tuple, or a list as JSON and TOML have it
            return BELOW_1(f"each of {name}", beta1), BELOW_1(f"each of {name}", beta2)
    raise ConfigError(f"{name} must be two numbers, not {value!r}.")


@dataclass(frozen=True)
class Adam(Outer):
    """Adam with bias correction (arXiv 1412.6980, algorithm 1), as `torch.optim.Adam` computes it; at step k = 1, 2, …:

        m ← β₁·m + (1 − β₁)·Δ        v ← β₂·v + (1 − β₂)·Δ²
        Θ ← Θ − lr/(1 − β₁ᵏ) · m / (√v/√(1 − β₂ᵏ) + eps)

    State: "first_moment" and "second_moment", fp32 of the parameters' shape, and "step", a 0-dimensional int64. As an
    outer optimizer it needs a large eps (0.1, arXiv 2311.08105), which lets small coordinates move in proportion to Δ.
    """

    vectors: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    counts: ClassVar[bool] = True

    lr: float = checked(positive)
    betas: tuple[float, float] = checked(_betas, (0.9, 0.95))
    eps: float = checked(positive, 0.1)

    def step_block(self, state: Mapping[str, Tensor], params: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        beta1, beta2 = self.betas
        step = int(state["step"]) + 1
        first = state["first_moment"].mul(beta1).add_(delta.mul(1 - beta1))
        second = state["second_moment"].mul(beta2).add_(delta.square().mul_(1 - beta2))
        correction = torch.tensor(math.sqrt(1 - beta2**step), dtype=torch.float32, device=params.device)
        denominator = second.sqrt().div_(correction).add_(self.eps)
        update = first.div(denominator).mul_(self.lr / (1 - beta1**step))
        return _descend(params, update), {"first_moment": first, "second_moment": second, "step": torch.tensor(step)}


OUTER_OPTIMIZERS: Registry[Outer] = Registry("outer optimizer", SGD, Nesterov, DelayedNesterov, Adam)


def _descend(params: Tensor, update: Tensor) -> Tensor:
    """params − update, written over `update`, a temporary of the caller."""
    return torch.sub(params, update, out=update)


def require_fit(outer: Outer, state: Mapping[str, Tensor], **vectors: Tensor | None) -> None:
    """Raise LayoutError unless all vectors are contiguous fp32 of one length and `state` is of this optimizer: torch
    would broadcast a vector of another length, and compiled loops would write past its end."""
    names = outer.init(0).keys()
    if state.keys() != names:
        raise LayoutError(f"the state of {outer} holds {sorted(names)}, not {sorted(state)}.")
    found = {name: each for name, each in {**vectors, **state}.items() if name != "step" and each is not None}
    num_elements = next(iter(found.values())).numel()
    for name, vector in found.items():
        if (vector.dtype, vector.shape) != (torch.float32, (num_elements,)) or not vector.is_contiguous():
            raise LayoutError(
                f"{name} of {outer} must be a flat float32 vector of {num_elements} elements,"
                f" not {tuple(vector.shape)} {str(vector.dtype).removeprefix('torch.')}."
            )
