"""Compiled loops and torch operations: the same bits, the same refusals, in any number of threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.compute import loops
from diloco.compute.threads import ThreadMap
from diloco.core import arithmetic
from diloco.core.adopt import Adopt, KeepDisplacement, Mix, Replace
from diloco.core.codecs import BF16, CODECS, E3M0, FP16, FP32, SEGMENT_ELEMENTS, Codec, Int4, Int8, TwoBit, compress
from diloco.core.global_fragment import GlobalFragment, apply_update, close
from diloco.core.layout import Placement, TensorSpec
from diloco.core.memory import flush_denormals
from diloco.core.merges import (
    MERGES,
    Encoded,
    HeLoCo,
    Mean,
    Merge,
    NormOutliers,
    NormZScore,
    RadialDirectional,
    merge_into,
    refused_by,
)
from diloco.core.merges.decoding import RUN_SEGMENTS
from diloco.core.merges.measures import block_sums
from diloco.core.method import Method
from diloco.core.outer import SGD, Adam, DelayedNesterov, Nesterov, Outer
from diloco.core.presets import DataParallel, DiLoCo
from diloco.errors import ConfigError, CorruptPayloadError, DilocoError, LayoutError, NonFiniteError

RUN_ELEMENTS = RUN_SEGMENTS * SEGMENT_ELEMENTS
LOOPED = [FP32(), BF16(), Int8(), Int4(), E3M0()]
OTHER_BLOCKS = [Int8(block=32768), Int4(block=2), E3M0(block=32)]
CODECS_OF_MERGES = [*LOOPED, *OTHER_BLOCKS[:2], TwoBit()]
SLOW = [Int4(), *OTHER_BLOCKS]
"""Loops of their own take seconds to compile; these are made as those of E3M0 and Int8."""
LENGTHS = [1, 2, 3, 63, 64, 65, 127, 255, 257, 4095, 4097, 32767, 32768, 32769, 65537, 5 * SEGMENT_ELEMENTS + 33]

seeds = st.integers(0, 2**31)
lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(1, 3000))


def of_codecs(codecs: Sequence[Codec]) -> pytest.MarkDecorator:
    each = [pytest.param(codec, marks=[pytest.mark.slow] if codec in SLOW else [], id=codec.name) for codec in codecs]
    return pytest.mark.parametrize("codec", each)


@pytest.fixture(scope="module")
def threads() -> Iterator[Mapping[int, ThreadMap]]:
    maps = {num: ThreadMap(num) for num in (1, 2, 3)}
    yield maps
    for each in maps.values():
        each.close()


def bits(value: Any) -> Any:
    """A value that is equal to another one's if all tensors in them have the same bits."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, bits(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, Mapping):
        return [(name, bits(each)) for name, each in value.items()]
    if isinstance(value, tuple | list):
        return [bits(each) for each in value]
    return value


def outcome(arithmetic_: arithmetic.Arithmetic, compute: Callable[[], Any]) -> Any:
    """The bits of a result, or the kind of a refusal and its sentence."""
    arithmetic.choose(arithmetic_)
    try:
        return bits(compute())
    except DilocoError as error:
        return type(error), str(error)


def require_same(compute: Callable[[], Any]) -> Any:
    """Compute by torch and by loops. Returns the outcome of both."""
    by_torch, by_loops = (outcome(each, compute) for each in ("torch", "compiled"))
    assert by_loops == by_torch
    return by_torch


