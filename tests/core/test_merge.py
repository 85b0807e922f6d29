"""The weighted mean against a double-precision reference, its exact cases, and that shards get the bits of the whole."""

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.core.codecs import CODECS, FP32, SEGMENT_ELEMENTS, Codec
from diloco.core.merge import RUN_SEGMENTS, Mean, merge_from_dict, weights_of
from diloco.errors import ConfigError, CorruptPayloadError, NonFiniteError

EVERY_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def encoded(codec: Codec, num_learners: int, num_elements: int) -> list[Tensor]:
    return [codec.encode(torch.randn(num_elements) * 0.01) for _ in range(num_learners)]


def exact_mean(codec: Codec, payloads: list[Tensor], weights: list[float], num_elements: int) -> tuple[Tensor, Tensor]:
    """In fp64: the weighted mean of the decoded outer gradients, and that of their magnitudes (which bounds rounding)."""
    decoded = torch.stack([codec.decode(payload, num_elements).double() for payload in payloads])
    shares = torch.tensor(weights, dtype=torch.float64)[:, None] / sum(weights)
    return (shares * decoded).sum(0), (shares * decoded.abs()).sum(0)


@EVERY_CODEC
@pytest.mark.parametrize("num_elements", [1, 1000, SEGMENT_ELEMENTS, (RUN_SEGMENTS + 1) * SEGMENT_ELEMENTS + 77])
def test_the_mean_in_double_precision_up_to_rounding(codec: Codec, num_elements: int) -> None:
    weights = [3.0, 1.0, 0.5, 7.0]
    payloads = encoded(codec, 4, num_elements)
    merged = Mean().merge(codec, payloads, weights, num_elements)
    assert merged.shape == (num_elements,)
    assert merged.dtype == torch.float32
    exact, magnitude = exact_mean(codec, payloads, weights, num_elements)
    # A relative 2⁻²⁴ for each rounding that a term goes through: its weight, its product, three sums, the divisor, the division.
    assert torch.all((merged.double() - exact).abs() <= 7.01 * 2**-24 * magnitude)


@EVERY_CODEC
def test_uniform_weights_are_the_plain_mean(codec: Codec) -> None:
    payloads = encoded(codec, 3, 5000)
    merged = Mean().merge(codec, payloads, [1.0] * 3, 5000)
    decoded = torch.stack([codec.decode(payload, 5000) for payload in payloads])
    # No products to round: the sum in this order, divided once, is the same bits; torch.mean may sum in another order.
    assert torch.equal(merged, ((decoded[0] + decoded[1]) + decoded[2]) / 3)
    assert torch.allclose(merged, decoded.mean(0), rtol=0, atol=3 * 2**-24 * float(decoded.abs().max()))


@EVERY_CODEC
@pytest.mark.parametrize("weight", [1.0, 0.3, 1e-30, 123456.0])
def test_one_contributor_is_the_identity(codec: Codec, weight: float) -> None:
    payload = encoded(codec, 1, 40000)[0]
    merged = Mean().merge(codec, [payload], [weight], 40000)
    assert torch.equal(merged.view(torch.int32), codec.decode(payload, 40000).view(torch.int32))


@pytest.mark.parametrize("factor", [2.0, 2**-20, 1e10])
def test_only_ratios_of_weights_count(factor: float) -> None:
    payloads = encoded(FP32(), 3, 1000)
    weights = [1.0, 2.0, 4.0]
    scaled = [factor * weight for weight in weights]
    assert torch.equal(Mean().merge(FP32(), payloads, weights, 1000), Mean().merge(FP32(), payloads, scaled, 1000))


def test_a_weight_of_zero_leaves_a_contribution_out() -> None:
    payloads = encoded(FP32(), 3, 1000)
    without = Mean().merge(FP32(), payloads[:2], [1.0, 3.0], 1000)
    assert torch.equal(Mean().merge(FP32(), payloads, [1.0, 3.0, 0.0], 1000), without)


def test_the_sum_is_taken_in_the_order_given() -> None:
    """2²⁴ + 1 + 1 in fp32 depends on the order: the caller's order decides, which is that of learner ids."""
    payloads = [FP32().encode(torch.tensor([value])) for value in (2.0**24, 1.0, 1.0)]
    assert Mean().merge(FP32(), payloads, [1.0] * 3, 1).item() == torch.tensor(2.0**24).div(3).item()
    assert Mean().merge(FP32(), payloads[::-1], [1.0] * 3, 1).item() == torch.tensor(2.0**24 + 2).div(3).item()


