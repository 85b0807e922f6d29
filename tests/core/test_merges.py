"""Every merge but the mean: against references on decoded vectors, in degenerate cases, and with learners that lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.whole_vectors import merged_vector
from torch import Tensor

from diloco.core.codecs import FP32, SEGMENT_ELEMENTS, Int4
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import (
    MERGES,
    SCREENS,
    CoordinateMedian,
    Encoded,
    GeometricMedian,
    HeLoCo,
    Mean,
    MedianNormClip,
    Merge,
    MultiKrum,
    NormOutliers,
    NormZScore,
    RadialDirectional,
    Screen,
    SenderMean,
    TrimmedMean,
    shard_of,
)
from diloco.core.merges.decoding import Decoder
from diloco.core.merges.measures import contribution_norms
from diloco.core.method import Method
from diloco.errors import ConfigError, CorruptPayloadError

ALL = [kind() for kind in MERGES]
ROBUST = [CoordinateMedian(), TrimmedMean(), GeometricMedian(20), MultiKrum(2), MedianNormClip()]

SIZES = {"embed.weight": 5000, "layers.0.weight": 30000, "layers.1.weight": 9001, "head.bias": 7}


def norm(x: torch.Tensor) -> float:
    return float(x.double().norm())


def places(sizes: dict[str, int] = SIZES) -> tuple[Placement, ...]:
    found, offset = [], 0
    for name, size in sizes.items():
        found.append(Placement(TensorSpec(name, (size,), "float32"), offset))
        offset += size
    return tuple(found)


PLACES = places()
NUM = sum(SIZES.values())


def vectors(num: int, seed: int = 0, size: int = NUM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator)
    return [common + 0.7 * torch.randn(size, generator=generator) for _ in range(num)]


def encoded(values: Sequence[Tensor], weights: Sequence[float] | None = None, **more: object) -> list[Encoded]:
    weights = [1.0] * len(values) if weights is None else weights
    return [
        Encoded(f"learner-{i}", (FP32().encode(value),), weights[i], **more)  # type: ignore[arg-type]
        for i, value in enumerate(values)
    ]


def merge(how: Merge, values: Sequence[Tensor], weights: Sequence[float] | None = None, **more: object) -> Tensor:
    return merged_vector(how, FP32(), encoded(values, weights, **more), PLACES, NUM)


# --- what holds for all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ALL, ids=str)
def test_one_learner_gets_its_own_back_to_the_bit(how: Merge) -> None:
    [value] = vectors(1)
    assert torch.equal(merge(how, [value]), value)
    assert torch.equal(merge(how, [value, torch.randn(NUM)], [3.0, 0.0]), value)  # weight 0 does not count


@pytest.mark.parametrize("how", ALL, ids=str)
def test_it_can_be_written_and_read(how: Merge) -> None:
    assert MERGES.read(how.to_dict()) == how


@pytest.mark.parametrize("how", ALL, ids=str)
def test_equal_contributions_give_themselves(how: Merge) -> None:
    [value] = vectors(1)
    # sums of equal values round in the last place, and lengths and directions are multiplied
    torch.testing.assert_close(merge(how, [value] * 5), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ALL, ids=str)
def test_late_and_fresh_work_of_one_learner_is_added(how: Merge) -> None:
    one, two, other = vectors(3)
    codec = FP32()
    late = [Encoded("a", (codec.encode(one), codec.encode(two)), 1.0), Encoded("b", (codec.encode(other),), 1.0)]
    assert torch.equal(merged_vector(how, codec, late, PLACES, NUM), merge(how, [one + two, other]))


@pytest.mark.parametrize("how", ALL, ids=str)
def test_a_learner_that_trains_other_tensors_than_before_brings_of_each_payload_what_it_trained(how: Merge) -> None:
    one, two, other = vectors(3)
    codec = FP32()
    late = [
        Encoded("a", (codec.encode(one), codec.encode(two)), 1.0, parts=(frozenset({0, 2, 3}), None)),
        Encoded("b", (codec.encode(other),), 1.0),
    ]
    trained = one.clone()
    trained[PLACES[1].elements] = 0.0
    assert torch.equal(merged_vector(how, codec, late, PLACES, NUM), merge(how, [trained + two, other]))


@pytest.mark.parametrize("how", ALL, ids=str)
def test_a_tensor_counts_those_who_train_it(how: Merge) -> None:
    values = vectors(3)
    contributions = encoded(values)
    alone = [
        contributions[0],
        Encoded("b", contributions[1].payloads, 1.0, tensors=frozenset({0, 2})),
        Encoded("c", contributions[2].payloads, 1.0, tensors=frozenset({0})),
    ]
    merged = merged_vector(how, FP32(), alone, PLACES, NUM)
    if not isinstance(
        how, SenderMean | GeometricMedian | MultiKrum | MedianNormClip
    ):  # (those look at whole fragments)
        assert torch.equal(merged[5000:35000], values[0][5000:35000])
    without = [Encoded(each.learner, each.payloads, 1.0, tensors=frozenset({0, 1, 2})) for each in contributions]
    if not isinstance(how, SenderMean):  # it goes by what is not zero
        assert not merged_vector(how, FP32(), without, PLACES, NUM)[-7:].any()


@pytest.mark.parametrize("how", ALL, ids=str)
def test_what_a_payload_says_of_tensors_that_its_learner_does_not_train_counts_for_nothing(how: Merge) -> None:
    """A codec of 2 bits says something of every coordinate, and a learner that lies says anything."""
    values, noisy = vectors(4), vectors(4)
    for one, other in zip(values[1:3], noisy[1:3], strict=True):
        one[5000:35000], other[5000:35000] = 0.0, 1e6
    own = [None, frozenset({0, 2, 3}), frozenset({0, 2, 3}), None]

    def merged(values: Sequence[Tensor]) -> Tensor:
        brought = [replace(each, tensors=theirs) for each, theirs in zip(encoded(values), own, strict=True)]
        return merged_vector(how, FP32(), brought, PLACES, NUM)

    assert torch.equal(merged(noisy), merged(values))
    assert merged(values)[5000:35000].any()


@pytest.mark.parametrize("how", [how for how in ALL if how.weighted], ids=str)
def test_weights_are_ratios(how: Merge) -> None:
    values = vectors(4)
    values[0], heavy = values[1], merge(how, values[1:], [2.0, 1.0, 1.0])
    # one learner twice is one of twice the weight, if it is not longer than the median or the median is its own
    if not isinstance(how, MedianNormClip):
        torch.testing.assert_close(merge(how, values), heavy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge(how, values[1:], [6.0, 3.0, 3.0]), heavy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [how for how in ALL if not how.weighted], ids=str)
def test_some_count_everybody_the_same(how: Merge) -> None:
    values = vectors(4)
    assert torch.equal(merge(how, values, [1e9, 1.0, 2.0, 3.0]), merge(how, values))
    assert torch.equal(merge(how, values, [1e9, 0.0, 2.0, 3.0]), merge(how, [values[0], *values[2:]]))


@pytest.mark.parametrize("how", ALL, ids=str)
@pytest.mark.parametrize("num_idle", [1, 5])
def test_who_trains_nothing_of_a_fragment_changes_nothing(how: Merge, num_idle: int) -> None:
    values, codec = vectors(3), FP32()
    for payloads in ((codec.encode(torch.zeros(NUM)),), ()):
        idle = [Encoded(f"z{i}", payloads, 1.0, tensors=frozenset()) for i in range(num_idle)]
        assert torch.equal(merged_vector(how, codec, [*encoded(values), *idle], PLACES, NUM), merge(how, values))
        assert not merged_vector(how, codec, idle, PLACES, NUM).any()


@pytest.mark.parametrize("how", [RadialDirectional(()), HeLoCo(0.9)], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-42])
def test_very_short_vectors_are_vectors(how: Merge, scale: float) -> None:
    """Their directions are longer than they by more than fp32 can say."""
    one, two = vectors(2)
    momentum = scale * (one + 3 * torch.randn(NUM, generator=torch.Generator().manual_seed(3)))
    merged = merged_vector(how, FP32(), encoded([one, two]), PLACES, NUM, momentum)
    if isinstance(how, HeLoCo):  # only the direction of the momentum counts; 1e-42 has a few bits left
        assert torch.isfinite(merged).all()
        same = merged_vector(how, FP32(), encoded([one, two]), PLACES, NUM, momentum / scale)
        assert norm(merged - same) < (0.01 if scale == 1e-42 else 1e-5) * norm(same)
    short = merged_vector(how, FP32(), encoded([scale * one, scale * two], [1e11, 1e11]), PLACES, NUM)
    expected = scale * merged_vector(how, FP32(), encoded([one, two]), PLACES, NUM)
    assert norm(short - expected) <= (0.01 if scale < 1e-37 else 1e-5) * norm(expected)  # denormals have fewer bits


@pytest.mark.parametrize("how", [how for how in ALL if how.elementwise], ids=str)
def test_shards_give_the_bits_of_the_whole(how: Merge) -> None:
    size = 3 * SEGMENT_ELEMENTS + 11
    values, codec = vectors(4, size=size), Int4()
    spots = places({"a": 40000, "b": size - 40000})
    payloads = [codec.encode(value) for value in values]
    whole = merged_vector(how, codec, [Encoded(str(i), (p,), 1.0 + i) for i, p in enumerate(payloads)], spots, size)
    for first, last in ((0, 1), (1, 4)):
        elements = slice(first * SEGMENT_ELEMENTS, min(last * SEGMENT_ELEMENTS, size))
        span = codec.segment_span(size, first, last)
        inside, _ = shard_of(spots, elements)
        part = [Encoded(str(i), (p[span],), 1.0 + i) for i, p in enumerate(payloads)]
        merged = merged_vector(how, codec, part, inside, elements.stop - elements.start)
        assert torch.equal(merged, whole[elements])


@pytest.mark.parametrize("how", ALL, ids=str)
def test_a_damaged_contribution_is_refused_with_its_learner_named(how: Merge) -> None:
    contributions = encoded(vectors(3))
    contributions[1].payloads[0][:4] = 255
    with pytest.raises(CorruptPayloadError, match="learner-1"):
        merged_vector(how, FP32(), contributions, PLACES, NUM)


# --- against references -----------------------------------------------------------------------------------------------


def rda(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The formula, in fp64."""
    out = torch.empty(NUM, dtype=torch.float64)
    for place in PLACES:
        part = slice(place.offset, place.offset + place.spec.numel)
        own = [value[part].double() for value in values]
        total = sum(weights)
        if place.spec.name.startswith("embed"):
            out[part] = sum(w * v for w, v in zip(weights, own, strict=True)) / total
            continue
        direction = sum(w * v / v.norm() for w, v in zip(weights, own, strict=True))
        radius = sum(w * v.norm() for w, v in zip(weights, own, strict=True)) / total
        out[part] = radius * direction / direction.norm()
    return out


