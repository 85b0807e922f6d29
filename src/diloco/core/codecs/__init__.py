"""Wire codecs: fp32 vectors as bytes of an exactly known size. The formats are written down in docs/protocol.md.

The names and sizes of the formats (`core.codecs.formats`) do not need torch, so the codecs themselves are imported at
their first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from diloco.core.codecs.formats import FAMILIES, SEGMENT_ELEMENTS

if TYPE_CHECKING:
    from diloco.core.codecs.bins import TwoBit
    from diloco.core.codecs.codec import Codec, compress
    from diloco.core.codecs.e3m0 import E3M0
    from diloco.core.codecs.floats import BF16, FP16, FP32
    from diloco.core.codecs.integers import Int4, Int8
    from diloco.core.codecs.registry import CODECS, codec_from_name
    from diloco.core.codecs.sparse import SignPruned, TopK

__all__ = ["BF16", "CODECS", "E3M0", "FP16", "FP32", "SEGMENT_ELEMENTS", "Codec", "Int4", "Int8", "SignPruned", "TopK",
           "TwoBit", "codec_from_name", "compress"]  # fmt: skip

_HOMES = {"Codec": "codec", "compress": "codec", "CODECS": "registry", "codec_from_name": "registry"} | {
    kind: module for module, kind in (family.codec.split(".") for family in FAMILIES)
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
