"""Push and pull through a real syncer against a bare socket, with and without TLS, as ratios measured in the same run.

A syncer process serves a model of one fragment. Learners send real contributions (header, admission, checksum, content
check, room in the spool's memory) and fetch real updates. The clock runs while a contribution is on its way; the round
then waits for the other learner, so no merge and no disk is in it: `benchmarks.versions` has those. The socket carries
as many bytes between as many processes, in turns with the syncer, and does nothing with them. Both use TLS 1.3 with the
cipher that gRPC chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tests.frames import frames
from torch import Tensor

from benchmarks.rawsocket import RawSocket, client_context, tls_of
from diloco.core.codecs import E3M0, FP32, Codec
from diloco.core.fragments import Fragment, Layout, Placement, TensorSpec
from diloco.core.method import Method
from diloco.core.outer import SGD
from diloco.core.quorum import AllLive
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.outgoing import OutgoingUpload
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.members import Deadlines
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Options, Syncer

RUN = "benchmark"
TLS_PUSH_TARGET = 0.75
_ROOT = Path(__file__).parent.parent
_PATIENT = Deadlines(lost_floor_s=3600, lost_cap_s=3600, stalled_floor_s=3600, stalled_cap_s=3600)


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows of name, value, unit, ratio, target, met; a ratio is the median over pairs of socket time ÷ own time."""
    return measure(num_bytes=32 << 20, rounds=5) if quick else measure(num_bytes=64 << 20, rounds=15)


def measure(*, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """As `run`.

    Arguments:
        num_bytes: of one contribution and one update, both fp32.
        rounds: each with two pushes and two pulls, and as many transfers on the socket.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
            folder = Path(name)
            Keyring.new(folder / "keys", RUN, ["127.0.0.1"], [("bench", "admin")], dt.timedelta(days=1))
            rows = [row for tls in (True, False) for row in _transfers(folder, tls, num_bytes, rounds)]
            return rows + _checks(num_bytes // 4)
    finally:
        torch.set_num_threads(num_threads)


# --- rows -------------------------------------------------------------------------------------------------------------


def _transfers(folder: Path, tls: bool, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    layout = _layout(num_bytes // 4)
    method = Method(name="transfer", paper="", up=FP32(), down=FP32(), outer=SGD(lr=1.0), quorum=AllLive(at_least=2))
    theta = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(0))
    payload, buffer = bytes_of(theta), memoryview(bytearray(num_bytes))
    push, pull = _Pairs(), _Pairs()
    with contextlib.ExitStack() as stack:
        syncer = stack.enter_context(serving(method, folder / f"fp32-{tls}", folder / "keys" if tls else None))
        raw = stack.enter_context(
            RawSocket(num_bytes, folder / "keys" / "syncer", syncer.cipher()) if tls else RawSocket(num_bytes)
        )
        learners = syncer.learners(layout, theta, 2)
        for round_ in range(rounds + 1):  # the first one warms up
            for learner in learners:
                push.add(lambda: raw.push(payload), lambda: learner.push(round_, theta))  # noqa: B023 - called at once
            learners[0].wait_for(round_ + 1)
            for learner in learners:
                pull.add(lambda: raw.pull(buffer), lambda: learner.pull(round_))  # noqa: B023
    kind = "TLS" if tls else "plain"
    return [
        push.row(f"push, {kind}", num_bytes, TLS_PUSH_TARGET if tls else None),
        pull.row(f"pull, {kind}", num_bytes, None),
    ]


def _checks(num_elements: int) -> list[dict[str, Any]]:
    """What a syncer does with a contribution's bytes besides receiving them; a learner checksums them too."""
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    codecs: tuple[Codec, ...] = (FP32(), E3M0())
    rows = [_speed("CRC-32", 4 * num_elements, lambda: zlib.crc32(bytes_of(x)))]
    for codec in codecs:
        payload = codec.encode(x)
        check = partial(codec.check, payload, num_elements)
        rows.append(_speed(f"content check, {codec.name}", payload.numel(), check))
    return rows


@dataclass
class _Pairs:
    """Seconds of a transfer over the socket and of the same one through the syncer, one after the other."""

    raw_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)

    def add(self, raw: Callable[[], object], own: Callable[[], object]) -> None:
        """Measure both; they take turns to go first."""
        pairs = [(raw, self.raw_s), (own, self.own_s)]
        for action, seconds in pairs if len(self.raw_s) % 2 else pairs[::-1]:
            seconds.append(_seconds(action))

    def row(self, name: str, num_bytes: int, target: float | None, skip: int = 2) -> dict[str, Any]:
        raw_s, own_s = self.raw_s[skip:], self.own_s[skip:]
        ratio = statistics.median(raw / own for raw, own in zip(raw_s, own_s, strict=True))
        return _row(name, num_bytes / statistics.median(own_s) / 1e9, "GB/s", ratio, target)


def _speed(name: str, num_bytes: int, action: Callable[[], object]) -> dict[str, Any]:
    return _row(name, num_bytes / statistics.median(_seconds(action) for _ in range(5)) / 1e9, "GB/s")


def _row(name: str, value: float, unit: str, ratio: float | None = None, target: float | None = None) -> dict[str, Any]:
    met = None if target is None or ratio is None else ratio >= target
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "target": target, "met": met}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _layout(num_elements: int) -> Layout:
    return Layout((Fragment(0, (Placement(TensorSpec("weights", (num_elements,), "float32"), 0),)),), ())