def test_radial_directional_is_the_papers_formula() -> None:
    values, weights = vectors(4), [1.0, 2.0, 0.5, 3.0]
    merged = merge(RadialDirectional(), values, weights)
    torch.testing.assert_close(merged.double(), rda(values, weights), rtol=1e-4, atol=1e-5)  # fp32 sums


def test_radial_directional_keeps_the_norm_whatever_the_number_of_learners() -> None:
    generator = torch.Generator().manual_seed(0)
    for num in (2, 8, 16):
        values = [torch.randn(NUM, generator=generator) for _ in range(num)]  # nearly orthogonal
        one = slice(5000, 35000)
        mean_norm = sum(norm(value[one]) for value in values) / num
        assert norm(merge(RadialDirectional(), values)[one]) == pytest.approx(mean_norm, rel=1e-5)
        assert norm(merge(Mean(), values)[one]) == pytest.approx(mean_norm / math.sqrt(num), rel=0.05)


def test_where_directions_cancel_it_takes_the_mean() -> None:
    [value] = vectors(1)
    values = [value, -0.5 * value]
    assert torch.equal(merge(RadialDirectional(), values), merge(Mean(), values))


def test_a_zero_contribution_has_no_direction() -> None:
    values = [torch.zeros(NUM), vectors(1)[0]]
    merged = merge(RadialDirectional(), values)
    torch.testing.assert_close(merged[5000:], 0.5 * values[1][5000:], rtol=1e-5, atol=1e-6)


