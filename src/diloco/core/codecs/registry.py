"""All codecs by name."""

from importlib import import_module

from diloco.core.codecs.codec import Codec
from diloco.core.codecs.formats import FAMILIES, wire_format
from diloco.errors import ConfigError


def codec_from_name(name: object) -> Codec:
    """The codec of a name such as "int4", or with other parameters than the defaults: "int4:128", "sign-pruned-0.25".

    Raises ConfigError on an unknown name, and on a parameter that the format does not allow.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a codec is named by a text such as 'int4', not by {name!r}")
    format_ = wire_format(name)
    module, kind = format_.codec.split(".")
    codec: Codec = getattr(import_module(f"diloco.core.codecs.{module}"), kind)(**format_.parameters)
    return codec


CODECS: dict[str, Codec] = {name: codec_from_name(name) for family in FAMILIES for name in family.names}
"""Every codec with its default parameters, by name; sparse ones also with the value formats in common use."""
