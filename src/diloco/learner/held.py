"""Learners that hold a part of a mixture's experts: the model is built with fewer, and local row i is the run's expert
`experts[i]`.

SPES (arXiv 2602.11543) trains a part of the experts on each node, and every node holds all of them. Here a learner
neither stores, receives nor sends the others. Its routers choose among those that it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from diloco.core.fragments import Experts, Layout
from diloco.core.layout import gather
from diloco.core.method import Method
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import Exchange, FlatModel
from diloco.learner.frozen import FrozenState, exchanged_tensors
from diloco.learner.pieces import Units
from diloco.learner.roles import ModelDescription
from diloco.protocol.units import numbers, units_of
from diloco.tables import number_ranges


@dataclass(frozen=True)
class HeldExperts:
    """The experts that a learner's model has.

    Attributes:
        experts: their numbers in the run, ascending.
        num_experts: of the run's model.
        groups: the fragments that they make up.
        num_groups: of the run's method.
    """

    experts: tuple[int, ...]
    num_experts: int
    groups: tuple[int, ...]
    num_groups: int

    @classmethod
    def of(cls, text: str, method: Method) -> HeldExperts:
        """The experts that `Learner(holds_experts=text)` names, such as "4-7 of 16".

        Raises:
            ConfigError: the text is malformed, or names an expert beyond their number or not whole groups; the method
                does not cut the model into experts.
        """
        if text == "auto":
            raise ConfigError(
                'holds_experts="auto" is for the reference trainer, which rebuilds its model when other experts are '
                'dealt; name those that this model has, such as "4-7 of 16".'
            )
        named, _, number = str(text).partition(" of ")
        if not re.fullmatch(r"\s*[1-9]\d{0,5}\s*", number):
            raise ConfigError(
                f'holds_experts={text!r} does not say which experts the model has, of how many; write "4-7 of 16".'
            )
        num_experts, cut = int(number), method.fragments
        ranges = number_ranges("holds_experts", named)
        if not isinstance(cut, Experts):
            raise ConfigError(
                f"holds_experts={text!r} finds no experts, since {method.name} cuts the model by {cut}; use a method "
                "that exchanges outer gradients, such as DiLoCo, with fragments=diloco.Experts(4)."
            )
        if (last := max(stop for _, stop in ranges) - 1) >= num_experts:
            raise ConfigError(
                f"holds_experts={text!r} names expert {last}, and the run's are 0 to {num_experts - 1}; name those."
            )
        experts = tuple(expert for first, stop in ranges for expert in range(first, stop))
        return cls(experts, num_experts, cut.groups_of(experts, num_experts), cut.groups)

    @property
    def text(self) -> str:
        """As `Learner(holds_experts=…)` takes it."""
        return f"{numbers(units_of(self.experts))} of {self.num_experts}"

    def described(self, part: ModelDescription, method: Method) -> ModelDescription:
        """The description of the run's model, given that of the model that has these experts only.

        Raises:
            ConfigError: the model has another number of experts; a tensor that the run does not train has a row for
                each expert.
        """
        cut = method.fragments
        assert isinstance(cut, Experts)
        exchanged = cut.whole(part.exchanged, len(self.experts), self.num_experts)
        others = (*part.static, *(each.spec for each in part.base))
        grown = cut.whole((*part.exchanged, *others), len(self.experts), self.num_experts)
        for before, after in zip(others, grown[len(exchanged) :], strict=True):
            if before != after:
                raise ConfigError(
                    f"{before.name!r} has a row for each expert and is not trained, so a learner that holds a part of "
                    f"the experts lacks rows of it; pass buffers={{{before.name!r}: 'average'}}, or train it."
                )
        return replace(part, exchanged=exchanged)

    def fragments(self, num_fragments: int) -> tuple[int, ...]:
        """The indices, of so many fragments, of those that are held: these groups, and the trunk."""
        return (*self.groups, *range(self.num_groups, num_fragments))

    def part(self, layout: Layout) -> Layout:
        """The layout of the model that has these experts only. `layout`: of the run. Raises LayoutError: it has no
        trunk, which all learners hold."""
        if len(layout.fragments) == self.num_groups:
            raise LayoutError(
                "a learner can hold a part of a model that has a trunk, and all tensors of this one belong to experts; "
                "leave holds_experts out."
            )
        return layout.part(self.fragments(len(layout.fragments)), self.experts)


def held_experts(text: str, method: Method, exchange: Exchange, trains_experts: str | None) -> HeldExperts:
    """As `HeldExperts.of`. Raises ConfigError also where all learners must hold the whole model, and for a choice of
    trained experts."""
    if trains_experts is not None:
        raise ConfigError(
            f"holds_experts={text!r} and trains_experts={trains_experts!r} exclude each other: a learner trains all "
            "that it holds; leave one of them out."
        )
    if not exchange.has_syncer:
        raise ConfigError(
            f"holds_experts={text!r} needs a syncer, which holds the experts that a learner does not (diloco.connect, "
            f"run_local); over {type(exchange).__name__} every learner holds the whole model, and trains_experts "
            "chooses what it trains."
        )
    return HeldExperts.of(text, method)


def whole_model(model: nn.Module | None, layout: Layout, describe: Callable[[nn.Module], Layout]) -> FlatModel:
    """The values of the whole model, from which a learner that holds a part of it initialises the run.

    Arguments:
        layout: of the run.
        describe: returns the layout of a whole model.

    Raises:
        ConfigError: there is none. LayoutError: it is another model.
    """
    if model is None:
        raise ConfigError(
            "a learner that holds a part of the experts cannot initialise the run from its part; pass the whole model "
            "as Learner(whole=…), or leave initialise out and let another learner give the run its model."
        )
    if difference := layout.first_difference(describe(model), "in the model", "in whole"):
        raise LayoutError(f"the model is not a part of Learner(whole=…): {difference}.")
    units = Units(layout)
    own = {name: units.local(name, tensor) for name, tensor in exchanged_tensors(model, layout).items()}
    fragments = tuple(gather(fragment, own).cpu() for fragment in layout.fragments)
    return FlatModel(fragments, FrozenState(model, layout, units).values())
