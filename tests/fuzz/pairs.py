"""What two syncers of a run tell each other, and what a state directory says of its part: a real syncer that is given a
standby's words, a standby's end that is given a first's."""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tests.fuzz.examining import Target, contents
from tests.fuzz.files import directory_of, fill
from tests.fuzz.mutations import JSON, SAFETENSORS, Form, cut, joined, mutated, mutated_parts, parted, protobuf
from tests.fuzz.states import healthy
from tests.syncer.pairs import DEADLINES
from tests.syncer.runs import RUN, method

from diloco.errors import UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import ERROR_KEY, from_rpc_error, path
from diloco.protocol.pair.values import Contents, Position
from diloco.protocol.succession import Standing
from diloco.store.inspection import inspect
from diloco.syncer.server import Options, Syncer
from diloco.syncer.standby.following import Following, StandbyCredentials
from diloco.syncer.standby.pairing import Pairing
from diloco.syncer.standby.replica import FILE, Replica, read_position, write_position

CALL_S = 20.0

HEARD = 4
"""Parts that a standby takes before it hangs up."""


@functools.cache
def run_files() -> dict[str, bytes]:
    """The state of a run with versions, without the logs."""
    return {
        name.removeprefix("state/"): data for name, data in healthy().items()
        if name in ("state/store.sqlite", "state/run.json") or name.startswith("state/tensors/")
    }  # fmt: skip


def run_state(root: Path) -> Path:
    """A new state directory with that run."""
    state = root / "state"
    (state / "tensors").mkdir(parents=True)
    fill(state, run_files())
    return state


class Silent:
    """Hears of standings."""

    def standing_changed(self, standing: Standing, epoch: int, why: str) -> None:
        """As `StandingObserver`."""

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        """As `StandingObserver`."""


# --- the position -----------------------------------------------------------------------------------------------------


def position() -> Target:
    """`standby.json`."""
    with tempfile.TemporaryDirectory() as root:
        write_position(Path(root), Position("standby", True, 3, frozenset({"a/1f", "b/2"})))
        seed = (Path(root) / FILE).read_bytes()

    def read(data: bytes) -> None:
        with directory_of({FILE: data}) as directory:
            found = read_position(directory)
            assert found is not None
            with tempfile.TemporaryDirectory() as other:
                write_position(Path(other), found)
                assert read_position(Path(other)) == found

    return Target("position", (seed,), read, lambda data, random: mutated(data, JSON, random))


# --- a first, given a standby's words ---------------------------------------------------------------------------------


class FirstUnderFire:
    """Two real syncers, one of which publishes alone and one that waits for its standby."""

    def __init__(self) -> None:
        self._roots: list[tempfile.TemporaryDirectory[str]] = []
        self._syncers: dict[bytes, Syncer] = {}

    def seeds(self) -> Iterator[bytes]:
        """A standby that has nothing, and one that has all."""
        with closing(Replica(run_state(self._root()))) as store:
            held = store.contents()
        new = pb.FollowHello(run=RUN, boot=5)
        old = pb.FollowHello(
            run=RUN, boot=5, epoch=held.epoch, base=1, num_published=held.num_published, run_id=held.run_id,
            held=[pb.HeldFile(fragment=f, version=v, sha256=sha) for f, (v, sha) in sorted(held.held.items())],
            files=sorted(run_files())[:1],
        )  # fmt: skip
        words = [pb.FollowAck(serial=1).SerializeToString(), pb.FollowAck(serial=2).SerializeToString()]
        for durable in (b"one", b"both"):
            for hello in (new, old):
                yield joined([durable, hello.SerializeToString(), *words])

    def _root(self) -> Path:
        self._roots.append(tempfile.TemporaryDirectory())
        return Path(self._roots[-1].name)

    def _syncer(self, durable: bytes) -> Syncer:
        """One that serves the run."""
        syncer = self._syncers.get(durable)
        if syncer is not None and syncer.pairing.standing == "alone":
            return syncer
        if syncer is not None:
            syncer.close()
        given = Options(
            "127.0.0.1:0", run_state(self._root()), deadlines=DEADLINES, journal=False,
            durable="one" if durable == b"one" else "both",
        )  # fmt: skip
        self._syncers[durable] = syncer = Syncer(RUN, method(), given)
        return syncer

    def hear(self, data: bytes) -> None:
        """A standby says this; raises the syncer's refusal."""
        durable, *messages = parted(data) or [b""]
        if durable not in (b"one", b"both"):
            return
        syncer = self._syncer(durable)
        before = syncer.driver.ask(lambda driver: tuple(driver.state.versions))
        with grpc.insecure_channel(syncer.address) as channel:
            call: Any = channel.stream_stream(path("Follow"), None, None)(iter(messages), timeout=CALL_S)
            try:
                for num, _ in enumerate(call):
                    if num == HEARD:
                        call.cancel()
                        break
            except grpc.RpcError as error:
                assert ERROR_KEY in dict(call.trailing_metadata() or ()), f"{call.code()}: {call.details()}"
                raise from_rpc_error(error, syncer.address) from error
        if syncer.pairing.standing != "fenced":
            syncer.driver.raise_failure()
            assert syncer.driver.ask(lambda driver: tuple(driver.state.versions)) == before

    def close(self) -> None:
        """End all of it."""
        for syncer in self._syncers.values():
            syncer.close()
        for root in self._roots:
            root.cleanup()


