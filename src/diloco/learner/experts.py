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

from diloco.core.adopt import Eager
from diloco.core.choices import number_ranges
from diloco.core.fragments import Experts
from diloco.core.layout import Layout, TensorSpec
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.optimizers import is_in_train_mode, require_hooks
from diloco.learner.routing import RoutedTokens
from diloco.learner.units import Units, parameter_of
from diloco.protocol.units import Ranges, ranges_of


def chosen_experts(text: str | None, layout: Layout, method: Method) -> frozenset[int] | None:
    """The experts that `Learner(trains_experts=text)` names; None: all.

    Raises:
        ConfigError: the text is malformed, or names an expert twice or beyond their number; the method does not cut the
            model into experts, or cannot merge a part of it.
    """
    if text is None:
        return None
    ranges = number_ranges("trains_experts", text)
    if isinstance(method.adopt, Eager) or method.exchanged != "outer gradients":
        raise ConfigError(
            f"trains_experts={text!r} cannot be used with {method.name}, which merges the whole model alike on every "
            "learner; leave it out, or use a method that exchanges outer gradients, such as DiLoCo."
        )
    if not isinstance(method.fragments, Experts):
        raise ConfigError(
            f"trains_experts={text!r} finds no experts, since the run's method cuts the model by {method.fragments}; "
            'set [method] fragments = { type = "Experts", groups = 4 } in the run file, before the run has a model, or '
            "fragments=diloco.Experts(4)."
        )
    num_experts = method.fragments.num_experts(place.spec for each in layout.fragments for place in each.tensors)
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
        self._units, self._optimizers = units, optimizers
        pairs: dict[str, list[tuple[int, int]] | None] = {}
        held = {parameter_of(spec): parameters[spec.name] for spec in untrained if spec.name in parameters}
        for spec in untrained:
            if spec.origin is None:
                pairs[spec.name] = None
            elif (known := pairs.setdefault(spec.origin.parameter, [])) is not None:
                known.append((spec.origin.first, spec.origin.first + spec.shape[0]))
        self._rows: dict[int, tuple[str, Ranges | None]] = {
            id(tensor): (name, None if (rows := pairs[name]) is None else ranges_of(rows))
            for name, tensor in held.items()
            if isinstance(tensor, nn.Parameter)
        }
        self._saved: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}  # by optimizer, of nested steps
        for optimizer in optimizers if self._rows else ():
            require_hooks(optimizer)
        self._parameters = [each for each in held.values() if id(each) in self._rows]

    def hooks(self) -> list[RemovableHandle]:
        """Register the hooks on the parameters and the optimizers; returns their handles."""
        if not self._rows:
            return []
        found = [each.register_post_accumulate_grad_hook(self._zero) for each in self._parameters]
        for optimizer in self._optimizers:
            found.append(optimizer.register_step_pre_hook(self._before))
            found.append(optimizer.register_step_post_hook(self._after))
        return found

    @torch.no_grad()
    def adopted(self) -> None:
        """The parameters may have been written: z of a schedule-free optimizer follows."""
        for optimizer in self._optimizers if self._rows else ():
            if is_in_train_mode(optimizer) is None:
                continue
            for parameter in self._of(optimizer):
                if isinstance(base := optimizer.state.get(parameter, {}).get("z"), Tensor):
                    for z, own in zip(self._views(parameter, base), self._views(parameter, parameter), strict=True):
                        z.copy_(own)

    def _of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [each for group in optimizer.param_groups for each in group["params"] if id(each) in self._rows]

    def _views(self, parameter: Tensor, tensor: Tensor) -> list[Tensor]:
        """The memory of the rows in the parameter itself, its gradient, or a tensor of the optimizer like it."""
        name, rows = self._rows[id(parameter)]
        return self._units.rows(name, parameter, rows, tensor)

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
        self._places = [
            [self._place(place.spec) for place in fragment.tensors]
            if any(Experts.expert_of(place.spec) is not None for place in fragment.tensors)
            else []
            for fragment in layout.fragments
        ]
        self._counts_any = exchange.sums_over_ranks([len(counter.blocks)])[0] > 0
        self._read: dict[int, Tensor] = {}

    def _place(self, spec: TensorSpec) -> tuple[int, int] | None:
        """(block, expert) of a tensor; None: this process does not count its tokens."""
        expert = Experts.expert_of(spec)
        found = [index for index, block in enumerate(self._counter.blocks) if spec.name.startswith(f"{block}.")]
        return None if expert is None or not found else (found[-1], expert)

    def counts(self, fragment: int) -> bool:
        """Whether the fragment has experts whose tokens are counted."""
        return self._counts_any and bool(self._places[fragment])

    def discard(self, fragment: int) -> None:
        """Count from here on; nothing is read from the device."""
        if self.counts(fragment):
            self._read[fragment] = self._counter.counts()

    def read(self, fragment: int) -> tuple[int, ...]:
        """The tokens of each tensor of the fragment; then count from here on. Every rank calls it."""
        now = self._counter.counts()
        before, self._read[fragment] = self._read.get(fragment), now
        table = (now if before is None else now - before.to(now.device)).tolist()
        return tuple(
            self._exchange.sums_over_ranks(
                [0 if place is None else int(table[place[0]][place[1]]) for place in self._places[fragment]]
            )
        )

    def close(self) -> None:
        """Count no more."""
        self._counter.close()
