"""The layout of a cut model: the fragment of each tensor, and its place in the fragment's flat fp32 vector.

A tensor may be a **unit**: some rows of a parameter (its `origin`), with a name of its own, such as one expert of a
fused tensor that holds all experts of a layer.

Every learner and the syncer have the same layout, which they compare by its digest. The algorithm and the wire use flat
vectors: `gather` copies a model's tensors into one, `scatter` gives views of one in the tensors' shapes, `digest`
identifies its bits.
"""

import ctypes
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, get_args

import torch
from blake3 import blake3
from torch import Tensor

from diloco.core.codecs.formats import SEGMENT_ELEMENTS
from diloco.core.memory import new_vector
from diloco.errors import LayoutError

Role = Literal["", "averaged", "variance", "local"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Origin:
    """The rows of a parameter that make up a unit: the unit's rows are those from `first` on, along dimension 0.

    Attributes:
        parameter: its name, or that of a buffer.
        num_rows: of the whole parameter.
    """

    parameter: str
    first: int
    num_rows: int


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype ("float32", "bfloat16", …) of one tensor of a model, and its role.

    Attributes:
        role: in a fragment, "": a trained parameter; "averaged": training changes it without a gradient, and it becomes
            the mean of the learners' values; "variance": averaged, and never below 0. Beside the fragments, "": a
            static tensor, which training does not change; "local": each learner keeps its own value after joining.
        origin: of a unit; None: the tensor is whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = ""
    origin: Origin | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_averaged(self) -> bool:
        """Whether the merge averages this tensor, without the outer optimizer."""
        return self.role in ("averaged", "variance")

    def __str__(self) -> str:
        it = self.origin
        rows = "" if it is None else f" from row {it.first} of {it.parameter!r} ({it.num_rows} rows)"
        return f"{self.shape} {self.dtype}{_ROLE_WORDS[self.role]}{rows}"

    def rows(self, size: int = 1) -> tuple["TensorSpec", ...]:
        """This tensor cut along dimension 0 into units of `size` rows, named `name.0`, `name.1`, …"""
        num_rows, rest = self.shape[0], self.shape[1:]
        return tuple(
            replace(self, name=f"{self.name}.{i}", shape=(size, *rest), origin=Origin(self.name, i * size, num_rows))
            for i in range(num_rows // size)
        )


_ROLE_WORDS: Mapping[Role, str] = {
    "": "", "averaged": " that is averaged", "variance": " that is averaged, a variance", "local": " kept local",
}  # fmt: skip


@dataclass(frozen=True)
class BaseTensor:
    """A static tensor that every learner loads itself, such as LoRA's base: never sent, compared by digest at joining.

    Attributes:
        digest: SHA-256 (hex) of the bytes of its elements, in row-major order.
    """

    spec: TensorSpec
    digest: str

    def __str__(self) -> str:
        return f"{self.spec} with digest {self.digest[:12]}, which each learner brings,"


@dataclass(frozen=True)
class Placement:
    """A tensor's place in its fragment's flat vector: `spec.numel` elements from `offset` on, in row-major order."""

    spec: TensorSpec
    offset: int

    @property
    def elements(self) -> slice:
        """The tensor's elements in the flat vector."""
        return slice(self.offset, self.offset + self.spec.numel)


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


SAME_MODEL = "make the same model on all learners, with the same answers for its buffers and frozen tensors"
"""What to do where two layouts differ."""


@dataclass(frozen=True)
class Layout:
    """How a model is cut: its fragments, and the static tensors (frozen parameters, persistent buffers) beside them.

    Attributes:
        static: tensors that the run stores and sends to every learner that joins.
        base: tensors that every learner loads itself.

    A fragment without tensors is one that a learner does not hold (`part`).

    Raises LayoutError when a fragment is out of order, a name occurs twice, or the units of a parameter are not all of
    its rows.
    """

    fragments: tuple[Fragment, ...]
    static: tuple[TensorSpec, ...]
    base: tuple[BaseTensor, ...] = field(default=())

    def __post_init__(self) -> None:
        names = [name for fragment in self.fragments for name in fragment.names]
        names += [spec.name for spec in self.static] + [each.spec.name for each in self.base]
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise LayoutError(f"tensor {name!r} occurs twice in the layout; every tensor has one place.")
            seen.add(name)
        for position, fragment in enumerate(self.fragments):
            if fragment.index != position:
                raise LayoutError(f"fragment {fragment.index} is at position {position}; number fragments from 0.")
        for parameter, units in self.units().items():
            alike = {(spec.shape[1:], spec.dtype, spec.role, spec.origin and spec.origin.num_rows) for spec in units}
            starts = [*map(_first_row, units), units[0].origin.num_rows if units[0].origin else 0]
            stops = [0, *(_first_row(spec) + spec.shape[0] for spec in units)]
            if parameter in seen or len(alike) > 1 or starts != stops:
                raise LayoutError(f"the units of {parameter!r} must contain each of its rows once; cut it anew.")

    def units(self) -> dict[str, list[TensorSpec]]:
        """The units of each parameter that is cut into some, in the order of its rows."""
        found: dict[str, list[TensorSpec]] = {}
        for spec in (placement.spec for fragment in self.fragments for placement in fragment.tensors):
            if spec.origin is not None:
                found.setdefault(spec.origin.parameter, []).append(spec)
        return {name: sorted(units, key=_first_row) for name, units in found.items()}

    def part(self, fragments: Collection[int], rows: Sequence[int]) -> "Layout":
        """The layout of a model that holds only some fragments, and of the parameters that are cut into units only some
        rows. The other fragments have no tensors; a unit keeps its name, and its origin is where the part holds it.

        Arguments:
            fragments: indices of those that are held.
            rows: those of each such parameter, in the order in which the part holds them.
        """
        local = {row: index for index, row in enumerate(rows)}

        def held(spec: TensorSpec) -> TensorSpec:
            if (origin := spec.origin) is None:
                return spec
            return replace(spec, origin=replace(origin, first=local[origin.first], num_rows=len(rows)))

        of_each = [each.tensors if each.index in fragments else () for each in self.fragments]
        cut = (place(index, [held(each.spec) for each in own]) for index, own in enumerate(of_each))
        return Layout(tuple(cut), self.static, self.base)

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements, tied weights counted once."""
        return sum(fragment.numel for fragment in self.fragments)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types. Offsets are left out: they follow from the order of the tensors."""
        base = [[_spec_to_list(each.spec), each.digest] for each in self.base]
        return {
            "fragments": [[_spec_to_list(placement.spec) for placement in each.tensors] for each in self.fragments],
            "static": [_spec_to_list(spec) for spec in self.static],
            **({"base": base} if base else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """Read back what `to_dict` wrote. Raises LayoutError on anything else."""
        if not isinstance(values, Mapping):
            raise LayoutError(f"a layout must be a JSON object, not a {type(values).__name__}; send Layout.to_dict().")
        fragments, static, base = values.get("fragments"), values.get("static"), values.get("base", [])
        lists = [isinstance(each, list) for each in (fragments, static, base)]
        if set(values) - {"base"} != {"fragments", "static"} or not all(lists):
            raise LayoutError(
                f"a layout has the lists 'fragments' and 'static', not {sorted(values)}; the list 'base' is optional."
            )
        assert isinstance(fragments, list)
        assert isinstance(base, list)
        placed = tuple(place(index, _specs_from_lists(specs)) for index, specs in enumerate(fragments))
        for fragment in placed:
            if fragment.numel == 0:
                raise LayoutError(
                    f"fragment {fragment.index} holds no elements; every fragment needs a trainable tensor."
                )
        return cls(placed, static=_specs_from_lists(static), base=tuple(map(_base_from_list, base)))

    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON: equal exactly when two layouts are equal."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def first_difference(self, other: "Layout", own: str = "here", others: str = "there") -> str | None:
        """A phrase that names the first tensor in which two layouts differ, and what to do; None where they are equal.
        `own` and `others` say in the phrase where this layout and the other one are.

        >>> here.first_difference(there)
        "tensor 'layers.0.w' is (4, 4) float32 here and (4, 8) float32 there; make the same model on all learners, with
        the same answers for its buffers and frozen tensors"
        """
        if (difference := self._difference(other, own, others)) is None:
            return None
        return f"{difference}; {SAME_MODEL}"

    def _difference(self, other: "Layout", own: str, others: str) -> str | None:
        mine, theirs = self._entries(), other._entries()
        for of_each in (0, 1):  # the tensors themselves, then where they are
            for name in {**mine, **theirs}:
                here, there = (each[name][of_each] if name in each else "missing" for each in (mine, theirs))
                if here != there:
                    return f"tensor {name!r} is {here} {own} and {there} {others}"
        return None

    def _entries(self) -> dict[str, tuple[TensorSpec | BaseTensor, str]]:
        """Every tensor's spec, and where it is, in words."""
        entries: dict[str, tuple[TensorSpec | BaseTensor, str]] = {
            placement.spec.name: (placement.spec, f"at element {placement.offset} of fragment {fragment.index}")
            for fragment in self.fragments
            for placement in fragment.tensors
        }
        entries |= {spec.name: (spec, f"static tensor {index}") for index, spec in enumerate(self.static)}
        return entries | {each.spec.name: (each, f"base tensor {index}") for index, each in enumerate(self.base)}


def _first_row(spec: TensorSpec) -> int:
    return 0 if spec.origin is None else spec.origin.first


def place(index: int, specs: Iterable[TensorSpec]) -> Fragment:
    """A fragment of `specs` in the given order, one after the other."""
    placements, offset = [], 0
    for spec in specs:
        placements.append(Placement(spec, offset))
        offset += spec.numel
    return Fragment(index, tuple(placements))


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of a tensor under a name."""
    return TensorSpec(name, tuple(tensor.shape), _dtype_name(tensor))


def gather(fragment: Fragment, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """Copy a fragment's tensors into one flat fp32 vector of shape (fragment.numel,).

    `tensors` maps names to tensors of the shapes and dtypes in the layout (bf16 and fp16 are widened, which is
    exact). `out` is reused when given; otherwise the result is on the device of the tensors. Raises LayoutError
    naming the tensor that is missing or does not fit.
    """
    for spec in (placement.spec for placement in fragment.tensors):
        if spec.name not in tensors:
            raise LayoutError(f"tensor {spec.name!r} of fragment {fragment.index} is missing; pass all of its tensors.")
        found = replace(spec_of(spec.name, tensors[spec.name]), role=spec.role, origin=spec.origin)
        if found != spec:
            raise LayoutError(
                f"tensor {spec.name!r} is {found}, and the layout has {spec}; bring the model into its dtype and shape "
                "before the learner attaches, and leave it so."
            )
    if out is None:
        out = new_vector(fragment.numel, device=tensors[fragment.names[0]].device if fragment.tensors else None)
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


def named_tensors(layout: Layout, thetas: Iterable[Tensor]) -> dict[str, Tensor]:
    """A model's tensors in their own dtypes, by name, from the flat fp32 vectors of its fragments.

    The units of a parameter are joined under the parameter's name.
    """
    named: dict[str, Tensor] = {}
    units: dict[str, dict[int, Tensor]] = {}
    for fragment, theta in zip(layout.fragments, thetas, strict=True):
        views = scatter(fragment, theta)
        for spec in (placement.spec for placement in fragment.tensors):
            value = views[spec.name].to(getattr(torch, spec.dtype))
            if spec.origin is None:
                named[spec.name] = value
            else:
                units.setdefault(spec.origin.parameter, {})[spec.origin.first] = value
    return named | {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in units.items()}


class Digest:
    """The digest of a contiguous fp32 vector on the CPU, computed part by part in order: BLAKE3 (hex, 32 bytes) of the
    BLAKE3 hashes of its segments (`codecs.SEGMENT_ELEMENTS`), each of the segment's little-endian bytes.

    Holders of one version of a fragment compare digests; ranks that hold shards compute it from the digests of their
    segments. The bytes are hashed in place, with the interpreter lock released; BLAKE3 is about twice as fast as
    SHA-256, even where the processor has instructions for SHA-256.
    """

    def __init__(self) -> None:
        self._whole: list[bytes] = []
        self._hasher = blake3()
        self._missing = SEGMENT_ELEMENTS  # elements until the current segment is complete

    def update(self, part: Tensor) -> None:
        """Add the next elements. Raises LayoutError for anything else than contiguous fp32 on the CPU."""
        if part.dtype != torch.float32 or part.device.type != "cpu" or not part.is_contiguous():
            raise LayoutError(
                f"a digest is taken of a contiguous float32 vector on the CPU, not {_dtype_name(part)} on "
                f"{part.device}."
            )
        data = memoryview((ctypes.c_char * (4 * part.numel())).from_address(part.data_ptr())).cast("B")
        while data:
            taken = min(self._missing, len(data) // 4)
            self._hasher.update(data[: 4 * taken])
            data, self._missing = data[4 * taken :], self._missing - taken
            if self._missing == 0:
                self._whole.append(self._hasher.digest())
                self._hasher, self._missing = blake3(), SEGMENT_ELEMENTS

    @property
    def segments(self) -> bytes:
        """The digests of all segments so far, 32 bytes each; the last segment may be incomplete."""
        last = [self._hasher.digest()] if self._missing < SEGMENT_ELEMENTS else []
        return b"".join(self._whole + last)

    def hex(self) -> str:
        """The digest of all parts so far."""
        return digest_of_segments(self.segments)


def digest_of_segments(segments: bytes) -> str:
    """The `Digest` of a vector with these `Digest.segments`."""
    return blake3(segments).hexdigest()


def segment_digests(part: Tensor) -> bytes:
    """`Digest.segments` of a vector, or of whole segments of it."""
    whole = Digest()
    whole.update(part)
    return whole.segments


def digest(flat: Tensor) -> str:
    """The `Digest` of a whole vector."""
    whole = Digest()
    whole.update(flat)
    return whole.hex()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spec_to_list(spec: TensorSpec) -> list[object]:
    if spec.origin is not None:
        origin = [spec.origin.parameter, spec.origin.first, spec.origin.num_rows]
        return [spec.name, list(spec.shape), spec.dtype, spec.role, origin]
    return [spec.name, list(spec.shape), spec.dtype, *([spec.role] if spec.role else [])]


def _base_from_list(entry: object) -> BaseTensor:
    match entry:
        case [list(spec), str(digest)]:
            return BaseTensor(_spec_from_list(spec), digest)
    raise LayoutError(f"a base tensor in a layout is [tensor, digest], not {entry!r}.")


def _specs_from_lists(entries: object) -> tuple[TensorSpec, ...]:
    if not isinstance(entries, list):
        raise LayoutError(f"a fragment is a list of [name, shape, dtype], not {entries!r}.")
    return tuple(_spec_from_list(entry) for entry in entries)


def _spec_from_list(entry: object) -> TensorSpec:
    match entry:
        case [str(name), list(shape), str(dtype), *rest] if all(type(size) is int and size >= 0 for size in shape):
            if not rest:
                return TensorSpec(name, tuple(shape), dtype)
            if len(rest) == 1 and rest[0] and rest[0] in ROLES:
                return TensorSpec(name, tuple(shape), dtype, rest[0])
            if len(rest) == 2 and rest[0] in ROLES and (origin := _origin_from_list(rest[1], shape)) is not None:
                return TensorSpec(name, tuple(shape), dtype, rest[0], origin)
    raise LayoutError(
        f"a tensor in a layout is [name, shape, dtype], [name, shape, dtype, role] or, for rows of a parameter, [name, "
        f"shape, dtype, role, [parameter, first row, number of rows]], not {entry!r}."
    )


def _origin_from_list(entry: object, shape: list[int]) -> Origin | None:
    match entry:
        case [str(parameter), int(first), int(num_rows)] if shape and 0 <= first <= num_rows - shape[0]:
            return Origin(parameter, first, num_rows)
    return None
