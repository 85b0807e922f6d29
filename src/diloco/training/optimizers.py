"""The inner optimizer of a run: AdamW, or Muon for the hidden matrices with AdamW for everything else."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, overload

import torch
from torch import nn
from torch.nn import Parameter

from diloco.config import MUON_PRESET, InnerTable, RunConfig
from diloco.errors import ConfigError


class Chained(torch.optim.Optimizer):
    """Several optimizers over different parameters of one model, as one torch optimizer: stepped together, in order.

    It has all their parameter groups and all their state, in the very dicts that they use, so that schedules, hooks,
    checkpoints and `diloco.Learner` need not know. Raises ValueError when two optimizers share a parameter.

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
        """Make every optimizer work on its part of this one's groups, and on this one's state."""
        start = 0
        for each in self.optimizers:
            stop = start + len(each.param_groups)
            each.param_groups = self.param_groups[start:stop]
            each.state = self.state
            start = stop

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same optimizers over the same parameters."""
        super().load_state_dict(dict(state_dict))  # puts new dicts in the place of groups and state
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while this is made: a group belongs to one of the optimizers. Raises ConfigError afterwards."""
        if self.optimizers:
            raise ConfigError("a chained optimizer takes no more groups; give them to one of its optimizers.")
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


def hidden_matrices(model: nn.Module) -> list[Parameter]:
    """The trainable two-dimensional parameters between embeddings and head, in model order: what Muon is for.

    Embeddings are the weights of `nn.Embedding` modules; the head is what `model.get_output_embeddings()` gives, where
    there is such a method. A head that is tied to an embedding is that embedding.
    """
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if head is not None:
        outer.add(id(head.weight))
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outer]


def untrained_parameters(model: nn.Module, patterns: Sequence[str]) -> list[Parameter]:
    """The parameters that a learner leaves alone which trains those whose names match the patterns; none where there
    are no patterns.

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
    """The inner optimizer of a run, with decay on matrices only. Raises ConfigError where Muon would have nothing to
    train.

    Muon orthogonalises the momentum of a matrix by Newton-Schulz iterations (Jordan et al. 2024). Under
    "match_rms_adamw" its updates have the size of AdamW's, so that one learning rate serves both (Liu et al. 2025,
    arXiv 2502.16982, equation 4). MuLoCo (arXiv 2505.23725) is DiLoCo on top of it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.inner_optimizer == "adamw":
        return _adamw(parameters, config.inner)
    matrices = hidden_matrices(model)
    if not matrices:
        raise ConfigError('inner.optimizer = "muon" finds no two-dimensional hidden weight in this model; use "adamw"')
    hidden = {id(p) for p in matrices}
    others = [p for p in parameters if id(p) not in hidden]
    muon = _muon(matrices, config.inner)
    return Chained([muon, _adamw(others, config.inner)] if others else [muon])


def _muon(parameters: Sequence[Parameter], table: InnerTable) -> torch.optim.Muon:
    return torch.optim.Muon(
        parameters,
        lr=table.lr if table.muon_lr is None else table.muon_lr,
        weight_decay=table.weight_decay,
        momentum=table.muon_momentum,
        ns_steps=table.muon_steps,
        adjust_lr_fn=table.muon_scale,
    )


def _adamw(parameters: Sequence[Parameter], table: InnerTable) -> torch.optim.AdamW:
    """The fused form is the fastest on CPU and CUDA alike."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": table.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=table.lr, betas=table.betas, eps=table.eps, fused=True
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Continue from a saved state, under the hyperparameters that `optimizer` has now.

    Raises ValueError when the state is of another kind of optimizer or of other parameters.
    """
    now = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    saved = [set(group) - {"params"} for group in state["param_groups"]]
    if saved != [set(group) for group in now]:
        raise ValueError("it was saved by another inner optimizer")
    optimizer.load_state_dict(dict(state))
    for group, values in zip(optimizer.param_groups, now, strict=True):
        group.update(values)


def describe_optimizer(optimizer: torch.optim.Optimizer, config: RunConfig) -> str:
    """The end of a sentence about a learner: which parameters are trained by what, and why."""
    if config.inner_optimizer == "adamw":
        return "trains every parameter by AdamW"
    num_matrices = sum(len(group["params"]) for group in optimizer.param_groups if "ns_steps" in group)
    why = "" if config.inner.optimizer is not None else f", as {MUON_PRESET} has it; inner.optimizer chooses another"
    return f"trains {num_matrices} hidden matrices by Muon and the rest by AdamW{why}"
