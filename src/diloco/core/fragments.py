"""Cut a model into fragments.

A **fragment** is the unit of synchronisation: a set of trainable tensors that is sent, merged and applied together. A
**fragmentation** says how the tensors are divided, and `make_layout` cuts a model by it: into a `Layout` (layout.py),
which gives each tensor its place in the flat fp32 vector of its fragment.

Streaming DiLoCo (arXiv 2501.18512, section 2.2) introduced fragments of whole transformer layers, strided or
sequential; Decoupled DiLoCo (arXiv 2604.21428) balances them by size. `Experts` cuts a mixture into groups of
experts and the trunk, which is everything else; SPES (arXiv 2602.11543) trains a part of the experts on each node.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from diloco.core.choices import FROM_1, Choice, Registry, checked, one_of, whole_number
from diloco.core.codecs import codec_from_name
from diloco.core.layout import (
    BaseTensor,
    Fragment,
    Layout,
    Placement,
    TensorSpec,
    digest,
    gather,
    place,
    scatter,
    spec_of,
)
from diloco.core.names import canonical_key, named_buffers, named_parameters
from diloco.core.outer import OUTER_OPTIMIZERS, Outer
from diloco.errors import ConfigError, LayoutError

__all__ = [
    "Balanced", "ByLayer", "Experts", "Fragment", "Fragmentation", "Layout", "LayersOrBalanced", "Named", "Placement",
    "TensorSpec", "Whole",
    "cut_in_words", "describe", "digest", "gather", "layout_of", "make_layout", "scatter",
]  # fmt: skip

TRAINABLE_DTYPES = ("float32", "bfloat16", "float16")


def describe(model: nn.Module) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The trainable and the static tensors of a model, each in model order, under canonical names (names.py).

    Trainable are the parameters that require a gradient; static are the frozen parameters, then the persistent
    buffers (those in the state dict). A tensor that is registered under several names (tied weights) counts once,
    under its first name. Raises ConfigError when a trainable parameter is not fp32, bf16 or fp16.
    """
    trainable: list[TensorSpec] = []
    static: list[TensorSpec] = []
    for name, parameter in named_parameters(model):
        spec = spec_of(name, parameter)
        if parameter.requires_grad and spec.dtype not in TRAINABLE_DTYPES:
            raise ConfigError(
                f"parameter {name!r} is {spec.dtype}, and only {', '.join(TRAINABLE_DTYPES)} can be synchronised;"
                " convert it, or freeze it with requires_grad_(False)."
            )
        (trainable if parameter.requires_grad else static).append(spec)
    persistent = {canonical_key(model, key) for key in model.state_dict(keep_vars=True)}
    seen: set[int] = set()
    for name, buffer in named_buffers(model):
        if name in persistent and id(buffer) not in seen:
            seen.add(id(buffer))
            static.append(spec_of(name, buffer))
    return tuple(trainable), tuple(static)


def make_layout(model: nn.Module, fragmentation: "Fragmentation") -> Layout:
    """The layout of `model`, cut by `fragmentation`.

    Example: `make_layout(model, ByLayer(layers=3)).fragments[0].names`. Raises ConfigError when the fragmentation
    does not put every trainable tensor into exactly one fragment, or leaves a fragment empty.
    """
    return layout_of(*describe(model), fragmentation)


def layout_of(
    trainable: Sequence[TensorSpec],
    static: Sequence[TensorSpec],
    fragmentation: "Fragmentation",
    base: Sequence[BaseTensor] = (),
) -> Layout:
    """The layout of a model known by its tensors' names and shapes only. Raises ConfigError like `make_layout`.

    The tensors are cut into the fragmentation's units first. In its fragment, an averaged tensor follows all trained
    ones: a lossy codec scales neighbours together.
    """
    if not any(spec.numel for spec in trainable):
        raise ConfigError("the model has no trainable parameter; there is nothing to synchronise.")
    try:
        trainable = fragmentation.units(trainable)
        groups = fragmentation.split(trainable)
        _require_partition(fragmentation, groups, trainable)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_other_cut(fragmentation, trainable)}") from error
    trainable = sorted(trainable, key=lambda spec: spec.is_averaged)  # a stable sort: else in model order
    order = {spec.name: position for position, spec in enumerate(trainable)}
    fragments = (
        place(index, [trainable[position] for position in sorted(order[name] for name in names)])
        for index, names in enumerate(groups)
    )
    return Layout(tuple(fragments), tuple(static), tuple(base))


