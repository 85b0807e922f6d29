"""Wire codecs: fp32 vectors as bytes of an exactly known size. The formats are written down in docs/wire-formats.md."""

import difflib

from diloco.core.codecs.base import SEGMENT_ELEMENTS, Codec, compress
from diloco.core.codecs.bins import TwoBit
from diloco.core.codecs.blocks import ScaledBlocks
from diloco.core.codecs.e3m0 import E3M0
from diloco.core.codecs.floats import BF16, FP16, FP32
from diloco.core.codecs.integers import Int4, Int8
from diloco.core.codecs.sparse import SignPruned, TopK
from diloco.errors import ConfigError

__all__ = [
    "BF16",
    "CODECS",
    "E3M0",
    "FP16",
    "FP32",
    "SEGMENT_ELEMENTS",
    "Codec",
    "Int4",
    "Int8",
    "SignPruned",
    "TopK",
    "TwoBit",
    "codec_from_name",
    "compress",
]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FP32(), BF16(), FP16(), Int8(), Int4(), E3M0(), TwoBit(),
        TopK(), TopK(values="bf16"), TopK(values="2bit"), SignPruned(),
    )
}  # fmt: skip
"""Every codec with its default parameters, by name; the sparse ones with each format of values in use."""

_PATTERNS = (TwoBit, TopK, SignPruned)


def codec_from_name(name: str) -> Codec:
    """The codec of a name such as "int4", or of other parameters than the defaults: "int4:128", "topk-64-2bit", "sign-pruned-0.25".

    Raises ConfigError on a name that no codec has.
    """
    for kind in _PATTERNS:
        if match := kind.pattern.fullmatch(name):
            return kind.from_match(match)
    family, colon, parameter = name.partition(":")
    codec = CODECS.get(family)
    if codec is None:
        nearest = difflib.get_close_matches(family.lower(), CODECS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"there is no codec {name!r}; did you mean {nearest!r}? (known: {', '.join(CODECS)})")
    if not colon:
        return codec
    if not isinstance(codec, ScaledBlocks | TwoBit):
        raise ConfigError(f"the codec {family!r} takes no parameter, but {name!r} gives one; write {family!r}")
    if not (parameter.isascii() and parameter.isdecimal()):
        raise ConfigError(
            f"the block size in {name!r} is not a whole number; write for example '{family}:{codec.block}'"
        )
    return type(codec)(block=int(parameter))