def test_sender_mean_divides_by_those_who_sent() -> None:
    values = vectors(3)
    values[0][::2] = 0.0
    values[1][::3] = 0.0
    values[2][::5] = 0.0
    weights = [1.0, 2.0, 4.0]
    scaled = torch.tensor(weights)[:, None]
    stack = torch.stack(values)
    expected = (stack * scaled).sum(0) / ((stack != 0) * scaled).sum(0).clamp(min=1e-9)
    torch.testing.assert_close(merge(SenderMean(), values, weights), expected, rtol=1e-5, atol=1e-6)
    assert not merge(SenderMean(), values)[0].any()  # no learner sent it


def test_sender_mean_of_dense_contributions_is_the_mean() -> None:
    values = vectors(4)
    torch.testing.assert_close(merge(SenderMean(), values), merge(Mean(), values), rtol=1e-6, atol=1e-7)


def test_krum_keeps_those_with_the_nearest_neighbours() -> None:
    """Against the definition, in fp64, with scattered contributions."""
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(NUM, generator=generator) * (1 + i % 4) for i in range(9)]
    for f in (0, 1, 2, 3):
        stack = torch.stack(values).double()
        distances = (stack[:, None] - stack[None]).square().sum(-1)
        near = distances.sort(dim=1).values[:, 1 : 1 + 9 - f - 2].sum(1)
        kept = sorted(near.argsort()[: 9 - f].tolist())
        assert torch.equal(merge(MultiKrum(f), values), merge(Mean(), [values[i] for i in kept]))


