"""Chaos of two syncers that share a run in a bucket: kills, freezes and partitions of either and of the bucket.

    python -m tests.chaos.standby --seed 7 --faults 200

Two syncers as processes, a bucket server, and two learners that train on through all of it. Faults come one after the
other, some together with requests that the bucket refuses, executes without an answer, or executes late; after each one
the run has to have a first and a standby again, and to publish. In the end no version is lost and none was published
twice, each epoch was served by one of the two, and the learners, which were never evicted, have the very bits of a run
of as many steps in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.processes import until
from tests.syncer.runs import RUN, LearnerThreads, method, train
from tests.syncer.standbys import LEASE_S, Pair

import diloco
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb

MORE_STEPS = 16
"""Inner steps after the last fault."""

BESIDES = 0.25
"""Share of faults that come with a fault of requests: refused, or executed without an answer."""

AND_REQUESTS = ", and requests"
"""Ends the kind of such a fault."""


class Chaos:
    """The faults of a seed.

    Attributes:
        first, standby: as they were last.
        takeovers: by kind, seconds from the fault until the other syncer serves.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self._draws = pair, random.Random(seed)
        self.first, self.standby = pair.a, pair.b
        self.takeovers: list[tuple[str, float]] = []
        self._kind = ""

    def strike(self) -> str:
        """One fault, and recovery; returns its kind."""
        self._settle()
        before = sum(self.pair.manifest().versions)
        kinds = [(kind, weight) for kind, (weight, _) in KINDS.items()]
        self._kind = self._draws.choices(*zip(*kinds, strict=True))[0]
        besides = self._draws.random() < BESIDES and self._kind != "late request"
        if besides:
            self.pair.server.fault(self._draws.choice(("status", "lost")), num=self._draws.randint(1, 3))
        KINDS[self._kind][1](self)
        self._settle()
        until(lambda: sum(self.pair.manifest().versions) > before, "nothing is published")
        return f"{self._kind}{AND_REQUESTS}" if besides else self._kind

    def _settle(self) -> None:
        """One of the two serves and the other one waits."""

        def is_settled() -> bool:
            standings = {it: it.standing() for it in (self.pair.a, self.pair.b)}
            for it, standing in standings.items():
                if standing == "serving":
                    self.first, self.standby = it, self.pair.other(it)
            return sorted(map(str, standings.values())) == ["serving", "waiting"]

        until(is_settled, f"after {self._kind!r} the two do not settle")

    def rest(self, least: float, most: float) -> None:
        """Wait for so many leases."""
        time.sleep(LEASE_S * self._draws.uniform(least, most))

    def until_taken_over(self, began_s: float) -> None:
        """The standby serves."""
        self.pair.until_serving(self.standby)
        self.takeovers.append((self._kind, time.monotonic() - began_s))

    # --- kinds --------------------------------------------------------------------------------------------------------

    def kill_first(self) -> None:
        """SIGKILL until the standby serves; back as its standby."""
        began_s = time.monotonic()
        self.first.kill()
        self.until_taken_over(began_s)
        self.first.start()

    def kill_briefly(self) -> None:
        """SIGKILL, and started again at once."""
        self.first.kill()
        self.first.start()

    def kill_standby(self) -> None:
        """SIGKILL, and started again within a lease."""
        self.standby.kill()
        self.rest(0.1, 1.0)
        self.standby.start()

    def kill_both(self) -> None:
        """SIGKILL of both; started again in any order."""
        both = [self.first, self.standby]
        for it in both:
            it.kill()
        self._draws.shuffle(both)
        for it in both:
            it.start()

    def stop_first(self) -> None:
        """SIGTERM until the standby serves; back as its standby."""
        self.first.terminate()
        self.until_taken_over(time.monotonic())
        self.first.start()

    def freeze_first(self) -> None:
        """SIGSTOP until the standby serves, then SIGCONT."""
        began_s = time.monotonic()
        self.first.freeze()
        self.until_taken_over(began_s)
        self.rest(0.0, 0.5)
        self.first.thaw()

    def nap_first(self) -> None:
        """SIGSTOP, SIGCONT within about a lease."""
        self.first.freeze()
        self.rest(0.1, 1.2)
        self.first.thaw()

    def freeze_standby(self) -> None:
        """SIGSTOP, SIGCONT within two leases."""
        self.standby.freeze()
        self.rest(0.5, 2.0)
        self.standby.thaw()

    def part_first(self) -> None:
        """No way from it to the bucket until the standby serves."""
        began_s = time.monotonic()
        self.first.cut_off()
        self.until_taken_over(began_s)
        self.first.heal()

    def blip_first(self) -> None:
        """The same, within about a lease."""
        self.first.cut_off()
        self.rest(0.1, 1.2)
        self.first.heal()

    def part_standby(self) -> None:
        """No way from it to the bucket within two leases."""
        self.standby.cut_off()
        self.rest(0.5, 2.0)
        self.standby.heal()

    def part_both(self) -> None:
        """No way from either to the bucket within two leases and a half."""
        both = [self.first, self.standby]
        for it in both:
            it.cut_off()
        self.rest(0.3, 2.5)
        self._draws.shuffle(both)
        for it in both:
            it.heal()

    def freeze_bucket(self) -> None:
        """SIGSTOP of the bucket server, SIGCONT within two leases and a half: what was sent meanwhile lands then."""
        os.kill(self.pair.server.pid(), signal.SIGSTOP)
        self.rest(0.3, 2.5)
        os.kill(self.pair.server.pid(), signal.SIGCONT)

    def refuse(self) -> None:
        """Up to eight requests are answered by 409, 429, 500 or 503."""
        path = self._draws.choice(("manifest.json", ""))
        status = self._draws.choice((409, 429, 500, 503))
        self.pair.server.fault("status", path=path, status=status, num=self._draws.randint(1, 8))
        until(lambda: self.pair.server.num_pending == 0, "nothing is refused")

    def lose_answers(self) -> None:
        """Up to four swaps are executed without an answer."""
        self.pair.server.fault("lost", num=self._draws.randint(1, 4))
        until(lambda: self.pair.server.num_pending == 0, "no answer is lost")

    def land_late(self) -> None:
        """A swap is executed within two leases and a half, whatever its sender has done meanwhile."""
        self.pair.server.fault("late")
        until(lambda: self.pair.server.num_waiting == 1, "no request is held")
        self.rest(0.1, 2.5)
        self.pair.server.release()

    def promote(self) -> None:
        """`diloco syncer promote`: they change places."""
        connection = Connection(self.standby.address)
        connection.call("control", "Promote", pb.PromoteRequest(run=RUN), pb.PromoteReply, timeout_s=60)
        connection.close()