def _require_partition(
    fragmentation: "Fragmentation", groups: Sequence[Sequence[str]], specs: Sequence[TensorSpec]
) -> None:
    """Raise ConfigError unless every tensor is in exactly one group, and no group is empty."""
    size = {spec.name: spec.numel for spec in specs}
    owner: dict[str, int] = {}
    for index, names in enumerate(groups):
        for name in names:
            if name not in size:
                raise ConfigError(f"{fragmentation} names {name!r}, which is not a trainable tensor of the model")
            if name in owner:
                raise ConfigError(f"{fragmentation} puts tensor {name!r} into fragments {owner[name]} and {index}")
            owner[name] = index
    for name in size:
        if name not in owner:
            raise ConfigError(f"{fragmentation} puts tensor {name!r} into no fragment, and every tensor needs one")
    for index, names in enumerate(groups):
        if sum(size[name] for name in names) == 0:
            raise ConfigError(f"{fragmentation} leaves fragment {index} empty")


def _other_cut(fragmentation: "Fragmentation", specs: Sequence[TensorSpec]) -> str:
    """Advice with a fragmentation that cuts this model."""
    wanted = fragmentation.num_fragments if isinstance(fragmentation, Balanced) else LayersOrBalanced.num_fragments
    number = _as_many(wanted, specs)
    table = f'[method] fragments = {{ type = "Balanced", num_fragments = {number} }}'
    return f"set {table} in the run file, before the run has a model, or fragments=diloco.Balanced({number})."


def _as_many(wanted: int, specs: Iterable[TensorSpec]) -> int:
    """The number of fragments nearest to the wanted one that tensors with elements can fill."""
    return min(wanted, sum(spec.numel > 0 for spec in specs))


def cut_in_words(layout: Layout, fragmentation: "Fragmentation") -> str:
    """How a model was cut: "2 fragments: Balanced(num_fragments=2), as its tensors' names hold no list of layers"."""
    specs = [placement.spec for fragment in layout.fragments for placement in fragment.tensors]
    resolved = fragmentation.resolved(specs)
    why = f", as {_find_layers(specs)}" if resolved != fragmentation and isinstance(resolved, Balanced) else ""
    number = len(layout.fragments)
    return f"{number} {'fragment' if number == 1 else 'fragments'}: {resolved}{why}"


