"""The inner optimizer of a run: AdamW, or Muon for the hidden matrices with AdamW for everything else; and its learning
rate, a pure function of a learner's step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from diloco.config import MUON_PRESET, InnerTable, RunConfig, ScheduleTable
from diloco.errors import ConfigError
from diloco.learner.experts import mixture_blocks
from diloco.training.expert_parallel import sharded_like


class Chained(torch.optim.Optimizer):
    """Several optimizers over different parameters of one model as one torch optimizer, stepped together in order.

    It shares the parameter groups and state dicts of the optimizers, so that schedules, hooks, checkpoints and
    `diloco.Learner` work as with one optimizer. Raises ValueError when two optimizers share a parameter.

    Example: `Chained([torch.optim.Muon(matrices), torch.optim.AdamW(others)])`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = tuple(optimizers)
        for each in optimizers:
            self.state.update(each.state)
        self._link()

    def _link(self) -> None:
        """Share this optimizer's groups and state with the chained ones."""
        start = 0
        for each in self.optimizers:
            stop = start + len(each.param_groups)
            each.param_groups = self.param_groups[start:stop]
            each.state = self.state
            start = stop

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same optimizers over the same parameters."""
        super().load_state_dict(dict(state_dict))  # replaces the dicts of groups and state
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError after construction: a group belongs to one of the chained optimizers."""
        if self.optimizers:
            raise ConfigError("a chained optimizer accepts no more groups; add them to one of its optimizers first.")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of each optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss


class Muon(torch.optim.Muon):
    """torch's Muon, also for groups of three-dimensional parameters (experts, rows, columns), added after construction.

    Each expert's matrix is updated as a parameter of its own would be, to the bit. A parameter that is sharded must be
    sharded by experts.
    """

    def _init_group(self, group: Any, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor]) -> bool:
        start = len(params)
        has_complex: bool = super()._init_group(group, params, grads, buffers)
        for tensors in (params, grads, buffers):  # the update of a view writes the parameter and its momentum
            tensors[start:] = chain.from_iterable(_matrices(each) for each in tensors[start:])
        return has_complex


def _matrices(tensor: Tensor) -> Iterable[Tensor]:
    """The matrices of a tensor of two or three dimensions, as views; of experts, those that this rank holds."""
    if tensor.ndim == 2:
        return (tensor,)
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).unbind(0)


def hidden_matrices(model: nn.Module) -> list[Parameter]:
    """The matrices that Muon trains: trainable two-dimensional parameters between embeddings and head, in model order,
    and the three-dimensional ones of experts, which are matrices for each expert.

    Embeddings are the weights of `nn.Embedding` modules; the head is the result of `model.get_output_embeddings()`, if
    the model has this method. A tied head is the embedding itself.
    """
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if head is not None:
        outer.add(id(head.weight))
    fused = {
        id(p) for block in mixture_blocks(model) for p in block.fused
    }  # a dimension more than they have as modules
    return [
        p for p in model.parameters()
        if p.requires_grad and p.ndim == (3 if id(p) in fused else 2) and id(p) not in outer
    ]  # fmt: skip