KINDS: dict[str, tuple[int, Callable[[Chaos], None]]] = {
    "kill first": (5, Chaos.kill_first), "kill first briefly": (2, Chaos.kill_briefly),
    "kill standby": (3, Chaos.kill_standby), "kill both": (3, Chaos.kill_both), "stop first": (3, Chaos.stop_first),
    "freeze first": (4, Chaos.freeze_first), "nap of first": (3, Chaos.nap_first),
    "freeze standby": (2, Chaos.freeze_standby), "first without bucket": (4, Chaos.part_first),
    "first without bucket briefly": (3, Chaos.blip_first), "standby without bucket": (2, Chaos.part_standby),
    "both without bucket": (4, Chaos.part_both), "freeze bucket": (4, Chaos.freeze_bucket),
    "requests refused": (2, Chaos.refuse), "answers lost": (3, Chaos.lose_answers),
    "late request": (4, Chaos.land_late), "promote": (3, Chaos.promote),
}  # fmt: skip
"""Weight, and what is done."""


class _Steps:
    """Steps of two learners, which end at the same one. `last`: that one; None: not decided."""

    def __init__(self) -> None:
        self.taken = [0, 0]
        self.last: int | None = None

    def of(self, index: int) -> Iterator[int]:
        while self.last is None or self.taken[index] < self.last:
            self.taken[index] += 1
            yield self.taken[index]


def run(directory: Path, seed: int, num_faults: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run it, and check what must hold; returns what happened."""
    steps, began_s, done = _Steps(), time.monotonic(), Counter[str]()
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(directory, lost_floor_s=120.0))
        pool = stack.enter_context(LearnerThreads(2))
        lives = [
            pool.submit(
                train, index, pool.connect(pair.addresses, learner=f"learner-{index}", initialise=index == 0), None,
                steps.of(index),
            )
            for index in range(2)
        ]  # fmt: skip
        until(lambda: min(steps.taken) > 8 or any(it.done() for it in lives), "the learners do not begin")
        chaos = Chaos(pair, seed)
        for number in range(num_faults):
            kind = chaos.strike()
            done[kind] += 1
            say(f"{time.monotonic() - began_s:7.0f} s  {number + 1}: {kind}; versions {pair.manifest().versions}")
        steps.last = max(steps.taken) + MORE_STEPS
        ends = [life.result(timeout=600) for life in lives]
        versions = pair.check()
        epoch = pair.manifest().epoch
    say(f"compared with {steps.last} steps in one process")
    given = diloco.Method.from_dict(method(at_least=2, codec="e3m0").to_dict())
    number = steps.last
    undisturbed = diloco.run_local(lambda index, exchange: train(index, exchange, given, number), learners=2)
    for (mine, metrics), (theirs, _) in zip(ends, undisturbed, strict=True):
        assert metrics["incarnation"] == 1, "a learner was evicted"
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs), "the bits differ"
    return {
        "seed": seed, "seconds": round(time.monotonic() - began_s, 1), "num_faults": num_faults, "faults": dict(done),
        "versions": versions, "epoch": epoch, "lease_s": LEASE_S, "takeovers": chaos.takeovers,
    }  # fmt: skip


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.standby", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--out", type=Path, help="an empty directory (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.out or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        found = run(directory, options.seed, options.faults, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(found))
        return
    for kind, number in sorted(found["faults"].items()):
        print(f"{number:4}  {kind}")
    print(f"{sum(found['faults'].values())} faults: no version is lost, none is published twice, every bit is the same")
    print(f"versions {found['versions']}, epoch {found['epoch']}")
    for kind in sorted({kind for kind, _ in found["takeovers"]}):
        each = [seconds for other, seconds in found["takeovers"] if other == kind]
        print(f"takeover after {kind}: {len(each)}, median {statistics.median(each):.2f} s, worst {max(each):.2f} s")


if __name__ == "__main__":
    main()
