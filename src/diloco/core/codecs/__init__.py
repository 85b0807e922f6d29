"""Wire codecs: fp32 vectors as bytes of an exactly known size. The formats are written down in docs/wire-formats.md."""

from importlib import import_module

from diloco.core.codecs.bins import TwoBit
from diloco.core.codecs.codec import Codec, compress
from diloco.core.codecs.e3m0 import E3M0
from diloco.core.codecs.floats import BF16, FP16, FP32
from diloco.core.codecs.integers import Int4, Int8
from diloco.core.codecs.sparse import SignPruned, TopK
from diloco.core.formats import FAMILIES, SEGMENT_ELEMENTS, wire_format
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


def codec_from_name(name: object) -> Codec:
    """The codec of a name such as "int4", or of other parameters than the defaults: "int4:128", "topk-64-2bit", "sign-pruned-0.25".

    Raises ConfigError on a name that no codec has, and on a parameter that it cannot have.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a codec is named by a text such as 'int4', not by {name!r}")
    format_ = wire_format(name)
    module, kind = format_.codec.split(".")
    codec: Codec = getattr(import_module(f"{__name__}.{module}"), kind)(**format_.parameters)
    return codec


CODECS: dict[str, Codec] = {name: codec_from_name(name) for family in FAMILIES for name in family.names}
"""Every codec with its default parameters, by name; the sparse ones with each format of values in use."""
