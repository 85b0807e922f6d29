"""Two bits, top-k and sign pruning: a readable reference bit for bit, what is kept, identities, damaged positions."""

import itertools
import math
import struct
from collections.abc import Callable, Sequence

import pytest
import torch

from diloco.core.codecs import CODECS, FP32, Codec, SignPruned, TopK, TwoBit
from diloco.core.codecs.codec import Scratch
from diloco.core.codecs.positions import Bitmap, EliasFano, positions_of
from diloco.errors import ConfigError, CorruptPayloadError

CHUNK = 4096


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def random(num_elements: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------- reference
# Element by element, as docs/protocol.md says it. Sums, products, quotients and square roots of fp32 values
# computed in double and rounded once are what fp32 gives.


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def bf16_bits(value: float) -> int:
    """Round a finite fp32 value to bf16, to nearest, ties to even."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def from_bf16_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def fold(values: Sequence[float], width: int) -> float:
    xs = [*values, *[0.0] * (width - len(values))]
    while len(xs) > 1:
        half = len(xs) // 2
        xs = [fp32(a + b) for a, b in zip(xs[:half], xs[half:], strict=True)]
    return xs[0]


def scaled(xs: Sequence[float]) -> tuple[list[float], int]:
    """(x · 2^(1 − e), e), e the exponent of the largest magnitude; zeros if that is subnormal."""
    largest = max(map(abs, xs))
    if largest < 2.0**-126:
        return [0.0] * len(xs), 0
    exponent = math.frexp(largest)[1] - 1
    return [fp32(math.ldexp(x, 1 - exponent)) for x in xs], exponent


def packed(codes: Sequence[int], bits: int) -> bytes:
    m = math.ceil(len(codes) * bits / 8)
    padded = [*codes, *[0] * (8 // bits * m - len(codes))]
    return bytes(sum(padded[i + j * m] << j * bits for j in range(8 // bits)) for i in range(m))


def reference_bins(xs: Sequence[float], range_sigmas: float = 6.0) -> tuple[bytes, list[float]]:
    ys, exponent = scaled(xs)
    width = 1 << (len(xs) - 1).bit_length()
    mean_square = fp32(fold([fp32(y * y) for y in ys], width) / len(xs))
    edge = fp32(fp32(math.sqrt(mean_square)) * fp32(range_sigmas / 4))
    codes = [0 if y < -edge else 1 if y < 0 else 2 if y <= edge else 3 for y in ys]
    codebook = []
    for code in range(4):
        total = fold([y if c == code else 0.0 for y, c in zip(ys, codes, strict=True)], width)
        mean = fp32(total / max(1, codes.count(code)))
        limit = (2 - 2**-7) * 2.0**127
        mean = max(-limit, min(limit, math.ldexp(mean, exponent - 1)))
        codebook.append(bf16_bits(mean) if abs(mean) >= 2.0**-126 else 0)
    payload = struct.pack("<4H", *codebook) + packed(codes, 2)
    return payload, [from_bf16_bits(codebook[code]) for code in codes]


def reference_values(xs: Sequence[float], values: str) -> tuple[bytes, list[float]]:
    match values:
        case "fp32":
            return struct.pack(f"<{len(xs)}f", *xs), list(xs)
        case "bf16":
            bits = [bf16_bits(x) for x in xs]
            return struct.pack(f"<{len(xs)}H", *bits), [from_bf16_bits(b) for b in bits]
    return reference_bins(xs)


def reference_positions(positions: Sequence[int], n: int) -> bytes:
    k = len(positions)
    if k == n:
        return b""
    chosen = set(positions)
    ways = [packed([int(i in chosen) for i in range(n)], 1)]
    for low_bits in range(1, n.bit_length()):
        planes = [packed([position >> bit & 1 for position in positions], 1) for bit in range(low_bits)]
        high = [0] * (k + (n - 1 >> low_bits))
        for i, position in enumerate(positions):
            high[(position >> low_bits) + i] = 1
        ways.append(b"".join(planes) + packed(high, 1))
    return min(ways, key=len)  # the first of the smallest


def top_k_positions(xs: Sequence[float], k: int) -> list[int]:
    return sorted(sorted(range(len(xs)), key=lambda i: (-abs(xs[i]), i))[:k])


def sign_pruned_positions(xs: Sequence[float], k: int) -> list[int]:
    ys, _ = scaled(xs)
    sign = -1.0 if fold(ys, 1 << (len(xs) - 1).bit_length()) < 0 else 1.0

    def worth(i: int) -> tuple[int, float, int]:
        group = 0 if xs[i] == 0 else 1 if xs[i] * sign < 0 else 2
        return -group, -abs(xs[i]), i

    return sorted(sorted(range(len(xs)), key=worth)[:k])


def reference(codec: Codec, xs: Sequence[float]) -> tuple[bytes, list[float]]:
    payload, decoded = b"", []
    size = codec.block if isinstance(codec, TwoBit) else CHUNK
    for start in range(0, len(xs), size):
        chunk = xs[start : start + size]
        if isinstance(codec, TwoBit):
            chunk_payload, chunk_decoded = reference_bins(chunk, codec.range_sigmas)
        else:
            assert isinstance(codec, TopK | SignPruned)
            choose: Callable[[Sequence[float], int], list[int]] = (
                top_k_positions if isinstance(codec, TopK) else sign_pruned_positions
            )
            positions = choose(chunk, codec.num_kept(len(chunk)))
            values, kept = reference_values([chunk[i] for i in positions], codec.values)
            chunk_payload, chunk_decoded = reference_positions(positions, len(chunk)) + values, [0.0] * len(chunk)
            for i, value in zip(positions, kept, strict=True):
                chunk_decoded[i] = value
        payload += chunk_payload
        decoded += chunk_decoded
    return payload, decoded


def adversarial() -> dict[str, torch.Tensor]:
    ties = random(5000, seed=1).mul(2).round().div(2)
    wide = random(4200, seed=2) * torch.exp2(torch.arange(4200) % 240 - 120.0)
    return {
        **{f"random {n}": random(n, seed=n) for n in (1, 2, 3, 5, 9, 31, 127, 4095, 4096, 9001)},
        "ties": ties,
        "constant": torch.full((4097,), -0.3),
        "one among zeros": torch.cat([torch.zeros(100), torch.tensor([-3.0]), -torch.zeros(5000)]),
        "zeros": torch.tensor([0.0, -0.0] * 65),
        "few": torch.cat([random(50), torch.zeros(4096)]),
        "wide": wide,
        "an outlier": torch.cat([random(4095, seed=3) * 1e-8, torch.tensor([1e4])]),
        "subnormal": torch.arange(-300, 300).float() * 2.0**-149,
        "partly subnormal": torch.arange(-300, 300).float() * 2.0**-133,
        "around 2^-126": torch.linspace(-4, 4, 600) * 2.0**-126,
        "largest": torch.tensor([1.0, -1.0, 0.99, 1.0, -0.7, 0.0] * 20) * ((2 - 2**-7) * 2.0**127),
        "one sign": -random(777, seed=4).abs(),
        "sum of zero": torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, -0.0] * 30),
        "edges": torch.tensor([3.0, -3.0, 1.5, -1.5] + [1.0, -1.0] * 10 + [0.0] * 8),
    }


REFERENCED = [
    TwoBit(),
    TwoBit(block=64, range_sigmas=4),
    TopK(),
    TopK(k=5, values="bf16"),
    TopK(k=1500, values="2bit"),
    SignPruned(),
    SignPruned(fraction=0.25, values="2bit"),
    SignPruned(fraction=0.75),
]


@pytest.mark.parametrize("codec", REFERENCED, ids=lambda codec: codec.name)
def test_formats_agree_with_the_reference_bit_for_bit(codec: Codec) -> None:
    for case, x in adversarial().items():
        expected_payload, expected = reference(codec, x.tolist())
        payload = codec.encode(x)
        assert bytes(payload.tolist()).hex() == expected_payload.hex(), case
        assert same_bits(codec.decode(payload, len(x)), torch.tensor(expected)), case


# -------------------------------------------------------------------------------------------------------------- 2 bits


def test_two_bits_keep_the_mean_and_most_of_the_energy() -> None:
    """Bin means keep sums, so a block's mean is off by no more than what rounding the means to bf16 costs: 2^-8 of
    each."""
    x = random(1 << 18) + 0.1
    decoded = TwoBit().decode(TwoBit().encode(x), len(x))
    assert bool(((x - decoded).view(-1, 4096).mean(1).abs() <= 2**-8 * x.abs().view(-1, 4096).mean(1)).all())
    # Four bins with edges at 0 and ±1.5σ lose 0.1627 of a Gaussian's energy, edges at ±σ 0.1176: both by integration.
    for codec, lost in ((TwoBit(), 0.1627), (TwoBit(range_sigmas=4), 0.1176)):
        y = random(1 << 18, seed=1)
        error = (y - codec.decode(codec.encode(y), len(y))).square().mean()
        assert float(error) == pytest.approx(lost, rel=0.02)  # 2^18 samples: the standard error is about 0.4 %


def test_scaling_by_a_power_of_two_scales_the_result() -> None:
    """Nothing in between overflows or underflows."""
    x = random(5000)
    decoded = TwoBit().decode(TwoBit().encode(x), 5000)
    for exponent in (-110, -60, 60, 120):
        scaled_x = x * 2.0**exponent
        assert same_bits(TwoBit().decode(TwoBit().encode(scaled_x), 5000), decoded * 2.0**exponent)


# --------------------------------------------------------------------------------------------------------------- top-k


@pytest.mark.parametrize("num_elements", [1, 77, 4096, 4097, 100_003])
@pytest.mark.parametrize("codec", [TopK(k=4096), SignPruned(fraction=0.0)], ids=lambda codec: codec.name)
def test_keeping_all_is_lossless(codec: Codec, num_elements: int) -> None:
    x = random(num_elements) * torch.exp2(torch.arange(num_elements) % 240 - 140.0)
    x[::3] = -0.0
    payload = codec.encode(x)
    assert codec.lossless
    assert torch.equal(payload, FP32().encode(x))
    assert same_bits(codec.decode(payload, num_elements), x)


def test_what_loses_something_is_not_lossless() -> None:
    lossy = [
        TopK(k=4095),
        TopK(k=4096, values="bf16"),
        SignPruned(fraction=0.0, values="2bit"),
        SignPruned(fraction=0.25),
    ]
    assert not any(codec.lossless for codec in [*lossy, TwoBit()])
    assert [name for name, codec in CODECS.items() if codec.lossless] == ["fp32"]


@pytest.mark.parametrize("k", [1, 2, 100, 128, 129, 500, 2048, 4095])
def test_the_largest_magnitudes_are_kept_exactly(k: int) -> None:
    codec, x = TopK(k=k), random(3 * 4096 + 1000, seed=k)
    decoded = codec.decode(codec.encode(x), len(x))
    for chunk, kept in zip(x.split(4096), decoded.split(4096), strict=True):
        expected = torch.zeros_like(chunk)
        index = chunk.abs().topk(min(k, len(chunk))).indices
        expected[index] = chunk[index]
        assert same_bits(kept, expected)


def test_among_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.ones(5000)
    x[1::2] = -1.0
    x[4000] = 2.0
    decoded = TopK(k=10).decode(TopK(k=10).encode(x), 5000)
    assert decoded.nonzero()[:, 0].tolist() == [*range(9), 4000, *range(4096, 4106)]


def test_top_k_sends_fewer_bytes_than_twelve_bits_a_position_or_a_bitmap() -> None:
    assert TopK(values="2bit").chunk_bytes(4096) == 112 + 8 + 32
    for k in range(8, 4096, 8):
        assert positions_of(4096, k).num_bytes <= min(math.ceil(k * 12 / 8), 512)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (9, 3), (100, 1), (100, 50), (4095, 128), (4096, 33), (4096, 900)])
def test_positions_survive_however_they_are_written(n: int, k: int) -> None:
    generator, scratch = torch.Generator().manual_seed(n + k), Scratch(torch.device("cpu"))
    chosen = torch.zeros(20, n, dtype=torch.bool)
    for row in chosen:
        row[torch.randperm(n, generator=generator)[:k]] = True
    chosen[0], chosen[1] = torch.arange(n) < k, torch.arange(n) >= n - k
    x = torch.rand(20, n, generator=generator) + 1
    for way in [Bitmap(n, k), *(EliasFano(n, k, low_bits) for low_bits in range(1, n.bit_length()))]:
        payload, out = torch.empty(20, way.num_bytes, dtype=torch.uint8), torch.empty(20, n)
        kept = way.encode(chosen, x, payload, scratch).clone()
        positions = way.decode(payload, scratch)
        assert positions is not None
        way.spread(positions, kept, out, scratch)
        assert torch.equal(out, x * chosen)


def test_damaged_positions_are_refused() -> None:
    """Every way to be wrong that has the right number of set bits: repeated, out of order, and beyond the chunk."""
    way = EliasFano(n=100, k=3, low_bits=4)  # 4 planes of a byte, then 3 + 6 bits in 2 bytes
    assert way.num_bytes == 6

    def written(positions: Sequence[int]) -> torch.Tensor:
        planes = [packed([position >> bit & 1 for position in positions], 1) for bit in range(4)]
        high = [int(any((p >> 4) + i == bit for i, p in enumerate(positions))) for bit in range(9)]
        return torch.tensor([list(b"".join(planes) + packed(high, 1))], dtype=torch.uint8)

    scratch = Scratch(torch.device("cpu"))
    intact = way.decode(written([5, 17, 99]), scratch)
    assert intact is not None
    assert intact.tolist() == [[5, 17, 99]]
    for wrong in ([5, 5, 99], [6, 5, 99], [5, 17, 100], [5, 17, 111]):
        assert way.decode(written(wrong), scratch) is None
    codec, x = TopK(k=3), random(100)
    payload = codec.encode(x)
    assert codec.chunk_bytes(100) == positions_of(100, 3).num_bytes + 12
    for bit in range(8 * positions_of(100, 3).num_bytes):
        damaged = payload.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            codec.check(damaged, 100)
        except CorruptPayloadError as error:
            assert "positions that are not 3 ascending ones below 100" in str(error)  # noqa: PT017
            with pytest.raises(CorruptPayloadError):
                codec.decode(damaged, 100)
        else:
            assert len(codec.decode(damaged, 100).nonzero()) == 3


def test_a_bitmap_with_bits_beyond_the_chunk_is_refused() -> None:
    codec, x = TopK(k=60), random(100)
    assert isinstance(positions_of(100, 60), Bitmap)
    payload = codec.encode(x)
    first = next(i for i in range(13) if payload[i] & 1)
    payload[first] -= 1
    payload[12] |= 0x80  # bit 7 of byte 12 of 13 is element 12 + 7 · 13 = 103
    with pytest.raises(CorruptPayloadError, match="below 100"):
        codec.check(payload, 100)


def test_unknown_values_are_refused() -> None:
    for make in (lambda: TopK(values="int4"), lambda: SignPruned(values="")):
        with pytest.raises(ConfigError, match="there is no codec"):
            make()


# -------------------------------------------------------------------------------------------------------- sign pruning


def test_pruned_are_zeros_then_the_other_sign_then_the_smallest() -> None:
    x = torch.tensor([5.0, -4.0, 0.0, 1.0, -1.0, 3.0, -0.5, 2.0])  # the positive ones sum to 11, the others to 5.5
    expected = {
        0.0: x.tolist(),
        0.25: [5.0, -4.0, 0.0, 1.0, -1.0, 3.0, 0.0, 2.0],
        0.5: [5.0, 0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 2.0],
        0.75: [5.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0],
    }
    for fraction, values in expected.items():
        codec = SignPruned(fraction=fraction)
        assert codec.decode(codec.encode(x), 8).tolist() == values
        flipped = [-value for value in values]
        assert codec.decode(codec.encode(-x), 8).tolist() == flipped


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 0.999, 0.9999])
@pytest.mark.parametrize("num_elements", [1, 5, 4095, 4096, 8192 + 3])
def test_as_many_are_pruned_as_stated(fraction: float, num_elements: int) -> None:
    codec, x = SignPruned(fraction=fraction), random(num_elements)
    decoded = codec.decode(codec.encode(x), num_elements)
    for chunk, original in zip(decoded.split(4096), x.split(4096), strict=True):
        kept = chunk != 0
        assert int((~kept).sum()) == math.floor(fraction * len(chunk))
        assert torch.equal(chunk[kept], original[kept])
        sign = torch.sign(original.double().sum())
        if bool((original[~kept] * sign > 0).any()):  # of the elected sign: then all of the other one went before
            assert bool((chunk[kept] * sign > 0).all())


@pytest.mark.parametrize("make", [lambda f: SignPruned(fraction=f), lambda f: SignPruned(fraction=f, values="bf16")])
def test_fractions_cost_what_they_keep(make: Callable[[float], Codec]) -> None:
    bits = 32 if make(0).lossless else 16
    assert [make(fraction).format.bits_per_value for fraction in (0, 0.25, 0.5, 0.75)] == [
        bits, 1 + 0.75 * bits, 1 + 0.5 * bits, 1 + 0.25 * bits,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codec", [*CODECS.values(), *REFERENCED], ids=lambda codec: codec.name)
def test_devices_write_and_read_the_same_bits(codec: Codec) -> None:
    for x in itertools.chain([random(300_001)], (x for x in adversarial().values() if float(x.abs().max()) < 6e4)):
        payload = codec.encode(x)
        on_device = codec.encode(x.cuda())
        assert torch.equal(on_device.cpu(), payload)
        assert same_bits(codec.decode(on_device, len(x)).cpu(), codec.decode(payload, len(x)))
