"""Training a part of a mixture's experts: which ones, their rows kept, and the tokens routed to them.

A learner holds the whole model and trains some of its experts (SPES, arXiv 2602.11543). The rows of a fused parameter
cannot be left out of the optimizer, whose weight decay and momentum also move rows without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco.core.fragments import Experts
from diloco.core.layout import Layout, TensorSpec
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.optimizers import is_in_train_mode, require_hooks
from diloco.learner.routing import RoutedTokens
from diloco.learner.units import Units, parameter_of
from diloco.protocol.units import Ranges, ranges_of
from diloco.tables import number_ranges


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
