"""Two syncers for tests, and learners that only train and vote."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.syncer.runs import RUN, Raw, layout, method, versions_of

from diloco.errors import DilocoError, StandbyError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Deadlines
from diloco.protocol.succession import Ballot, Elector, Proposal
from diloco.store.records import connect_read_only, stored_versions
from diloco.syncer.server import Options, Syncer

PATIENCE_S = 2.0
DEADLINES = Deadlines(lost_floor_s=PATIENCE_S, reconnect_floor_s=PATIENCE_S)
PATIENT = Deadlines(lost_floor_s=60.0, reconnect_floor_s=60.0)
"""Of a syncer that never takes over nor goes on alone, however busy the machine is."""

BEAT_S = 0.1
LAYOUT = json.dumps(layout().to_dict())


def serve(state: Path, port: int = 0, deadlines: Deadlines = DEADLINES, **more: Any) -> Syncer:
    return Syncer(RUN, method(), Options(f"127.0.0.1:{port}", state, deadlines=deadlines, **more))


def standing(syncer: Syncer) -> str:
    return syncer.pairing.standing


def serves(syncer: Syncer) -> bool:
    try:
        return syncer.driver.ask(lambda driver: driver.state.is_initialised)
    except StandbyError:
        return False


def on_disk(state: Path) -> dict[int, list[tuple[int, str]]]:
    """By fragment, versions and digests, newest first."""
    db = connect_read_only(state)
    try:
        return {
            fragment: [(each.update.version, each.update.digest) for each in versions]
            for fragment, versions in stored_versions(db).items()
        }
    finally:
        db.close()


class Learner:
    """Beats, votes and pushes over bare calls, to the addresses in turn; a thread beats until it is closed.

    Attributes:
        witness: what it follows and has promised.
        cut: addresses that it does not reach.
    """

    def __init__(self, name: str, addresses: list[str]) -> None:
        self.raws = {address: Raw(address, name) for address in addresses}
        self.addresses = list(addresses)
        self.witness = Elector()
        self.cut: set[str] = set()
        self.process = secrets.randbits(32) + 1
        for raw in self.raws.values():
            raw.process = self.process
        self._at, self._heard_at = 0, time.monotonic()
        self._is_over = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def raw(self) -> Raw:
        return self.raws[self.addresses[self._at]]

    @property
    def follows(self) -> str:
        return self.addresses[self._at]

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for raw in self.raws.values():
            raw.connection.close()

    def _run(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with self._lock:
                if not self._beat():
                    self._vote()

    def _beat(self) -> bool:
        raw, seen = self.raw, self.witness.seen
        if self.follows in self.cut:
            return False
        try:
            if not raw.incarnation:
                self._join(raw)
            reply = raw.connection.call(
                "control", "Heartbeat", pb.HeartbeatRequest(
                    run=RUN, learner=raw.name, incarnation=raw.incarnation, step=1000, steps=1000, tokens=5000,
                    seen=None if seen is None else pb.Lineage(run_id=seen.run_id, epoch=seen.epoch, boot=seen.boot),
                    process=self.process, promised=self._promised,
                ), pb.HeartbeatReply, timeout_s=300.0,
            )  # fmt: skip
        except DilocoError as error:
            if "join again" in str(error):
                raw.incarnation, self._heard_at = 0, time.monotonic()
            return False
        lineage = Lineage(reply.lineage.run_id, reply.lineage.epoch, reply.lineage.boot)
        if self.witness.refusal(lineage) is not None:
            return False
        self.witness.follow(lineage)
        raw.boot, raw.heard, self._heard_at = lineage.boot, reply.standing, time.monotonic()
        if reply.HasField("proposal"):
            self._asked(reply.proposal, is_silent=False)
        return True

    def _join(self, raw: Raw) -> None:
        request = pb.JoinRequest(run=RUN, learner=raw.name, layout=LAYOUT, process=self.process)
        raw.incarnation = raw.connection.call("joins", "Join", request, pb.JoinReply, timeout_s=300.0).incarnation
        for other in self.raws.values():
            other.incarnation, other.numbers = raw.incarnation, raw.numbers

    def _vote(self) -> None:
        seen, silent_s = self.witness.seen, time.monotonic() - self._heard_at
        for index, address in enumerate(self.addresses):
            if address in self.cut or seen is None or silent_s < 3 * BEAT_S:
                continue
            request = pb.VoteRequest(
                run=RUN, learner=self.raw.name, process=self.process, silent_s=silent_s, promised=self._promised,
                seen=pb.Lineage(run_id=seen.run_id, epoch=seen.epoch, boot=seen.boot),
            )  # fmt: skip
            try:
                reply = self.raws[address].connection.call("control", "Vote", request, pb.VoteReply, timeout_s=300.0)
            except DilocoError:
                continue
            if reply.HasField("proposal"):
                self._asked(reply.proposal, is_silent=silent_s >= PATIENCE_S)
            if reply.serves:
                self._at = index

    def _asked(self, message: pb.Proposal, *, is_silent: bool) -> None:
        proposal = Proposal(Ballot(message.ballot.epoch, message.ballot.boot), message.base)
        self.witness.asked(proposal, is_silent=is_silent)

    @property
    def _promised(self) -> pb.Ballot | None:
        it = self.witness.promised
        return None if it is None else pb.Ballot(epoch=it.epoch, boot=it.boot)

    def push(self, version: int, value: float = 0.0) -> None:
        """Its work on fragment 0, from this version on: this value everywhere."""
        with self._lock:
            raw = self.raw
            payload = torch.full((layout().fragments[0].numel,), value).view(torch.uint8)
            raw.push(payload, round=version, base=version, step=4 * (version + 1), trained=5 * (version + 1))


@contextmanager
def learners(names: str, addresses: list[str]) -> Iterator[list[Learner]]:
    """Learners that have joined and beat."""
    found = [Learner(name, addresses) for name in names.split()]
    try:
        for each in found:
            each.start()
        yield found
    finally:
        for each in found:
            each.close()


def trains(syncer: Syncer, all_learners: list[Learner], until: Callable[[Callable[[], bool], str], None]) -> int:
    """One round of fragment 0: all push; returns the new version once it is published."""
    boot = syncer.pairing.succession.boot
    until(lambda: all(each.raw.boot == boot for each in all_learners), "the learners do not follow")
    version = versions_of(syncer)[0]
    for each in all_learners:
        each.push(version)
    until(lambda: versions_of(syncer)[0] == version + 1, "nothing is published")
    return version + 1
