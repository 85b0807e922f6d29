"""Wire codecs: one contract for all of them, a reference for the block formats, golden bytes, error feedback."""

import math
import re
import struct
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.codecs import (
    BF16,
    CODECS,
    E3M0,
    FP16,
    FP32,
    SEGMENT_ELEMENTS,
    Codec,
    Int4,
    Int8,
    SignPruned,
    TopK,
    TwoBit,
    codec_from_name,
    compress,
)
from diloco.errors import ConfigError, CorruptPayloadError, NonFiniteError

# A codec in the registry is in the contract; below are other parameters than the defaults.
ALL = [
    *CODECS.values(),
    Int8(block=2),
    Int8(block=32768),
    Int4(block=2),
    Int4(block=128),
    E3M0(block=32),
    TwoBit(block=8),
    TwoBit(block=32768, range_sigmas=4),
    TopK(k=1),
    TopK(k=700, values="2bit"),
    TopK(k=4096),
    SignPruned(fraction=0.0),
    SignPruned(fraction=0.25, values="2bit"),
    SignPruned(fraction=0.75, values="bf16"),
]
BLOCK_CODECS = [codec for codec in ALL if isinstance(codec, Int8 | Int4 | E3M0)]
LENGTHS = [0, 1, 2, 3, 63, 64, 65, 127, 4095, 4097, 32767, 32768, 32769, 100003]

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_SUBNORMAL = 2.0**-149

each_codec = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
each_block_codec = pytest.mark.parametrize("codec", BLOCK_CODECS, ids=lambda codec: codec.name)


