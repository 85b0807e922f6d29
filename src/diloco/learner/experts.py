"""Experts of a mixture: counts of the tokens that routers send to each, and the training of some of them.

A block of a mixture is a module with the children `experts` and `gate` or `router`, and its router returns the indices
of the chosen experts, as in transformers and torchtitan. The indices are global also under expert parallelism, where a
router sees the tokens of its rank.

A learner holds the whole model and trains some of its experts (SPES, arXiv 2602.11543). The rows of a fused parameter
cannot be left out of the optimizer, whose weight decay and momentum also move rows without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco.core.fragments import Experts
from diloco.core.layout import Layout, TensorSpec
from diloco.core.method import Method
from diloco.core.names import named_modules, unwrapped
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.optimizers import is_in_train_mode, require_hooks
from diloco.learner.pieces import Units, parameter_of
from diloco.protocol.units import Ranges, ranges_of
from diloco.tables import number_ranges

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
    """The blocks of a model with experts, in model order."""
    for path, module in named_modules(model):
        experts = module._modules.get("experts")
        router = next((module._modules[name] for name in ROUTERS if module._modules.get(name) is not None), None)
        if experts is None or router is None:
            continue
        experts = unwrapped(experts)
        fused = () if isinstance(experts, nn.ModuleList) else tuple(experts.parameters(recurse=False))
        num_experts = fused[0].shape[0] if fused else len(experts) if isinstance(experts, nn.ModuleList) else 0
        if num_experts:
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


def chosen_experts(text: str | None, layout: Layout, method: Method) -> frozenset[int] | None:
    """The experts that `Learner(trains_experts=text)` names; None: all.

    Raises:
        ConfigError: the text is malformed, or names an expert twice or beyond their number; the method does not cut the
            model into experts.
    """
    if text is None:
        return None
    ranges, cut = number_ranges("trains_experts", text), method.fragments
    if not isinstance(cut, Experts):
        raise ConfigError(
            f"trains_experts={text!r} finds no experts, since {method.name} cuts the model by {cut}; use a method that "
            'exchanges outer gradients, such as DiLoCo, with [method] fragments = { type = "Experts", groups = 4 } in '
            "the run file, before the run has a model, or fragments=diloco.Experts(4)."
        )
    num_experts = cut.num_experts(place.spec for each in layout.fragments for place in each.tensors)
    last = max(stop for _, stop in ranges) - 1
    if last >= num_experts:
        raise ConfigError(
            f"trains_experts={text!r} names expert {last}, and the model's are 0 to {num_experts - 1}; name those only."
        )
    return frozenset(expert for first, stop in ranges for expert in range(first, stop))


class UntrainedRows:
    """Keeps the bits of tensors that a learner's optimizers hold and do not train: rows of parameters, or all of one.

    Their gradients are zeroed when they are accumulated, so before they are clipped. Around each step of an optimizer
    their values are saved and written back. They also become the base sequence z of a schedule-free optimizer, from
    which it computes its other model; all further state of their rows stays what zero gradients make of it.

    Arguments:
        parameters: as `LearnerTensors.parameters`.
        untrained: the tensors of the layout.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], untrained: Sequence[TensorSpec], units: Units,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        by_parameter: dict[str, list[TensorSpec]] = {}
        for spec in untrained:
            by_parameter.setdefault(parameter_of(spec), []).append(spec)
        self._rows: dict[int, tuple[str, nn.Parameter, Ranges]] = {  # no rows: all of the parameter
            id(tensor): (
                name,
                tensor,
                ranges_of((s.origin.first, s.origin.first + s.shape[0]) for s in specs if s.origin),
            )
            for name, specs in by_parameter.items()
            if isinstance(tensor := parameters.get(specs[0].name), nn.Parameter)
        }
        self._units, self._optimizers = units, optimizers if self._rows else ()
        self._saved: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}  # by optimizer, of nested steps
        for optimizer in self._optimizers:
            require_hooks(optimizer)

    def hooks(self) -> list[RemovableHandle]:
        """Register the hooks on the parameters and the optimizers; returns their handles."""
        found = [each.register_post_accumulate_grad_hook(self._zero) for _, each, _ in self._rows.values()]
        for optimizer in self._optimizers:
            found.append(optimizer.register_step_pre_hook(self._before))
            found.append(optimizer.register_step_post_hook(self._after))
        return found

    @torch.no_grad()
    def adopted(self) -> None:
        """The parameters may have been written: z of a schedule-free optimizer follows."""
        for optimizer in self._optimizers:
            for parameter in self._of(optimizer) if is_in_train_mode(optimizer) is not None else ():
                if isinstance(base := optimizer.state.get(parameter, {}).get("z"), Tensor):
                    for z, own in zip(self._views(parameter, base), self._views(parameter, parameter), strict=True):
                        z.copy_(own)

    def _of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [each for group in optimizer.param_groups for each in group["params"] if id(each) in self._rows]

    def _views(self, parameter: Tensor, tensor: Tensor) -> list[Tensor]:
        """The memory of the rows in the parameter itself, its gradient, or a tensor of the optimizer like it."""
        return self._units.rows(*self._rows[id(parameter)], tensor)

    @torch.no_grad()
    def _zero(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            for rows in self._views(parameter, parameter.grad):
                rows.zero_()

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        saved = []
        for parameter in self._of(optimizer):
            self._zero(parameter)  # of a gradient that autograd did not accumulate
            saved += [(rows, rows.clone()) for rows in self._views(parameter, parameter)]
        self._saved.setdefault(id(optimizer), []).append(saved)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for rows, values in self._saved[id(optimizer)].pop():
            rows.copy_(values)
        self.adopted()


class RoutedWork:
    """The tokens that were routed to the expert of each tensor, by fragment, since they were last read or discarded.

    They stay on the device until a fragment is sent. In a learner of several ranks they are the sum over its ranks.

    Arguments:
        counter: of the model in this process.
        exchange: sums over the ranks.
    """

    def __init__(self, counter: RoutedTokens, layout: Layout, exchange: Exchange) -> None:
        self._counter, self._exchange = counter, exchange
        self._counts_any = exchange.sums_over_ranks([len(counter.blocks)])[0] > 0
        self._places = [[self._place(place.spec) for place in fragment.tensors] for fragment in layout.fragments]
        self._has_experts = [
            any(Experts.expert_of(place.spec) is not None for place in each.tensors) for each in layout.fragments
        ]
        self._read: dict[int, Tensor] = {}

    def _place(self, spec: TensorSpec) -> tuple[int, int] | None:
        """(block, expert) of a tensor; None: this process does not count its tokens."""
        expert = Experts.expert_of(spec)
        found = [index for index, block in enumerate(self._counter.blocks) if spec.name.startswith(f"{block}.")]
        return None if expert is None or not found else (found[-1], expert)

    def counts(self, fragment: int) -> bool:
        """Whether the fragment has experts whose tokens are counted."""
        return self._counts_any and self._has_experts[fragment]

    def discard(self, fragment: int) -> None:
        """Count from here on; nothing is read from the device."""
        self._read[fragment] = self._counter.counts()

    def read(self, fragment: int) -> tuple[int, ...]:
        """The tokens of each tensor of the fragment; then count from here on. Every rank calls it."""
        before = self._read[fragment]
        self.discard(fragment)
        since = (self._read[fragment] - before.to(self._read[fragment].device)).tolist()
        own = [0 if place is None else since[place[0]][place[1]] for place in self._places[fragment]]
        return tuple(self._exchange.sums_over_ranks(own))

    def close(self) -> None:
        """Count no more."""
        self._counter.close()