def vector(num_elements: int, seed: int, *, finite: bool = True) -> Tensor:
    """Stretches of 64 elements: ordinary values of any magnitude, ties of every format, zeros of both signs, subnormal
    numbers, the largest ones; not `finite`: an inf or NaN at some place."""
    generator = torch.Generator().manual_seed(seed)
    rows = -(-num_elements // 64)
    x, kind = torch.randn(rows, 64, generator=generator), torch.randint(0, 10, (rows,), generator=generator)
    exponent = torch.randint(-135, 100, (rows, 1), generator=generator).double().exp2().float()
    ties = (x * 6).round() / 2  # of whole numbers up to 7, of E3M0
    ties[:, 0] = 7.0
    halfway = x.view(torch.int32) & -0x10000 | 0x8000  # between two numbers of bf16, or next to it
    halfway[:, ::3] -= 1
    kinds = (
        x * 0.01, x * exponent, ties, ties * exponent, halfway.view(torch.float32), x * 2.0**-127, x * 2.0**-145,
        x * 0.0, torch.full_like(x, 1.5), x.sign() * 2.0**118,
    )  # fmt: skip
    for i, each in enumerate(kinds):
        x[kind == i] = each[kind == i]
    found = x.flatten()[:num_elements].clone()
    if not finite:
        place = int(torch.randint(0, num_elements, (1,), generator=generator))
        found[place] = (math.inf, -math.inf, math.nan)[seed % 3]
    return found


# --- codecs -----------------------------------------------------------------------------------------------------------


@of_codecs([*CODECS.values(), *OTHER_BLOCKS])
@given(num_elements=lengths, seed=seeds, finite=st.sampled_from([True, True, True, False]))
@settings(max_examples=8)
def test_encoding_and_decoding(codec: Codec, num_elements: int, seed: int, finite: bool) -> None:
    x = vector(num_elements, seed, finite=finite)
    found = require_same(lambda: codec.encode(x))
    assert finite or found[0] is NonFiniteError
    if found[0] is not NonFiniteError:
        payload = codec.encode(x)
        require_same(lambda: codec.decode(payload, num_elements))


@of_codecs([*LOOPED, *OTHER_BLOCKS])
def test_magnitudes_at_the_ends_of_the_formats(codec: Codec) -> None:
    for exponent in (-149, -127, -126, -121, -120, -119, -114, -113, 117, 118, 119, 120, 121, 124, 126, 127):
        x = (torch.linspace(-1, 1, 200).double() * 2.0**exponent * (2 - 2**-23)).float()
        require_same(lambda x=x: codec.decode(codec.encode(x), 200))


@of_codecs([*LOOPED, *OTHER_BLOCKS])
@given(num_elements=lengths, seed=seeds)
@settings(max_examples=8)
def test_any_bytes_are_decoded_or_refused(codec: Codec, num_elements: int, seed: int) -> None:
    """Random codes, and scales or values at and beyond the limits of the format."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (codec.encoded_bytes(num_elements),), dtype=torch.uint8, generator=generator)
    if hasattr(codec, "block"):
        limits = [0, 0x8000, (127 - 120) << 7, codec.largest_scale_bits, 0x3F80]  # type: ignore[attr-defined]
        limits += [limits[2] - 1, limits[3] + 1, 0xBF80, 0x7F80, 0x7FC0] if seed % 2 else []
        for first in range(0, num_elements, SEGMENT_ELEMENTS):
            num_blocks = -(-min(SEGMENT_ELEMENTS, num_elements - first) // codec.block)  # type: ignore[attr-defined]
            chosen = torch.randint(0, len(limits), (num_blocks,), generator=generator)
            at = codec.encoded_bytes(first)
            scales = torch.tensor(limits, dtype=torch.int32).to(torch.int16)[chosen]
            payload[at : at + 2 * num_blocks] = scales.view(torch.uint8)
    found = require_same(lambda: codec.decode(payload, num_elements))
    assert len(found) == 3 or found[0] is CorruptPayloadError


@of_codecs([*LOOPED, TwoBit()])
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_error_feedback(codec: Codec, decay: float) -> None:
    for num_elements, seed in itertools.product((65, 70001), range(3)):
        x = vector(num_elements, seed)
        require_same(lambda x=x: compress(codec, x, None, decay))
        for residual in (0.01 * torch.randn(num_elements), vector(num_elements, seed + 100)):
            require_same(lambda x=x, residual=residual: compress(codec, x, residual, decay))


@of_codecs(LOOPED)
def test_what_is_no_vector_or_payload_is_refused(codec: Codec) -> None:
    x, payload = torch.randn(100), codec.encode(torch.randn(100))
    odd = torch.zeros(2 * len(payload), dtype=torch.uint8)[::2]
    for compute in (
        lambda: codec.encode(x[::2]), lambda: codec.encode(x.double()), lambda: codec.encode(x, payload[:-1]),
        lambda: codec.decode(payload[:-1], 100), lambda: codec.decode(odd, 100),
        lambda: codec.decode(payload, 100, x[:-1]), lambda: codec.decode(payload.view(1, -1), 100),
    ):  # fmt: skip
        assert require_same(compute)[0] in (ConfigError, CorruptPayloadError)


@of_codecs(LOOPED)
def test_payloads_begin_at_any_address(codec: Codec) -> None:
    x = vector(70001, 0)
    room = torch.empty(codec.encoded_bytes(70001) + 8, dtype=torch.uint8)
    for base, first in itertools.product((0, 1, 2, 3), (0, 1, 2, 3)):
        out = torch.frombuffer(room.numpy(), dtype=torch.uint8, offset=base)[first:][: codec.encoded_bytes(70001)]
        require_same(lambda out=out: codec.encode(x, out).clone())
        require_same(lambda out=out: codec.decode(out, 70001))


# --- sums, outer steps, denormals -------------------------------------------------------------------------------------


@given(num_elements=lengths, seed=seeds)
@settings(max_examples=8)
def test_sums_of_blocks(num_elements: int, seed: int) -> None:
    x, y = (vector(num_elements, seed + i) for i in range(2))
    require_same(lambda: [block_sums(x), block_sums(x, y)])


OUTERS = [SGD(lr=0.7), Nesterov(lr=0.7, momentum=0.9), Adam(lr=0.1), DelayedNesterov(lr=0.7, buffer=2, c=0.25)]


@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: type(outer).__name__)
@given(num_elements=lengths, seed=seeds)
@settings(max_examples=8)
def test_outer_steps(outer: Outer, num_elements: int, seed: int) -> None:
    params, delta, other = (vector(num_elements, seed + i) for i in range(3))

    def compute() -> Any:
        new, state = outer.step(outer.init(num_elements), params, delta)
        into = other.clone()
        return [new, state, outer.step(state, new, into, out=into, new_state=state)]  # in the memory of its inputs

    require_same(compute)


@given(num_elements=lengths, seed=seeds, finite=st.booleans())
@settings(max_examples=8)
def test_denormals_are_flushed(num_elements: int, seed: int, finite: bool) -> None:
    x = vector(num_elements, seed, finite=finite)
    require_same(lambda: flush_denormals(x.clone()))


@pytest.mark.parametrize("rule", [Mix(0.3), Mix(1.0), Mix(0.0), KeepDisplacement(), Replace()], ids=str)
@given(num_elements=lengths, seed=seeds, of_itself=st.booleans())
@settings(max_examples=8)
def test_adoptions(rule: Adopt, num_elements: int, seed: int, of_itself: bool) -> None:
    local, theta, origin = (vector(num_elements, seed + i) for i in range(3))

    def adopted() -> Tensor:
        own = local.clone()
        rule.adopt_into(own, theta, None if of_itself else origin)
        return own

    assert require_same(adopted) == bits(rule.adopt(local, theta, local if of_itself else origin))


def test_adoptions_are_computed_by_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic.choose("compiled")
    computed = []
    monkeypatch.setattr(loops, "adopt", lambda rule, *_: computed.append(rule))
    x = torch.ones(64, 3)
    for rule in (Mix(0.5), KeepDisplacement()):
        rule.adopt_into(x.clone(), x)
        rule.adopt_into(x.bfloat16(), x)
        rule.adopt_into(x.t().clone(memory_format=torch.preserve_format), x.t())
    assert computed == [Mix(0.5), KeepDisplacement()]


# --- merges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Contributions to a merge of several tensors."""

    codec: Codec
    places: tuple[Placement, ...]
    contributions: list[Encoded]
    momentum: Tensor

    @property
    def num_elements(self) -> int:
        return len(self.momentum)


SHAPES = [(1,), (63,), (4097, 3), (32768, 5), (77, 32767, 4099), (RUN_ELEMENTS - 5, 77, RUN_ELEMENTS + 4099, 3)]
"""Tensors that lie in a segment, end with one, straddle several, and straddle runs."""


def of_learner(sizes: Sequence[int], common: Tensor, learner: int, seed: int) -> Tensor:
    """What a learner brings, tensor by tensor: like the others', cancelling them, zeros, very short, or anything."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for i, part in enumerate(common.split(list(sizes))):
        noise = torch.randn(len(part), generator=generator)
        same = int(torch.randint(0, 10, (1,), generator=torch.Generator().manual_seed(seed // 1000 + i)))
        match same if same < 2 else int(torch.randint(0, 6, (1,), generator=generator)):
            case 0:
                parts.append(part + 0.7 * noise)
            case 1:
                parts.append(part * (-1.0) ** learner)
            case 2:
                parts.append(torch.zeros_like(part))
            case 3:
                parts.append(noise * 1e-39)
            case 4:
                parts.append(noise * 2.0**-130)
            case _:
                parts.append(vector(len(part), seed + i) * 2.0**-20)
    return torch.cat(parts)


@st.composite
def cases(draw: st.DrawFn, codecs: Sequence[Codec] = tuple(CODECS_OF_MERGES)) -> Case:
    codec, sizes, seed = (
        draw(st.sampled_from(codecs)),
        draw(st.sampled_from(SHAPES)),
        1000 * draw(st.integers(0, 10**6)),
    )
    names = ["embed.weight", *(f"layers.{i}.weight" for i in range(len(sizes)))]
    if draw(st.booleans()):
        names = names[1:]
    offsets = itertools.accumulate(sizes, initial=0)
    places = tuple(
        Placement(TensorSpec(name, (size,), "float32"), at)
        for name, size, at in zip(names, sizes, offsets, strict=False)
    )
    common, subsets = (
        torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)),
        st.frozensets(st.integers(0, len(sizes) - 1)),
    )
    contributions, late = [], draw(st.sampled_from([False, False, True]))  # loops read contributions of one payload
    for i in range(draw(st.integers(1, 4))):
        num = draw(st.integers(1, 3)) if late else 1
        payloads = tuple(codec.encode(of_learner(sizes, common, i, seed + 10 * i + j)) for j in range(num))
        contributions.append(Encoded(
            f"learner-{i}", payloads, draw(st.sampled_from([0.0, 1.0, 1.0, 3.0, 0.1, 1e-44, 7e11])),
            staleness=draw(st.integers(0, 2)),
            tensors=draw(st.one_of(st.none(), st.none(), subsets)),
            shares=draw(st.one_of(st.none(), st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * len(sizes)))),
            parts=draw(st.one_of(st.just(()), st.tuples(*[st.one_of(st.none(), subsets)] * num))) if late else (),
        ))  # fmt: skip
    assume(any(each.weight for each in contributions))
    return Case(codec, places, contributions, 0.01 * common + vector(sum(sizes), seed) * 2.0**-20)


@pytest.mark.slow
@pytest.mark.parametrize("how", [*(kind() for kind in MERGES), RadialDirectional(()), HeLoCo(0.9)], ids=str)
@given(case=cases())
@settings(max_examples=8)
def test_merges_of_any_contributions(how: Merge, case: Case, threads: Mapping[int, ThreadMap]) -> None:
    def compute(num: int) -> Tensor:
        out = torch.full((case.num_elements,), math.nan)
        merge_into(out, how, case.codec, case.contributions, case.places, case.momentum, each=threads[num])
        return out

    found = require_same(lambda: compute(1))
    assert outcome("compiled", lambda: compute(2)) == found
    assert outcome("torch", lambda: compute(3)) == found


@pytest.mark.parametrize("screen", [NormOutliers(1.0), NormZScore(0.5)], ids=str)
@given(case=cases())
@settings(max_examples=4)
def test_screens_refuse_the_same_learners(screen: Any, case: Case, threads: Mapping[int, ThreadMap]) -> None:
    def compute(num: int) -> Any:
        return refused_by(screen, case.codec, case.contributions, case.places, case.num_elements, threads[num])

    found = require_same(lambda: compute(1))
    assert outcome("compiled", lambda: compute(3)) == found


@of_codecs(CODECS_OF_MERGES)
@pytest.mark.parametrize("how", [Mean(), RadialDirectional(())], ids=str)
def test_factors_that_fp32_cannot_hold(how: Merge, codec: Codec) -> None:
    """Very short vectors are made long, and back; with weights as far apart as numbers can be."""
    places = (
        Placement(TensorSpec("a", (33000,), "float32"), 0),
        Placement(TensorSpec("b", (1001,), "float32"), 33000),
    )
    generator = torch.Generator().manual_seed(0)
    for scale, weights in itertools.product((1e-35, 1e-38, 1e-42), ((3.0, 1.0), (1e-300, 1e300), (1e11, 3e-7))):
        values = scale * torch.randn(2, 34001, generator=generator)
        values[1, :100] = torch.randn(100, generator=generator)
        contributions = [Encoded(str(i), (codec.encode(values[i]),), weights[i]) for i in range(2)]

        def compute(contributions: list[Encoded] = contributions) -> Tensor:
            merge_into(out := torch.empty(34001), how, codec, contributions, places)
            return out

        require_same(compute)


@of_codecs([FP16(), TwoBit(), E3M0()])
def test_learners_none_of_whom_trains_all(codec: Codec) -> None:
    places = tensors(3 * SEGMENT_ELEMENTS + 5)
    contributions = [
        Encoded(str(i), (codec.encode((1 + 9 * i) * vector(3 * SEGMENT_ELEMENTS + 5, 1).clamp(-1, 1)),), 1.0,
                tensors=frozenset({i, 2}))
        for i in range(2)
    ]  # fmt: skip

    def merged(how: Merge) -> Tensor:
        merge_into(out := torch.empty(3 * SEGMENT_ELEMENTS + 5), how, codec, contributions, places)
        return out

    for kind in MERGES:
        require_same(lambda kind=kind: merged(kind()))
    assert require_same(lambda: refused_by(NormOutliers(1.0), codec, contributions, places, 3 * SEGMENT_ELEMENTS + 5))


@of_codecs(LOOPED)
@pytest.mark.parametrize("how", [kind() for kind in MERGES], ids=str)
def test_a_contribution_that_is_damaged_in_the_middle(
    how: Merge, codec: Codec, threads: Mapping[int, ThreadMap]
) -> None:
    num_elements = RUN_ELEMENTS + 70001
    places = (Placement(TensorSpec("w", (num_elements,), "float32"), 0),)
    contributions = [Encoded(f"learner-{i}", (codec.encode(torch.randn(num_elements)),), 1.0 + i) for i in range(3)]
    for segment in (1, RUN_SEGMENTS, RUN_SEGMENTS + 2):  # the last one is shorter
        payloads = [each.payloads[0].clone() for each in contributions]
        at = codec.encoded_bytes(segment * SEGMENT_ELEMENTS)
        for payload in payloads[1:]:
            payload[at + 8 : at + 12] = 255  # NaN; of a block format, two of the scales
        damaged = [replace(each, payloads=(own,)) for each, own in zip(contributions, payloads, strict=True)]
        for each in (threads[1], threads[3]):

            def compute(damaged: list[Encoded] = damaged, each: ThreadMap = each) -> None:
                merge_into(torch.empty(num_elements), how, codec, damaged, places, torch.ones(num_elements), each=each)

            kind, sentence = require_same(compute)
            assert kind is CorruptPayloadError
            assert sentence.startswith("the contribution of learner-1 cannot be merged: ")
    short = [contributions[0], replace(contributions[1], payloads=(contributions[1].payloads[0][:-1],))]
    kind, sentence = require_same(lambda: merge_into(torch.empty(num_elements), how, codec, short, places))
    assert kind is CorruptPayloadError
    assert sentence.startswith("the contribution of learner-1 is ")


# --- rounds -----------------------------------------------------------------------------------------------------------

MANY = RUN_ELEMENTS + SEGMENT_ELEMENTS + 1001
DOWN = ["fp32", "bf16", "int4", "e3m0", "2bit"]


def methods(down: str) -> dict[str, Method]:
    plain = {type(outer).__name__: DiLoCo(codec=("e3m0", down), outer=outer) for outer in OUTERS}
    return {
        **plain,
        "on the learners": replace(plain["Nesterov"], outer_at="learners"),
        "radial": replace(plain["Nesterov"], merge=RadialDirectional(), screen=NormOutliers(1.01)),
        "HeLoCo": replace(plain["Nesterov"], merge=HeLoCo()),
        "gradients": DataParallel(codec=("int8", down)),
    }


def tensors(num_elements: int, *, averaged: bool = False) -> tuple[Placement, ...]:
    """Three tensors, of which the second may be averaged: of many elements, it is in the last run only."""
    small = max(1, num_elements // 20)
    sizes = [num_elements - 2 * small, small, small]
    offsets = itertools.accumulate(sizes, initial=0)
    roles = ["parameter", "variance" if averaged else "parameter", "parameter"]
    return tuple(
        Placement(TensorSpec(f"w{i}", (size,), "float32", role=role), at)  # type: ignore[arg-type]
        for i, (size, role, at) in enumerate(zip(sizes, roles, offsets, strict=False))
    )


def rounds(how: Method, num_elements: int, places: Sequence[Placement], each: Any, *, in_place: bool) -> list[Any]:
    """Two rounds, and what another holder of the version before makes of their updates."""
    theta = vector(num_elements, 1)
    held = GlobalFragment.first(how, 0, theta)
    other, found = GlobalFragment.first(how, 0, theta.clone()), []
    for number in range(2):
        payloads = [how.up.encode(0.1 * vector(num_elements, 10 * number + i)) for i in range(2, 5)]
        contributions = [Encoded(f"learner-{i}", (each,), 1.0 + i) for i, each in enumerate(payloads)]
        if how.outer.one_at_a_time:
            contributions = contributions[:1]
        closed = close(how, held, contributions, places, 0.75, in_place=in_place, each=each)
        applied = apply_update(how, other, closed.update, closed.payload, places, each=each)
        found.append(bits([closed, applied.held.theta, applied.mean, applied.segments]))
        held, other = closed.held, applied.held
    return found


@pytest.mark.parametrize(
    "down", [pytest.param(each, marks=[pytest.mark.slow] if each == "int4" else []) for each in DOWN]
)
@pytest.mark.parametrize("kind", methods("fp32"))
def test_rounds(kind: str, down: str, threads: Mapping[int, ThreadMap]) -> None:
    """In place or not, in any number of threads: payload, digest, Θ, residual and outer state."""
    how = methods(down)[kind]
    for num_elements, averaged in ((5, False), (1003, True), (MANY, True)):
        compute = partial(rounds, how, num_elements, tensors(num_elements, averaged=averaged))
        expected = outcome("torch", partial(compute, threads[1], in_place=False))
        if num_elements < MANY or down == "e3m0":
            assert outcome("torch", partial(compute, threads[3], in_place=True)) == expected
        assert outcome("compiled", partial(compute, threads[1], in_place=False)) == expected
        assert outcome("compiled", partial(compute, threads[2], in_place=True)) == expected


@pytest.mark.parametrize("how", [Mean(), RadialDirectional()], ids=str)
@pytest.mark.parametrize("down", ["fp32", "e3m0"])
def test_a_round_in_place_is_computed_by_the_loops(how: Merge, down: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they cannot do, torch does, with the same bits: so no other test would see that they are left out."""
    called = set[str]()

    def watched(name: str) -> Callable[..., Any]:
        loop = getattr(loops, name)

        def call(*arguments: Any) -> Any:
            called.add(name)
            return loop(*arguments)

        return call

    for name in loops.__all__:
        monkeypatch.setattr(loops, name, watched(name))
    arithmetic.choose("compiled")
    rounds(replace(DiLoCo(codec=("e3m0", down)), merge=how), MANY, tensors(MANY), map, in_place=True)
    expected = {"can_read", "encode", "weighted_sum", "flush_denormals"}
    expected |= {"outer_step"} if down == "fp32" else {"change", "land", "decode"}
    expected |= {"decoded_squares", "block_sums"} if how == RadialDirectional() else set()
    assert called == expected


@pytest.mark.parametrize("name", ["theta", "momentum", "residual"])
@pytest.mark.parametrize("in_place", [False, True])
def test_memory_of_another_length_is_refused(name: str, in_place: bool) -> None:
    """Loops would write past its end."""
    how, places = DiLoCo(codec="e3m0"), tensors(MANY)
    held = GlobalFragment.first(how, 0, torch.randn(MANY))
    held = replace(held, residual=torch.zeros(MANY))
    short = torch.zeros(MANY)[: MANY // 2]
    broken = replace(held, **({"outer_state": {name: short}} if name == "momentum" else {name: short}))  # type: ignore[arg-type]
    contributions = [Encoded("a", (how.up.encode(torch.randn(MANY)),), 1.0)]
    kind, sentence = require_same(lambda: close(how, broken, contributions, places, in_place=in_place))
    assert issubclass(kind, DilocoError), sentence
    for out, new in ((short, torch.zeros(MANY)), (torch.zeros(MANY), short)):
        kind, sentence = require_same(
            lambda out=out, new=new: how.outer.step(
                held.outer_state, held.theta, held.theta, out=out, new_state={"momentum": new}
            )
        )
        assert kind is LayoutError
        assert f"must be a flat float32 vector of {MANY} elements" in sentence


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("down", ["fp32", "bf16", "e3m0"])
@pytest.mark.parametrize("outer", [Nesterov(lr=1e3), Nesterov(lr=1e-3), SGD(lr=1e3)], ids=str)
@pytest.mark.parametrize("value", [math.nan, 3e38, 3e37])
def test_a_round_that_is_refused(
    value: float, outer: Outer, down: str, in_place: bool, threads: Mapping[int, ThreadMap]
) -> None:
    """In the same sentence, and the version is as it was: only one element in the last run cannot be used."""
    how, places = DiLoCo(codec=("fp32", down), outer=outer), tensors(MANY)
    arithmetic.choose("torch")
    small = [Encoded(str(i), (FP32().encode(1e-6 * torch.randn(MANY)),), 1.0) for i in range(2)]
    held = close(how, GlobalFragment.first(how, 0, torch.randn(MANY)), small, places).held
    before = bits(held)
    bad = [replace(each, payloads=(each.payloads[0].clone(),)) for each in small]
    for each in bad:
        each.payloads[0].view(torch.float32)[-1001] = value
    if value == 3e37 and outer.lr < 1:  # type: ignore[attr-defined]
        bad = [*bad, *(replace(each, learner=f"more {i}") for i in range(12) for each in bad)]  # the sum overflows
    for each_ in (threads[1], threads[3]):
        kind, _ = require_same(lambda each_=each_: close(how, held, bad, places, in_place=in_place, each=each_))
        assert kind in (NonFiniteError, CorruptPayloadError)
        assert bits(held) == before
