"""`protocol.succession`: two syncers and their learners under random partitions, crashes and lost messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import combinations, count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import LineageError
from diloco.protocol.lineage import Lineage
from diloco.protocol.succession import Ballot, Elector, ElectorVote, Place, Proposal, Succession, next_electorate

RUN = "a" * 32


@dataclass
class Disk:
    """What is durable of a syncer. `log`: the versions, each with a name of its own."""

    place: Place
    is_paired: bool = False
    epoch: int = 1
    base: int = 1
    log: list[int] = field(default_factory=list)
    electorate: frozenset[str] = frozenset()


class Node:
    """A syncer: its disk, and its process if there is one."""

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.disk = Disk(place)
        self.process: Succession | None = None
        self.num_published = 0
        self.first_boot = 0  # of the first that a standby is in sync with


class Learner:
    """A learner: its process's witness, and whom it asks next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.witness = Elector()
        self.elector = ""
        self.heard_at = 0.0
        self.asks = 0


class World:
    """What is published is one line, whatever happens."""

    def __init__(self, seed: int, num_learners: int) -> None:
        self.draws = random.Random(seed)
        self.now = 0.0
        self.silence_s = self.draws.choice((0.2, 1.0, 6.0))
        self.nodes = [Node("A", "first"), Node("B", "standby")]
        self.learners = [Learner(f"L{index}") for index in range(num_learners)]
        self.names, self.boots, self.processes = count(1), count(1), count(1)
        self.line: list[int] = []
        self.members: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        self.loss = 0.0
        rates = (
            self.draws.choice((0.05, 0.25)),
            self.draws.choice((0.0, 0.02, 0.1)),
            self.draws.choice((0.2, 1.0, 3.0)),
        )
        self.weights = (6.0 * num_learners, 6.0, 4.0, *rates)
        for learner in self.learners:
            self.start_learner(learner)
        for node in self.nodes:
            self.start(node)

    # --- processes

    def start(self, node: Node) -> None:
        disk = node.disk
        if disk.place == "first" and not disk.is_paired:
            disk.epoch = disk.base = disk.epoch + 1
        node.process = Succession(
            disk.place, is_paired=disk.is_paired, epoch=disk.epoch, base=disk.base, boot=next(self.boots),
            electorate=disk.electorate, silence_s=self.silence_s, now=self.now,
        )  # fmt: skip
        node.num_published = 0

    def start_learner(self, learner: Learner) -> None:
        self.members.discard(learner.elector)
        learner.witness, learner.heard_at = Elector(), self.now
        learner.elector = f"{learner.name}/{next(self.processes)}"

    # --- messages

    def passes(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut and self.draws.random() >= self.loss

    def call(self, learner: Learner) -> None:
        """A heartbeat or a vote, and the answer."""
        node, witness = self.nodes[learner.asks], learner.witness
        process = node.process
        if process is None or not self.passes(learner.name, node.name):
            learner.asks = 1 - learner.asks
            return
        seen, silent_s = witness.seen, self.now - learner.heard_at
        if seen is not None:
            process.heard(self.now, ElectorVote(learner.elector, seen, witness.promised, silent_s))
        serves, lineage, proposal = process.serves, Lineage(RUN, process.epoch, process.boot), process.proposal
        if serves and (seen is None or lineage == seen):
            self.members.add(learner.elector)
        if not self.passes(learner.name, node.name):
            learner.asks = 1 - learner.asks
            return
        if serves and witness.refusal(lineage) is None:
            witness.follow(lineage)
            learner.heard_at = self.now
        elif self.draws.random() < 0.3:
            learner.asks = 1 - learner.asks
        if proposal is not None:
            witness.asked(proposal, is_silent=silent_s >= self.silence_s)

    # --- syncers

    def step(self, node: Node) -> None:
        process, disk, other = node.process, node.disk, self.nodes[1 - self.nodes.index(node)]
        if process is None:
            return
        process.tick(self.now)
        if process.wants is not None:
            disk.place, disk.is_paired, disk.epoch = "first", True, process.wants
            disk.base = disk.epoch
            process.begun(disk.epoch)
        if process.is_installed:
            disk.is_paired = False
            process.alone()
        if process.standing == "alone" and process.is_refused:
            disk.epoch = disk.base = process.next_epoch(0)
            process.entered(disk.epoch)
        if other.process is not None and self.passes(node.name, other.name):
            self.link(node, other)

    def link(self, node: Node, other: Node) -> None:
        """The two syncers speak: the one that has more leads, and the other one follows it."""
        firsts = [each for each in (node, other) if each.disk.place == "first"]
        if not firsts:
            return
        leader = max(firsts, key=self.rank)
        follower = other if leader is node else node
        first, second = leader.process, follower.process
        assert first is not None
        assert second is not None
        if len(follower.disk.log) > len(leader.disk.log) and follower.disk.base >= leader.disk.base:
            return
        if follower.disk.place == "first":
            follower.disk.place = "standby"
            second = follower.process = Succession(
                "standby", is_paired=True, epoch=follower.disk.epoch, base=follower.disk.base, boot=second.boot,
                electorate=follower.disk.electorate, silence_s=self.silence_s, now=self.now,
            )  # fmt: skip
        in_sync = follower.first_boot == first.boot and second.base == first.epoch == first.base
        if in_sync and first.standing in ("paired", "proposing") and not first.is_refused:
            second.linked(self.now)
            first.linked(self.now)
        elif self.draws.random() < 0.5:
            self.sync(leader, follower)

    @staticmethod
    def rank(node: Node) -> tuple[int, int, bool, str]:
        assert node.process is not None
        return node.disk.base, len(node.disk.log), node.process.serves, node.name

    def sync(self, leader: Node, follower: Node) -> None:
        """The follower gets everything, and an epoch that is new unless the leader's own is the highest."""
        first, second, disk = leader.process, follower.process, leader.disk
        assert first is not None
        assert second is not None
        epoch = first.epoch
        if first.standing not in ("alone", "paired") or second.highest > epoch or first.is_refused:
            epoch = first.next_epoch(second.highest)
        disk.is_paired = True
        if first.standing == "alone":
            first.paired(self.now, first.epoch)
        follower.disk = replace(disk, place="standby", is_paired=True, epoch=epoch, base=epoch, log=list(disk.log))
        second.synced(self.now, epoch)
        second.electorate, follower.first_boot = disk.electorate, first.boot
        if self.passes(leader.name, follower.name):
            disk.epoch = disk.base = epoch
            first.paired(self.now, epoch)

    def publish(self, node: Node) -> None:
        process, disk, other = node.process, node.disk, self.nodes[1 - self.nodes.index(node)]
        if process is None or not process.may_publish:
            return
        if node.num_published == len(disk.log):
            disk.log.append(next(self.names))
            disk.electorate = next_electorate(disk.electorate, self.members)
            process.electorate = disk.electorate
        if disk.is_paired:
            second = other.process
            if second is None or not self.passes(node.name, other.name) or not second.acknowledges:
                return
            if other.first_boot != process.boot or second.base != process.epoch:
                return
            other.disk.log, other.disk.electorate = list(disk.log), disk.electorate
            second.electorate = disk.electorate
            second.linked(self.now)
            if not self.passes(node.name, other.name):
                return
            process.linked(self.now)
        node.num_published = len(disk.log)
        num_known = len(self.line)
        assert disk.log[:num_known] == self.line[: len(disk.log)], f"{node.name} publishes another line"
        assert len(disk.log) >= num_known, f"{node.name} has lost published versions"
        self.line = list(disk.log)

    # --- time

    def happen(self) -> None:
        """Something, at random."""
        draws = self.draws
        self.now += draws.uniform(0.0, 0.2)
        match draws.choices(range(6), self.weights)[0]:
            case 0:
                self.call(draws.choice(self.learners))
            case 1:
                self.step(draws.choice(self.nodes))
            case 2:
                self.publish(draws.choice(self.nodes))
            case 3:
                node = draws.choice(self.nodes)
                if node.process is None:
                    self.start(node)
                else:
                    node.process = None
            case 4:
                self.start_learner(draws.choice(self.learners))
            case _:
                self.cut_or_heal()

    def cut_or_heal(self) -> None:
        """The syncers mostly on two sides; a learner is on one side, on both, or on none, and changes sides."""
        draws, nodes = self.draws, self.nodes
        self.loss = draws.choice((0.0, 0.0, 0.1, 0.5))
        moved = self.learners if draws.random() < 0.1 else [draws.choice(self.learners)]
        if draws.random() < 0.2:
            between = frozenset(node.name for node in nodes)
            self.cut = self.cut - {between} if draws.random() < 0.3 else self.cut | {between}
        for learner in moved:
            self.cut -= {frozenset((node.name, learner.name)) for node in nodes}
            away = draws.choice((nodes[:1], nodes[1:], nodes[:1], nodes[1:], [], nodes))
            self.cut |= {frozenset((node.name, learner.name)) for node in away}

    def calm(self) -> None:
        """All works, and every process is there: time goes on."""
        self.cut, self.loss = set(), 0.0
        for node in self.nodes:
            if node.process is None:
                self.start(node)
        for _ in range(60):
            self.now += 0.5
            for learner in self.learners:
                self.call(learner)
            for node in self.nodes:
                self.step(node)
                self.publish(node)


@pytest.mark.parametrize("num_learners", [1, 2, 3, 5])
def test_what_is_published_is_one_line_and_goes_on(num_learners: int) -> None:
    """Whatever two syncers and their learners go through; once all works again, so does the run."""
    num_takeovers = 0
    for seed in range(60):
        world = World(seed, num_learners)
        world.calm()
        for _ in range(400):
            world.happen()
        num_takeovers += world.nodes[1].disk.place == "first"
        num_before = len(world.line)
        world.calm()
        assert len(world.line) > num_before + 5, f"seed {seed}: nothing is published any more"
        served = {
            (node.process.epoch, node.process.boot) for node in world.nodes if node.process and node.process.serves
        }
        followed = {each.witness.seen and (each.witness.seen.epoch, each.witness.seen.boot) for each in world.learners}
        assert followed == served, f"seed {seed}: a learner follows no syncer that serves the run"
    assert num_takeovers > 0


SEEN = Lineage(RUN, epoch=5, boot=17)


def witness(seen: Lineage | None = SEEN) -> Elector:
    it = Elector()
    it.seen = seen
    return it


def test_a_learner_promises_each_epoch_once_and_keeps_it() -> None:
    it = witness()
    proposal = Proposal(Ballot(7, boot=99), base=5)
    assert not it.asked(proposal, is_silent=False), "the syncer that it follows answers"
    assert it.asked(proposal, is_silent=True)
    assert it.asked(proposal, is_silent=False), "said again"
    assert not it.asked(Proposal(Ballot(7, boot=98), base=5), is_silent=True)
    assert not it.asked(Proposal(Ballot(6, boot=17), base=5), is_silent=True)
    assert isinstance(it.refusal(Lineage(RUN, 6, 17)), LineageError)
    assert it.refusal(SEEN) is None, "what that one publishes has the acknowledgement of the other"
    assert it.refusal(Lineage(RUN, 7, 99)) is None
    assert isinstance(it.refusal(Lineage(RUN, 7, 98)), LineageError)
    assert it.refusal(Lineage(RUN, 8, 98)) is None


def test_a_learner_promises_nothing_to_a_syncer_that_lacks_an_epoch_and_nothing_before_it_follows_one() -> None:
    assert not witness().asked(Proposal(Ballot(9, boot=99), base=4), is_silent=True)
    assert not witness(None).asked(Proposal(Ballot(9, boot=99), base=4), is_silent=True)


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_an_electorate_changes_by_one_so_that_majorities_meet(now: set[str], members: set[str]) -> None:
    following = next_electorate(now, members)
    assert len(following ^ now) <= 1
    for one in combinations(sorted(now), len(now) // 2 + 1):
        for other in combinations(sorted(following), len(following) // 2 + 1):
            assert set(one) & set(other) or not now or not following
    steps = 0
    while now != members:
        now, steps = set(next_electorate(now, members)), steps + 1
        assert steps <= 12
        assert now or not members


def test_a_standby_takes_over_once_most_learners_have_lost_the_first() -> None:
    """Killed, it is missed for the patience, and two more questions to every learner."""
    it = Succession(
        "standby", is_paired=True, epoch=5, base=5, boot=99, electorate=("a", "b", "c"), silence_s=6.0, now=0.0
    )
    learners = {name: witness() for name in "abc"}
    it.linked(100.0)
    now = 100.0
    for tenth in range(1000, 1090):
        now = tenth / 10
        for name in "ab":
            each = learners[name]
            assert each.seen is not None
            it.heard(now, ElectorVote(name, each.seen, each.promised, silent_s=now - 100.0))
            if it.proposal is not None:
                each.asked(it.proposal, is_silent=True)
            if it.serves:
                each.follow(Lineage(RUN, it.epoch, it.boot))
        it.tick(now)
        if it.wants is not None:
            it.begun(it.wants)
        if it.is_installed:
            it.alone()
        if it.may_publish:
            break
    assert (it.standing, it.epoch, it.base) == ("alone", 6, 6)
    assert now <= 106.5


def test_a_first_without_most_learners_publishes_nothing_once_its_standby_is_silent() -> None:
    it = Succession(
        "first", is_paired=True, epoch=5, base=5, boot=17, electorate=("a", "b", "c"), silence_s=6.0, now=0.0
    )
    assert not it.serves, "it was started again: its standby may have taken over"
    it.paired(0.0, 5)
    allowed = []
    for now in range(30):
        it.heard(float(now), ElectorVote("a", SEEN, None, silent_s=0.0))
        it.tick(float(now))
        allowed.append(it.may_publish)
    assert allowed == [True] * 6 + [False] * 24
    assert it.serves, "learners go on training with what there is"
    other = Lineage(RUN, 9, 99)
    for name in "bc":
        it.heard(30.0, ElectorVote(name, other, None, silent_s=0.0))
    it.tick(30.0)
    assert it.standing == "fenced"
    assert not it.serves


def first_of(*electorate: str, silence_s: float = 6.0) -> Succession:
    """A first in epoch 5 with its standby."""
    it = Succession(
        "first", is_paired=True, epoch=5, base=5, boot=17, electorate=electorate, silence_s=silence_s, now=0.0
    )
    it.paired(0.0, 5)
    return it


def test_only_learners_of_the_electorate_vote_and_each_once() -> None:
    """Neither one that was never in it, nor one that has left it, nor another process of one that is, nor one twice."""
    it = first_of("a", "b", "c", "d")
    it.tick(10.0)
    assert it.standing == "proposing"
    assert it.proposal is not None
    promise = it.proposal.ballot
    for name in ("a", "a", "a", "x", "y", "a/other", "b"):
        it.heard(10.0, ElectorVote(name, SEEN, promise, silent_s=9.0))
    assert it.wants is None, "two of four"
    it.electorate = frozenset("acd")
    it.heard(10.0, ElectorVote("c", SEEN, None, silent_s=9.0))
    assert it.wants is None, "one of three: the other one has left"
    it.heard(10.0, ElectorVote("c", SEEN, promise, silent_s=9.0))
    assert it.wants == promise.epoch


def test_a_learner_that_has_promised_the_epoch_to_the_other_one_is_heard_also_where_it_is_no_elector() -> None:
    it = first_of("a", "b")
    for second in range(8):
        it.linked(float(second))
        it.heard(float(second), ElectorVote("c", Lineage(RUN, 4, 3), Ballot(5, 99), silent_s=0.0))
        it.tick(float(second))
    assert it.raises()
    assert it.next_epoch(0) == 6
    it.entered(6)
    assert not it.is_refused


def test_a_syncer_with_most_promises_has_its_epoch_as_its_base_also_after_it_was_started_again() -> None:
    """Learners that follow the epoch promise nothing to a lower base; only that syncer may have published in it."""
    it = Succession("standby", is_paired=True, epoch=5, base=5, boot=99, electorate="a", silence_s=6.0, now=0.0)
    learner = witness()
    for second in range(7, 12):
        it.heard(float(second), ElectorVote("a", learner.seen or SEEN, learner.promised, silent_s=9.0))
        it.tick(float(second))
        if it.proposal is not None:
            assert learner.asked(it.proposal, is_silent=True)
        if it.wants is not None:
            it.begun(it.wants)
            learner.follow(Lineage(RUN, it.epoch, it.boot))
    assert (it.standing, it.epoch, it.base) == ("installing", 6, 6)
    again = Succession("first", is_paired=True, epoch=6, base=it.base, boot=100, electorate="a", silence_s=6.0, now=0.0)
    again.heard(7.0, ElectorVote("a", Lineage(RUN, 6, 99), learner.promised, silent_s=9.0))
    again.tick(7.0)
    assert again.proposal is not None
    assert learner.asked(again.proposal, is_silent=True)


@pytest.mark.parametrize(("ahead", "raises"), [(0, False), (1, True)])
def test_a_first_begins_a_later_epoch_for_a_learner_that_has_promised_it_one_that_came_to_nothing(
    ahead: int, raises: bool
) -> None:
    """It was asked for while the standby was silent, and the two agreed on an earlier one."""
    it = first_of("a")
    it.linked(10.0)
    it.heard(10.0, ElectorVote("a", Lineage(RUN, 1, 3), Ballot(it.epoch + ahead, it.boot), silent_s=0.0))
    it.tick(10.0)
    assert it.raises() is raises


def test_a_learner_that_claims_promises_does_not_have_the_run_begin_epochs_without_end() -> None:
    it = first_of("a", "liar")
    times = []
    for tenth in range(36_000):
        now = tenth / 10
        it.linked(now)
        it.heard(now, ElectorVote("liar", Lineage(RUN, 1, 3), Ballot(it.epoch + 10**6, 4), silent_s=0.0))
        it.tick(now)
        if it.raises():
            times.append(now)
            it.paired(now, it.next_epoch(0))
    assert len(times) < 15, "in an hour"
    assert times[1] - times[0] < 7.0, "the second one is soon"
    assert max(later - sooner for sooner, later in pairwise(times)) < 700.0
