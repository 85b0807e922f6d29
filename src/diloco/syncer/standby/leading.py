"""The first's end of a standby's connection: it sends every durable state to the standby, which confirms it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import IO

import grpc

from diloco.errors import CorruptPayloadError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES, Unpaced, frames, parse, streamed
from diloco.protocol.pair.endpoints import FirstEndpoint
from diloco.protocol.pair.values import Commit, Contents, Hello, StandbyConnection
from diloco.run.validation import check_epoch
from diloco.syncer.standby.pairing import Pairing
from diloco.syncer.standby.replica import MissingParts, Replica

log = logging.getLogger("diloco.syncer")

KEEPALIVE_S = 0.5
"""Between two messages without a new state."""


class Leading:
    """Answers Follow calls, one standby at a time: a new call ends the earlier one.

    Arguments:
        store: the state to send.
        pairing: hosts the pair core.
    """

    def __init__(self, store: Replica, pairing: Pairing) -> None:
        self._store, self._pairing = store, pairing
        self._end = FirstEndpoint(pairing.core)

    def follow(
        self, hello: pb.FollowHello, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The messages to a standby, until its connection ends.

        Raises:
            PayloadError: an epoch is out of range. Others as `FirstEndpoint.accept`.
        """
        pairing = self._pairing
        check_epoch("the other syncer", max(hello.epoch, hello.base), pairing.most_epoch)
        link = pairing.event(lambda now: self._end.accept(now, _hello_of(hello)))
        if link is None:
            yield pb.FollowPart(boot=pairing.succession.boot, fenced=True).SerializeToString()
            return

        def end() -> None:
            pairing.unlink(link)

        reader = threading.Thread(target=self._read, args=(link, messages, end), name="syncer-standby", daemon=True)
        if not context.add_callback(end):
            end()
        reader.start()
        try:
            yield pb.FollowPart(boot=link.boot, epoch=pairing.succession.highest).SerializeToString()
            yield from self._parts(link)
        finally:
            end()

    # --- messages to the standby --------------------------------------------------------------------------------------

    def _parts(self, link: StandbyConnection) -> Iterator[bytes]:
        """Send each state that the standby lacks, and keepalives in between."""
        while not link.is_over:
            epoch = self._pairing.event(lambda now: self._end.next_state(now, link))
            lacking = None if epoch is None else self._store.lacking(link.copy)
            if epoch is None or lacking is None:
                yield from self._keepalive(link)
                continue
            with closing(lacking):
                yield from self._commit(link, lacking, epoch)

    def _commit(self, link: StandbyConnection, lacking: MissingParts, epoch: int) -> Iterator[bytes]:
        sizes = [_size(file) for _, _, file in lacking.files]
        behind, electorate = self._pairing.event(lambda now: self._end.begins(now, link, lacking.newest, sum(sizes)))
        for (name, sha256, file), size in zip(lacking.files, sizes, strict=True):
            part = pb.FollowPart(
                boot=link.boot, num_bytes=size, file=name, sha256=sha256, lag_versions=behind, lag_bytes=sum(sizes)
            )
            yield from streamed(part, _chunks(file), Unpaced())
        state = replace(lacking.state, electorate=tuple(sorted(electorate)))
        commit = Commit(lacking.serial, lacking.state.row["run_id"], lacking.newest, electorate)
        number = self._pairing.event(lambda _: link.sends(commit))
        text = memoryview(state.to_json().encode())
        yield from frames(pb.FollowPart(boot=link.boot, num_bytes=len(text), serial=number, epoch=epoch), text)

    def _keepalive(self, link: StandbyConnection) -> Iterator[bytes]:
        """Wait for a new state, for a short time, and show that this syncer lives."""
        with self._pairing.changed:
            self._pairing.changed.wait_for(lambda: self._end.has_news(link), KEEPALIVE_S)
        if not link.is_over:
            yield pb.FollowPart(boot=link.boot).SerializeToString()

    # --- messages from the standby ------------------------------------------------------------------------------------

    def _read(self, link: StandbyConnection, messages: Iterator[bytes], end: Callable[[], None]) -> None:
        try:
            for message in messages:
                number = parse(pb.FollowAck, message).serial
                self._pairing.event(partial(self._end.acknowledged, link=link, number=number))
        except (grpc.RpcError, CorruptPayloadError) as error:
            log.info("the connection of the standby has ended: %r", error)
        finally:
            end()


def _hello_of(hello: pb.FollowHello) -> Hello:
    held = {each.fragment: (each.version, each.sha256) for each in hello.held}
    contents = Contents(hello.run_id, hello.epoch, held, frozenset(hello.files))
    return Hello(hello.boot, hello.is_first, hello.epoch, hello.base, hello.stays, hello.serves, contents)


def _size(file: IO[bytes]) -> int:
    file.seek(0, 2)
    size = file.tell()
    file.seek(0)
    return size


def _chunks(file: IO[bytes]) -> Iterator[memoryview]:
    while data := file.read(LONGEST_CHUNK_BYTES):
        yield memoryview(data)