def first() -> Target:
    """What a standby says to a first: a hello, and what it confirms."""
    it = FirstUnderFire()
    other = pb.FollowHello(run=RUN, boot=5, is_first=True, epoch=9, base=9, serves=True)
    forms = {1: protobuf(pb.FollowHello)}
    return Target(
        "first", tuple(it.seeds()), it.hear,
        lambda data, random: mutated_parts(data, lambda index: forms.get(index, _ACK) if index else None, random),
        it.close, others=(joined([b"one", other.SerializeToString()]),),
    )  # fmt: skip


_ACK = protobuf(pb.FollowAck)


# --- a standby, given a first's words ---------------------------------------------------------------------------------


class StandbyUnderFire(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A server that answers Follow with given parts, and the standby's end of the connection."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: Any) -> Any:
        """As gRPC calls it."""
        return grpc.stream_stream_rpc_method_handler(lambda stream, context: self._answer(stream))

    def _answer(self, stream: Iterator[bytes]) -> Iterator[bytes]:
        next(stream)
        yield from self._parts

    def seeds(self) -> Iterator[bytes]:
        """All of a run for a standby that has none of it, a newer record for one that has all, and the end."""
        with tempfile.TemporaryDirectory() as root, closing(Replica(run_state(Path(root)))) as store:
            for kind, copy, epoch in ((b"new", Contents(), 3), (b"old", store.contents(), 0), (b"old", Contents(), 9)):
                lacking = store.lacking(copy)
                assert lacking is not None
                groups = [joined([pb.FollowPart(boot=7).SerializeToString()])]
                with closing(lacking):
                    for name, sha256, file in lacking.files:
                        data = file.read()
                        part = pb.FollowPart(boot=7, num_bytes=len(data), file=name, sha256=sha256, lag_versions=1)
                        groups.append(joined([part.SerializeToString(), data]))
                text = lacking.state.to_json().encode()
                commit = pb.FollowPart(boot=7, num_bytes=len(text), serial=1, epoch=epoch)
                yield joined([kind, *groups, joined([commit.SerializeToString(), text])])
        yield joined([b"old", joined([pb.FollowPart(boot=7, fenced=True).SerializeToString()])])

    def hear(self, data: bytes) -> None:
        """The first says this; raises the standby's refusal."""
        kind, *groups = parted(data) or [b""]
        self._parts = [message for group in groups for message in _messages(parted(group))]
        with tempfile.TemporaryDirectory() as root:
            state = Path(root) / "state"
            if kind == b"old":
                run_state(Path(root))
            write_position_of_a_standby(state)
            before, had_run = contents(state), kind == b"old"
            try:
                self._follow(state)
            finally:
                found = inspect(state)
                assert found.starts or not had_run, f"the standby's state is broken: {found.to_dict()}"
                kept = set(contents(state).values())
                lost = [name for name, it in before.items() if name.startswith("tensors/") and it not in kept]
                assert not lost, f"{lost} are gone"
                assert {each.name for each in Path(root).iterdir()} == {"state"}

    def _follow(self, state: Path) -> None:
        failures: list[BaseException] = []
        with closing(Replica(state)) as store:
            pairing = Pairing(store, other=self._address, waits_for_both=True, silence_s=CALL_S, observer=Silent())
            following = Following(
                RUN, store, pairing, StandbyCredentials(insecure=True), end_driver=lambda: None, failed=failures.append
            )  # fmt: skip
            try:
                following.once()
            except UnreachableError as error:
                if "has ended the connection" not in str(error):
                    raise
            finally:
                following.close()
                pairing.close()

    def close(self) -> None:
        """End all of it."""
        self._server.stop(grace=None).wait()


def write_position_of_a_standby(state: Path) -> None:
    """It has followed its first before."""
    state.mkdir(exist_ok=True)
    write_position(state, Position("standby", True, 0, frozenset()))


def _messages(group: list[bytes]) -> Iterator[bytes]:
    """A part, and its payload with its checksum."""
    yield from group
    if len(group) == 2:
        yield zlib.crc32(group[1]).to_bytes(4, "little")


PART = protobuf(pb.FollowPart)


def _mutate_parts(data: bytes, random: Random) -> bytes:
    """Changes in a part, its payload, or the order of parts; often with sizes, digests and names made right again."""
    if random.random() < 0.2:
        return mutated_parts(data, lambda index: None, random)
    kind, *groups = parted(data) or [b""]
    if not groups:
        return cut(data, random)
    index = random.randrange(len(groups)) if random.random() < 0.5 else len(groups) - 1
    group = parted(groups[index])
    if not group:
        return mutated_parts(data, lambda index: None, random)
    form: Form | None = PART
    which = random.randrange(len(group))
    if which == 1:
        form = JSON if index == len(groups) - 1 else SAFETENSORS
    changed = mutated(group[which], form, random)
    group[which] = changed
    groups[index] = joined(group)
    if which == 1 and random.random() < 0.9:
        try:
            header = pb.FollowPart.FromString(group[0])
        except DecodeError:
            return joined([kind, *groups])
        header.num_bytes = len(changed)
        groups[index] = joined([header.SerializeToString(), changed])
    return joined([kind, *groups])


def standby() -> Target:
    """What a first says to its standby: parts, files of tensors, states of the run."""
    it = StandbyUnderFire()
    return Target("standby", tuple(it.seeds()), it.hear, _mutate_parts, it.close)