@EVERY_CODEC
@given(data=st.data())
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
    whole = Mean().merge(codec, payloads, weights, num_elements)
    elements = slice(start * SEGMENT_ELEMENTS, min(stop * SEGMENT_ELEMENTS, num_elements))
    span = codec.segment_span(num_elements, start, stop)
    expected = whole[elements]
    shard = Mean().merge(codec, [payload[span] for payload in payloads], weights, expected.numel())
    assert torch.equal(shard, expected)


@EVERY_CODEC
def test_merging_writes_to_no_payload(codec: Codec) -> None:
    payloads = encoded(codec, 2, 1000)
    kept = [payload.clone() for payload in payloads]
    Mean().merge(codec, payloads, [1.0, 2.0], 1000)
    assert all(torch.equal(payload, before) for payload, before in zip(payloads, kept, strict=True))


@EVERY_CODEC
def test_an_empty_fragment_merges_to_nothing(codec: Codec) -> None:
    assert Mean().merge(codec, [codec.encode(torch.empty(0))] * 2, [1.0, 1.0], 0).shape == (0,)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_name_the_contribution(value: float) -> None:
    bad = torch.ones(RUN_SEGMENTS * SEGMENT_ELEMENTS + 9)
    bad[-1] = value  # FP32 would refuse to encode it, so write the bytes
    payloads = [FP32().encode(torch.ones(bad.numel())), bad.view(torch.uint8)]
    with pytest.raises(CorruptPayloadError, match="contribution 1 cannot be merged"):
        Mean().merge(FP32(), payloads, [1.0, 1.0], bad.numel())
    with pytest.raises(CorruptPayloadError, match="contribution 0 cannot be merged"):
        Mean().merge(FP32(), payloads[::-1], [1.0, 1.0], bad.numel())


def test_a_sum_that_overflows_is_refused() -> None:
    payloads = [FP32().encode(torch.tensor([1.0, 3e38]))] * 2
    with pytest.raises(NonFiniteError, match="overflows fp32"):
        Mean().merge(FP32(), payloads, [1.0, 1.0], 2)


@EVERY_CODEC
def test_a_payload_of_the_wrong_size_names_the_contribution(codec: Codec) -> None:
    payloads = encoded(codec, 2, 1000)
    payloads[1] = payloads[1][:-1]
    expected = codec.encoded_bytes(1000)
    with pytest.raises(
        CorruptPayloadError, match=rf"contribution 1 is \({expected - 1},\) uint8, .* are {expected} bytes"
    ):
        Mean().merge(codec, payloads, [1.0, 1.0], 1000)


@pytest.mark.parametrize(
    ("num_payloads", "weights", "message"),
    [
        (0, [], "not 0 and 0"),
        (2, [1.0], "not 2 and 1"),
        (2, [0.0, 0.0], "weights of all 2 contributions are 0"),
        (2, [1.0, -1.0], "weight of contribution 1 must be finite and not negative, not -1.0"),
        (2, [float("nan"), 1.0], "weight of contribution 0 .* not nan"),
        (2, [1.0, float("inf")], "weight of contribution 1 .* not inf"),
    ],
)
def test_unusable_weights_are_refused(num_payloads: int, weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mean().merge(FP32(), encoded(FP32(), num_payloads, 10), weights, 10)


@dataclass(frozen=True)
class Trained:
    tokens: int


def test_weights() -> None:
    contributions = [Trained(tokens=30), Trained(tokens=0)]
    assert weights_of("uniform", contributions) == [1.0, 1.0]
    assert weights_of("tokens", contributions) == [30.0, 0.0]
    with pytest.raises(ConfigError, match="'token' is not a known weight; did you mean 'tokens'"):
        weights_of("token", contributions)


def test_merges_survive_json() -> None:
    assert merge_from_dict(json.loads(json.dumps(Mean().to_dict()))) == Mean()
    with pytest.raises(ConfigError, match="'Meen' is not a known merge; did you mean 'Mean'"):
        merge_from_dict({"type": "Meen"})