def normal(num_elements: int, seed: int = 0) -> torch.Tensor:
    """Gaussian values whose scale differs from block to block, as the layers' outer gradients do."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-8, 3, (num_elements // 64 + 1,), generator=generator).float()).repeat_interleave(
        64
    )
    return torch.randn(num_elements, generator=generator) * spread[:num_elements]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def absmax_of_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """For each element, the largest magnitude of its block (block sizes divide a segment)."""
    padded = torch.nn.functional.pad(x.abs(), (0, -len(x) % block))
    return padded.view(-1, block).amax(1).repeat_interleave(block)[: len(x)]


def error_bound(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """What the format allows |x − decode(encode(x))| to be, per element, for magnitudes that it does not saturate.

    One rounding of a 24-bit quotient adds at most 2^-22 of a step; bf16 scales are within 2^-8 of their value.
    """
    x = x.double()
    if not len(x):
        return x
    match codec:
        case FP32():
            return torch.zeros_like(x)
        case BF16():
            return (
                x.abs() * 2**-8 / (1 + 2**-8) + SMALLEST_SUBNORMAL * 2**15
            )  # half of the last of 8 bits; of the smallest subnormal
        case FP16():
            return (x.abs() * 2**-11).clamp_min(2**-25)  # half of the last of 11 bits; half the smallest subnormal
        case Int8() | Int4():
            step = absmax_of_blocks(x, codec.block) / codec.levels * (1 + 2**-8)
            return torch.where(step < 2**-119, step * codec.levels, step / 2 * (1 + 2**-22))
        case E3M0():
            scale = absmax_of_blocks(x, codec.block) * (1 + 2**-8)
            # Half the gap from 0 to the smallest code, or a third of the value: 1.5 · 2^k is as far from 2^k as from
            # 2^(k + 1).
            return torch.where(scale < 2**-119, scale, torch.maximum(scale * 2**-7, x.abs() / 3) * (1 + 2**-22))
        case TwoBit():
            whole = len(x) // codec.block * codec.block
            parts = [x[:whole].view(-1, codec.block), x[whole:].view(1, -1)]
            return torch.cat([bin_bound(blocks, codec.range_sigmas) for blocks in parts if blocks.numel()])
        case TopK() | SignPruned():
            return torch.cat([sparse_bound(codec, chunk) for chunk in x.split(4096)])
    return 2 * absmax_of_blocks(x, SEGMENT_ELEMENTS)  # no value leaves its segment's range; tests of its own say more


def bin_bound(x: torch.Tensor, range_sigmas: float) -> torch.Tensor:
    """For rows of blocks: no further from its bin's mean than the bin is wide; a mean rounds by 2^-8, below 2^-126 to
    0."""
    edge, largest = x.square().mean(1, keepdim=True).sqrt() * range_sigmas / 4, x.abs().amax(1, keepdim=True)
    width = torch.maximum(edge.minimum(largest), largest - edge)
    return (width * (1 + 2**-20) + largest * 2**-8 + 2.0**-126).expand_as(x).flatten()


def sparse_bound(codec: TopK | SignPruned, x: torch.Tensor) -> torch.Tensor:
    """For one chunk: what is not kept is lost, and with top-k that is nothing above the k-th largest magnitude."""
    k = codec.num_kept(len(x))
    smallest_kept = x.abs().topk(k).values[-1] if isinstance(codec, TopK) else x.abs().max()
    lost = torch.where(x.abs() <= smallest_kept, x.abs(), 0.0) if k < len(x) else torch.zeros_like(x)
    match codec.values:
        case "fp32":
            rounding = torch.zeros_like(x)
        case "bf16":
            rounding = error_bound(BF16(), x.float())
        case _:  # at most the largest magnitude: a mean lies on its values' side of zero
            rounding = (x.abs().max() * (1 + 2**-7) + 2.0**-126).expand_as(x)
    return torch.maximum(lost, rounding)


def is_projection(codec: Codec) -> bool:
    """Whether decoded values encode to the same bytes; means of bins lie in other bins once the spread has shrunk."""
    if isinstance(codec, TopK | SignPruned):
        return codec.values != "2bit"
    return isinstance(codec, FP32 | BF16 | FP16 | Int8 | Int4 | E3M0)


# ------------------------------------------------------------------------------------------------------------ contract


@each_codec
def test_round_trip_has_the_promised_size_and_error(codec: Codec) -> None:
    for num_elements in LENGTHS:
        x = normal(num_elements)
        payload = codec.encode(x)
        assert payload.dtype == torch.uint8
        assert payload.shape == (codec.encoded_bytes(num_elements),)
        codec.check(payload, num_elements)
        decoded = codec.decode(payload, num_elements)
        assert decoded.dtype == torch.float32
        assert decoded.shape == (num_elements,)
        assert bool(((x.double() - decoded.double()).abs() <= error_bound(codec, x)).all()), num_elements
        if codec.lossless:
            assert same_bits(decoded, x), num_elements


@pytest.mark.parametrize("codec", [c for c in ALL if is_projection(c)], ids=lambda codec: codec.name)
def test_what_was_decoded_encodes_to_the_same_bytes(codec: Codec) -> None:
    for num_elements in LENGTHS:
        payload = codec.encode(normal(num_elements, seed=1))
        assert torch.equal(codec.encode(codec.decode(payload, num_elements)), payload), num_elements


@each_codec
def test_encode_and_decode_write_into_what_they_are_given(codec: Codec) -> None:
    x = normal(70001)
    expected = codec.encode(x)
    out = torch.full((codec.encoded_bytes(70001) + 2,), 0xAA, dtype=torch.uint8)
    assert codec.encode(x, out[1:-1]).data_ptr() == out[1:].data_ptr()  # an odd address, as in a received message
    assert torch.equal(out[1:-1], expected)
    assert out[0] == out[-1] == 0xAA
    vector = torch.full((70003,), 7.0)
    codec.decode(out[1:-1], 70001, vector[1:-1])
    assert same_bits(vector[1:-1].clone(), codec.decode(expected, 70001))
    assert vector[0] == vector[-1] == 7.0


@each_codec
@pytest.mark.parametrize("num_elements", [32769, 100003, 20 * SEGMENT_ELEMENTS + 5])
def test_segments_are_payloads(codec: Codec, num_elements: int) -> None:
    x = normal(num_elements)
    payload = codec.encode(x)
    decoded = codec.decode(payload, num_elements)
    num_segments = math.ceil(num_elements / SEGMENT_ELEMENTS)
    for start, stop in [(0, 1), (0, num_segments), (1, num_segments), (num_segments - 1, num_segments), (1, 1)]:
        elements = slice(start * SEGMENT_ELEMENTS, min(stop * SEGMENT_ELEMENTS, num_elements))
        span = codec.segment_span(num_elements, start, stop)
        part = payload[span]
        assert torch.equal(part, codec.encode(x[elements]))
        assert same_bits(codec.decode(part, elements.stop - elements.start), decoded[elements])


@each_codec
def test_zeros_are_exact(codec: Codec) -> None:
    decoded = codec.decode(codec.encode(torch.zeros(1000)), 1000)
    assert same_bits(decoded, torch.zeros(1000))
    assert torch.equal(codec.decode(codec.encode(-torch.zeros(1000)), 1000), torch.zeros(1000))  # either zero


@each_codec
def test_subnormals_round_within_the_bound(codec: Codec) -> None:
    x = torch.tensor([SMALLEST_SUBNORMAL, -(2.0**-127), 2.0**-126, -(2.0**-121), 0.0] * 13)
    decoded = codec.decode(codec.encode(x), len(x))
    assert bool(((x.double() - decoded.double()).abs() <= error_bound(codec, x)).all())


@each_block_codec
def test_no_block_decodes_to_subnormal_or_overflowing_numbers(codec: Codec) -> None:
    for exponent in (-149, -130, -126, -121, -120, -119, -117, -113, -100, 100, 118, 119, 120, 121, 124, 125, 127):
        ramp = torch.linspace(-1, 1, 64).double() * 2.0**exponent * (2 - 2**-23)
        x = torch.cat([ramp.float(), normal(64)])  # beside an ordinary block, in the same segment
        payload = codec.encode(x)
        codec.check(payload, 128)
        decoded = codec.decode(payload, 128)
        assert bool(decoded.isfinite().all()), exponent
        assert bool(((decoded == 0) | (decoded.abs() >= 2.0**-126)).all()), exponent
        if exponent < 120:
            assert bool(((x.double() - decoded.double()).abs() <= error_bound(codec, x)).all()), exponent


@each_codec
def test_the_largest_magnitudes(codec: Codec) -> None:
    """±max of fp32 encodes, integers saturating by at most 1.5 steps; 16-bit floats, which would overflow, refuse."""
    x = torch.tensor([FP32_MAX, -FP32_MAX, 1.0, FP32_MAX / 3])
    if isinstance(codec, BF16 | FP16) or (isinstance(codec, TopK | SignPruned) and codec.values == "bf16"):
        with pytest.raises(NonFiniteError, match=r"overflows .*; use (bf16 or )?fp32"):
            codec.encode(x)
        return
    decoded = codec.decode(codec.encode(x), 4)
    assert bool(decoded.isfinite().all())
    saturation = FP32_MAX * {"int8": 1 / 127, "int4": 1 / 7}.get(codec.name.partition(":")[0], 0.0)
    assert bool(((x.double() - decoded.double()).abs() <= error_bound(codec, x) + saturation).all())


@pytest.mark.parametrize(
    ("codec", "largest", "too_large"),
    [(FP16(), 65519.996, 65520.0), (BF16(), (2 - 2**-8 - 2**-23) * 2.0**127, (2 - 2**-8) * 2.0**127)],
    ids=["fp16", "bf16"],
)
def test_half_formats_overflow_where_rounding_does(codec: Codec, largest: float, too_large: float) -> None:
    assert bool(codec.decode(codec.encode(torch.tensor([largest])), 1).isfinite().all())
    with pytest.raises(NonFiniteError, match="overflows"):
        codec.encode(torch.tensor([0.0, -too_large]))


@each_codec
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_input_is_refused(codec: Codec, value: float) -> None:
    for position in (0, 64, 40000, 99999, 100002):
        x = normal(100003)
        x[position] = value
        with pytest.raises(NonFiniteError, match="NaN" if math.isnan(value) else "inf"):
            codec.encode(x)


@each_codec
def test_a_payload_of_another_size_is_refused(codec: Codec) -> None:
    for num_elements in LENGTHS:
        for surplus in (-1, 1):
            num_bytes = max(codec.encoded_bytes(num_elements) + surplus, 1 if num_elements == 0 else 0)
            payload = torch.zeros(num_bytes, dtype=torch.uint8)
            for use in (codec.decode, codec.check):
                with pytest.raises(CorruptPayloadError, match=f"{codec.name} payload of {num_elements} elements has"):
                    use(payload, num_elements)


# Of each format, bytes that no encoder writes as the first element (floats), scale (block formats) or mean (2 bits).
DAMAGE = {
    "fp32": [b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\x80\x7f", b"\xff\xff\xff\xff"],
    "bf16": [b"\x80\x7f", b"\x80\xff", b"\x81\x7f"],
    "fp16": [b"\x00\x7c", b"\x00\xfc", b"\x01\x7c"],
    "int8": [b"\x80\x7f", b"\xc0\x7f", b"\x80\xbf", b"\x00\x80", b"\x00\x7c", b"\x7f\x03", b"\x01\x00"],
    "int4": [b"\x80\x7f", b"\xc0\x7f", b"\x80\xbf", b"\x00\x80", b"\x00\x7e", b"\x7f\x03", b"\x01\x00"],
    "e3m0": [b"\x80\x7f", b"\xc0\x7f", b"\x80\xbf", b"\x00\x80", b"\x7f\x03", b"\x01\x00"],
    "2bit": [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x00\x80", b"\x01\x00", b"\x7f\x80"],
}


def damages(codec: Codec, num_elements: int) -> list[tuple[int, bytes]]:
    """(offset in the segment, bytes): of sparse formats the positions of the first chunk, all or none of them set, and
    its values.

    All bits set are NaN in every kind of float, so every format refuses them where it has a scale, a mean or a value.
    """
    if not isinstance(codec, TopK | SignPruned):
        return [(0, damage) for damage in (b"\xff" * 4, *DAMAGE.get(re.split("[:-]", codec.name)[0], []))]
    first = min(num_elements, 4096)
    k = codec.num_kept(first)
    values_bytes = codec_from_name(codec.values).encoded_bytes(k)
    num_bytes = codec.chunk_bytes(first) - values_bytes
    positions = [(0, b"\0" * num_bytes), (0, b"\xff" * num_bytes)] if num_bytes else []
    return positions + [(num_bytes, damage) for damage in DAMAGE[codec.values]]


@each_codec
@pytest.mark.parametrize("segment", [0, 1, 3])
def test_damaged_content_is_refused(codec: Codec, segment: int) -> None:
    num_elements = 3 * SEGMENT_ELEMENTS + 65
    start = codec.segment_span(num_elements, 0, segment).stop
    intact = codec.encode(normal(num_elements))
    for offset, damage in damages(codec, min(SEGMENT_ELEMENTS, num_elements - segment * SEGMENT_ELEMENTS)):
        payload = intact.clone()
        payload[start + offset : start + offset + len(damage)] = torch.tensor(list(damage), dtype=torch.uint8)
        with pytest.raises(CorruptPayloadError, match=codec.name):
            codec.check(payload, num_elements)
        with pytest.raises(CorruptPayloadError, match=codec.name):
            codec.decode(payload, num_elements)
        span = codec.segment_span(num_elements, segment, segment + 1)
        with pytest.raises(CorruptPayloadError, match=codec.name):
            codec.check(payload[span], min(SEGMENT_ELEMENTS, num_elements - segment * SEGMENT_ELEMENTS))


@each_codec
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_bytes_that_pass_the_check_decode_to_finite_numbers(codec: Codec, data: st.DataObject) -> None:
    num_elements = data.draw(st.integers(0, 150))
    raw = data.draw(st.binary(min_size=codec.encoded_bytes(num_elements), max_size=codec.encoded_bytes(num_elements)))
    payload = torch.tensor(list(raw), dtype=torch.uint8)
    try:
        codec.check(payload, num_elements)
    except CorruptPayloadError:
        with pytest.raises(CorruptPayloadError):
            codec.decode(payload, num_elements)
    else:
        assert bool(codec.decode(payload, num_elements).isfinite().all())


@each_codec
@given(
    values=st.lists(st.floats(-65000, 65000, width=32), max_size=200),
    exponent=st.integers(-20, 0),
)
@settings(max_examples=20, deadline=None)
def test_any_values_round_trip_within_the_bound(codec: Codec, values: list[float], exponent: int) -> None:
    x = torch.tensor(values, dtype=torch.float32) * 2.0**exponent
    payload = codec.encode(x)
    decoded = codec.decode(payload, len(x))
    assert bool(((x.double() - decoded.double()).abs() <= error_bound(codec, x)).all())
    if is_projection(codec):
        assert torch.equal(codec.encode(decoded), payload)


@st.composite
def awkward_vectors(draw: st.DrawFn) -> torch.Tensor:
    """Ties, runs, sparse and lopsided vectors, of lengths about chunks and segments; magnitudes that every format can
    hold."""
    num_elements = draw(st.sampled_from([1, 7, 65, 4095, 4096, 4097, 12289, 32768, 32769, 65537]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(num_elements, generator=generator)
    match draw(st.sampled_from(["few values", "constant", "sparse", "one sign", "sorted", "wide", "signed zeros"])):
        case "few values":
            x = x.round()
        case "constant":
            x = torch.full_like(x, float(x[0]))
        case "sparse":
            x *= torch.rand(num_elements, generator=generator) < 0.01
        case "one sign":
            x = -x.abs()
        case "sorted":
            x = x.sort().values
        case "wide":
            x *= torch.exp2(torch.randint(-149, 12, (num_elements,), generator=generator).double()).float()
        case "signed zeros":
            x = torch.copysign(torch.zeros(()), x)
    return x


@each_codec
@given(x=awkward_vectors())
@settings(max_examples=15, deadline=None)
def test_awkward_vectors_have_the_promised_size_and_error_segment_by_segment(codec: Codec, x: torch.Tensor) -> None:
    payload = codec.encode(x)
    assert payload.numel() == codec.encoded_bytes(len(x))
    codec.check(payload, len(x))
    decoded = codec.decode(payload, len(x))
    assert bool(((x.double() - decoded.double()).abs() <= error_bound(codec, x)).all())
    assert torch.equal(payload, torch.cat([codec.encode(part) for part in x.split(SEGMENT_ELEMENTS)]))


@each_codec
def test_wrong_tensors_are_refused(codec: Codec) -> None:
    x = normal(128)
    payload = codec.encode(x)
    for wrong in (x.double(), x.bfloat16(), x.view(2, 64), normal(256)[::2]):
        with pytest.raises(ConfigError, match=r"input of encode must be a contiguous 1-D tensor of torch\.float32"):
            codec.encode(wrong)
    for wrong in (payload.view(torch.int8), payload.view(1, -1), torch.cat([payload, payload])[::2]):
        with pytest.raises(ConfigError, match="payload must be a contiguous 1-D tensor of torch.uint8"):
            codec.decode(wrong, 128)
    with pytest.raises(ConfigError, match="output of encode must have"):
        codec.encode(x, payload[:-1])
    with pytest.raises(ConfigError, match="output of decode must have 128 elements, not 127"):
        codec.decode(payload, 128, torch.empty(127))
    with pytest.raises(ConfigError, match="-1 elements"):
        codec.encoded_bytes(-1)
    with pytest.raises(ConfigError, match="segments 0 to 2 do not exist"):
        codec.segment_span(128, 0, 2)


@each_codec
def test_parameters_of_a_model_can_be_encoded(codec: Codec) -> None:
    parameter = torch.nn.Parameter(normal(100))
    assert torch.equal(codec.encode(parameter), codec.encode(parameter.detach()))


@each_codec
def test_bits_do_not_depend_on_the_number_of_threads(codec: Codec) -> None:
    x = normal(5 * SEGMENT_ELEMENTS + 77)
    results = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        payload = codec.encode(x)
        results.append((payload, codec.decode(payload, len(x))))
    for payload, decoded in results[1:]:
        assert torch.equal(payload, results[0][0])
        assert same_bits(decoded, results[0][1])


# --------------------------------------------------------------------------------------------------------------- names


@each_codec
def test_names_round_trip(codec: Codec) -> None:
    assert codec_from_name(codec.name) == codec


def test_the_registry_holds_the_defaults_by_name() -> None:
    assert all(codec.name == name for name, codec in CODECS.items())
    assert codec_from_name("int4:64") == Int4() == codec_from_name("int4")
    assert Int4(block=128).name == "int4:128"
    assert TwoBit(block=1024, range_sigmas=4.0).name == "2bit-4sigma:1024"
    assert TwoBit(range_sigmas=4.5).name == "2bit-4.5sigma"
    assert codec_from_name("2bit:4096") == codec_from_name("2bit-6sigma") == TwoBit()
    assert TopK(k=64, values="2bit").name == "topk-64-2bit"
    assert SignPruned(fraction=0.0).name == "sign-pruned-0"
    assert codec_from_name("sign-pruned-0.50") == SignPruned()
    assert codec_from_name(SignPruned(fraction=1e-5).name) == SignPruned(fraction=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in4", "did you mean 'int4'"),
        ("FP32", "did you mean 'fp32'"),
        ("e3mo", "did you mean 'e3m0'"),
        ("", "there is no codec ''"),
        ("fp32:64", "takes no parameter"),
        ("int4:", "not a whole number; write for example 'int4:64'"),
        ("int4:-64", "not a whole number"),
        ("int4:63", "use a power of two"),
        ("int4:65536", "use a power of two"),
        ("int4:1", "use a power of two"),
        ("2bit:", "not a whole number; write for example '2bit:4096'"),
        ("2bit:4", "use a power of two from 8"),
        ("2bit:100", "use a power of two from 8"),
        ("2bit-0.5sigma", "a range of 0.5 sigmas is not within 1 to 16"),
        ("topk", "did you mean 'topk-128'"),
        ("topk-128:64", "takes no parameter"),
        ("topk-0", "top-k cannot keep 0 of a chunk of 4096"),
        ("topk-4097", "use k from 1 to 4096"),
        ("topk-128-int4", "did you mean 'topk-128"),
        ("sign-pruned-1", "use a fraction from 0 to below 1"),
        ("sign-pruned-half", "did you mean 'sign-pruned-0.5'"),
    ],
)
def test_unusable_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_from_name(name)


def test_what_is_no_text_names_no_codec() -> None:
    with pytest.raises(ConfigError, match=r"a codec is named by a text such as 'int4', not by \['int4'\]"):
        codec_from_name(["int4"])


# ----------------------------------------------------------------------------------------------------------- reference


def fp32(value: float) -> float:
    """Round a double to fp32: sums, products and quotients computed in double then are what fp32 gives."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def bf16_bits(value: float) -> int:
    """Round a positive finite fp32 value to bf16, to nearest, ties to even."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def from_bf16_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


@dataclass(frozen=True)
class Format:
    levels: int
    largest_scale: float

    def code(self, x: float, scale: float) -> int:
        raise NotImplementedError

    def value(self, code: int, scale: float) -> float:
        raise NotImplementedError


class IntegerFormat(Format):
    def code(self, x: float, scale: float) -> int:
        quotient = fp32(x / scale)
        return max(-self.levels, min(self.levels, round(quotient)))  # Python's round takes ties to even

    def value(self, code: int, scale: float) -> float:
        return code * scale


class E3M0Format(Format):
    """Sign in bit 3; the nearest of the eight magnitudes, the larger one of two as near."""

    def code(self, x: float, scale: float) -> int:
        sign = 8 if math.copysign(1.0, x) < 0 else 0
        ratio = abs(fp32(x / scale)) if scale else 0.0
        magnitudes = [0.0] + [2.0 ** (c - 7) for c in range(1, 8)]
        return sign + min(range(8), key=lambda c: (abs(ratio - magnitudes[c]), -c))

    def value(self, code: int, scale: float) -> float:
        magnitude = scale * 2.0 ** (code % 8 - 7) if code % 8 else 0.0
        return -magnitude if code & 8 else magnitude


FORMATS: dict[type[Codec], Format] = {
    Int8: IntegerFormat(127, (2 - 2**-7) * 2.0**120),
    Int4: IntegerFormat(7, (2 - 2**-7) * 2.0**124),
    E3M0: E3M0Format(1, (2 - 2**-7) * 2.0**127),
}


def reference(codec: Int8 | Int4 | E3M0, xs: list[float]) -> tuple[bytes, list[float]]:
    """(payload, decoded) of one segment, element by element."""
    fmt = FORMATS[type(codec)]
    scales, codes, decoded = b"", b"", []
    for start in range(0, len(xs), codec.block):
        block = xs[start : start + codec.block]
        scale_bits = bf16_bits(min(fp32(max(map(abs, block)) * fp32(1 / fmt.levels)), fmt.largest_scale))
        scale = from_bf16_bits(scale_bits)
        if scale < 2.0**-120:
            scale_bits, scale = 0, 0.0
        block_codes = [fmt.code(x, scale) if scale or fmt.levels == 1 else 0 for x in block]
        decoded += [fmt.value(code, scale) for code in block_codes]
        scales += struct.pack("<H", scale_bits)
        if codec.code_bits == 8:
            codes += bytes(code % 256 for code in block_codes)
        else:
            half = math.ceil(len(block) / 2)
            nibbles = [code % 16 for code in block_codes] + [0] * (2 * half - len(block))
            codes += bytes(nibbles[i] | nibbles[i + half] << 4 for i in range(half))
    return scales + codes, decoded


def ties(scale: float) -> list[float]:
    """Multiples and halves of a step, powers of two and their midpoints, each with its neighbours in fp32."""
    points = [scale * k / 2 for k in range(16)] + [scale * 2.0**k * m for k in range(-10, 4) for m in (1.0, 1.5)]
    x = torch.tensor([*points, *(-p for p in points)])
    return torch.cat([x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(-math.inf))]).tolist()


def adversarial() -> dict[str, list[float]]:
    cases = {f"random {n}": normal(n, seed=n).tolist() for n in (1, 2, 3, 5, 63, 64, 65, 127, 129, 1001)}
    for exponent in (-149, -126, -121, -120, -119, -118, -113, -112, -20, 0, 100, 118, 119, 120, 121, 124, 126):
        scale = 2.0**exponent
        blocks = (
            [[7 * scale, *ties(scale)[i : i + 31]] for i in range(0, 261, 31)]
            if exponent < 120
            else [[scale * 1.99, scale, -scale / 2]]
        )
        cases[f"ties at 2^{exponent}"] = [fp32(x) for block in blocks for x in block]
    cases["ties of a third"] = [fp32(x) for x in [1.0, *ties(1 / 7), *ties(1 / 127), *ties(1.0)] if abs(x) <= 1]
    cases["max"] = [FP32_MAX, -FP32_MAX, FP32_MAX / 2, fp32(FP32_MAX * 0.75), 1.0, -1.0, 0.0]
    cases["zeros"] = [0.0, -0.0] * 65
    cases["one among zeros"] = [0.0] * 70 + [-3.0] + [-0.0] * 70
    cases["subnormal"] = [SMALLEST_SUBNORMAL * k for k in range(-70, 70)]
    return cases


@each_block_codec
def test_block_formats_agree_with_the_reference_bit_for_bit(codec: Int8 | Int4 | E3M0) -> None:
    for case, xs in adversarial().items():
        expected_payload, expected = reference(codec, xs)
        payload = codec.encode(torch.tensor(xs))
        assert bytes(payload.tolist()).hex() == expected_payload.hex(), case
        assert same_bits(codec.decode(payload, len(xs)), torch.tensor(expected)), case


def test_every_code_decodes_to_its_value() -> None:
    """All codes, those that no encoder writes included, on all scales of a sample."""
    for codec, count in ((Int8(block=256), 256), (Int4(block=16), 16), (E3M0(block=16), 16)):
        fmt = FORMATS[type(codec)]
        for scale in (2.0**-120, 0.00390625, 1.0, 1.9921875, 2.0**100, fmt.largest_scale, 0.0):
            codes = list(range(count))
            packed = codes if count == 256 else [codes[i] | codes[i + 8] << 4 for i in range(8)]
            payload = torch.tensor([*struct.pack("<H", bf16_bits(scale)), *packed], dtype=torch.uint8)
            signed = (
                codes if codec.family == "e3m0" else [code - count if code >= count // 2 else code for code in codes]
            )
            assert codec.decode(payload, count).tolist() == [fmt.value(code, scale) for code in signed]


# -------------------------------------------------------------------------------------------------------------- golden

GOLDEN_INPUT = [1.0, -0.5, 0.3, -0.01, 0.0]
GOLDEN = {  # as in docs/protocol.md
    "fp32": (
        "0000803f 000000bf 9a99993e 0ad723bc 00000000",
        [1.0, -0.5, 0.30000001192092896, -0.009999999776482582, 0.0],
    ),
    "bf16": ("803f 00bf 9a3e 24bc 0000", [1.0, -0.5, 0.30078125, -0.010009765625, 0.0]),
    "fp16": ("003c 00b8 cd34 1fa1 0000", [1.0, -0.5, 0.300048828125, -0.01000213623046875, 0.0]),
    "int8": ("013c 7fc026ff00", [0.99993896484375, -0.50390625, 0.2991943359375, -0.00787353515625, 0.0]),
    "int4": ("123e 070c02", [0.998046875, -0.5703125, 0.28515625, 0.0, 0.0]),
    "e3m0": ("803f 97 0e 05", [1.0, -0.5, 0.25, -0.015625, 0.0]),
    "2bit": ("0000 83be 1a3e 803f 2b05", [1.0, -0.255859375, 0.150390625, -0.255859375, 0.150390625]),
    "topk-2": ("03 0000803f 000000bf", [1.0, -0.5, 0.0, 0.0, 0.0]),
    "topk-2-bf16": ("03 803f 00bf", [1.0, -0.5, 0.0, 0.0, 0.0]),
    "topk-2-2bit": ("03 0000 00bf 803f 0000 06", [1.0, -0.5, 0.0, 0.0, 0.0]),
    "sign-pruned-0.5": ("07 0000803f 000000bf 9a99993e", [1.0, -0.5, 0.30000001192092896, 0.0, 0.0]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    expected, values = GOLDEN[name]
    payload = codec_from_name(name).encode(torch.tensor(GOLDEN_INPUT))
    assert bytes(payload.tolist()).hex() == expected.replace(" ", "")
    assert codec_from_name(name).decode(payload, 5).tolist() == values


# ------------------------------------------------------------------------------------------------------ error feedback


@each_codec
def test_error_feedback_keeps_what_was_not_sent(codec: Codec) -> None:
    x, residual = normal(1001, seed=2), normal(1001, seed=3) * 1e-3
    x_before, residual_before = x.clone(), residual.clone()
    payload, new_residual = compress(codec, x, residual)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)
    assert torch.equal(payload, codec.encode(x + residual))
    assert same_bits(new_residual, (x + residual) - codec.decode(payload, 1001))
    first_payload, first_residual = compress(codec, x, None)
    with_zeros = compress(codec, x, torch.zeros(1001))
    assert torch.equal(first_payload, with_zeros[0])
    assert same_bits(first_residual, with_zeros[1])
    if codec.lossless:
        assert same_bits(new_residual, torch.zeros(1001))


@each_codec
def test_error_feedback_tracks_the_sum(codec: Codec) -> None:
    """Σ decoded = Σ x − residual: the sums differ by the last residual only, which the last total's error bound bounds.

    Each round's total = x + residual rounds once in fp32 (2^-24 of it); total − decoded is exact or rounds as finely.
    """
    num_rounds, residual = 50, torch.zeros(300)
    sum_x, sum_decoded = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    rounding = torch.zeros(300, dtype=torch.float64)
    for round_ in range(num_rounds):
        x = normal(300, seed=round_)
        total = x + residual
        payload, residual = compress(codec, x, residual)
        sum_x += x.double()
        sum_decoded += codec.decode(payload, 300).double()
        rounding += 2**-24 * (total.double().abs() + residual.double().abs())
    assert bool(((sum_x - sum_decoded).abs() <= error_bound(codec, total) + rounding).all())


@each_codec
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_error_feedback_may_decay(codec: Codec, decay: float) -> None:
    """The product is rounded, then the sum; a decay of 0 forgets."""
    x, residual = normal(1001, seed=2), normal(1001, seed=3) * 1e-3
    total = torch.add(x, torch.mul(residual, torch.tensor(decay)))
    payload, new_residual = compress(codec, x, residual, decay)
    assert torch.equal(payload, codec.encode(total))
    assert same_bits(new_residual, total - codec.decode(payload, 1001))
    first_payload, first_residual = compress(codec, x, None, decay)
    assert torch.equal(first_payload, codec.encode(x))
    assert same_bits(first_residual, x - codec.decode(first_payload, 1001))


@pytest.mark.parametrize("decay", [-0.1, 1.01, math.inf, math.nan])
def test_error_feedback_refuses_a_decay_that_grows(decay: float) -> None:
    with pytest.raises(ConfigError, match="must be from 0 to 1"):
        compress(Int4(), torch.zeros(3), None, decay)


def test_top_k_with_error_feedback_sends_every_coordinate_in_the_end() -> None:
    """What was not among the largest grows in the residual until it is: SparseLoCo's e ← e + Δ; e ← e − TopK(e)."""
    codec, x, residual = TopK(k=128), torch.linspace(-2, 2, 4096), None
    x += torch.copysign(torch.tensor(0.5), x)
    sent = torch.zeros(4096)
    for _ in range(5 * 4096 // 128):  # the smallest is a fifth of the largest
        payload, residual = compress(codec, x, residual)
        sent += codec.decode(payload, 4096)
    assert bool((sent != 0).all())


def test_error_feedback_refuses_a_residual_of_another_length() -> None:
    with pytest.raises(ConfigError, match="residual of compress must have 3 elements, not 2"):
        compress(Int4(), torch.zeros(3), torch.zeros(2))
