"""A first's end of a standby's connection: everything that is durable goes to the standby, which confirms it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import IO

import grpc

from diloco.errors import BusyError, CorruptPayloadError, LineageError, StandbyError, UnknownRunError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import Unpaced, frames, parse, streamed
from diloco.exchange.wire.window import LONGEST_CHUNK_BYTES
from diloco.run.sense import check_epoch
from diloco.syncer.pairing import Pairing, StandbyLink
from diloco.syncer.replica import Contents, Lacking, Replica

log = logging.getLogger("diloco.syncer")

WORD_S = 0.5
"""Between two words while there is nothing else to say."""

CATCH_UP_ROUNDS = 3
"""States that a standby gets before versions wait for it, if each brings new versions."""


class Leading:
    """Answers Follow calls, one standby at a time: a new one ends the one before.

    Arguments:
        store: what is to be had.
        pairing: decides.
    """

    def __init__(self, store: Replica, pairing: Pairing) -> None:
        self._store, self._pairing = store, pairing

    def follow(
        self, hello: pb.FollowHello, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """What goes to a standby, for as long as it is one.

        Raises:
            StandbyError: this syncer leads none. LineageError, UnknownRunError: it does not lead this one.
        """
        pairing = self._pairing
        copy = _contents_of(hello)
        if (lost := self._accept(hello, copy)) is not None:
            yield lost.SerializeToString()
            return
        link = StandbyLink(copy, pairing.boot, hello.boot)
        pairing.linked_to(link)

        def end() -> None:
            pairing.unlink(link)

        reader = threading.Thread(target=self._read, args=(link, messages, end), name="syncer-standby", daemon=True)
        if not context.add_callback(end):
            end()
        reader.start()
        try:
            yield pb.FollowPart(boot=link.boot, epoch=pairing.succession.highest).SerializeToString()
            yield from self._parts(link, hello.epoch)
        finally:
            end()

    def _accept(self, hello: pb.FollowHello, copy: Contents) -> pb.FollowPart | None:
        """Whether the caller may follow; a part: it serves the run, and this syncer no more."""
        pairing = self._pairing
        check_epoch("the other syncer", max(hello.epoch, hello.base), pairing.most_epoch)
        mine = pairing.rank()
        held = self._store.contents()
        if copy.run_id and held.run_id and copy.run_id != held.run_id:
            raise UnknownRunError(
                f"the caller holds another run of this name (id {copy.run_id}) than is served here (id {held.run_id}); "
                "give it an empty state directory."
            )
        if hello.is_first and held.run_id and hello.base > pairing.succession.epoch:
            pairing.outranked(hello.base)
        if hello.stays:
            if pairing.standing in ("fenced", "following"):
                return pb.FollowPart(boot=pairing.boot, fenced=True)
            raise LineageError(
                f"both syncers serve the run, this one in epoch {pairing.succession.epoch} and the caller in epoch "
                f"{hello.epoch}; stop the one that is not meant to, and start it with --follow."
            )
        if pairing.standing in ("following", "fenced"):
            raise StandbyError("this syncer does not serve the run, and leads no standby.")
        link = pairing.link
        if link is not None and link.peer != hello.boot and pairing.is_heard(link):
            raise BusyError("another standby follows this syncer; a run has one.")
        if hello.is_first and mine < (hello.base, copy.num_published, hello.serves, hello.boot):
            raise StandbyError("the caller has more of the run than this syncer, which has to follow it.")
        if not hello.is_first and copy.num_published > held.num_published and hello.base >= mine[0]:
            raise LineageError(
                f"the standby has {copy.num_published} versions and this syncer has {held.num_published}: its state "
                "went back; stop it, and let the standby take over."
            )
        return None

    # --- parts --------------------------------------------------------------------------------------------------------

    def _parts(self, link: StandbyLink, other_epoch: int) -> Iterator[bytes]:
        """Bring the standby up to date, agree with it, and go on."""
        num_rounds = 0
        while not link.is_over:
            if self._pairing.is_up_to_date(link):
                num_rounds = CATCH_UP_ROUNDS
            is_sync = self._agrees_next(link, num_rounds)
            is_due = is_sync or not self._pairing.is_up_to_date(link)
            lacking = self._store.lacking(link.copy) if is_due else None
            if lacking is None:
                yield from self._word(link)
                continue
            epoch = 0
            if is_sync:
                with closing(lacking):
                    epoch = self._pairing.begin_sync(other_epoch, lacking.state.record)
                lacking = self._store.lacking(link.copy)  # from here on nothing is published that the standby lacks
                assert lacking is not None
            num_rounds += 1
            with closing(lacking):
                yield from self._commit(link, lacking, epoch)
            yield from self._until_acked(link)
            if is_sync and not link.is_over:
                self._pairing.finish_sync(link, epoch)

    def _agrees_next(self, link: StandbyLink, num_rounds: int) -> bool:
        pairing = self._pairing
        is_wanted = pairing.waits_for_both or pairing.standing != "alone"
        return is_wanted and link.epoch is None and num_rounds >= CATCH_UP_ROUNDS

    def _commit(self, link: StandbyLink, lacking: Lacking, epoch: int) -> Iterator[bytes]:
        sizes = [_size(file) for _, _, file in lacking.files]
        behind = max(0, sum(version for version, _ in lacking.newest.values()) - link.copy.num_published)
        with self._pairing.changed:
            self._pairing.lag.of(behind, sum(sizes))
            electorate = self._pairing.succession.electorate
        for (name, sha256, file), size in zip(lacking.files, sizes, strict=True):
            part = pb.FollowPart(
                boot=link.boot, num_bytes=size, file=name, sha256=sha256, lag_versions=behind, lag_bytes=sum(sizes)
            )
            yield from streamed(part, _chunks(file), Unpaced())
        state = replace(lacking.state, electorate=tuple(sorted(electorate)))
        number = link.sends(lacking, electorate)
        text = memoryview(state.to_json().encode())
        yield from frames(pb.FollowPart(boot=link.boot, num_bytes=len(text), serial=number, epoch=epoch), text)

    def _until_acked(self, link: StandbyLink) -> Iterator[bytes]:
        """Words, until the standby has the newest commit."""
        while not link.is_over and link.unconfirmed:
            with self._pairing.changed:
                self._pairing.changed.wait_for(lambda: link.is_over or not link.unconfirmed, WORD_S)
            if link.unconfirmed:
                yield pb.FollowPart(boot=link.boot).SerializeToString()

    def _word(self, link: StandbyLink) -> Iterator[bytes]:
        """Wait for a write, and say that this syncer is there."""
        with self._pairing.changed:
            self._pairing.changed.wait_for(lambda: link.is_over or not self._pairing.is_up_to_date(link), WORD_S)
        yield pb.FollowPart(boot=link.boot).SerializeToString()

    # --- what the standby says ----------------------------------------------------------------------------------------

    def _read(self, link: StandbyLink, messages: Iterator[bytes], end: Callable[[], None]) -> None:
        try:
            for message in messages:
                self._pairing.acknowledged(link, parse(pb.FollowAck, message).serial)
        except (grpc.RpcError, CorruptPayloadError) as error:
            log.info("the connection of the standby has ended: %r", error)
        finally:
            end()


def _contents_of(hello: pb.FollowHello) -> Contents:
    held = {each.fragment: (each.version, each.sha256) for each in hello.held}
    return Contents(hello.run_id, hello.epoch, held, frozenset(hello.files))


def _size(file: IO[bytes]) -> int:
    file.seek(0, 2)
    size = file.tell()
    file.seek(0)
    return size


def _chunks(file: IO[bytes]) -> Iterator[memoryview]:
    while data := file.read(LONGEST_CHUNK_BYTES):
        yield memoryview(data)
