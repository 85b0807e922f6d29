"""Cut a model into fragments, and lay each fragment out as one flat fp32 vector.

A **fragment** is the unit of synchronisation: a set of trainable tensors that is sent, merged and applied together. A
**fragmentation** says how the tensors are divided; the **layout** is the result, the same on every learner and on the
syncer: each tensor's fragment and its place in that fragment's flat vector. Two parties hold the same model when
their layouts have the same digest.

Streaming DiLoCo (arXiv 2501.18512, section 2.2) introduced fragments of whole transformer layers, strided or
sequential; Decoupled DiLoCo (arXiv 2604.21428) balances them by size.
"""

import ctypes
import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from diloco.core.values import Choice, choice_from_dict, whole_number
from diloco.errors import ConfigError, LayoutError

TRAINABLE_DTYPES = ("float32", "bfloat16", "float16")


# --- the layout -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype ("float32", "bfloat16", …) of one tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True)
class Placement:
    """A tensor's place in its fragment's flat vector: `spec.numel` elements from `offset` on, in row-major order."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class Fragment:
    """Trainable tensors that are synchronised together, in model order and without gaps."""

    index: int
    tensors: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        """Length of the flat vector, in elements."""
        return sum(placement.spec.numel for placement in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order of the flat vector."""
        return tuple(placement.spec.name for placement in self.tensors)


