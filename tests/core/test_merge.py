"""The weighted mean against a double-precision reference and in exact cases; shards get the bits of the whole."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.whole_vectors import merged_vector
from torch import Tensor

from diloco.core.codecs import CODECS, FP32, SEGMENT_ELEMENTS, Codec
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import MERGES, Encoded, Mean, shard_of
from diloco.core.merges.decoding import RUN_SEGMENTS
from diloco.core.weights import weights_of
from diloco.errors import ConfigError, CorruptPayloadError, NonFiniteError
from diloco.protocol.contribution import Contribution
from diloco.run.tensor_jobs import encoded_of

EVERY_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def encoded(codec: Codec, num_learners: int, num_elements: int) -> list[Tensor]:
    return [codec.encode(torch.randn(num_elements) * 0.01) for _ in range(num_learners)]


def whole(num_elements: int) -> tuple[Placement, ...]:
    return tensors(num_elements)


def tensors(*sizes: int) -> tuple[Placement, ...]:
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        Placement(TensorSpec(f"w{i}", (size,), "float32"), at)
        for i, (size, at) in enumerate(zip(sizes, offsets, strict=True))
    )


def mean(codec: Codec, payloads: list[Tensor], weights: list[float], num_elements: int) -> Tensor:
    brought = [Encoded(f"learner-{i}", (each,), w) for i, (each, w) in enumerate(zip(payloads, weights, strict=True))]
    return merged_vector(Mean(), codec, brought, whole(num_elements), num_elements)


def exact_mean(codec: Codec, payloads: list[Tensor], weights: list[float], num_elements: int) -> tuple[Tensor, Tensor]:
    """In fp64: the weighted mean of the decoded outer gradients, and of their magnitudes (it bounds rounding)."""
    decoded = torch.stack([codec.decode(payload, num_elements).double() for payload in payloads])
    shares = torch.tensor(weights, dtype=torch.float64)[:, None] / sum(weights)
    return (shares * decoded).sum(0), (shares * decoded.abs()).sum(0)


@EVERY_CODEC
@pytest.mark.parametrize("num_elements", [1, 1000, SEGMENT_ELEMENTS, (RUN_SEGMENTS + 1) * SEGMENT_ELEMENTS + 77])
def test_the_mean_in_double_precision_up_to_rounding(codec: Codec, num_elements: int) -> None:
    weights = [3.0, 1.0, 0.5, 7.0]
    payloads = encoded(codec, 4, num_elements)
    merged = mean(codec, payloads, weights, num_elements)
    assert merged.shape == (num_elements,)
    assert merged.dtype == torch.float32
    exact, magnitude = exact_mean(codec, payloads, weights, num_elements)
    # A relative 2⁻²⁴ for each rounding that a term goes through: its weight, its product, three sums, the divisor, the
    # division.
    assert torch.all((merged.double() - exact).abs() <= 7.01 * 2**-24 * magnitude)


@EVERY_CODEC
def test_uniform_weights_are_the_plain_mean(codec: Codec) -> None:
    payloads = encoded(codec, 3, 5000)
    merged = mean(codec, payloads, [1.0] * 3, 5000)
    decoded = torch.stack([codec.decode(payload, 5000) for payload in payloads])
    # No products to round: the sum in this order, divided once, is the same bits; torch.mean may sum in another order.
    assert torch.equal(merged, ((decoded[0] + decoded[1]) + decoded[2]) / 3)
    assert torch.allclose(merged, decoded.mean(0), rtol=0, atol=3 * 2**-24 * float(decoded.abs().max()))


@EVERY_CODEC
@pytest.mark.parametrize("weight", [1.0, 0.3, 1e-30, 123456.0])
def test_one_contributor_is_the_identity(codec: Codec, weight: float) -> None:
    payload = encoded(codec, 1, 40000)[0]
    merged = mean(codec, [payload], [weight], 40000)
    assert torch.equal(merged.view(torch.int32), codec.decode(payload, 40000).view(torch.int32))


@pytest.mark.parametrize("factor", [2.0, 2**-20, 1e10])
def test_only_ratios_of_weights_count(factor: float) -> None:
    payloads = encoded(FP32(), 3, 1000)
    weights = [1.0, 2.0, 4.0]
    scaled = [factor * weight for weight in weights]
    assert torch.equal(mean(FP32(), payloads, weights, 1000), mean(FP32(), payloads, scaled, 1000))


def test_a_weight_of_zero_leaves_a_contribution_out() -> None:
    payloads = encoded(FP32(), 3, 1000)
    without = mean(FP32(), payloads[:2], [1.0, 3.0], 1000)
    assert torch.equal(mean(FP32(), payloads, [1.0, 3.0, 0.0], 1000), without)


def test_the_sum_is_taken_in_the_order_given() -> None:
    """2²⁴ + 1 + 1 in fp32 depends on the order: the caller's order decides, which is that of learner ids."""
    payloads = [FP32().encode(torch.tensor([value])) for value in (2.0**24, 1.0, 1.0)]
    assert mean(FP32(), payloads, [1.0] * 3, 1).item() == torch.tensor(2.0**24).div(3).item()
    assert mean(FP32(), payloads[::-1], [1.0] * 3, 1).item() == torch.tensor(2.0**24 + 2).div(3).item()