def untrained_parameters(model: nn.Module, patterns: Sequence[str]) -> list[Parameter]:
    """The parameters that a learner does not train: those whose names match none of `patterns`. No patterns: none.

    Raises ConfigError for a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ConfigError(
                f'train.trains has "{pattern}", which matches no parameter; the first is {next(iter(parameters))}'
            )
    return [
        p for name, p in parameters.items()
        if patterns and p.requires_grad and not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]  # fmt: skip


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The inner optimizer of a run, with weight decay on matrices only. Raises ConfigError if Muon finds no matrix.

    Muon orthogonalises the momentum of a matrix by Newton-Schulz iterations (Jordan et al. 2024). Under
    "match_rms_adamw" its updates have the size of AdamW's, so that one learning rate serves both (Liu et al. 2025,
    arXiv 2502.16982, equation 4). MuLoCo (arXiv 2505.23725) is DiLoCo on top of it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.inner_optimizer == "adamw":
        return _adamw(parameters, config.inner)
    matrices = hidden_matrices(model)
    if not any(p.ndim == 2 for p in matrices):
        raise ConfigError('inner.optimizer = "muon" finds no two-dimensional hidden weight in this model; use "adamw"')
    hidden = {id(p) for p in matrices}
    others = [p for p in parameters if id(p) not in hidden]
    muon = _muon(matrices, config.inner)
    return Chained([muon, _adamw(others, config.inner)] if others else [muon])


def _muon(parameters: Sequence[Parameter], table: InnerTable) -> Muon:
    muon = Muon(
        [p for p in parameters if p.ndim == 2],
        lr=table.lr if table.muon_lr is None else table.muon_lr,
        weight_decay=table.weight_decay,
        momentum=table.muon_momentum,
        ns_steps=table.muon_steps,
        adjust_lr_fn=table.muon_scale,
    )
    if experts := [p for p in parameters if p.ndim == 3]:
        muon.add_param_group({"params": experts})
    return muon


def _adamw(parameters: Sequence[Parameter], table: InnerTable) -> torch.optim.AdamW:
    """AdamW in its fused form, which is the fastest on CPU and CUDA."""
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": table.weight_decay},
        # A group of their own: under expert parallelism they are on another device mesh, and a fused step takes one.
        {"params": [p for p in parameters if p.ndim > 2], "weight_decay": table.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=table.lr, betas=table.betas, eps=table.eps, fused=True
    )


def converted(state: Mapping[str, Any], convert: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    """An optimizer's saved state, in which `convert` has replaced each tensor. It gets the parameter's index too."""
    own = {
        index: {key: convert(index, each) if isinstance(each, Tensor) else each for key, each in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": own}


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a saved state into `optimizer`, which keeps its own hyperparameters.

    Raises ValueError for the state of another kind of optimizer or of other parameters.
    """
    now = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    saved = [set(group) - {"params"} for group in state["param_groups"]]
    if saved != [set(group) for group in now]:
        raise ValueError("it was saved by another inner optimizer")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.load_state_dict(converted(state, lambda index, each: sharded_like(parameters[index], each)))
    for group, values in zip(optimizer.param_groups, now, strict=True):
        group.update(values)


def describe_optimizer(optimizer: torch.optim.Optimizer, config: RunConfig) -> str:
    """Describe which parameters the optimizer trains; the end of a sentence about a learner."""
    if config.inner_optimizer == "adamw":
        return "trains every parameter by AdamW"
    num_matrices = sum(len(group["params"]) for group in optimizer.param_groups if "ns_steps" in group)
    why = "" if config.inner.optimizer is not None else f", as in {MUON_PRESET}; inner.optimizer selects another"
    return f"trains {num_matrices} hidden matrices by Muon and the rest by AdamW{why}"


def lr_factor(schedule: ScheduleTable, steps: int, step: int) -> float:
    """Share of the peak rate at inner step `step` = 1, 2, 3 …; after `steps` it stays at its last value.

    Warm-up: step / warmup_steps. "cosine": f + (1−f)·(1 + cos πx)/2 with x the share of the remaining steps done.
    "wsd" (warm-up, stable, decay): 1, then linearly to f over the last `decay_fraction` of `steps`. "constant": 1.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    step, final = min(step, steps), schedule.final_fraction
    if schedule.kind == "cosine":
        done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    if schedule.kind == "wsd":
        decay_steps = max(1, round(steps * schedule.decay_fraction))
        return 1 - (1 - final) * max(0, step - (steps - decay_steps)) / decay_steps
    return 1.0


def schedule_factor(config: RunConfig, step: int) -> float:
    """Share of the peak rate of a run at a learner's step; the same for every parameter."""
    return lr_factor(config.schedule, config.schedule_steps, step)


def learning_rate(config: RunConfig, step: int) -> float:
    """The inner learning rate (AdamW's) of a run at a learner's step."""
    return config.inner.lr * schedule_factor(config, step)