@dataclass(frozen=True)
class Layout:
    """How a model is cut: its fragments, and the static tensors (frozen parameters, persistent buffers) beside them.

    Raises LayoutError when a fragment is empty or out of order, or a name occurs twice.
    """

    fragments: tuple[Fragment, ...]
    static: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [name for fragment in self.fragments for name in fragment.names] + [spec.name for spec in self.static]
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise LayoutError(f"tensor {name!r} occurs twice in the layout; every tensor has one place.")
            seen.add(name)
        for position, fragment in enumerate(self.fragments):
            if fragment.index != position:
                raise LayoutError(f"fragment {fragment.index} stands at position {position}; number fragments from 0.")
            if fragment.numel == 0:
                raise LayoutError(f"fragment {position} holds no elements; every fragment needs a trainable tensor.")

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements, tied weights counted once."""
        return sum(fragment.numel for fragment in self.fragments)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types. Offsets are left out: they follow from the order of the tensors."""
        return {
            "fragments": [[_spec_to_list(placement.spec) for placement in each.tensors] for each in self.fragments],
            "static": [_spec_to_list(spec) for spec in self.static],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """Read back what `to_dict` wrote. Raises LayoutError on anything else."""
        fragments, static = values.get("fragments"), values.get("static")
        if set(values) != {"fragments", "static"} or not isinstance(fragments, list) or not isinstance(static, list):
            raise LayoutError(f"a layout has the lists 'fragments' and 'static', not {sorted(values)}.")
        return cls(
            fragments=tuple(_place(index, _specs_from_lists(specs)) for index, specs in enumerate(fragments)),
            static=_specs_from_lists(static),
        )

    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON: equal exactly when two layouts are equal."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def first_difference(self, other: "Layout") -> str | None:
        """A phrase that names the first tensor in which `other` ("there") differs from this layout ("here"), or None.

        >>> here.first_difference(there)
        "tensor 'layers.0.w' is (4, 4) float32 here and (4, 8) float32 there"
        """
        mine, theirs = self._entries(), other._entries()
        for name, (spec, place) in mine.items():
            if name not in theirs:
                return f"tensor {name!r} is {spec} here and missing there"
            their_spec, their_place = theirs[name]
            if spec != their_spec:
                return f"tensor {name!r} is {spec} here and {their_spec} there"
            if place != their_place:
                return f"tensor {name!r} is {place} here and {their_place} there"
        for name, (spec, _) in theirs.items():
            if name not in mine:
                return f"tensor {name!r} is missing here and {spec} there"
        return None

    def _entries(self) -> dict[str, tuple[TensorSpec, str]]:
        """Every tensor's spec, and its place in words."""
        entries = {
            placement.spec.name: (placement.spec, f"at element {placement.offset} of fragment {fragment.index}")
            for fragment in self.fragments
            for placement in fragment.tensors
        }
        return entries | {spec.name: (spec, f"static tensor {index}") for index, spec in enumerate(self.static)}


def describe(model: nn.Module) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The trainable and the static tensors of a model, each in model order.

    Trainable are the parameters that require a gradient; static are the frozen parameters, then the persistent
    buffers (those in the state dict). A tensor that is registered under several names (tied weights) counts once,
    under its first name. Raises ConfigError when a trainable parameter is not fp32, bf16 or fp16.
    """
    trainable: list[TensorSpec] = []
    static: list[TensorSpec] = []
    for name, parameter in model.named_parameters():
        spec = _spec_of(name, parameter)
        if parameter.requires_grad and spec.dtype not in TRAINABLE_DTYPES:
            raise ConfigError(
                f"parameter {name!r} is {spec.dtype}, and only {', '.join(TRAINABLE_DTYPES)} can be synchronised;"
                " convert it, or freeze it with requires_grad_(False)."
            )
        (trainable if parameter.requires_grad else static).append(spec)
    persistent = model.state_dict(keep_vars=True).keys()
    seen: set[int] = set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent and id(buffer) not in seen:
            seen.add(id(buffer))
            static.append(_spec_of(name, buffer))
    return tuple(trainable), tuple(static)


def make_layout(model: nn.Module, fragmentation: "Fragmentation") -> Layout:
    """Cut `model` as `fragmentation` says.

    Example: `make_layout(model, ByLayer(layers=3)).fragments[0].names`. Raises ConfigError when the fragmentation
    does not put every trainable tensor into exactly one fragment, or leaves a fragment empty.
    """
    return layout_of(*describe(model), fragmentation)


def layout_of(trainable: Sequence[TensorSpec], static: Sequence[TensorSpec], fragmentation: "Fragmentation") -> Layout:
    """The layout of a model known by its tensors' names and shapes only. Raises ConfigError like `make_layout`."""
    if not trainable:
        raise ConfigError("the model has no trainable parameter; there is nothing to synchronise.")
    groups = fragmentation.split(trainable)
    order = {spec.name: position for position, spec in enumerate(trainable)}
    owner: dict[str, int] = {}
    for index, names in enumerate(groups):
        for name in names:
            if name not in order:
                raise ConfigError(f"{fragmentation} names {name!r}, which is no trainable tensor of the model.")
            if name in owner:
                raise ConfigError(f"{fragmentation} puts tensor {name!r} into fragments {owner[name]} and {index}.")
            owner[name] = index
    for name in order:
        if name not in owner:
            raise ConfigError(
                f"{fragmentation} puts tensor {name!r} into no fragment; every trainable tensor needs one."
            )
    for index, names in enumerate(groups):
        if sum(trainable[order[name]].numel for name in names) == 0:
            raise ConfigError(f"{fragmentation} leaves fragment {index} empty; cut the model into fewer fragments.")
    fragments = (
        _place(index, [trainable[position] for position in sorted(order[name] for name in names)])
        for index, names in enumerate(groups)
    )
    return Layout(tuple(fragments), tuple(static))


# --- fragmentations ---------------------------------------------------------------------------------------------------


class Fragmentation(Choice):
    """How the trainable tensors are divided into fragments."""

    @abstractmethod
    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's tensors, given all trainable tensors in model order."""


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
    Raises ConfigError when no list is found, or two are equally long (an encoder and a decoder): use Named there.
    """

    layers: int = 3
    pattern: Literal["strided", "sequential"] = "strided"

    def __post_init__(self) -> None:
        whole_number("ByLayer(layers=…)", self.layers, minimum=1)
        if self.pattern not in ("strided", "sequential"):
            raise ConfigError(f"ByLayer(pattern=…) must be 'strided' or 'sequential', not {self.pattern!r}.")

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        layer_of = _find_layers(specs)
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

    num_fragments: int

    def __post_init__(self) -> None:
        whole_number("Balanced(num_fragments=…)", self.num_fragments, minimum=1)

    def split(self, specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
        if self.num_fragments > len(specs):
            raise ConfigError(
                f"Balanced({self.num_fragments}) is more fragments than the {len(specs)} trainable tensors of the model."
            )
        groups: list[list[str]] = [[] for _ in range(self.num_fragments)]
        sizes = [0] * self.num_fragments
        for spec in sorted(specs, key=lambda spec: -spec.numel):  # a stable sort: ties stay in model order
            smallest = sizes.index(min(sizes))
            groups[smallest].append(spec.name)
            sizes[smallest] += spec.numel
        return tuple(tuple(group) for group in groups)


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


FRAGMENTATIONS: tuple[type[Fragmentation], ...] = (Whole, ByLayer, Balanced, Named)


def fragmentation_from_dict(values: Mapping[str, object]) -> Fragmentation:
    """Read back `Fragmentation.to_dict()`, e.g. `{"type": "Balanced", "num_fragments": 8}`; ConfigError on a typo."""
    return choice_from_dict("fragmentation", FRAGMENTATIONS, values)


# --- flat vectors -----------------------------------------------------------------------------------------------------


def gather(fragment: Fragment, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """Copy a fragment's tensors into one flat fp32 vector of shape (fragment.numel,).

    `tensors` maps names to tensors of the shapes and dtypes in the layout (bf16 and fp16 are widened, which is
    exact). `out` is reused when given; otherwise the result is on the device of the tensors. Raises LayoutError
    naming the tensor that is missing or does not fit.
    """
    for spec in (placement.spec for placement in fragment.tensors):
        if spec.name not in tensors:
            raise LayoutError(f"tensor {spec.name!r} of fragment {fragment.index} is missing; pass all of its tensors.")
        found = _spec_of(spec.name, tensors[spec.name])
        if found != spec:
            raise LayoutError(f"tensor {spec.name!r} is {found}, and the layout has {spec}.")
    if out is None:
        out = torch.empty(fragment.numel, dtype=torch.float32, device=tensors[fragment.names[0]].device)
    for name, view in scatter(fragment, out).items():
        view.copy_(tensors[name].detach())
    return out


def scatter(fragment: Fragment, flat: Tensor) -> dict[str, Tensor]:
    """Views of a flat fp32 vector of shape (fragment.numel,), one per tensor in its shape; writing one writes `flat`.

    Raises LayoutError when `flat` has another dtype, length or is not contiguous.
    """
    if flat.dtype != torch.float32 or flat.shape != (fragment.numel,) or not flat.is_contiguous():
        raise LayoutError(
            f"fragment {fragment.index} is a contiguous float32 vector of {fragment.numel} elements,"
            f" not {tuple(flat.shape)} {_dtype_name(flat)}."
        )
    return {
        placement.spec.name: flat[placement.offset : placement.offset + placement.spec.numel].view(placement.spec.shape)
        for placement in fragment.tensors
    }


def digest(flat: Tensor) -> str:
    """SHA-256 (hex) of the little-endian bytes of a contiguous fp32 vector on the CPU.

    Two holders of one version of a fragment compare it. The bytes are hashed in place, with the interpreter lock
    released; with the processor's SHA instructions SHA-256 is twice as fast as BLAKE2b.
    """
    if flat.dtype != torch.float32 or flat.device.type != "cpu" or not flat.is_contiguous():
        raise LayoutError(
            f"a digest is taken of a contiguous float32 vector on the CPU, not {_dtype_name(flat)} on {flat.device}."
        )
    num_bytes = flat.numel() * flat.element_size()
    hasher = hashlib.sha256()
    if num_bytes:
        hasher.update((ctypes.c_char * num_bytes).from_address(flat.data_ptr()))
    return hasher.hexdigest()


# --- helpers ----------------------------------------------------------------------------------------------------------

_FIRST_NUMBER = re.compile(r"(?:(.*?)\.)??(\d+)\.")


def _find_layers(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """The layer (0, 1, …) of every tensor that is in one, by the rule in ByLayer."""
    lists: dict[str, dict[str, int]] = {}
    for spec in specs:
        match = _FIRST_NUMBER.match(spec.name)
        if match:
            lists.setdefault(match[1] or "", {})[spec.name] = int(match[2])
    if not lists:
        raise ConfigError("ByLayer finds no list of layers in the tensors' names; use Whole, Balanced or Named.")
    longest = max(len(set(numbers.values())) for numbers in lists.values())
    found = [prefix for prefix, numbers in lists.items() if len(set(numbers.values())) == longest]
    if len(found) > 1:
        raise ConfigError(f"ByLayer finds equally long lists of layers, {found[0]!r} and {found[1]!r}; use Named.")
    numbers = lists[found[0]]
    rank = {number: layer for layer, number in enumerate(sorted(set(numbers.values())))}
    return {name: rank[number] for name, number in numbers.items()}


def _place(index: int, specs: Iterable[TensorSpec]) -> Fragment:
    """A fragment of `specs` in the given order, one after the other."""
    placements, offset = [], 0
    for spec in specs:
        placements.append(Placement(spec, offset))
        offset += spec.numel
    return Fragment(index, tuple(placements))


def _spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), _dtype_name(tensor))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spec_to_list(spec: TensorSpec) -> list[object]:
    return [spec.name, list(spec.shape), spec.dtype]


def _specs_from_lists(entries: object) -> tuple[TensorSpec, ...]:
    if not isinstance(entries, list):
        raise LayoutError(f"a fragment is a list of [name, shape, dtype], not {entries!r}.")
    return tuple(_spec_from_list(entry) for entry in entries)


def _spec_from_list(entry: object) -> TensorSpec:
    match entry:
        case [str(name), list(shape), str(dtype)] if all(type(size) is int and size >= 0 for size in shape):
            return TensorSpec(name, tuple(shape), dtype)
    raise LayoutError(f"a tensor in a layout is [name, shape, dtype], not {entry!r}.")