def test_krum_compares_learners_over_what_both_train() -> None:
    """Seven train the first two tensors and seven the last two; the one that lies in each half is left out."""
    honest = vectors(14)
    halves = [frozenset({0, 1}) if i < 7 else frozenset({2, 3}) for i in range(14)]
    bad = {3, 9}
    values = [-10 * value if i in bad else value for i, value in enumerate(honest)]
    brought = [replace(each, tensors=own) for each, own in zip(encoded(values), halves, strict=True)]
    good = [each for i, each in enumerate(brought) if i not in bad]
    assert torch.equal(
        merged_vector(MultiKrum(2), FP32(), brought, PLACES, NUM), merged_vector(Mean(), FP32(), good, PLACES, NUM)
    )


def test_lengths_of_parts_are_compared_with_those_of_wholes() -> None:
    """A learner that trains a tenth of the elements is as long as one whose other elements are like those."""
    values = [torch.full((NUM,), value) for value in (1.0, 2.0, 3.0)]
    brought = [
        replace(each, tensors=own)
        for each, own in zip(encoded(values), [None, frozenset({1}), frozenset({0, 2})], strict=True)
    ]
    assert contribution_norms(Decoder(FP32(), brought, PLACES, NUM)) == pytest.approx(
        [math.sqrt(NUM) * i for i in (1, 2, 3)], rel=1e-12
    )
    clipped = merged_vector(MedianNormClip(), FP32(), brought, PLACES, NUM)
    torch.testing.assert_close(clipped[5000:35000], torch.full((30000,), 1.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(clipped[:5000], torch.full((5000,), 1.5), rtol=1e-6, atol=0)  # 3 is clipped to 2


@pytest.mark.parametrize("num", [3, 4, 7])
def test_the_medians_are_torchs(num: int) -> None:
    values = vectors(num)
    stack = torch.stack(values).sort(dim=0).values
    middle = stack[(num - 1) // 2 : num // 2 + 1].mean(0)
    torch.testing.assert_close(merge(CoordinateMedian(), values), middle, rtol=1e-6, atol=1e-7)
    cut = math.floor(0.25 * num)
    torch.testing.assert_close(merge(TrimmedMean(0.25), values), stack[cut : num - cut].mean(0), rtol=1e-5, atol=1e-6)


def test_nothing_trimmed_is_the_mean() -> None:
    values = vectors(5)  # sorted, so summed in another order
    torch.testing.assert_close(merge(TrimmedMean(0.0), values), merge(Mean(), values), rtol=1e-5, atol=1e-6)


def test_the_geometric_median_has_the_smallest_sum_of_distances() -> None:
    values = vectors(5)
    values[4] = values[4] * 10

    def cost(centre: Tensor) -> float:
        return sum(float((value - centre).double().norm()) for value in values)

    found = merge(GeometricMedian(30), values)
    assert cost(found) < cost(merge(Mean(), values))
    for value in values:
        assert cost(found) <= cost(found + 0.01 * (value - found))


def test_norm_clipping_is_the_mean_of_the_clipped() -> None:
    values = vectors(3)
    values[2] = values[2] * 5
    limit = sorted(float(value.double().norm()) for value in values)[1]
    clipped = torch.stack([value * min(1.0, limit / float(value.double().norm())) for value in values]).mean(0)
    torch.testing.assert_close(merge(MedianNormClip(), values), clipped, rtol=1e-5, atol=1e-6)


# --- HeLoCo -----------------------------------------------------------------------------------------------------------


def corrected(v: Tensor, m: Tensor, threshold: float) -> Tensor:
    """By definition, in fp64."""
    v, m = v.double(), m.double()
    unit = m / m.norm()
    cosine = float(v @ unit / v.norm())
    if cosine >= threshold:
        return v
    across = v - (v @ unit) * unit
    if cosine < 0:
        return across
    return v.norm() * (threshold * unit + math.sqrt(1 - threshold**2) * across / across.norm())


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.9])
def test_heloco_turns_towards_the_momentum(threshold: float) -> None:
    values = vectors(3)
    momentum = values[0] + 0.1 * torch.randn(NUM, generator=torch.Generator().manual_seed(5))
    values[2] = -values[2]
    expected = torch.empty(NUM, dtype=torch.float64)
    for place in PLACES:
        part = slice(place.offset, place.offset + place.spec.numel)
        turned = [corrected(value[part], momentum[part], threshold) for value in values]
        expected[part] = torch.stack(turned).mean(0)
    merged = merged_vector(HeLoCo(threshold, damping=0.0), FP32(), encoded(values), PLACES, NUM, momentum)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-4, atol=1e-5)


