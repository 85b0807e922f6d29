"""`protocol.pair`: two syncers and one learner, step by step, with disks in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from diloco.errors import ConfigError, StandbyError, StoreError
from diloco.protocol.lineage import Lineage
from diloco.protocol.pair.endpoints import FirstEndpoint, StandbyEndpoint
from diloco.protocol.pair.pair_core import REFUSED_S, PairCore
from diloco.protocol.pair.values import Commit, Contents, PairedWrites, Position, StandbyConnection, WriteKey
from diloco.protocol.succession import Elector, ElectorVote, Standing

RUN_ID = "a" * 32
PATIENCE_S = 6.0
RECORD: Mapping[str, Any] = {"members": ["ann"], "accounts": {"ann": {"process": 11}}}
ANN = "ann/b"


@dataclass
class Disk:
    """A run of one fragment, at a version. `refuses`: what fails once."""

    version: int | None = None
    epochs: list[int] = field(default_factory=list)
    position: Position | None = None
    serial: int = 0
    refuses: set[str] = field(default_factory=set)

    def contents(self) -> Contents:
        if self.version is None:
            return Contents()
        return Contents(RUN_ID, self.epochs[-1], {0: (self.version, str(self.version))})

    def epoch(self) -> int:
        return max(self.epochs, default=0)

    def versions(self) -> tuple[int, ...]:
        return () if self.version is None else (self.version,)

    def record(self) -> Mapping[str, Any] | None:
        return None if self.version is None else RECORD

    def begin_epoch(self, number: int) -> None:
        self._write("epoch")
        if number not in self.epochs:
            self.epochs.append(number)

    def keep(self, position: Position) -> None:
        self._write("position")
        self.position = position

    def publish(self) -> int:
        self.version = 1 if self.version is None else self.version + 1
        self.serial += 1
        return self.serial

    def _write(self, what: str) -> None:
        if what in self.refuses:
            self.refuses.remove(what)
            raise StoreError("the disk is full.")


class Told:
    """What observers hear."""

    def __init__(self) -> None:
        self.standings: list[Standing] = []

    def standing_changed(self, standing: Standing, epoch: int, why: str) -> None:
        self.standings.append(standing)

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        assert versions >= 0


BOOTS = count(101)


def syncer(disk: Disk, *, other: str | None = None, now: float = 0.0, waits_for_both: bool = True) -> PairCore:
    return PairCore(
        disk, disk.position, other=other, waits_for_both=waits_for_both, silence_s=PATIENCE_S,
        new_boot=lambda: next(BOOTS), observer=Told(), now=now,
    )  # fmt: skip


class Pair:
    """A first with a run, and a standby that has connected."""

    def __init__(self) -> None:
        self.disks = Disk(version=3, epochs=[1]), Disk()
        self.first, self.second = syncer(self.disks[0]), syncer(self.disks[1], other="first:1")
        self.down = self.dial(0.0)
        self.up: StandbyConnection

    def dial(self, now: float) -> StandbyConnection:
        hello = StandbyEndpoint(self.second).hello()
        down = FirstEndpoint(self.first).accept(now, hello)
        assert down is not None
        StandbyEndpoint(self.second).concede(now, hello.base)
        self.up = StandbyEndpoint(self.second).linked(now, hello.contents, down.boot)
        return down

    def pass_states(self, now: float) -> list[int]:
        """All that is to go to the standby does, and is confirmed; returns the epochs to agree on."""
        end, epochs = FirstEndpoint(self.first), []
        while (epoch := end.next_state(now, self.down)) is not None:
            epochs.append(epoch)
            contents = self.disks[0].contents()
            _, electorate = end.begins(now, self.down, contents.held, 100)
            number = self.down.sends(Commit(self.disks[0].serial, contents.run_id, contents.held, electorate))
            StandbyEndpoint(self.second).take(now, self.up, electorate, epoch, self._write)
            StandbyEndpoint(self.second).heard(now, self.up, 0, 0)
            end.acknowledged(now, self.down, number)
        return epochs

    def _write(self) -> None:
        self.disks[1].version, self.disks[1].epochs = self.disks[0].version, list(self.disks[0].epochs)


def paired() -> Pair:
    pair = Pair()
    assert pair.pass_states(1.0) == [0, 1]
    assert (pair.first.standing, pair.second.standing) == ("paired", "following")
    assert pair.first.succession.electorate == pair.second.succession.electorate == {ANN}
    return pair


def test_a_write_may_be_seen_once_the_standby_has_it() -> None:
    pair = paired()
    assert pair.first.may_write(0.0)
    pair.first.write_begins(RECORD)
    serial = pair.disks[0].publish()
    assert not pair.first.is_confirmed(serial, 0.0)
    assert FirstEndpoint(pair.first).has_news(pair.down)
    assert pair.pass_states(2.0) == [0]
    assert pair.first.is_confirmed(serial, 1.0)
    assert pair.disks[1].version == 4
    assert not FirstEndpoint(pair.first).has_news(pair.down)


def test_a_first_that_waits_for_one_only_sends_and_agrees_on_nothing() -> None:
    pair = Pair()
    pair.first.waits_for_both = False
    assert pair.pass_states(1.0) == [0]
    assert pair.first.standing == "alone"
    assert pair.first.is_confirmed(pair.disks[0].publish(), 0.0)
    assert pair.disks[1].version == 3
    assert pair.pass_states(2.0) == [0]
    assert pair.disks[1].version == 4


def test_before_the_run_has_a_model_there_is_nothing_to_say_but_words() -> None:
    """A first that asked at once again and again would do nothing else."""
    first, second = syncer(Disk()), syncer(Disk(), other="first:1")
    link = FirstEndpoint(first).accept(0.0, StandbyEndpoint(second).hello())
    assert link is not None
    assert not FirstEndpoint(first).has_news(link)
    assert FirstEndpoint(first).next_state(0.0, link) is None


def votes(pair: Pair, now: float, witness: Elector, asker: PairCore, silent_s: float) -> None:
    """The learner speaks to a syncer, and gives the promise that it is asked for."""
    assert witness.seen is not None
    proposal = asker.heard(now, ElectorVote(ANN, witness.seen, witness.promised, silent_s))
    if proposal is not None:
        witness.asked(proposal, is_silent=silent_s >= PATIENCE_S)
    it = asker.succession
    lineage = Lineage(RUN_ID, it.epoch, it.boot)
    if it.serves and witness.refusal(lineage) is None:
        witness.follow(lineage)


def test_a_write_of_a_first_whose_standby_is_silent_goes_on_with_the_learners_or_is_refused() -> None:
    pair, witness = paired(), Elector()
    witness.follow(Lineage(RUN_ID, 1, pair.first.succession.boot))
    serial = pair.disks[0].publish()
    pair.first.tick(1.1 + PATIENCE_S)
    assert pair.first.standing == "proposing"
    assert pair.down.is_over
    assert not pair.first.is_confirmed(serial, PATIENCE_S + REFUSED_S)
    with pytest.raises(StoreError, match="the standby has not confirmed the write, and this syncer is proposing"):
        pair.first.is_confirmed(serial, PATIENCE_S + REFUSED_S + 0.1)
    pair.first.hurry()
    with pytest.raises(StoreError, match="a syncer that is proposing publishes nothing"):
        pair.first.may_write(1.5)
    for second in range(4):
        votes(pair, 8.0 + second, witness, pair.first, 0.0)
        pair.first.tick(8.0 + second)
    assert pair.first.standing == "alone"
    assert pair.first.is_confirmed(serial, 100.0)
    it = Position("first", is_paired=False, base=2, electorate=frozenset({ANN}), offered=1)
    assert pair.disks[0].position == it


@pytest.mark.parametrize("refuses", [set(), {"epoch"}, {"position"}, {"epoch", "position"}])
def test_a_standby_takes_over_with_the_learner_also_where_its_disk_refuses_for_a_while(refuses: set[str]) -> None:
    pair, witness = paired(), Elector()
    witness.follow(Lineage(RUN_ID, 1, pair.first.succession.boot))
    pair.second.unlink(pair.up)
    pair.disks[1].refuses = set(refuses)
    num_refused = 0
    for second in range(8, 16):
        votes(pair, float(second), witness, pair.second, second - 1.0)
        try:
            pair.second.tick(float(second))
        except StoreError:
            num_refused += 1
            assert not pair.second.succession.may_publish
    assert num_refused == len(refuses)
    assert (pair.second.standing, pair.disks[1].epochs) == ("alone", [1, 2])
    assert pair.disks[1].position == Position("first", is_paired=False, base=2, electorate=frozenset({ANN}))
    with pytest.raises(StandbyError, match="now serves the run"):
        StandbyEndpoint(pair.second).concede(14.0, 1)

    assert FirstEndpoint(pair.first).accept(14.0, StandbyEndpoint(pair.second).hello()) is None, (
        "it is told that it lost the run"
    )
    assert pair.first.standing == "fenced"
    assert pair.disks[0].position == Position("first", True, base=1, electorate=frozenset({ANN}), offered=1)
    assert "start this one with --follow" in str(pair.first.refusal())
    again = syncer(pair.disks[0], now=20.0)
    assert (again.standing, again.succession.serves) == ("waiting", False)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_first_publishes_alone_in_no_epoch_that_a_standby_may_have_as_its_base(is_killed: bool) -> None:
    """It has offered one while the learners came to follow it; the standby's word is lost, and perhaps the process."""
    pair, witness, now = paired(), Elector(), 1.1 + PATIENCE_S
    witness.follow(Lineage(RUN_ID, 1, pair.first.succession.boot))
    pair.first.tick(now)
    while pair.first.standing != "installing":
        votes(pair, now, witness, pair.first, 0.0)
        pair.first.tick(now)
    pair.second.unlink(pair.up)
    pair.down, end, offered = pair.dial(now), FirstEndpoint(pair.first), 0
    while not offered:
        offered = end.next_state(now, pair.down)
        contents = pair.disks[0].contents()
        number = pair.down.sends(Commit(pair.disks[0].serial, contents.run_id, contents.held, frozenset({ANN})))
        StandbyEndpoint(pair.second).take(now, pair.up, frozenset({ANN}), offered, pair._write)
        if not offered:
            end.acknowledged(now, pair.down, number)
    assert pair.disks[1].position.base == offered == pair.first.succession.epoch + 1
    if is_killed:
        pair.first = syncer(pair.disks[0], other="second:1", now=now)
        now += PATIENCE_S + 1.0
        pair.first.tick(now)
    while pair.first.standing != "alone":
        now += 1.0
        votes(pair, now, witness, pair.first, 10.0 if is_killed else 0.0)
        pair.first.tick(now)
    assert pair.first.succession.epoch > offered


