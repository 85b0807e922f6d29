"""The link probe: what is timed, how sizes grow, and a real syncer that answers one at a time, within bounds, to those
who may."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.syncer.runs import RUN, method, start

from diloco.errors import AuthError, ConfigError, CorruptPayloadError, DilocoError, RunError, UnknownRunError
from diloco.exchange.connection import Connection
from diloco.exchange.probe import (
    CHANNEL,
    FIRST_BYTES,
    GROWTH,
    measure_link,
    probe,
    rate_bit_per_s,
)
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES
from diloco.exchange.wire.link_probe import MAX_PROBE_BYTES, StreamTiming, noise
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Syncer

# ------------------------------------------------------------------------------------------------------ what is timed


@pytest.mark.parametrize("num_bytes", [1, 15, 100, 1 << 16, (1 << 16) + 3, 40 * LONGEST_CHUNK_BYTES + 1])
def test_noise_has_the_size_asked_for_and_no_few_large_chunks(num_bytes: int) -> None:
    chunks = list(noise(num_bytes))
    assert sum(map(len, chunks)) == num_bytes
    assert max(map(len, chunks)) <= max(1, min(LONGEST_CHUNK_BYTES, num_bytes // 16))


def test_the_first_quarter_is_not_timed() -> None:
    now_s = 0.0

    def arriving() -> Iterator[bytes]:
        nonlocal now_s
        for i in range(16):
            now_s += 7.0 if i < 4 else 0.5  # a slow beginning
            yield bytes(10)

    timing = StreamTiming()
    assert list(timing.take(arriving(), 160, clock=lambda: now_s)) == list(range(10, 170, 10))
    assert timing == StreamTiming(120, 6.0)
    assert list(timing.take(iter([]), 0)) == []
    assert timing == StreamTiming(0, 0.0)


@pytest.mark.parametrize(("sizes", "words"), [([5, 4], "ended after 9 of 10"), ([5, 6], "more than the 10 bytes")])
def test_another_number_of_bytes_is_an_error(sizes: list[int], words: str) -> None:
    with pytest.raises(CorruptPayloadError, match=words):
        list(StreamTiming().take(map(bytes, sizes), 10))


@pytest.mark.parametrize("bit_per_s", [1e5, 1e7, 1e9])
def test_sizes_grow_until_a_probe_takes_long_enough_and_the_rate_is_the_links(bit_per_s: float) -> None:
    sizes = []

    def link(size: int) -> tuple[int, float]:
        sizes.append(size)
        return 3 * size // 4, (3 * size // 4) * 8 / bit_per_s

    assert rate_bit_per_s(link, seconds=1.0, repeats=3) == pytest.approx(bit_per_s)
    assert sizes[0] == FIRST_BYTES
    assert all(2 * before <= after <= GROWTH * before for before, after in itertools.pairwise(sizes[:-2]))
    assert sizes[-1] == sizes[-2] == sizes[-3]
    assert 8 * sizes[-1] / bit_per_s >= 1.0
    assert 8 * sum(sizes) / bit_per_s < 16.0  # seconds in all: three times the 5 of the first one, at 100 kbit/s


def test_a_link_too_fast_for_the_largest_probe_is_measured_by_it() -> None:
    assert rate_bit_per_s(lambda size: (size, 8 * size / 1e12), seconds=1.0, repeats=1) == pytest.approx(1e12)
    with pytest.raises(RunError, match="too fast to be timed"):
        rate_bit_per_s(lambda size: (size, 0.0), seconds=1.0, repeats=1)


# ------------------------------------------------------------------------------------------------------ a real syncer


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with start(tmp_path, method()) as it:
        yield it


@pytest.fixture
def connection(syncer: Syncer) -> Iterator[Connection]:
    it = Connection(syncer.address)
    yield it
    it.close()


def test_a_running_syncer_without_a_model_is_measured(syncer: Syncer) -> None:
    speed = measure_link(syncer.address, run=RUN, learner="a", seconds=0.02, repeats=1)
    assert min(speed.up_bit_per_s, speed.down_bit_per_s, speed.latency_s) > 0
    assert 2 * FIRST_BYTES <= speed.num_bytes <= 4 * MAX_PROBE_BYTES


def header(up_bytes: int = 0, down_bytes: int = 0, run: str = RUN) -> pb.ProbeHeader:
    return pb.ProbeHeader(run=run, learner="a", up_bytes=up_bytes, down_bytes=down_bytes)


def test_both_ways_in_one_call_and_the_syncer_times_what_it_receives(connection: Connection) -> None:
    reply, timing = probe(connection, header(1 << 20, 1 << 16))
    assert reply.num_bytes == 3 << 18
    assert timing.num_bytes == 3 << 14
    assert min(reply.seconds, timing.seconds) > 0


REFUSED: dict[str, tuple[pb.ProbeHeader, type[DilocoError], str]] = {
    "too large up": (header(MAX_PROBE_BYTES + 1), ConfigError, "send up to 268435456"),
    "too large down": (header(0, MAX_PROBE_BYTES + 1), ConfigError, "too large"),
    "another run": (header(run="other"), UnknownRunError, "'tiny', not 'other'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: str, connection: Connection) -> None:
    wrong, expected, words = REFUSED[kind]
    with pytest.raises(expected, match=words):
        probe(connection, wrong)
    probe(connection, header(100, 100))


def test_one_at_a_time_and_one_that_breaks_off_makes_room(connection: Connection, syncer: Syncer) -> None:
    stub: Any = connection._channel(CHANNEL).stream_stream("/diloco.v1.Syncer/Probe", None, None)
    call = stub(iter([header(0, MAX_PROBE_BYTES).SerializeToString()]))
    next(call)  # it has begun, and cannot end: its rest is not read
    second = Connection(syncer.address)
    with pytest.raises(RunError, match="another learner's link"):
        probe(second, header())
    call.cancel()
    while True:
        try:
            probe(second, header())
            break
        except RunError:  # the syncer has not heard yet
            continue
    second.close()


def test_only_who_may_train_may_probe_and_only_as_itself(tmp_path: Path) -> None:
    keys, names = tmp_path / "keys", [("eye", "viewer"), ("a", "learner"), ("b", "learner")]
    Keyring.new(keys, RUN, ["127.0.0.1"], names, dt.timedelta(days=1))  # type: ignore[arg-type]
    with start(tmp_path, method(), keys=keys / "syncer") as syncer:
        for name, words in (("eye", "role"), ("b", "only, not for 'a'")):
            with pytest.raises(AuthError, match=words):
                measure_link(syncer.address, run=RUN, learner="a", keys=keys / name)
        connection = Connection(syncer.address, keys=keys / "a")
        probe(connection, header(10, 10))
        connection.close()