@EVERY_CODEC
@given(data=st.data())
@settings(max_examples=25)  # for each codec
def test_shards_get_the_bits_of_the_whole(codec: Codec, data: st.DataObject) -> None:
    num_segments = data.draw(st.integers(1, RUN_SEGMENTS + 3), "segments")
    num_elements = (num_segments - 1) * SEGMENT_ELEMENTS + data.draw(
        st.sampled_from([1, 999, SEGMENT_ELEMENTS]), "rest"
    )
    start = data.draw(st.integers(0, num_segments), "start")
    stop = data.draw(st.integers(start, num_segments), "stop")
    # the same short noise over and over: what matters here is where the segments begin
    noise = torch.randn(2, 4099).repeat(1, num_elements // 4099 + 1)[:, :num_elements].contiguous()
    payloads, weights = [codec.encode(each) for each in noise], [0.3, 0.9]
    everything = mean(codec, payloads, weights, num_elements)
    elements = slice(start * SEGMENT_ELEMENTS, min(stop * SEGMENT_ELEMENTS, num_elements))
    span = codec.segment_span(num_elements, start, stop)
    expected = everything[elements]
    shard = mean(codec, [payload[span] for payload in payloads], weights, expected.numel())
    assert torch.equal(shard, expected)


@EVERY_CODEC
def test_merging_writes_to_no_payload(codec: Codec) -> None:
    payloads = encoded(codec, 2, 1000)
    kept = [payload.clone() for payload in payloads]
    mean(codec, payloads, [1.0, 2.0], 1000)
    assert all(torch.equal(payload, before) for payload, before in zip(payloads, kept, strict=True))


@EVERY_CODEC
def test_an_empty_fragment_merges_to_nothing(codec: Codec) -> None:
    assert mean(codec, [codec.encode(torch.empty(0))] * 2, [1.0, 1.0], 0).shape == (0,)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_name_the_contribution(value: float) -> None:
    bad = torch.ones(RUN_SEGMENTS * SEGMENT_ELEMENTS + 9)
    bad[-1] = value  # FP32 would refuse to encode it, so write the bytes
    payloads = [FP32().encode(torch.ones(bad.numel())), bad.view(torch.uint8)]
    with pytest.raises(CorruptPayloadError, match="contribution of learner-1 cannot be merged"):
        mean(FP32(), payloads, [1.0, 1.0], bad.numel())
    with pytest.raises(CorruptPayloadError, match="contribution of learner-0 cannot be merged"):
        mean(FP32(), payloads[::-1], [1.0, 1.0], bad.numel())


def test_a_sum_that_overflows_is_refused() -> None:
    payloads = [FP32().encode(torch.tensor([1.0, 3e38]))] * 2
    with pytest.raises(NonFiniteError, match="overflows fp32"):
        mean(FP32(), payloads, [1.0, 1.0], 2)


@EVERY_CODEC
def test_a_payload_of_the_wrong_size_names_the_contribution(codec: Codec) -> None:
    payloads = encoded(codec, 2, 1000)
    payloads[1] = payloads[1][:-1]
    expected = codec.encoded_bytes(1000)
    with pytest.raises(
        CorruptPayloadError, match=rf"contribution of learner-1 is \({expected - 1},\) uint8, .* have {expected} bytes"
    ):
        mean(codec, payloads, [1.0, 1.0], 1000)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_a_merge_without_weights_is_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match=f"weights of all {len(weights)} contributions are 0"):
        mean(FP32(), encoded(FP32(), len(weights), 10), weights, 10)