def test_heloco_without_momentum_is_the_damped_mean() -> None:
    values = vectors(2)
    old = [Encoded("a", (FP32().encode(values[0]),), 1.0, staleness=4), *encoded([values[1]])]
    for momentum in (None, torch.zeros(NUM)):
        merged = merged_vector(HeLoCo(damping=0.25), FP32(), old, PLACES, NUM, momentum)
        torch.testing.assert_close(merged, (values[0] / 2 + values[1]) / 2, rtol=1e-6, atol=1e-6)


# --- learners that lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["noise", "flipped", "scaled"])
@pytest.mark.parametrize("how", ROBUST, ids=str)
def test_one_of_eight_that_lies_does_not_move_a_robust_merge_far(how: Merge, attack: str) -> None:
    values = vectors(8)
    honest = torch.stack(values[:7]).mean(0)
    noise = torch.randn(NUM, generator=torch.Generator().manual_seed(9))
    bad = {"noise": 30 * noise, "flipped": -values[7], "scaled": 100 * values[7]}[attack]
    lied = [*values[:7], bad]

    def error(merged: Tensor) -> float:
        return float((merged - honest).norm() / honest.norm())

    assert error(merge(how, lied)) < 0.4
    assert error(merge(how, lied)) < 1.05 * error(merge(Mean(), lied))
    if attack != "flipped":
        assert error(merge(Mean(), lied)) > 1.5


# --- screens ----------------------------------------------------------------------------------------------------------


def test_outliers_are_refused_by_their_norm() -> None:
    assert NormOutliers(3.0).refused([1.0, 1.2, 0.1, 9.0]) == (3,)
    assert NormOutliers(3.0).refused([1.0]) == ()
    assert NormOutliers(3.0).refused([0.0, 0.0, 1.0]) == (2,)
    assert NormZScore(1.5).refused([1.0, 1.1, 0.9, 9.0]) == (3,)
    assert NormZScore(1.5).refused([1.0, 1.0, 1.0]) == ()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_never_all_are_refused(norms: list[float]) -> None:
    for screen in (NormOutliers(1.0), NormZScore(0.1)):
        assert len(screen.refused(norms)) < len(norms)


@pytest.mark.parametrize("screen", [NormOutliers(2.5), NormZScore(1.5)])
def test_a_screen_can_be_written_and_read(screen: Screen) -> None:
    assert SCREENS.read(screen.to_dict()) == screen


def test_norms_are_those_of_what_is_decoded() -> None:
    values = vectors(2, size=2 * SEGMENT_ELEMENTS + 5)
    contributions = [Encoded(str(i), (Int4().encode(value),), 1.0) for i, value in enumerate(values)]
    spots = places({"w": len(values[0])})
    for each, found in zip(
        contributions, contribution_norms(Decoder(Int4(), contributions, spots, len(values[0]))), strict=True
    ):
        decoded = Int4().decode(each.payloads[0], len(values[0]))
        assert found == pytest.approx(float(decoded.double().norm()), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TrimmedMean(0.5), "leaves nothing"),
        (lambda: GeometricMedian(0), "iterations"),
        (lambda: MultiKrum(-1), "num_byzantine"),
        (lambda: HeLoCo(threshold=1.0), "threshold"),
        (lambda: HeLoCo(damping=-1.0), "damping"),
        (lambda: NormOutliers(0.5), "refuses the median itself"),
        (lambda: NormZScore(0.0), "threshold"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


def test_the_page_about_merges_has_them_all_and_its_examples_work() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    for kind in (*MERGES, *SCREENS):
        assert f"`{kind.__name__}(" in page, kind
    names: dict[str, object] = {}
    exec(page.split("```python")[1].split("```")[0], names)
    guarded = names["guarded"]
    assert isinstance(guarded, Method)
    assert (guarded.merge, guarded.screen) == (TrimmedMean(0.125), NormOutliers(4.0))
