"""Wire formats by name, and their sizes in bytes: the part of the codecs that does not need torch.

A codec is one line of `FAMILIES` and one file in `core/codecs/`, which encodes and decodes; planner and codecs take
sizes from here. docs/protocol.md describes the bytes.
"""

import difflib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor

from diloco.errors import ConfigError

SEGMENT_ELEMENTS = 32768
"""A payload joins independently encoded segments of this many elements; the last one may be shorter."""
CHUNK_ELEMENTS = 4096
"""Of a chunk in sparse formats, as in SparseLoCo: a position has 12 bits, and kept elements are spread over the vector.
"""
SCALE_BYTES = 2
"""A bf16 number for each block of integers or of small floats."""
CODEBOOK_BYTES = 8
"""Four bin means in bf16 for each block of 2-bit codes."""
INT8_BLOCK, NIBBLE_BLOCK, TWO_BIT_BLOCK = 256, 64, 4096
"""Elements of a block, unless the name gives another number."""
PAPER_RANGE_SIGMAS = 6.0


class Sizes(ABC):
    """The sizes of a format whose vectors are cut into blocks, encoded one by one.

    Attributes:
        block: elements of a block; only the last one of a vector can be shorter.
    """

    block: int

    @abstractmethod
    def block_bytes(self, num_elements: int) -> int:
        """Exact bytes of a block of 1 to `block` elements."""


@dataclass(frozen=True)
class CodedSizes(Sizes):
    """Codes of `code_bits` bits, and for each block a header from which the codes' values follow, if there is one."""

    block: int
    header_bytes: int
    code_bits: int

    def block_bytes(self, num_elements: int) -> int:
        return self.header_bytes + ceil(num_elements * self.code_bits / 8)


@dataclass(frozen=True)
class SparseSizes(Sizes):
    """The positions of the elements that are kept of a chunk, then their values; no positions where all are kept."""

    num_kept: Callable[[int], int]
    values: Sizes
    block: int = CHUNK_ELEMENTS

    def block_bytes(self, num_elements: int) -> int:
        num_kept = self.num_kept(num_elements)
        values_bytes = self.values.block_bytes(num_kept)
        return values_bytes + (smallest_positions(num_elements, num_kept)[0] if num_kept < num_elements else 0)