# --- partial learners, several payloads -------------------------------------------------------------------------------


@EVERY_CODEC
@given(data=st.data())
@settings(max_examples=25)
def test_each_tensor_is_the_mean_of_those_who_train_it(codec: Codec, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 77, 5000, SEGMENT_ELEMENTS]), min_size=1, max_size=5), "sizes")
    places, num_elements = tensors(*sizes), sum(sizes)
    some = st.none() | st.frozensets(st.integers(0, len(sizes) - 1))
    trained = data.draw(st.lists(some, min_size=1, max_size=4), "tensors")
    weights = [1.0, 0.25, 3.0, 0.7][: len(trained)]
    payloads = encoded(codec, len(trained), num_elements)
    brought = [
        Encoded(f"learner-{i}", (payload,), weight, tensors=own)
        for i, (payload, weight, own) in enumerate(zip(payloads, weights, trained, strict=True))
    ]
    merged = merged_vector(Mean(), codec, brought, places, num_elements)
    for index, place in enumerate(places):
        elements = slice(place.offset, place.offset + place.spec.numel)
        who = [i for i, own in enumerate(trained) if own is None or index in own]
        if not who:
            assert not merged[elements].any()
            continue
        alone = mean(codec, [payloads[i] for i in who], [weights[i] for i in who], num_elements)
        assert torch.equal(merged[elements].view(torch.int32), alone[elements].view(torch.int32))


def test_a_tensor_whose_learners_count_for_nothing_gets_nothing() -> None:
    payloads = encoded(FP32(), 2, 20)
    brought = [
        Encoded("a", (payloads[0],), 0.0, tensors=frozenset({0, 1})),
        Encoded("b", (payloads[1],), 2.0, tensors=frozenset({1})),
    ]
    merged = merged_vector(Mean(), FP32(), brought, tensors(10, 10), 20)
    assert not merged[:10].any()
    assert torch.equal(merged[10:], FP32().decode(payloads[1], 20)[10:])


@EVERY_CODEC
def test_late_and_fresh_work_of_one_learner_add_up(codec: Codec) -> None:
    late, fresh, other = encoded(codec, 3, 70000)
    total = codec.decode(late, 70000) + codec.decode(fresh, 70000)
    alone = merged_vector(Mean(), codec, [Encoded("a", (late, fresh), 2.0)], whole(70000), 70000)
    assert torch.equal(alone, total)
    both = merged_vector(
        Mean(), codec, [Encoded("a", (late, fresh), 1.0), Encoded("b", (other,), 1.0)], whole(70000), 70000
    )
    assert torch.equal(both, (total + codec.decode(other, 70000)) / 2)
    other_first = merged_vector(
        Mean(), codec, [Encoded("a", (other,), 1.0), Encoded("b", (late, fresh), 1.0)], whole(70000), 70000
    )
    assert torch.equal(other_first, (codec.decode(other, 70000) + total) / 2)


