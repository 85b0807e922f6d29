"""Sizes by name are those of the codecs themselves."""

import pytest

from diloco.core.codecs import CODECS, codec_from_name
from diloco.errors import ConfigError
from diloco.planning.wire import wire_format

NAMES = [
    *CODECS,
    "int8:32",
    "int4:128",
    "e3m0:32768",
    "2bit:64",
    "2bit-4sigma",
    "2bit-4sigma:8",
    "topk-1-bf16",
    "topk-4096",
    "topk-64-2bit",
    "sign-pruned-0.25-bf16",
    "sign-pruned-1e-05",
]
COUNTS = (0, 1, 7, 63, 64, 65, 255, 4095, 4096, 4097, 32767, 32768, 32769, 100_003)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_the_codecs(name: str) -> None:
    codec, wire = codec_from_name(name), wire_format(name)
    assert [wire.encoded_bytes(n) for n in COUNTS] == [codec.encoded_bytes(n) for n in COUNTS]
    assert wire.bits_per_value == codec.bits_per_element


@pytest.mark.parametrize(
    "name", ["fp23", "int4:3", "int4:x", "bf16:64", "topk-0", "topk-5000", "sign-pruned-1", "2bit:4", "e3m0:"]
)
def test_what_is_no_codec_is_none_here_either(name: str) -> None:
    with pytest.raises(ConfigError) as ours:
        wire_format(name)
    assert repr(name) in str(ours.value)
    with pytest.raises(ConfigError):
        codec_from_name(name)