@dataclass(frozen=True)
class WireFormat:
    """The format that a codec's name denotes.

    Attributes:
        name: of the codec.
        codec: module and class below `diloco.core.codecs`.
        parameters: arguments of that class.
        sizes: of its payloads.
    """

    name: str
    codec: str
    parameters: Mapping[str, float | str]
    sizes: Sizes

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact bytes of a vector of `num_elements` elements; 0 for none."""
        if num_elements < 0:
            raise ConfigError(f"a vector cannot have {num_elements} elements; give a count of 0 or more")
        num_full, tail = divmod(num_elements, self.sizes.block)
        return num_full * self.sizes.block_bytes(self.sizes.block) + (self.sizes.block_bytes(tail) if tail else 0)

    @property
    def bits_per_value(self) -> float:
        """Bits per element of a long vector."""
        return 8 * self.sizes.block_bytes(self.sizes.block) / self.sizes.block


@dataclass(frozen=True)
class CodecFamily:
    """Formats that differ in their parameters only.

    Attributes:
        codec: module and class below `diloco.core.codecs`.
        pattern: regular expression of the names; its groups are the parameters in a name.
        sizes: the sizes for given parameters; raises ConfigError on impossible ones.
        names: the format with the default parameters, then others in common use.
    """

    codec: str
    pattern: str
    sizes: Callable[..., Sizes]
    names: tuple[str, ...]


def _blocks(header_bytes: int, code_bits: int, default: int) -> Callable[..., Sizes]:
    def sizes(block: int = default) -> Sizes:
        _require_block(block, smallest=2)
        return CodedSizes(block, header_bytes, code_bits)

    return sizes


def _two_bit(block: int = TWO_BIT_BLOCK, range_sigmas: float = PAPER_RANGE_SIGMAS) -> Sizes:
    _require_block(block, smallest=8)
    if not 1 <= range_sigmas <= 16:
        raise ConfigError(f"a range of {range_sigmas} sigmas is not within 1 to 16; the papers use 6")
    return CodedSizes(block, CODEBOOK_BYTES, code_bits=2)


def _top_k(k: int = 128, values: str = "fp32") -> Sizes:
    if not 1 <= k <= CHUNK_ELEMENTS:
        raise ConfigError(f"top-k cannot keep {k} of a chunk of {CHUNK_ELEMENTS}; use k from 1 to {CHUNK_ELEMENTS}")
    return SparseSizes(functools.partial(min, k), _VALUES[values])


def _sign_pruned(fraction: float = 0.5, values: str = "fp32") -> Sizes:
    if not 0 <= fraction < 1:
        raise ConfigError(f"sign pruning cannot prune {fraction} of a chunk; use a fraction from 0 to below 1")
    return SparseSizes(functools.partial(_num_kept, fraction), _VALUES[values])


def _num_kept(fraction: float, num_elements: int) -> int:
    return num_elements - floor(fraction * num_elements)


def _require_block(block: int, smallest: int) -> None:
    if block < smallest or SEGMENT_ELEMENTS % block:
        raise ConfigError(
            f"a block of {block} does not divide a segment of {SEGMENT_ELEMENTS}; "
            f"use a power of two from {smallest} to {SEGMENT_ELEMENTS}"
        )


_VALUES: Mapping[str, Sizes] = {
    "fp32": CodedSizes(1, 0, 32),
    "bf16": CodedSizes(1, 0, 16),
    "2bit": CodedSizes(CHUNK_ELEMENTS, CODEBOOK_BYTES, 2),
}

_BLOCK = r"(?::(?P<block>\d+))?"
_KEPT_AS = r"(?:-(?P<values>bf16|2bit))?"

FAMILIES = (
    CodecFamily("floats.FP32", "fp32", lambda: CodedSizes(1, 0, 32), ("fp32",)),
    CodecFamily("floats.BF16", "bf16", lambda: CodedSizes(1, 0, 16), ("bf16",)),
    CodecFamily("floats.FP16", "fp16", lambda: CodedSizes(1, 0, 16), ("fp16",)),
    CodecFamily("integers.Int8", "int8" + _BLOCK, _blocks(SCALE_BYTES, 8, INT8_BLOCK), ("int8",)),
    CodecFamily("integers.Int4", "int4" + _BLOCK, _blocks(SCALE_BYTES, 4, NIBBLE_BLOCK), ("int4",)),
    CodecFamily("e3m0.E3M0", "e3m0" + _BLOCK, _blocks(SCALE_BYTES, 4, NIBBLE_BLOCK), ("e3m0",)),
    CodecFamily("uniform.Uniform8", "uniform8", lambda: CodedSizes(SEGMENT_ELEMENTS, 1024, code_bits=8), ("uniform8",)),
    CodecFamily("bins.TwoBit", r"2bit(?:-(?P<range_sigmas>\d+(?:\.\d+)?)sigma)?" + _BLOCK, _two_bit, ("2bit",)),
    CodecFamily("sparse.TopK", r"topk-(?P<k>\d+)" + _KEPT_AS, _top_k, ("topk-128", "topk-128-bf16", "topk-128-2bit")),
    CodecFamily(
        "sparse.SignPruned",
        r"sign-pruned-(?P<fraction>\d+(?:\.\d+)?(?:e-\d+)?)" + _KEPT_AS,
        _sign_pruned,
        ("sign-pruned-0.5",),
    ),
)
"""All codecs, one a line."""


@functools.lru_cache(maxsize=256)
def wire_format(name: str) -> WireFormat:
    """The format of a name such as "bf16", "int4:128", "2bit-4sigma", "topk-64-bf16", "sign-pruned-0.25".

    Raises:
        ConfigError: an unknown name, or a parameter that the format does not allow.
    """
    for family in FAMILIES:
        if match := re.fullmatch(family.pattern, name, re.ASCII):
            parameters = {key: _parameter(text) for key, text in match.groupdict().items() if text is not None}
            try:
                return WireFormat(name, family.codec, parameters, family.sizes(**parameters))
            except ConfigError as error:
                raise ConfigError(f"{name!r} is not a valid codec: {error}") from None
    raise ConfigError(_unknown(name))


def _parameter(text: str) -> float | str:
    """A parameter in a name: a whole number, a number or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _unknown(name: str) -> str:
    stem, colon, _ = name.partition(":")
    known = [each for family in FAMILIES for each in family.names]
    for family in FAMILIES:
        if colon and (match := re.fullmatch(family.pattern, stem, re.ASCII)):
            if "block" in match.groupdict():
                example = f"{stem}:{family.sizes().block}"
                return f"the block size in {name!r} is not a whole number; write for example {example!r}"
            return f"the codec {stem!r} takes no parameter, but {name!r} gives one; write {stem!r}"
    near = difflib.get_close_matches(name.lower(), known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else "choose for example 'fp32'"
    return f"there is no codec {name!r}; {advice} (known: {', '.join(known)})"


@functools.lru_cache(maxsize=256)
def smallest_positions(num_elements: int, num_kept: int) -> tuple[int, int]:
    """(bytes, low bits) of the shortest encoding of the positions of kept elements.

    0 low bits: a bitmap. Otherwise an Elias-Fano list, with that number of low bits of each position. Among equally
    short encodings, the bitmap, then the list with the fewest low bits.
    """
    lists = (
        (low * ceil(num_kept / 8) + ceil((num_kept + (num_elements - 1 >> low)) / 8), low)
        for low in range(1, num_elements.bit_length())
    )
    return min((ceil(num_elements / 8), 0), *lists)