@given(data=st.data())
def test_shards_of_partial_learners_get_the_bits_of_the_whole(data: st.DataObject) -> None:
    codec, sizes = FP32(), data.draw(st.lists(st.sampled_from([1, 999, 40000]), min_size=1, max_size=6), "sizes")
    places, num_elements = tensors(*sizes), sum(sizes)
    num_segments = -(-num_elements // SEGMENT_ELEMENTS)
    start = data.draw(st.integers(0, num_segments - 1), "start")
    stop = data.draw(st.integers(start + 1, num_segments), "stop")
    own = data.draw(st.frozensets(st.integers(0, len(sizes) - 1)), "tensors")
    payloads = encoded(codec, 2, num_elements)
    everything = merged_vector(
        Mean(),
        codec,
        [Encoded("a", (payloads[0],), 1.0, tensors=own), Encoded("b", (payloads[1],), 2.0)],
        places,
        num_elements,
    )
    elements = slice(start * SEGMENT_ELEMENTS, min(stop * SEGMENT_ELEMENTS, num_elements))
    span = codec.segment_span(num_elements, start, stop)
    clipped, indices = shard_of(places, elements)
    contributions = [said("a", tensors=tuple(own)), said("b")]
    brought = encoded_of(contributions, [1.0, 2.0], [payload[span] for payload in payloads], 0, places, indices)
    expected = everything[elements]
    assert torch.equal(merged_vector(Mean(), codec, brought, clipped, expected.numel()), expected)


def test_a_shard_has_the_tensors_that_lie_in_it() -> None:
    places = tensors(10, 0, 5, 20)
    clipped, indices = shard_of(places, slice(12, 20))
    assert [(each.spec.name, each.spec.numel, each.offset) for each in clipped] == [("w2", 3, 0), ("w3", 5, 3)]
    assert indices == range(2, 4)
    assert shard_of(places, slice(0, 35)) == (places, range(4))
    assert shard_of(places, slice(3, 15))[1] == range(3)
    assert shard_of(places, slice(7, 7)) == ((), range(0))


# --- who brings what, and how much it counts --------------------------------------------------------------------------


def said(learner: str, base: int = 5, tensors: tuple[int, ...] | None = None) -> Contribution:
    return Contribution(learner, 1, 0, 1, 5, base, 10, 1, step=1, tensors=tensors)


def test_contributions_of_one_learner_become_one() -> None:
    payloads = encoded(FP32(), 4, 3)
    late, fresh = said("b", base=2, tensors=(0, 1)), said("b", base=4, tensors=(1, 2))
    places = tuple(Placement(TensorSpec(name, (1,), "float32"), at) for at, name in enumerate("xyz"))
    one, two, three = encoded_of([said("a"), late, fresh, said("c", base=4)], [1.0, 2.0, 3.0], payloads, 5, places)
    assert [(each.learner, each.weight, each.staleness) for each in (one, two, three)] == [
        ("a", 1.0, 0),
        ("b", 2.0, 3),
        ("c", 3.0, 1),
    ]
    assert [each.tensors for each in (one, two, three)] == [None, frozenset({0, 1, 2}), None]
    assert (one.parts, two.parts) == ((), (frozenset({0, 1}), frozenset({1, 2})))
    assert two.payloads[0] is payloads[1]
    assert two.payloads[1] is payloads[2]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        encoded_of([said("a"), said("b"), said("b"), said("c")], [1.0] * 4, payloads, 7, places)


def test_weights() -> None:
    tokens, steps, staleness = [30, 0, 40], [3, 0, 8], [0, 1, 4]
    assert weights_of("uniform", tokens, steps, staleness) == [1.0, 1.0, 1.0]
    assert weights_of("tokens", tokens, steps, staleness) == [30.0, 0.0, 40.0]
    assert weights_of("tokens^2/steps", tokens, steps, staleness) == [300.0, 0.0, 200.0]
    assert weights_of("discounted", tokens, steps, staleness) == [30.0, 0.0, 20.0]
    with pytest.raises(ConfigError, match="30 tokens in 0 steps have no rate"):
        weights_of("tokens^2/steps", [30], [0], [0])
    with pytest.raises(ConfigError, match="'token' is not a known weight; did you mean 'tokens'"):
        weights_of("token", tokens, steps, staleness)


def test_merges_survive_json() -> None:
    assert MERGES.read(json.loads(json.dumps(Mean().to_dict()))) == Mean()
    with pytest.raises(ConfigError, match="'Meen' is not a known merge; did you mean 'Mean'"):
        MERGES.read({"type": "Meen"})
    with pytest.raises(ConfigError, match=r"'Mean' is not a valid merge; write a table with its type"):
        MERGES.read("Mean")
