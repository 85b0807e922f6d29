"""The ranks of a learner over a syncer: each sends and receives its shard of every fragment, over its own connection.

Rank 0 has the session. Its `Sender` and `Receiver` (`Leading…`) have all ranks execute the session's requests, and the
other ranks follow (`FollowingRank`). A contribution has arrived once all its shards have. A version is adopted once the
digests of all its shards give the digest that was published.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from diloco.core.fragments import Layout
from diloco.core.global_fragment import AppliedUpdate, require_digest
from diloco.core.layout import digest_of_segments
from diloco.core.method import Method
from diloco.core.shards import Segments, even_shards
from diloco.errors import DigestError, DilocoError, ExchangeError, NoRoomError, UnreachableError, VersionError
from diloco.exchange.base import FlatModel
from diloco.exchange.dialling import Dialler
from diloco.exchange.group import Group, as_bytes
from diloco.exchange.lanes import Command, CommandLane, CommandLanes, RankTask
from diloco.exchange.remote.messages import pull_request, push_header
from diloco.exchange.remote.transfers import FetchResult, Key, Receiver, Sender, key_of, num_bytes_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.session import requests
from diloco.protocol.session.joining import GONE_TIMEOUT_S

log = logging.getLogger("diloco")


def _fetch_task(receiver: Receiver, request: pb.PullRequest, take: Callable[[FetchResult], None]) -> RankTask:
    """Fetch this rank's shard of a version; it settles to the result, after `take` of it, if all ranks have fetched
    the same version."""
    fetched: list[FetchResult] = []

    def fetch() -> list[Any]:
        result = receiver.pull(request)
        fetched.append(result)
        update, advanced = result.update, result.advanced
        assert advanced is not None
        return [update.base, update.version, update.lossless, advanced.segments.hex()]

    def settle(values: Sequence[Any]) -> FetchResult:
        for rank, (*version, _) in enumerate(values):
            if version != values[0][:-1]:
                raise VersionError(
                    f"rank 0 was sent version {values[0][1]} of fragment {request.fragment} and rank {rank} version "
                    f"{version[1]}; fetch it again."
                )
        [result] = fetched
        require_digest(result.update, digest_of_segments(b"".join(bytes.fromhex(each[-1]) for each in values)))
        take(result)
        return result

    return RankTask(fetch, settle)


def _collect_task(group: Group, shard: Tensor, owner: int) -> RankTask:
    """Bring the `owner`'s shard (uint8) to rank 0, where it settles to that."""

    def settle(nums_bytes: Sequence[int]) -> Tensor:
        sizes = [num_bytes if rank == owner else 0 for rank, num_bytes in enumerate(nums_bytes)]
        part = shard if group.rank == owner else shard[:0]
        return group.collect(part, sizes, "a shard of this learner's model")

    return RankTask(shard.numel, settle)