def test_the_old_first_becomes_the_standby_of_the_new_one() -> None:
    pair = paired()
    with pytest.raises(ConfigError, match="the other syncer is connected, or was heard"):
        pair.second.promote(1.0, force=False)
    pair.second.unlink(pair.up)
    assert pair.second.promote(1.0 + PATIENCE_S, force=False) == (2, (3,))
    old = syncer(pair.disks[0], other="second:1", now=10.0)
    pair.disks = pair.disks[1], pair.disks[0]
    pair.first, pair.second = pair.second, old
    pair.down = pair.dial(10.0)
    assert pair.pass_states(11.0)[-1] == 2
    assert (pair.first.standing, old.standing) == ("paired", "following")
    assert pair.disks[1].epochs == [1, 2]
    assert pair.disks[1].position == Position("standby", True, base=2, electorate=frozenset({ANN}), offered=1)


def test_a_version_that_is_not_confirmed_comes_before_all_other_writes() -> None:
    writes, key = PairedWrites(), WriteKey(0, 4, "d4")
    assert not writes.begins(key)
    writes.wrote(key)
    for other in (None, WriteKey(1, 7, "d7")):
        with pytest.raises(StoreError, match="version 4 of fragment 0 must be confirmed by the standby first"):
            writes.begins(other)
    assert writes.begins(key), "only its record is written again"
    writes.confirmed()
    assert not writes.begins(None)
