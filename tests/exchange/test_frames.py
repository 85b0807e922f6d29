"""Bulk bytes on a stream: what was sent is what arrives, or an error says why not."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError, CorruptPayloadError
from diloco.exchange.wire import frames as wire
from diloco.exchange.wire import syncer_pb2 as pb

HEADER = pb.PullHeader(num_bytes=7, digest="abc")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK_BYTES", 16)


def sent(*parts: bytes) -> list[bytes]:
    return list(wire.frames(HEADER, *map(memoryview, parts)))


def received(messages: list[bytes], num_bytes: int) -> bytes:
    stream = iter(messages)
    assert wire.read_header(stream, pb.PullHeader) == HEADER
    buffer = bytearray(num_bytes)
    wire.read_into(stream, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("sizes", [(0,), (1,), (7,), (8,), (16,), (17,), (100,), (5, 0, 16, 33)])
def test_parts_arrive_one_after_the_other(sizes: tuple[int, ...]) -> None:
    parts = [bytes(range(start, start + size)) for start, size in enumerate(sizes)]
    messages = sent(*parts)
    assert all(len(message) <= 16 for message in messages[1:-1])
    assert received(messages, sum(sizes)) == b"".join(parts)


def test_the_checksum_is_the_one_documented() -> None:
    chunks = [bytes(range(16)), bytes(range(100, 111))]
    first = sum(struct.unpack("<2Q", chunks[0]))
    second = sum(struct.unpack("<2Q", chunks[1] + bytes(5)))
    expected = (first * 0x9E3779B97F4A7C15 + second) % 2**64
    assert sent(b"".join(chunks))[-1] == struct.pack("<Q", expected)
    assert wire.checksum_of(b"") == 0
    assert wire.checksum_of(b"\xff" * 8, 1) == 0x9E3779B97F4A7C14  # wraps around


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_flipped_bit_is_noticed(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    chunks = list(wire.frames(HEADER, memoryview(damaged)))[:-1]
    with pytest.raises(CorruptPayloadError, match="checksum"):
        received([*chunks, sent(payload)[-1]], len(payload))


def _swapped(messages: list[bytes]) -> list[bytes]:
    return [messages[0], messages[2], messages[1], *messages[3:]]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_swapped, "checksum of 40 bytes does not match"),
        (lambda messages: messages[:2], "ended after 16 of 40 bytes"),
        (lambda messages: messages[:-1], "does not end with its checksum"),
        (lambda messages: [*messages[:-1], messages[-1][:4]], "does not end with its checksum"),
        (lambda messages: [*messages[:3], *messages[1:]], "more than the 40 bytes"),
    ],
)
def test_damage_is_named(damage: Callable[[list[bytes]], list[bytes]], says: str) -> None:
    messages = damage(sent(bytes(range(40))))
    with pytest.raises(CorruptPayloadError, match=says):
        received(messages, 40)


@pytest.mark.parametrize("stream", [iter([]), iter([b"\xff\xff"])], ids=["nothing", "no header"])
def test_a_stream_begins_with_its_header(stream: Iterator[bytes]) -> None:
    with pytest.raises(CorruptPayloadError):
        wire.read_header(stream, pb.PullHeader)


def test_tensors_are_sent_and_received_where_they_lie() -> None:
    tensor = torch.arange(5.0)
    view = wire.bytes_of(tensor)
    tensor[0] = 7.0
    assert wire.tensor_of(view, torch.float32)[0] == 7.0
    with pytest.raises(ConfigError, match="contiguous"):
        wire.bytes_of(torch.zeros(4, 4).t())


@pytest.mark.parametrize("num_bytes", [0, 5, (4 << 20) + 3], ids=["none", "few", "in huge pages"])
def test_room_is_zero_and_writable(num_bytes: int) -> None:
    buffer = wire.room(num_bytes)
    assert len(buffer) == num_bytes
    tensor = wire.tensor_of(buffer)
    assert not tensor.any()
    tensor.fill_(3)
    assert bytes(buffer) == b"\3" * num_bytes
