"""Which entries an inner optimizer keeps of its parameters, learnt from a step of a small copy of it.

An optimizer makes its entries when it first steps, and takes those that are there for whole: AdamW with first moments
alone ends at its next step. What a joiner is given by a peer must therefore have all that its own optimizer would make.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.errors import ConfigError, first_line
from diloco.plain_json import MALFORMED

KINDS = (int, float, bool)
"""Of plain values beside tensors: counters of steps."""

Entries = frozenset[tuple[str, bool]]
"""Names, and whether the value is a tensor with dimensions."""

SIDE, GRADIENT = 2, 1e-3
"""Of each dimension of a small parameter, and in all of its gradient."""


def entries_of(state: Mapping[str, Any]) -> Entries:
    """Of one parameter."""
    return frozenset(
        (name, isinstance(value, Tensor) and bool(value.dim()))
        for name, value in state.items()
        if isinstance(value, (Tensor, *KINDS))
    )


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one is made of (`diloco.training.optimizers.Chained`); else itself."""
    return tuple(getattr(optimizer, "optimizers", ())) or (optimizer,)


def made_by(optimizer: torch.optim.Optimizer) -> dict[tuple[int, int], Entries]:
    """By a group's number and a parameter's number of dimensions, what is there after a first step. The optimizer, its
    parameters and the generators of random numbers stay as they are.

    Raises:
        ConfigError: a small copy of it takes no step.
    """
    found: dict[tuple[int, int], Entries] = {}
    first = 0
    for part in parts_of(optimizer):
        for number, dims, entries in _made_by_one(part):
            found[first + number, dims] = entries
        first += len(part.param_groups)
    return found


def _made_by_one(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, int, Entries]]:
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    groups = [{**group, "params": _small_params(group["params"], optimizer, state)} for group in optimizer.param_groups]
    small = _small_copy(optimizer, groups, state)
    devices = {each.device.index for group in groups for each in group["params"] if each.device.type == "cuda"}
    try:
        if small.param_groups is not groups or small.state is not state:
            raise TypeError("its groups and its state are another optimizer's")
        with torch.random.fork_rng(sorted(devices)):
            type(optimizer).step(small)
    except (RuntimeError, AssertionError, NotImplementedError, *MALFORMED) as error:
        raise ConfigError(
            f"what {type(optimizer).__name__} keeps of its parameters cannot be learnt from a step of a small copy "
            f"({type(error).__name__}: {first_line(error)}), so that a peer's state could not be checked; use "
            "source='global'."
        ) from error
    for number, group in enumerate(groups):
        for each in group["params"]:
            yield number, each.dim(), entries_of(state.get(each, {}))


def _small_params(
    params: list[Tensor], optimizer: torch.optim.Optimizer, state: dict[Tensor, dict[str, Any]]
) -> list[Tensor]:
    """One for each number of dimensions, with what the optimizer has made of such a parameter already, as Adagrad does
    when it is made."""
    found: dict[int, Tensor] = {}
    for each in params:
        if each.dim() not in found:
            small = torch.nn.Parameter(torch.ones([SIDE] * each.dim(), dtype=each.dtype, device=each.device))
            small.grad = torch.full_like(small, GRADIENT)
            found[each.dim()] = small
            if made := optimizer.state.get(each):
                state[small] = {name: _small_value(value, small) for name, value in made.items()}
    return list(found.values())


def _small_value(value: Any, small: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.ones_like(small, dtype=value.dtype) if value.dim() else value.detach().clone()


def _small_copy(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]
) -> torch.optim.Optimizer:
    """With these groups and this state, without the hooks, and without a `step` that was put on the instance, as
    schedulers do."""
    small: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        small.__dict__[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    small.__dict__.pop("step", None)
    small.__dict__.update(
        param_groups=groups, state=state, _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )  # fmt: skip
    return small
