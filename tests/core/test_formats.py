"""Formats by name: the sizes that the docs state, without torch, and names that no codec has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.core.codecs import CODECS, SEGMENT_ELEMENTS
from diloco.core.codecs.formats import FAMILIES, wire_format
from diloco.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "protocol.md"
ROW = re.compile(r"^\| `([^`]+)` \| (yes|no) \| (\d+) \| ([\d.]+) \|", re.MULTILINE)


def test_the_page_about_formats_has_them_all_with_their_sizes() -> None:
    rows = {
        name: (lossless == "yes", int(size), float(bits))
        for name, lossless, size, bits in ROW.findall(DOCS.read_text())
    }
    assert rows.keys() == CODECS.keys()
    for name, (lossless, size, bits) in rows.items():
        assert CODECS[name].lossless == lossless
        assert wire_format(name).encoded_bytes(SEGMENT_ELEMENTS) == size
        assert wire_format(name).bits_per_value == pytest.approx(bits, abs=5.1e-5)  # rounded in the docs


def test_sizes_of_tails() -> None:
    """By hand: headers, bytes of codes that are rounded up, positions."""
    assert wire_format("int4").encoded_bytes(65) == 2 + 32 + 2 + 1
    assert wire_format("int8:32").encoded_bytes(33) == 2 + 32 + 2 + 1
    assert wire_format("2bit").encoded_bytes(4097) == 8 + 1024 + 8 + 1
    assert wire_format("topk-2").encoded_bytes(5) == 1 + 8
    assert wire_format("topk-128").encoded_bytes(4096 + 100) == 112 + 512 + 400  # all of the tail is kept: no positions
    assert [wire_format(name).encoded_bytes(0) for name in CODECS] == [0] * len(CODECS)


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; from diloco.core.codecs.formats import wire_format; wire_format('topk-64-2bit'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_of_one_family() -> None:
    for name in CODECS:
        assert sum(re.fullmatch(family.pattern, name) is not None for family in FAMILIES) == 1


@pytest.mark.parametrize(
    "name", ["fp23", "int4:3", "int4:x", "bf16:64", "topk-0", "topk-5000", "sign-pruned-1", "2bit:4", "e3m0:"]
)
def test_what_is_no_codec_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        wire_format(name)
    assert repr(name) in str(refused.value)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot have -1 elements"):
        wire_format("fp32").encoded_bytes(-1)