class Fragmentation(Choice):
    """How the trainable tensors are divided into fragments."""

    @abstractmethod
    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's tensors, given all trainable tensors, cut into `units`, in model order."""

    def units(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """All trainable tensors in model order, those that it cuts as their units. Most fragmentations cut none."""
        return tuple(specs)

    def own_answers(self, fragment: int) -> Mapping[str, Any]:
        """Fields of a Method that this fragment answers differently from the others."""
        return {}

    def multiples(self, num_fragments: int) -> tuple[int, ...]:
        """Of each fragment, the number of intervals H between two sends."""
        return (1,) * num_fragments

    def experts_of(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Of each fragment, the experts that its tensors belong to, by number; empty: it has no experts.

        Raises LayoutError when the layout is of another cut.
        """
        return ((),) * len(layout.fragments)

    def resolved(self, specs: Sequence[TensorSpec]) -> "Fragmentation":
        """The fragmentation that cuts a model of these tensors, in any order: this one, or the one that it chooses."""
        return self


@dataclass(frozen=True)
class Whole(Fragmentation):
    """One fragment: the whole model at once, as in DiLoCo (arXiv 2311.08105)."""

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        return (tuple(spec.name for spec in specs),)


@dataclass(frozen=True)
class ByLayer(Fragmentation):
    """Whole transformer layers, `layers` to a fragment; everything outside them is a fragment of its own, the last one.

    The layers are the longest module list among the tensors' names: of each name the part before its *first* number
    (`model.layers` in `model.layers.7.mlp.w`, `transformer.h` in `transformer.h.7.ln.w`) names a list, and the list
    with most entries is taken; lists inside a layer (the experts of a mixture) are thereby part of that layer. With L
    layers there are n = ⌈L / layers⌉ fragments of them:

        strided      layer i is in fragment i mod n          (the default of Streaming DiLoCo, arXiv 2501.18512)
        sequential   layer i is in fragment ⌊i / layers⌋

    Embeddings, final norm and head are in the last fragment (the paper: "the embedding in a fragment of its own").
    Raises ConfigError when no list is found, or two are equally long (an encoder and a decoder): use LayersOrBalanced
    or Named there.
    """

    layers: int = checked(FROM_1, 3)
    pattern: Literal["strided", "sequential"] = checked(one_of("strided", "sequential"), "strided")

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        layer_of = _find_layers(specs)
        if isinstance(layer_of, str):
            raise ConfigError(f"{self} cannot cut this model, as {layer_of}")
        num_layers = max(layer_of.values()) + 1
        num_fragments = -(-num_layers // self.layers)
        groups: list[list[str]] = [[] for _ in range(num_fragments + 1)]
        for spec in specs:
            layer = layer_of.get(spec.name)
            if layer is None:
                groups[-1].append(spec.name)
            else:
                groups[layer % num_fragments if self.pattern == "strided" else layer // self.layers].append(spec.name)
        if not groups[-1]:
            groups.pop()
        return tuple(tuple(group) for group in groups)


@dataclass(frozen=True)
class Balanced(Fragmentation):
    """Fragments of nearly equal size: tensors by descending size, each into the currently smallest fragment.

    Longest-processing-time packing; ties go by model order and to the lowest fragment (Decoupled DiLoCo, arXiv
    2604.21428). Raises ConfigError when there are more fragments than tensors.
    """

    num_fragments: int = checked(FROM_1)

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        if self.num_fragments > len(specs):
            raise ConfigError(
                f"Balanced({self.num_fragments}) is more fragments than the {len(specs)} trainable tensors of the model"
            )
        groups: list[list[str]] = [[] for _ in range(self.num_fragments)]
        sizes = [0] * self.num_fragments
        for spec in sorted(specs, key=lambda spec: -spec.numel):  # a stable sort: ties stay in model order
            smallest = sizes.index(min(sizes))
            groups[smallest].append(spec.name)
            sizes[smallest] += spec.numel
        return tuple(tuple(group) for group in groups)


@dataclass(frozen=True)
class LayersOrBalanced(Fragmentation):
    """`ByLayer(layers, pattern)` where it can cut the model, otherwise `Balanced(num_fragments)`: cuts any model.

    A pure function of the tensors' names and sizes, so that all learners of a model cut it alike. A model of fewer
    tensors than `num_fragments` has a fragment for each.
    """

    layers: int = checked(FROM_1, 3)
    pattern: Literal["strided", "sequential"] = checked(one_of("strided", "sequential"), "strided")
    num_fragments: int = checked(FROM_1, 4)  # as many as a model of 12 layers has by the default, besides its embedding

    def resolved(self, specs: Sequence[TensorSpec]) -> Fragmentation:
        if isinstance(_find_layers(specs), str):
            return Balanced(_as_many(self.num_fragments, specs))
        return ByLayer(self.layers, self.pattern)

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        return self.resolved(specs).split(specs)


@dataclass(frozen=True)
class Named(Fragmentation):
    """Fragments by name patterns (`*`, `?` and `[…]` as in a shell, case-sensitive; `*` matches dots too).

    Example: `Named([["embed.*", "layers.0.*"], ["layers.1.*", "head.*"]])`. Every trainable tensor must match the
    patterns of exactly one fragment: a tensor that matches none, or those of two fragments, is an error that names
    it.
    """

    patterns: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for group in self.patterns:
            if isinstance(group, str) or not all(isinstance(pattern, str) for pattern in group):
                raise ConfigError(f"Named([[pattern, …], …]) takes one list of patterns per fragment, not {group!r}.")
        object.__setattr__(self, "patterns", tuple(tuple(group) for group in self.patterns))

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(spec.name for spec in specs if any(fnmatchcase(spec.name, pattern) for pattern in group))
            for group in self.patterns
        )


@dataclass(frozen=True)
class Experts(Fragmentation):
    """The experts of a mixture in `groups`, and its trunk, which is everything else, by another fragmentation.

    Fragments 0 to G − 1 are the groups; of E experts, expert e is in group ⌊e·G / E⌋, with its tensors of all layers.
    The trunk's fragments follow. Where the experts of a layer are one fused tensor, each is a unit: its row of that
    tensor, named `….gate_up_proj.3`. Rows of a router and of per-expert buffers belong to their expert.

    Experts are found in Mixtral, Qwen3-MoE, DeepSeek-V3 and models with the same names: in a block, the tensors
    `experts.*`, whose rows are experts, or the list `experts.0.*`, `experts.1.*`, …; and those tensors of `gate.*` or
    `router.*` that have a row for each.

    Attributes:
        groups: G.
        trunk: how the trunk is cut.
        every: an expert group is sent every `every`·H inner steps; the trunk every H.
        up, down: names of the experts' codecs; None: the method's.
        outer: the experts' outer optimizer; None: the method's.
        patterns: names of tensors whose rows are experts, as in `Named`, for models with other names; empty: as above.
        copies: learners whose sets of groups the syncer deals (`train.holds_experts = "auto"`) hold each group this
            many times.
        deal_every: rounds of the trunk after which these sets are dealt anew, each shifted by one group, a multiple of
            `every`; all fragments are then sent after the same inner steps, so that no work is lost. 0: only when a
            group has lost its holders.

    Example: `DiLoCo(fragments=Experts(groups=4, every=4))`. Raises ConfigError when it finds no experts, experts of
    unequal number, or fewer than groups.
    """

    groups: int
    trunk: Fragmentation = LayersOrBalanced()
    every: int = 1
    up: str | None = None
    down: str | None = None
    outer: Outer | None = None
    patterns: Sequence[str] = ()
    copies: int = 1
    deal_every: int = 0

    def __post_init__(self) -> None:
        whole_number("Experts(groups=…)", self.groups, minimum=1)
        whole_number("Experts(copies=…)", self.copies, minimum=1)
        whole_number("Experts(deal_every=…)", self.deal_every, minimum=0)
        if self.deal_every % self.every:
            raise ConfigError(
                f"Experts(deal_every={self.deal_every}) is not a multiple of every={self.every}, and sets of experts "
                "are dealt only in rounds that send experts; use a multiple."
            )
        whole_number("Experts(every=…), the experts' H as a multiple of the trunk's,", self.every, minimum=1)
        trunk: Any = self.trunk
        outer: Any = self.outer
        trunk = FRAGMENTATIONS.read(trunk) if isinstance(trunk, Mapping) else trunk
        outer = OUTER_OPTIMIZERS.read(outer) if isinstance(outer, Mapping) else outer
        if not isinstance(trunk, Fragmentation) or isinstance(trunk, Experts):
            raise ConfigError(f"Experts(trunk=…) must be another fragmentation, such as Whole(), not {trunk!r}.")
        if not isinstance(outer, Outer | None):
            raise ConfigError(f"Experts(outer=…) must be an outer optimizer, such as Nesterov(), not {outer!r}.")
        object.__setattr__(self, "trunk", trunk)
        object.__setattr__(self, "outer", outer)
        for name in filter(None, (self.up, self.down)):
            codec_from_name(name)
        if isinstance(self.patterns, str) or not all(isinstance(each, str) for each in self.patterns):
            raise ConfigError(f"Experts(patterns=…) is a list of names of tensors, not {self.patterns!r}.")
        object.__setattr__(self, "patterns", tuple(self.patterns))

    @staticmethod
    def expert_of(spec: TensorSpec) -> int | None:
        """The number of the expert that a tensor of a layout belongs to; None: the tensor is in the trunk."""
        if spec.origin is not None:
            return spec.origin.first
        match = _LISTED_EXPERT.fullmatch(spec.name)
        return int(match[2]) if match else None

    def experts_of(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        of_tensors = [[self.expert_of(place.spec) for place in each.tensors] for each in layout.fragments]
        groups = tuple(tuple(expert for expert in own if expert is not None) for own in of_tensors)
        # An expert in a list may be frozen, so its number may be missing; others may send any number.
        num_tensors = sum(map(len, of_tensors)) + len(layout.static) + len(layout.base)
        last = max((expert for own in groups for expert in own), default=-1)
        sizes = [len(own) if index < self.groups else 0 for index, own in enumerate(of_tensors)]
        if last >= num_tensors or [len(own) for own in groups] != sizes:
            raise LayoutError(f"the layout is not cut by {self}; cut the model by the run's method.")
        return groups

    def num_experts(self, specs: Iterable[TensorSpec]) -> int:
        """E, given all trainable tensors, cut into `units`."""
        return 1 + max((expert for spec in specs if (expert := self.expert_of(spec)) is not None), default=-1)

    def units(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        fused, num_experts = self._fused(specs)
        if self.groups > num_experts:
            raise ConfigError(
                f"Experts(groups={self.groups}) makes more groups than the {num_experts} experts of the model"
            )
        units = list[TensorSpec]()
        for spec in specs:
            units += spec.rows() if spec.name in fused else (spec,)
        return tuple(units)

    def whole(self, specs: Sequence[TensorSpec], num_held: int, num_experts: int) -> tuple[TensorSpec, ...]:
        """The tensors of a mixture of which a model holds `num_held` experts, given the tensors of that model: those
        that have a row for each expert have `num_experts`.

        Raises ConfigError when the model has another number of experts, or has them in lists.
        """
        fused, found = self._fused(specs)
        if found != num_held:
            raise ConfigError(f"the learner holds {num_held} experts, the model has {found}; build it with {num_held}.")
        if listed := next((spec.name for spec in specs if _LISTED_EXPERT.fullmatch(spec.name)), None):
            raise ConfigError(
                f"a learner cannot hold a part of a list of experts, to which {listed!r} belongs; use a model that has "
                "the experts of a layer in one tensor, as those of transformers."
            )
        return tuple(
            replace(spec, shape=(num_experts, *spec.shape[1:])) if spec.name in fused else spec for spec in specs
        )

    def groups_of(self, experts: Collection[int], num_experts: int) -> tuple[int, ...]:
        """The groups, by number, of these experts. Raises ConfigError when they are not whole groups."""
        members: dict[int, list[int]] = {}
        for expert in range(num_experts):
            members.setdefault(expert * self.groups // num_experts, []).append(expert)
        for group, own in members.items():
            held = [expert for expert in own if expert in experts]
            if held and held != own:
                raise ConfigError(
                    f"experts {own[0]} to {own[-1]} are group {group} of Experts(groups={self.groups}), which a "
                    "learner holds as a whole or not at all; name all of them, or cut the model into more groups."
                )
        return tuple(group for group, own in members.items() if own[0] in experts)

    def _fused(self, specs: Sequence[TensorSpec]) -> tuple[set[str], int]:
        """The names of the tensors that have a row for each expert, and the number of experts."""
        sizes = self._named(specs) if self.patterns else _blocks_of_experts(specs)
        if not sizes:
            raise ConfigError(
                f"Experts(groups={self.groups}) finds no experts among the model's tensors, such as {specs[0].name!r}"
            )
        for name, size in sizes.items():
            if size != (most := max(sizes.values())):
                raise ConfigError(
                    f"Experts(groups={self.groups}) finds {size} experts in {name!r} and {most} in another tensor"
                )
        number = next(iter(sizes.values()))
        if self.patterns:
            return set(sizes), number
        return {it.name for it in specs if _fused_in(it) in sizes and it.shape[0] == number}, number

    def _named(self, specs: Sequence[TensorSpec]) -> dict[str, int]:
        """The number of rows of each tensor that `patterns` name."""
        for pattern in self.patterns:
            if not any(spec.shape and fnmatchcase(spec.name, pattern) for spec in specs):
                raise ConfigError(f"Experts(groups={self.groups}) finds no tensor with rows of the name {pattern!r}")
        return {s.name: s.shape[0] for s in specs if s.shape and any(fnmatchcase(s.name, p) for p in self.patterns)}

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        groups: list[list[str]] = [[] for _ in range(self.groups)]
        num_experts = self.num_experts(specs)
        for spec in specs:
            if (expert := self.expert_of(spec)) is not None:
                groups[expert * self.groups // num_experts].append(spec.name)
        trunk = self._trunk_of(specs)
        return (*map(tuple, groups), *(self.trunk.split(trunk) if trunk else ()))

    def _trunk_of(self, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """None where training changes the experts only."""
        return [spec for spec in specs if self.expert_of(spec) is None]

    def resolved(self, specs: Sequence[TensorSpec]) -> Fragmentation:
        trunk = self._trunk_of(specs)
        return replace(self, trunk=self.trunk.resolved(trunk)) if trunk else self

    def own_answers(self, fragment: int) -> Mapping[str, Any]:
        if fragment >= self.groups:
            return {}
        codecs = {"up": self.up, "down": self.down}
        own: dict[str, Any] = {key: codec_from_name(name) for key, name in codecs.items() if name is not None}
        return own if self.outer is None else {**own, "outer": self.outer}

    def multiples(self, num_fragments: int) -> tuple[int, ...]:
        return tuple(self.every if fragment < self.groups else 1 for fragment in range(num_fragments))


FRAGMENTATIONS: Registry[Fragmentation] = Registry(
    "fragmentation", Whole, ByLayer, Balanced, LayersOrBalanced, Named, Experts
)

_LISTED_EXPERT = re.compile(r"(?:(.*)\.)?experts\.(\d{1,5})\..+")
_FUSED_EXPERTS = re.compile(r"(?:(.*)\.)?experts\.[^.]+")
_ROUTER = re.compile(r"(?:(.*)\.)?(?:gate|router)\.[^.]+")


def _blocks_of_experts(specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The number of experts of each block that has some, by the block's name."""
    sizes: dict[str, int] = {}
    for spec in specs:
        if match := _LISTED_EXPERT.fullmatch(spec.name):
            sizes[match[1] or ""] = max(sizes.get(match[1] or "", 0), int(match[2]) + 1)
        elif len(spec.shape) > 1 and (match := _FUSED_EXPERTS.fullmatch(spec.name)):
            sizes[match[1] or ""] = spec.shape[0]
    return sizes


def _fused_in(spec: TensorSpec) -> str | None:
    """The block of experts that a tensor would be part of as a fused tensor or router; None: of none."""
    match = spec.shape and (_FUSED_EXPERTS.fullmatch(spec.name) or _ROUTER.fullmatch(spec.name))
    return (match[1] or "") if match else None


_FIRST_NUMBER = re.compile(r"(?:(.*?)\.)??(\d{1,18})\.")  # bounded, as `int` is: names come from others too


def _find_layers(specs: Iterable[TensorSpec]) -> dict[str, int] | str:
    """The layer (0, 1, …) of every tensor that is in one, by the rule in ByLayer; a str says why there are none."""
    lists: dict[str, dict[str, int]] = {}
    for spec in specs:
        match = _FIRST_NUMBER.match(spec.name)
        if match:
            lists.setdefault(match[1] or "", {})[spec.name] = int(match[2])
    if not lists:
        return "its tensors' names hold no list of layers"
    longest = max(len(set(numbers.values())) for numbers in lists.values())
    found = sorted(prefix for prefix, numbers in lists.items() if len(set(numbers.values())) == longest)
    if len(found) > 1:
        return f"its tensors' names hold equally long lists of layers, {found[0]!r} and {found[1]!r}"
    numbers = lists[found[0]]
    rank = {number: layer for layer, number in enumerate(sorted(set(numbers.values())))}
    return {name: rank[number] for name, number in numbers.items()}
