"""The ranks of a learner over a syncer: each sends and receives its shard of every fragment, over its own connection.

Rank 0 has the session. What the session asks of `Sender` and `Receiver`, rank 0 has all ranks do (`Leading…`), and the
other ranks do it as they are told (`Follower`). A contribution has arrived once all shards have; a version is held once
the digests of all shards make up the one that was published.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from diloco.core.fragments import Layout
from diloco.core.global_fragment import AppliedUpdate, require_digest
from diloco.core.layout import digest_of_segments
from diloco.core.method import Method
from diloco.core.shards import Segments, dealt
from diloco.errors import DilocoError, ExchangeError, NoRoomError, UnreachableError, VersionError
from diloco.exchange.base import FlatModel
from diloco.exchange.dialling import Dialler
from diloco.exchange.group import Group, as_bytes
from diloco.exchange.lanes import Command, CommandLane, CommandLanes, RankTask, ShardTransfer
from diloco.exchange.remote.messages import pull_request, push_header
from diloco.exchange.remote.transfers import FetchResult, Key, Payload, Receiver, Sender, key_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of
from diloco.protocol.contribution import Contribution
from diloco.protocol.session import requests
from diloco.protocol.session.joining import GONE_TIMEOUT_S


class _Upload(RankTask):
    """This rank's shard of a contribution. `payload`: None: the training thread may have yet to offer it."""

    def __init__(self, sender: Sender, header: pb.PushHeader, payload: Payload | None, *, again: bool) -> None:
        self._sender, self._header, self._payload, self._again = sender, header, payload, again

    def work(self) -> None:
        header = self._header
        payload = self._payload or self._sender.awaited((header.incarnation, header.fragment, header.number))
        self._sender.upload(header, payload, again=self._again)


class _Fetch(RankTask):
    """This rank's shard of a version. `download`: what was fetched, if all ranks have the same version."""

    def __init__(self, receiver: Receiver, request: pb.PullRequest) -> None:
        self._receiver, self._request = receiver, request
        self.download: FetchResult

    def work(self) -> list[Any]:
        self.download = self._receiver.pull(self._request)
        update, advanced = self.download.update, self.download.advanced
        assert advanced is not None
        return [update.base, update.version, update.lossless, advanced.segments.hex()]

    def settle(self, said: Sequence[Any], group: Group) -> None:
        for rank, (*version, _) in enumerate(said):
            if version != said[0][:-1]:
                raise VersionError(
                    f"rank 0 was sent version {said[0][1]} of fragment {self._request.fragment} and rank {rank} "
                    f"version {version[1]}; fetch it again."
                )
        require_digest(self.download.update, digest_of_segments(b"".join(bytes.fromhex(each[-1]) for each in said)))


class FetchedShards:
    """The shards of versions that were fetched and that the training thread has not taken in yet.

    An incarnation fetches a version once. The next one may fetch the same version again, before the training thread has
    heard of either.
    """

    def __init__(self) -> None:
        self._by_version: dict[tuple[int, int, int], AppliedUpdate] = {}  # incarnation, fragment, version
        self._incarnation = 0  # of the training thread
        self._changed = threading.Condition()
        self._is_over = False

    def put(self, incarnation: int, download: FetchResult) -> None:
        """A version is here, fetched as this incarnation."""
        update, advanced = download.update, download.advanced
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
        """A version that all ranks have, which this one may be about to put; earlier ones, and what earlier
        incarnations have fetched, are not asked for any more.

        Arguments:
            incarnation: which starts from it; None: the one that has started last received it.

        Raises:
            ExchangeError: rank 0 is gone.
        """
        with self._changed:
            self._incarnation = incarnation or self._incarnation
            wanted = self._incarnation, fragment, version
            self._changed.wait_for(lambda: wanted in self._by_version or self._is_over)
            if wanted not in self._by_version:
                raise ExchangeError("rank 0 of this learner is gone; start all of its ranks again.")
            found = self._by_version.pop(wanted)
            self._by_version = {
                key: each for key, each in self._by_version.items()
                if key[0] >= wanted[0] and (key[1] != fragment or key > wanted)
            }  # fmt: skip
        return found


class LeadingSender(Sender):
    """On rank 0: sends the shards of all ranks."""

    def __init__(self, dialler: Dialler, spans: Sequence[tuple[slice, int]], lane: CommandLane) -> None:
        super().__init__(dialler, spans)
        self._lane = lane
        self._dropped: list[Key] = []
        self._refused = False

    def drop(self, c: Contribution) -> None:
        super().drop(c)
        self._dropped.append(key_of(c))

    def push(self, call: requests.Push) -> None:
        header = push_header(call)
        if (payload := self.kept(key_of(call.contribution))) is None:
            return
        dropped, self._dropped = self._dropped, []
        command = {
            "push": header.SerializeToString().hex(),
            "at": self._dialler.place,
            "dropped": dropped,
            "again": self._refused,
        }
        again, self._refused = self._refused, False
        try:
            self._lane.lead(command, _Upload(self, header, payload, again=again))
        except DilocoError as error:
            self._refused = not isinstance(error, UnreachableError | NoRoomError)
            raise


