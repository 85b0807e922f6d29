"""Counts of the tokens that the routers of a mixture of experts send to each expert in training.

A block of a mixture is a module with the children `experts` and `gate` or `router`, and its router returns the indices
of the chosen experts, as in transformers and torchtitan. The indices are global also under expert parallelism, where a
router sees the tokens of its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco.core.names import named_modules, unwrapped

ROUTERS = ("gate", "router")
"""Names of a block's router among its children."""


class RoutedTokens:
    """Counts tokens per block and expert, on the model's device, without waiting for it.

    A token counts when a backward pass goes through its block in training mode: once, however often activation
    checkpointing computes the block. So evaluation does not count, and neither does a block that trains nothing.

    Arguments:
        entropy: compute the routers' entropies too.

    Attributes:
        found: the blocks whose routers count, in model order; none for a dense model.
        blocks: their canonical names.
        num_experts: experts of a block, the most where blocks differ.
    """

    def __init__(self, model: nn.Module, *, entropy: bool = False) -> None:
        # A linear layer as the router returns logits, which do not tell the choices.
        found = tuple(block for block in mixture_blocks(model) if not isinstance(block.router, nn.Linear))
        self.found = found
        self.blocks = tuple(block.name for block in found)
        self.num_experts = max((block.num_experts for block in found), default=0)
        self._has_entropy = entropy
        self._counts = [torch.zeros(self.num_experts, dtype=torch.int64) for _ in found]
        self._entropies = [torch.zeros(2, dtype=torch.float64) for _ in found]  # sum over tokens in nats, tokens
        self._passing: list[tuple[Tensor, Tensor] | None] = [None] * len(found)  # from a router to the end of its block
        self._hooks = []
        for index, block in enumerate(found):
            self._hooks.append(block.router.register_forward_hook(partial(self._routed, index)))
            self._hooks.append(block.module.register_forward_hook(partial(self._passed, index)))

    def counts(self) -> Tensor:
        """Tokens routed to each expert since construction: int64 [blocks, experts], a copy on the model's device."""
        return _stacked(self._counts, self.num_experts)

    def read_entropy(self) -> Tensor:
        """Mean entropy in nats of the softmax of each router's logits since the last call: float64 [blocks].

        0 where no token was routed.
        """
        total, tokens = _stacked(self._entropies, 2).unbind(1)
        self._entropies = [torch.zeros_like(each) for each in self._entropies]
        return total / tokens.clamp(min=1)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _routed(self, index: int, router: nn.Module, _: object, output: Any) -> None:
        """Keep a router's choices until the forward pass of its block ends."""
        if not router.training:
            return
        tensors = [each.detach() for each in output if isinstance(each, Tensor)] if isinstance(output, tuple) else []
        chosen = next((each for each in tensors if not each.is_floating_point()), None)
        if chosen is None:
            return
        chosen = chosen.flatten().long()
        load = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        load.scatter_add_(0, chosen, torch.ones_like(chosen))
        self._passing[index] = load, _entropy(tensors) if self._has_entropy else torch.zeros(2, device=load.device)

    def _passed(self, index: int, _: nn.Module, __: object, output: Any) -> None:
        """Count the choices when the backward pass reaches the block's output.

        It goes through the first computation of a checkpointed block, and through the second one only if that is the
        one with a graph (`use_reentrant=True`).
        """
        passing, self._passing[index] = self._passing[index], None
        first = output[0] if isinstance(output, tuple) else output
        if passing is not None and isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._count, index, *passing))

    @torch.no_grad()
    def _count(self, index: int, load: Tensor, entropy: Tensor, _: Tensor) -> None:
        self._counts[index] = self._counts[index].to(load.device) + load
        self._entropies[index] = self._entropies[index].to(load.device) + entropy


@dataclass(frozen=True)
class MixtureBlock:
    """A block of a mixture of experts.

    Attributes:
        name: canonical.
        fused: the experts' parameters whose first dimension is the experts; none where each expert is a module.
    """

    name: str
    module: nn.Module
    router: nn.Module
    num_experts: int
    fused: tuple[nn.Parameter, ...]


def mixture_blocks(model: nn.Module) -> Iterator[MixtureBlock]:
    """The blocks of a model with several experts, in model order."""
    for path, module in named_modules(model):
        experts = module._modules.get("experts")
        router = next((module._modules[name] for name in ROUTERS if module._modules.get(name) is not None), None)
        if experts is None or router is None:
            continue
        experts = unwrapped(experts)
        fused = () if isinstance(experts, nn.ModuleList) else tuple(experts.parameters(recurse=False))
        num_experts = fused[0].shape[0] if fused else len(experts) if isinstance(experts, nn.ModuleList) else 0
        if num_experts > 1:
            yield MixtureBlock(path.removesuffix("."), module, unwrapped(router), num_experts, fused)


def _entropy(tensors: list[Tensor]) -> Tensor:
    """Sum over tokens of the entropy of the softmax of the logits, a router's first output, and number of tokens."""
    logits = tensors[0].flatten(0, -2).float()
    log_p = logits.log_softmax(-1)
    total = -(log_p.exp() * log_p).sum()
    return torch.stack([total, total.new_tensor(len(logits))])


def _stacked(rows: list[Tensor], width: int) -> Tensor:
    """The rows as one matrix, on the device of the first."""
    return torch.stack([row.to(rows[0].device) for row in rows]) if rows else torch.zeros(0, width, dtype=torch.int64)
