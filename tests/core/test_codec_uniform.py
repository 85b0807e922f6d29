"""INTELLECT-1's int8: against a readable reference, its error, its golden bytes."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.codecs import SEGMENT_ELEMENTS
from diloco.core.codecs.uniform import Uniform8
from diloco.errors import CorruptPayloadError

CODEC = Uniform8()
GOLDEN_INPUT = [1.0, -0.5, 0.3, -0.01, 0.0]


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in values) / len(values))


def reference(values: list[float]) -> tuple[list[float], list[int]]:
    """(bucket means, codes) of a segment in fp64; values near an edge of a bucket may lie in its neighbour in fp32."""
    width = 12 * root_mean_square(values) / 256
    codes = [min(255, max(0, math.floor(x / width) + 128)) for x in values]
    buckets = [[x for x, code in zip(values, codes, strict=True) if code == bucket] for bucket in range(256)]
    return [math.fsum(bucket) / len(bucket) if bucket else 0.0 for bucket in buckets], codes


@pytest.mark.parametrize("num_elements", [1, 2, 1000, SEGMENT_ELEMENTS])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_it_is_the_mean_of_the_bucket(num_elements: int, scale: float) -> None:
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(num_elements)) * scale
    means, codes = reference(x.tolist())
    payload = CODEC.encode(x)
    written = payload[1024:].tolist()
    assert sum(one != other for one, other in zip(written, codes, strict=True)) <= num_elements / 1000
    if written == codes:
        assert payload[:1024].view(torch.float32).tolist() == pytest.approx(means, rel=1e-6)
    decoded = CODEC.decode(payload, num_elements)
    assert decoded.tolist() == pytest.approx(
        [means[code] for code in codes], abs=12 / 256 * root_mean_square(x.tolist())
    )


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    outliers=st.lists(st.sampled_from([0.0, 2.0**110, -(2.0**110)]), max_size=2),
)
@settings(max_examples=100, deadline=None)
def test_a_value_within_6_sigma_is_off_by_less_than_a_bucket(values: list[float], outliers: list[float]) -> None:
    x = torch.tensor([*values, *outliers])
    sigma = root_mean_square(x.tolist())
    width, largest = 12 * sigma / 256, float(x.abs().max())
    error = (CODEC.decode(CODEC.encode(x), len(x)).double() - x.double()).abs()
    # A mean rounds to fp32 and is +0 below 2^-126; a value may lie in the next bucket by a rounding of its quotient.
    bound = torch.where(x.abs().double() <= 6 * sigma, width, max(0.0, largest - 6 * sigma) + width)
    assert bool((error <= bound * (1 + 2**-15) + largest * 2**-23 + 2.0**-126).all())


def test_the_error_of_gaussian_values_is_that_of_a_uniform_quantiser() -> None:
    x = torch.randn(8 * SEGMENT_ELEMENTS, generator=torch.Generator().manual_seed(0))
    error = (CODEC.decode(CODEC.encode(x), len(x)) - x).square().mean().sqrt()
    assert float(error) == pytest.approx(12 / 256 / math.sqrt(12), rel=0.01)


def test_far_outliers_share_the_last_bucket_and_their_mean() -> None:
    x = torch.randn(SEGMENT_ELEMENTS, generator=torch.Generator().manual_seed(0))
    x[7], x[9] = 40.0, 60.0
    payload = CODEC.encode(x)
    assert payload[1024 + 7] == payload[1024 + 9] == 255
    decoded = CODEC.decode(payload, len(x))
    assert decoded[7] == decoded[9] == 50.0


def test_sums_do_not_depend_on_the_order_of_the_values() -> None:
    """So a device that adds in any order writes the same codebook."""
    x = torch.randn(SEGMENT_ELEMENTS, generator=torch.Generator().manual_seed(1))
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(2))]
    one, other = CODEC.encode(x), CODEC.encode(shuffled)
    assert torch.equal(one[1024:].sort().values, other[1024:].sort().values)
    assert torch.equal(one[:1024], other[:1024])


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -0.0, 2.0**-130])
def test_a_codebook_that_no_encoder_writes_is_refused(number: float) -> None:
    payload = CODEC.encode(torch.randn(100))
    payload[1020:1024] = torch.tensor(list(struct.pack("<f", number)), dtype=torch.uint8)
    with pytest.raises(CorruptPayloadError, match="uniform8 payload holds a codebook mean"):
        CODEC.decode(payload, 100)


def test_golden_bytes() -> None:
    payload = CODEC.encode(torch.tensor(GOLDEN_INPUT))
    codes = [169, 107, 140, 127, 128]
    codebook = [0.0] * 256
    for code, value in zip(codes, GOLDEN_INPUT, strict=True):
        codebook[code] = value
    assert bytes(payload.tolist()) == struct.pack("<256f", *codebook) + bytes(codes)
    assert CODEC.decode(payload, 5).tolist() == torch.tensor(GOLDEN_INPUT).tolist()
