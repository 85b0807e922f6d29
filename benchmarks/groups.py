"""Groups of reinforcement learning through the door of a syncer, beside the heartbeats of 64 learners.

    python -m benchmarks.groups [--in-flight N] [--seconds S] [--json]

A real syncer serves a run from a directory. Two rollout workers, threads of one process, send groups of 8 completions
of 256 tokens with their rewards, each with N groups under way, up to 16 a call, which is answered once it is durable.
512 of them wait for a trainer until the end, as in a full queue; the others have no signal. 64 learners have joined and
send a heartbeat a second, from a process of their own, first alone and then beside the groups.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import diloco
from benchmarks.__main__ import machine
from benchmarks.processes import SyncerProcess, run_file
from diloco.core.layout import digest
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup
from diloco.exchange.wire.values import message_of
from diloco.protocol.groups import digest_of
from diloco.protocol.leases import GroupRules

RUN, WIDTH = "groups", 16
NAMES = [f"beats-{number}" for number in range(64)]
NUM_WORKERS = 2
GROUP_SIZE, NUM_TOKENS = 8, 256
A_CALL, WAITING = 16, 512
RULES = GroupRules("0" * 64, 1000, GROUP_SIZE, 64, NUM_TOKENS, max_staleness=4, queue=100_000, inline=True)


@dataclass(frozen=True)
class Row:
    """One stretch.

    Attributes:
        in_flight: groups of each worker under way; 0: there are no groups.
        groups_per_s, mb_per_s: acknowledged.
        answer_s: from a call to its answer, median.
        heartbeats: sent, and how long their answers took.
    """

    in_flight: int
    groups_per_s: float
    mb_per_s: float
    answer_s: float
    heartbeats: int
    median_s: float
    p99_s: float
    worst_s: float


class Heart:
    """The heartbeats of all learners."""

    def __init__(self, address: str, layout: str) -> None:
        self._connection = Connection(address, insecure=True)
        self._took_s: list[float] = []
        for process, name in enumerate(NAMES, 1):
            self._connection.call("joins", "Join", _join(name, process, layout), pb.JoinReply)
        for part in range(4):
            threading.Thread(target=self._beat, args=(part,), daemon=True).start()

    def _beat(self, part: int) -> None:
        while True:
            began = time.monotonic()
            for process, name in list(enumerate(NAMES, 1))[part::4]:
                beat = pb.HeartbeatRequest(run=RUN, learner=name, incarnation=1, process=process, versions=[0])
                sent = time.monotonic()
                self._connection.call("control", "Heartbeat", beat, pb.HeartbeatReply)
                self._took_s.append(time.monotonic() - sent)
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))

    def stretch(self, seconds: float) -> list[float]:
        """What the answers of so many seconds took."""
        first = len(self._took_s)
        time.sleep(seconds)
        return sorted(self._took_s[first:])


_heart: Heart | None = None


def _stretch(address: str, layout: str, seconds: float) -> list[float]:
    """`Heart.stretch`, in the process of the learners, which join with the first call."""
    global _heart  # noqa: PLW0603 - of a process that does nothing else
    _heart = _heart or Heart(address, layout)
    return _heart.stretch(seconds)


class Rollout:
    """One rollout worker: what it sends is always the same but for its number."""

    def __init__(self, address: str, name: str, weights: str, in_flight: int) -> None:
        self.name, self._weights, self._in_flight = name, weights, in_flight
        self._connection = Connection(address, insecure=True)
        self._order = 0
        self.took_s: list[float] = []
        self.num_groups = self.num_bytes = 0

    def _lease(self) -> list[int]:
        self._order += 1
        request = pb.WorkRequest(
            run=RUN, learner=self.name, role="rollout", process=1, order=self._order, digest=RULES.digest,
            wants=self._in_flight,
        )  # fmt: skip
        return list(self._connection.call("control", "Work", request, pb.WorkReply).numbers)

    def _group(self, number: int) -> pb.MadeGroup:
        num = GROUP_SIZE * NUM_TOKENS
        data = CompletionGroup(
            number, "sums", 0, (0,), self._weights, "0" * 64, 1.0, torch.ones(32, dtype=torch.int32),
            torch.randint(0, 1000, (num,), dtype=torch.int32), torch.full((GROUP_SIZE,), NUM_TOKENS, dtype=torch.int32),
            torch.zeros(GROUP_SIZE, dtype=torch.bool), -torch.rand(num),
        ).to_bytes()  # fmt: skip
        return pb.MadeGroup(
            number=number, task="sums", versions=[0], weights=self._weights, data=data,
            rewards=[float(number < WAITING and index % 2) for index in range(GROUP_SIZE)],
        )  # fmt: skip

    def _send(self, numbers: list[int]) -> None:
        groups = [self._group(number) for number in numbers]
        request = pb.GroupsRequest(run=RUN, learner=self.name, process=1, groups=groups)
        sent = time.monotonic()
        self._connection.call("contributions", "Groups", request, pb.GroupsReply, timeout_s=60.0)
        self.took_s.append(time.monotonic() - sent)
        self.num_groups += len(groups)
        self.num_bytes += sum(len(group.data) for group in groups)

    def work(self, until_s: float) -> None:
        """Send groups until then."""
        with ThreadPoolExecutor(self._in_flight) as pool:
            while time.monotonic() < until_s:
                numbers = self._lease()
                list(
                    pool.map(self._send, (numbers[first : first + A_CALL] for first in range(0, len(numbers), A_CALL)))
                )


def _join(name: str, process: int, layout: str) -> pb.JoinRequest:
    return pb.JoinRequest(run=RUN, learner=name, layout=layout, process=process)


@contextmanager
def _served() -> Iterator[tuple[str, str, str]]:
    """A syncer's address, its model's layout, and the digest of the weights."""
    with tempfile.TemporaryDirectory(prefix="diloco-groups-") as name:
        syncer = SyncerProcess(Path(name), run_file(RUN, preset="AsyncDiLoCo", sync_every=10))
        try:
            model = nn.Linear(WIDTH, WIDTH, bias=False)
            exchange = diloco.connect(syncer.address, run=RUN, learner="first", initialise="if-empty")
            with diloco.Learner(model, torch.optim.SGD(model.parameters(), 0.1), exchange=exchange) as learner:
                layout = json.dumps(learner.layout.to_dict())
                weights = digest_of([digest(model.weight.detach().flatten().float())])
                yield syncer.address, layout, weights
        finally:
            syncer.kill()


def run(in_flight: list[int], seconds: float) -> list[Row]:
    """A row without groups, and one for each number of calls under way."""
    rows = []
    with (
        _served() as (address, layout, weights),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as learners,
    ):
        learners.submit(_stretch, address, layout, 1.0).result()
        groups = message_of(pb.GroupRules, RULES)
        lease = pb.LeaseRequest(
            run=RUN, learner=NAMES[0], incarnation=1, process=1, number=1, num_units=1, data_units=1,
            data_digest=RULES.digest, groups=groups,
        )  # fmt: skip
        Connection(address, insecure=True).call("joins", "Lease", lease, pb.LeaseReply)
        for num in (0, *in_flight):
            print(f"{num} groups of each worker under way …", file=sys.stderr)
            workers = [Rollout(address, f"w{index}-{num}", weights, num) for index in range(NUM_WORKERS if num else 0)]
            until_s = time.monotonic() + seconds
            threads = [threading.Thread(target=worker.work, args=(until_s,), daemon=True) for worker in workers]
            for thread in threads:
                thread.start()
            beats = learners.submit(_stretch, address, layout, seconds).result()
            for thread in threads:
                thread.join()
            took_s = [each for worker in workers for each in worker.took_s]
            mb = sum(worker.num_bytes for worker in workers) / 1e6
            median_s, p99_s = statistics.median(beats), beats[int(0.99 * len(beats))]
            num_groups, answer_s = sum(worker.num_groups for worker in workers), statistics.median(took_s or [0.0])
            rows.append(Row(num, num_groups / seconds, mb / seconds, answer_s, len(beats), median_s, p99_s, beats[-1]))
    return rows


def show(rows: list[Row], console: Console) -> None:
    """One line a stretch."""
    table = Table(box=None, pad_edge=False)
    for title in ("in flight", "groups/s", "MB/s", "answer", "heartbeats", "median", "99 %", "worst"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            str(row.in_flight), f"{row.groups_per_s:.1f}", f"{row.mb_per_s:.2f}", f"{1e3 * row.answer_s:.0f} ms",
            str(row.heartbeats), *(f"{1e3 * each:.1f} ms" for each in (row.median_s, row.p99_s, row.worst_s)),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64], help="default: 1, 16 and 64")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stretch; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    rows = run(chosen.in_flight, chosen.seconds)
    if chosen.json:
        print(json.dumps({"machine": before, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()
