"""How many bytes a codec puts on the wire, by its name, without torch.

The sizes are those of `diloco.core.codecs`, whose tests say what the formats are; a test holds the two together.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor

from diloco.errors import ConfigError

SEGMENT = 32768
CHUNK = 4096
SCALE_BYTES = 2
CODEBOOK_BYTES = 8
CASTS = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALED = {"int8": (8, 256), "int4": (4, 64), "e3m0": (4, 64)}
EXAMPLES = (*CASTS, *SCALED, "2bit", "topk-128-2bit", "sign-pruned-0.5")

_TWO_BIT = re.compile(r"2bit(?:-(\d+(?:\.\d+)?)sigma)?(?::(\d+))?", re.ASCII)
_TOP_K = re.compile(r"topk-(\d+)(?:-(bf16|2bit))?", re.ASCII)
_SIGN_PRUNED = re.compile(r"sign-pruned-(\d+(?:\.\d+)?(?:e-\d+)?)(?:-(bf16|2bit))?", re.ASCII)


@dataclass(frozen=True)
class WireFormat:
    """The size of what a codec writes: a vector is cut into blocks, and only the last one can be shorter.

    Attributes:
        name: the codec's.
        block: elements of a whole block.
        block_bytes: bytes of a block of 1 to `block` elements.
    """

    name: str
    block: int
    block_bytes: Callable[[int], int]

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact bytes of a vector of `num_elements` values."""
        num_full, tail = divmod(num_elements, self.block)
        return num_full * self.block_bytes(self.block) + (self.block_bytes(tail) if tail else 0)

    @property
    def bits_per_value(self) -> float:
        """Bits a value of a long vector takes."""
        return 8 * self.block_bytes(self.block) / self.block


def wire_format(name: str) -> WireFormat:
    """The size of a codec: "bf16", "e3m0", "int4:128", "2bit", "topk-64-bf16", "sign-pruned-0.25", as `--codec` takes
    them.

    Raises:
        ConfigError: a name that no codec has, or a parameter that it cannot have.
    """
    if name in CASTS:
        num_bytes = CASTS[name]
        return WireFormat(name, 1, lambda n: n * num_bytes)
    family, colon, block = name.partition(":")
    if family in SCALED:
        bits, default = SCALED[family]
        return _scaled(name, bits, _block(name, block, smallest=2) if colon else default)
    if match := _TWO_BIT.fullmatch(name):
        return WireFormat(name, _block(name, match[2], smallest=8) if match[2] else CHUNK, _bins_bytes)
    if match := _TOP_K.fullmatch(name):
        k = int(match[1])
        if not 1 <= k <= CHUNK:
            raise ConfigError(f"the codec {name!r} cannot keep {k} of {CHUNK} values; use k from 1 to {CHUNK}")
        return _sparse(name, lambda n: min(k, n), match[2])
    if match := _SIGN_PRUNED.fullmatch(name):
        fraction = float(match[1])
        if not fraction < 1:
            raise ConfigError(f"the codec {name!r} cannot prune {fraction} of the values; use a fraction below 1")
        return _sparse(name, lambda n: n - floor(fraction * n), match[2])
    near = difflib.get_close_matches(name.lower(), EXAMPLES, n=1, cutoff=0.4)
    meant = (
        f"did you mean {near[0]!r}? (for example {', '.join(EXAMPLES)})"
        if near
        else f"choose for example {', '.join(EXAMPLES)}."
    )
    raise ConfigError(f"there is no codec {name!r}; {meant}")


def _scaled(name: str, bits: int, block: int) -> WireFormat:
    """A scale a block, then the codes."""
    return WireFormat(name, block, lambda n: SCALE_BYTES + ceil(n * bits / 8))


def _bins_bytes(num_elements: int) -> int:
    return CODEBOOK_BYTES + ceil(num_elements / 4)


def _sparse(name: str, num_kept: Callable[[int], int], values: str | None) -> WireFormat:
    """The positions of what is kept of a chunk, then its values."""

    def chunk_bytes(n: int) -> int:
        k = num_kept(n)
        value_bytes = _bins_bytes(k) if values == "2bit" else k * CASTS[values or "fp32"]
        return value_bytes + (_positions_bytes(n, k) if k < n else 0)

    return WireFormat(name, CHUNK, chunk_bytes)


def _positions_bytes(n: int, k: int) -> int:
    """The smaller of a bitmap and Elias-Fano lists of each number of low bits."""
    lists = (low * ceil(k / 8) + ceil((k + (n - 1 >> low)) / 8) for low in range(1, n.bit_length()))
    return min(ceil(n / 8), *lists)


def _block(name: str, text: str, *, smallest: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < smallest or SEGMENT % int(text):
        raise ConfigError(
            f"the block of the codec {name!r} does not divide a segment of {SEGMENT} values; "
            f"use a power of two from {smallest} to {SEGMENT}"
        )
    return int(text)