# --- a syncer and its learners, as far as bytes go --------------------------------------------------------------------


class WireLearner:
    """One learner's end of the wire."""

    def __init__(self, connection: Connection, name: str, layout: Layout) -> None:
        self._connection, self.name = connection, name
        request = pb.JoinRequest(run=RUN, learner=name, layout=json.dumps(layout.to_dict()))
        self._incarnation = connection.call("joins", "Join", request, pb.JoinReply).incarnation
        self._boot = self._beat().lineage.boot

    def _beat(self) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(run=RUN, learner=self.name, incarnation=self._incarnation)
        return self._connection.call("control", "Heartbeat", request, pb.HeartbeatReply)

    def push(self, round_: int, payload: Tensor, fragment: int = 0) -> None:
        header = pb.PushHeader(
            run=RUN,
            learner=self.name,
            incarnation=self._incarnation,
            fragment=fragment,
            number=round_ + 1,
            round=round_,
            base=round_,
            tokens=1,
            steps=1,
            trained=round_ + 1,
            num_bytes=payload.numel() * payload.element_size(),
            step=round_ + 1,
            boot=self._boot,
        )
        with OutgoingUpload(header, lambda: [bytes_of(payload)]) as upload:
            self._connection.upload("contributions", "Push", upload.messages(), pb.PushReply, heard=upload.heard)

    def pull(self, base: int, fragment: int = 0) -> None:
        request = pb.PullRequest(
            run=RUN, learner=self.name, incarnation=self._incarnation, fragment=fragment, base=base
        )  # fmt: skip
        self._connection.pull("updates", request)

    def wait_for(self, version: int, fragment: int = 0) -> None:
        """Until it is published.

        Raises:
            RuntimeError: a contribution was rejected instead.
        """
        while (standing := self._beat().standing).versions[fragment] < version:
            if rejected := [verdict.reason for verdict in standing.verdicts if verdict.HasField("reason")]:
                raise RuntimeError(f"a contribution was not accepted: {rejected[0]}")
            time.sleep(0.01)


class ServingSyncer:
    """A syncer process, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], address: str, keys: Path | None) -> None:
        self._process, self._address, self._keys = process, address, keys
        self.connections: list[Connection] = []

    def learners(self, layout: Layout, theta: Tensor, number: int) -> list[WireLearner]:
        """Give the run its model, with the same values in all fragments; learners that have joined, with connections of
        their own."""
        keys = None if self._keys is None else self._keys / "bench"
        self.connections = [Connection(self._address, keys=keys) for _ in range(number)]
        parts = [bytes_of(theta)] * len(layout.fragments) + [memoryview(save({}))]  # and no static tensors
        header = pb.InitialiseHeader(
            run=RUN,
            learner="0",
            layout=json.dumps(layout.to_dict()),
            source="benchmark",
            part_bytes=[len(part) for part in parts],
        )
        self.connections[0].upload("joins", "Initialise", frames(header, *parts), pb.InitialiseReply)
        return [WireLearner(connection, str(index), layout) for index, connection in enumerate(self.connections)]

    def cipher(self) -> str:
        """What its port answers to an offer of all ciphers of TLS 1.3."""
        assert self._keys is not None
        host, port = self._address.split(":")
        keys = self._keys / "bench"
        context = client_context(keys)
        context.load_cert_chain(keys / "cert.pem", keys / "key.pem")
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as connection:
            return tls_of(connection)[1]

    def memory_bytes(self, field_: str) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field_}:"))


@contextlib.contextmanager
def serving(method: Method, state: Path, keys: Path | None) -> Iterator[ServingSyncer]:
    """A fresh syncer process; with TLS if there is a directory with certificates."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.transfer",
            "--serve",
            json.dumps(method.to_dict()),
            str(state),
            str(keys or ""),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"the syncer did not start (exit code {process.wait()})")
        syncer = ServingSyncer(process, address, keys)
        yield syncer
        for connection in syncer.connections:
            connection.close()
    finally:
        process.communicate()  # closes its input, which ends it


def _serve(method: Method, state: Path, keys: Path | None) -> None:
    torch.set_num_threads(1)
    own = None if keys is None else keys / "syncer"
    options = Options(address="127.0.0.1:0", state_dir=state, keys=own, deadlines=_PATIENT, keep_s=60)
    with Syncer(RUN, method, options) as syncer:
        print(syncer.address, flush=True)
        stop = threading.Event()
        threading.Thread(target=_set_at_the_end_of_input, args=(stop,), daemon=True).start()
        syncer.wait(stop)


def _set_at_the_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller transfers")
    parser.add_argument("--serve", nargs=3, metavar=("METHOD", "STATE", "TRUST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        method, state, keys = arguments.serve
        _serve(Method.from_dict(json.loads(method)), Path(state), Path(keys) if keys else None)
        return
    for row in run(arguments.quick):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:6.2f} of a socket"
        target = "" if row["target"] is None else f"target {row['target']:.2f} {'met' if row['met'] else 'MISSED'}"
        print(f"{row['name']:52s}{row['value']:8.2f} {row['unit']:7s}{ratio}  {target}")


if __name__ == "__main__":
    main()