class FetchedShards:
    """Shards of versions that were fetched, until the training thread takes them.

    An incarnation fetches a version once. The next incarnation may fetch the same version again before the training
    thread has taken either.
    """

    def __init__(self) -> None:
        self._by_version: dict[tuple[int, int, int], AppliedUpdate] = {}  # incarnation, fragment, version
        self._incarnation = 0  # of the training thread
        self._changed = threading.Condition()
        self._is_over = False

    def put(self, incarnation: int, fetched: FetchResult) -> None:
        """Add a version that was fetched by this incarnation."""
        update, advanced = fetched.update, fetched.advanced
        assert advanced is not None
        with self._changed:
            self._by_version[incarnation, update.fragment, update.version] = advanced
            self._changed.notify_all()

    def close(self) -> None:
        """No version follows."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def take(self, fragment: int, version: int, incarnation: int | None) -> AppliedUpdate:
        """Return a version that all ranks have fetched; blocks until this rank has put it. Earlier versions of the
        fragment, and those of earlier incarnations, are dropped.

        Arguments:
            incarnation: the one that starts from it; None: the one that started last received it.

        Raises:
            ExchangeError: rank 0 is lost.
        """
        with self._changed:
            self._incarnation = incarnation or self._incarnation
            wanted = self._incarnation, fragment, version
            self._changed.wait_for(lambda: wanted in self._by_version or self._is_over)
            if wanted not in self._by_version:
                raise ExchangeError("rank 0 of this learner is lost; start all of its ranks again.")
            found = self._by_version.pop(wanted)
            self._by_version = {
                key: each for key, each in self._by_version.items()
                if key[0] >= wanted[0] and (key[1] != fragment or key > wanted)
            }  # fmt: skip
        return found


class LeadingSender(Sender):
    """On rank 0: sends a contribution as the shards of all ranks, which it commands."""

    def __init__(self, dialler: Dialler, run: str, spans: Sequence[tuple[slice, int]], lane: CommandLane) -> None:
        super().__init__(dialler, run, spans)
        self._lane = lane
        self._dropped: list[Key] = []
        self._was_refused = False

    def drop(self, key: Key) -> None:
        super().drop(key)
        self._dropped.append(key)

    def push(self, call: requests.Push) -> None:
        header = push_header(self._run, call)
        if (payload := self.kept(key_of(call.contribution))) is None:
            return
        again, self._was_refused = self._was_refused, False
        dropped, self._dropped = self._dropped, []
        command = {
            "push": header.SerializeToString().hex(),
            "at": self._dialler.place,
            "dropped": dropped,
            "again": again,
        }
        try:
            self._lane.lead(command, RankTask(lambda: self.upload(header, payload, again=again)))
        except DilocoError as error:
            self._was_refused = not isinstance(error, UnreachableError | NoRoomError)
            raise


class LeadingReceiver(Receiver):
    """On rank 0: fetches a version as the shards of all ranks, which it commands."""

    def __init__(
        self, dialler: Dialler, run: str, layout: Layout, method: Method, shards: Sequence[Segments], lane: CommandLane
    ) -> None:
        super().__init__(dialler, run, layout, method, shards)
        self._lane = lane

    def fetch(self, call: requests.Fetch) -> FetchResult:
        request = pull_request(self._run, call)
        if request.static:
            return self.pull(request)
        try:
            return self._lead(request)
        except DigestError as error:
            if not request.joining or request.direct:
                raise
            log.warning("%s Fetching it again from the syncer itself.", error)
            request.direct = True  # some rank may have read it from the store
            return self._lead(request)

    def _lead(self, request: pb.PullRequest) -> FetchResult:
        command = {"pull": request.SerializeToString().hex(), "at": self._dialler.place}
        result: FetchResult = self._lane.lead(command, _fetch_task(self, request, lambda _: None))
        return result


class FollowingRank:
    """On the other ranks: executes rank 0's commands, on a thread for each lane.

    Arguments:
        model: this rank's shards of the model that initialises the run; None: another learner does.

    Attributes:
        sender: this rank's shards of contributions.
        receiver: this rank's shards of the newest global fragments.
        fetched: versions that the training thread has yet to take.
    """

    def __init__(
        self, dialler: Dialler, run: str, layout: Layout, method: Method, lanes: CommandLanes, model: FlatModel | None
    ) -> None:
        spans, shards = divided(layout, method, lanes)
        self.sender, self.fetched = Sender(dialler, run, spans), FetchedShards()
        self.receiver = Receiver(dialler, run, layout, method, shards)
        self._dialler, self._group, self._model = dialler, lanes.receive.group, model
        self._threads = [
            threading.Thread(target=partial(self._follow, lane, task_of), name=f"diloco-follow-{name}", daemon=True)
            for name, lane, task_of in (("send", lanes.send, self._send), ("receive", lanes.receive, self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, lane: CommandLane, task_of: Callable[[Command], RankTask]) -> None:
        try:
            lane.follow(task_of)
        except ExchangeError:  # rank 0 is lost: the training thread finds out at its next boundary
            self.fetched.close()

    def _send(self, command: Command) -> RankTask:
        self._dialler.move(command["at"])
        for key in command["dropped"]:
            self.sender.drop(tuple(key))
        header = pb.PushHeader.FromString(bytes.fromhex(command["push"]))
        key = header.incarnation, header.fragment, header.number
        return RankTask(lambda: self.sender.upload(header, self.sender.awaited(key), again=command["again"]))

    def _receive(self, command: Command) -> RankTask:
        if "model" in command:
            assert self._model is not None
            fragment, owner = command["model"]
            return _collect_task(self._group, as_bytes(self._model.fragments[fragment]), owner)
        self._model = None  # the run has been initialised
        self._dialler.move(command["at"])
        request = pb.PullRequest.FromString(bytes.fromhex(command["pull"]))
        return _fetch_task(self.receiver, request, partial(self._take, request.incarnation))

    def _take(self, incarnation: int, fetched: FetchResult) -> None:
        self.receiver.take(fetched)
        self.fetched.put(incarnation, fetched)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Payload bytes by kind, sent and received."""
        return num_bytes_of(self.sender, self.receiver)

    @property
    def resumed_bytes(self) -> int:
        """Payload bytes that resumed transfers did not send again."""
        return self.sender.resumed_bytes + self.receiver.resumed_bytes

    def close(self, timeout_s: float) -> None:
        """Follow rank 0 until it has left the run, for which it has this time; hang up if it takes longer."""
        self.sender.close()  # the training thread offers nothing more
        give_up_at = time.monotonic() + timeout_s + 2 * GONE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        self._dialler.close()


def divided(layout: Layout, method: Method, lanes: CommandLanes) -> tuple[list[tuple[slice, int]], list[Segments]]:
    """For every fragment: the bytes of a contribution that this rank sends and the size of them all; and the segments
    of a version that it fetches."""
    rank = lanes.group.rank
    shards = even_shards((fragment.numel for fragment in layout.fragments), lanes.group.size)
    codecs = [method.for_fragment(index).up for index in range(len(shards))]
    spans = [
        (each.payload_span(codec, rank), codec.encoded_bytes(each.num_elements))
        for each, codec in zip(shards, codecs, strict=True)
    ]
    return spans, [each.segments(rank) for each in shards]


def sharded_parts(model: FlatModel, static: memoryview, lanes: CommandLanes) -> Iterator[memoryview]:
    """On rank 0: the model that initialises a run, shard by shard, then its static tensors."""
    for index, own in enumerate(model.fragments):
        for owner in range(lanes.group.size):
            task = _collect_task(lanes.receive.group, as_bytes(own), owner)
            yield bytes_of(lanes.receive.lead({"model": [index, owner]}, task))
    yield static