class LeadingReceiver(Receiver):
    """On rank 0: fetches the shards of all ranks."""

    def __init__(
        self, dialler: Dialler, layout: Layout, method: Method, shards: Sequence[Segments], lane: CommandLane
    ) -> None:
        super().__init__(dialler, layout, method, shards)
        self._lane = lane

    def fetch(self, call: requests.Fetch) -> FetchResult:
        request = pull_request(call)
        if request.static:
            return self.pull(request)
        job = _Fetch(self, request)
        self._lane.lead({"pull": request.SerializeToString().hex(), "at": self._dialler.place}, job)
        return job.download


class Follower:
    """On the other ranks: does what rank 0 tells, on a thread for each lane.

    Arguments:
        model: this rank's shards of the model that initialises the run; None: another learner does.

    Attributes:
        sender: has this rank's shards of contributions.
        fetched: versions that are here.
    """

    def __init__(
        self, dialler: Dialler, layout: Layout, method: Method, lanes: CommandLanes, model: FlatModel | None
    ) -> None:
        spans, shards = divided(layout, method, lanes)
        self.sender, self.fetched = Sender(dialler, spans), FetchedShards()
        self.receiver = Receiver(dialler, layout, method, shards)
        self._dialler, self._model = dialler, model
        self._threads = [
            threading.Thread(target=partial(self._follow, lane, job_of), name=f"diloco-follow-{name}", daemon=True)
            for name, lane, job_of in (("send", lanes.send, self._sends), ("receive", lanes.receive, self._receives))
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, lane: CommandLane, job_of: Callable[[Command], RankTask]) -> None:
        try:
            lane.follow(job_of)
        except ExchangeError:  # rank 0 is gone: the training thread finds out at its next boundary
            self.fetched.close()

    def _sends(self, command: Command) -> RankTask:
        self._dialler.move(command["at"])
        for key in command["dropped"]:
            self.sender.forget(tuple(key))
        header = pb.PushHeader.FromString(bytes.fromhex(command["push"]))
        return _Upload(self.sender, header, None, again=command["again"])

    def _receives(self, command: Command) -> RankTask:
        if "model" in command:
            assert self._model is not None
            fragment, owner = command["model"]
            return ShardTransfer(as_bytes(self._model.fragments[fragment]), owner)
        self._model = None  # the run has it
        self._dialler.move(command["at"])
        return _Follow(self, pb.PullRequest.FromString(bytes.fromhex(command["pull"])))

    def close(self, timeout_s: float) -> None:
        """Follow rank 0 to its end of the run, for which it has this time; hang up if it takes longer than it can."""
        self.sender.close()  # the training thread offers nothing more
        give_up_at = time.monotonic() + timeout_s + 2 * GONE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        self._dialler.close()


class _Follow(_Fetch):
    """Another rank than 0 takes in what it has fetched once all ranks have."""

    def __init__(self, follower: Follower, request: pb.PullRequest) -> None:
        super().__init__(follower.receiver, request)
        self._follower = follower

    def settle(self, said: Sequence[Any], group: Group) -> None:
        super().settle(said, group)
        self._follower.receiver.take(self.download)
        self._follower.fetched.put(self._request.incarnation, self.download)


def divided(layout: Layout, method: Method, lanes: CommandLanes) -> tuple[list[tuple[slice, int]], list[Segments]]:
    """Of every fragment, the bytes of a contribution that this rank sends, with its size, and what it fetches."""
    shards = dealt((fragment.numel for fragment in layout.fragments), lanes.num_ranks)
    spans = [(each.payload(method.up, lanes.rank), method.up.encoded_bytes(each.num_elements)) for each in shards]
    return spans, [each.segments(lanes.rank) for each in shards]


def sharded_parts(model: FlatModel, static: memoryview, lanes: CommandLanes) -> Iterator[memoryview]:
    """On rank 0: the whole model that initialises a run, shard by shard, then its static tensors."""
    for index, own in enumerate(model.fragments):
        for owner in range(lanes.num_ranks):
            transfer = ShardTransfer(as_bytes(own), owner)
            lanes.receive.lead({"model": [index, owner]}, transfer)
            yield bytes_of(transfer.received)
    yield static
