"""No token vanishes: whatever happens, pending + merged + discarded + lost is what was trained, and no work counts
twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from tests.protocol.driving import restarted

from diloco.core.quorum import QUORUMS, Quorum
from diloco.core.schedule import Schedule
from diloco.protocol.actions import Acknowledge, Action, Evict, MergeRound, Reject
from diloco.protocol.contribution import KEPT, OUTLIER, UNMERGED, Contribution, Verdict
from diloco.protocol.in_flight import Ledger, Send, total
from diloco.protocol.learner import LearnerCore
from diloco.protocol.members import Deadlines, Report
from diloco.protocol.records import Record
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore


def test_what_is_not_merged_discarded_or_lost_is_pending() -> None:
    ledger = Ledger(trained=100, merged=30)
    ledger.discard(20, "overlap")
    ledger.discard(5, "overlap")
    ledger.discard(0, "missed")
    assert ledger.pending == 45
    ledger.lose()
    assert ledger.as_dict() == {"trained": 100, "pending": 0, "merged": 30, "lost": 45, "discarded": {"overlap": 25}}


def test_the_total_is_the_sum_over_learners() -> None:
    ledgers = [Ledger(10, 1, 2, {"missed": 3}), Ledger(100, 10, 20, {"missed": 30, "overlap": 4})]
    assert total(ledgers) == Ledger(110, 11, 22, {"missed": 33, "overlap": 4})
    assert total([]) == Ledger()
    assert ledgers[0].discarded == {"missed": 3}


@pytest.mark.parametrize("discarded", [0, 20])
def test_a_contribution_accounts_for_what_it_holds_and_what_was_given_up(discarded: int) -> None:
    c = Contribution("a", 1, 0, 1, 0, 0, 80, 8, 100, (("overlap", discarded),), step=8)
    assert c.accounted == 80 + discarded


# --- runs in which everything happens in any order --------------------------------------------------------------------

NAMES = ("a", "b", "c")
FRAGMENTS = 2
H = 4
EVENTS = {  # and how often
    "step": 40, "beat": 10, "hear": 10, "fetch": 25, "send_again": 6, "join": 1, "leave": 0.3, "disconnect": 1,
    "time_passes": 2,
    "merge": 12, "abandon": 0.5, "begin_write": 15, "end_write": 15, "crash": 1,
}  # fmt: skip
Key = tuple[str, int, int, int]


def key_of(c: Contribution) -> Key:
    return c.learner, c.incarnation, c.fragment, c.number


@dataclass
class Learner:
    """One incarnation. `unsettled`: contributions of which it knows no verdict; after a restart of the syncer it sends
    them again. `acknowledged`: those of which the syncer has said that they are there."""

    incarnation: int
    core: LearnerCore
    unsettled: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    heard: dict[tuple[int, int], Verdict] = field(default_factory=dict)

    @property
    def confirmed(self) -> tuple[int, ...]:
        """Per fragment, the number up to which it knows all verdicts."""
        return tuple(
            next(number for number in range(1, len(self.heard) + 2) if (f, number) not in self.heard) - 1
            for f in range(FRAGMENTS)
        )


@dataclass
class Truth:
    """What became of contributions, kept by hand: the verdict of each that has one, and what its tokens were."""

    versions: list[int]
    verdicts: dict[Key, Verdict] = field(default_factory=dict)
    settled: dict[Key, Contribution] = field(default_factory=dict)

    def settle(self, c: Contribution, reason: str | None, version: int) -> None:
        assert key_of(c) not in self.settled, f"{c} has a verdict already"
        self.verdicts[key_of(c)] = Verdict(c.fragment, c.number, reason, version)
        self.settled[key_of(c)] = c


class Life:
    """Learners, a syncer and its disk; messages are lost, repeated and heard in any order, and what is known is kept by
    hand."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.core = SyncerCore(rules, [0] * FRAGMENTS, deadlines=Deadlines(lost_floor_s=40.0))
        self.now = 0.0
        self.learners: dict[str, Learner] = {}
        self.truth = Truth([0] * FRAGMENTS)
        self.open: dict[Key, Contribution] = {}
        self.closing: dict[int, tuple[MergeRound, frozenset[str]]] = {}
        self.writing: tuple[list[int], Record, Truth] | None = None
        self.left: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.disk = self.core.saved(), deepcopy(self.truth)
        for name in NAMES:
            self.join(name)

    def live(self, num_events: int) -> None:
        for event in self.random.choices(list(EVENTS), list(EVENTS.values()), k=num_events):
            getattr(self, event)(self.random.choice(NAMES))
            self.check()

    def calm_down(self) -> None:
        """Nothing goes wrong any more, and all that was lost is said again."""
        before = sum(self.truth.versions)
        for _ in range(12 * H):
            self.now += 0.5
            for name in NAMES:
                if name not in self.learners:
                    self.join(name)
                for happens in (self.hear, self.send_again, self.fetch, self.fetch, self.step):
                    happens(name)
            for name in NAMES:
                self.beat(name)
            self.act(self.core.tick(self.now))
            for _ in range(FRAGMENTS):
                self.merge("", refuse=False)
                self.end_write()
                self.begin_write()
                self.end_write()
            self.check()
        assert sum(self.truth.versions) >= before + 2 * FRAGMENTS

    # --- the syncer's driver ---

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            self.counts[type(action).__name__] += 1
            if isinstance(action, Reject):
                self.counts[action.reason] += 1
                self.open.pop(key_of(action.contribution), None)
                version = self.core.fragments[action.contribution.fragment].version
                self.truth.settle(action.contribution, action.reason, version)
            elif isinstance(action, MergeRound):
                self.closing[action.fragment] = action, frozenset()
            elif isinstance(action, Evict) and action.learner in self.learners:
                if self.learners[action.learner].incarnation == action.incarnation:
                    del self.learners[action.learner]

    def merge(self, _: str, *, refuse: bool = True) -> None:
        """Tensor work is done; sometimes one of several is refused."""
        for fragment, state in enumerate(self.core.fragments):
            if state.phase == "merging":
                action, _refused = self.closing[fragment]
                learners = sorted({c.learner for c in action.contributions})
                refused = (
                    frozenset(learners[:1])
                    if refuse and len(learners) > 1 and self.random.random() < 0.2
                    else frozenset()
                )
                self.closing[fragment] = action, refused
                self.core.merged(fragment, sorted(refused))
                return

    def abandon(self, _: str) -> None:
        """The sum overflows."""
        for fragment, state in enumerate(self.core.fragments):
            if state.phase == "merging":
                del self.closing[fragment]
                self.act(self.core.abandoned(self.now, fragment, "not finite"))
                return

    def begin_write(self, _: str = "") -> None:
        """A record goes to the disk, with the versions that are to be stored."""
        if self.writing is not None:
            return
        storing = [f for f, state in enumerate(self.core.fragments) if state.phase == "storing"]
        self.counts["record with two versions"] += len(storing) > 1
        truth = deepcopy(self.truth)
        for fragment in storing:
            truth.versions[fragment] += 1
            merge, refused = self.closing[fragment]
            for c in merge.contributions:
                truth.settle(c, OUTLIER if c.learner in refused else None, truth.versions[fragment])
            for c, reason in self.core.rounds.left_out(fragment):
                truth.settle(c, reason, truth.versions[fragment])
        self.writing = storing, self.core.saved(storing), truth

    def end_write(self, _: str = "") -> None:
        if self.writing is None:
            return
        (storing, record, truth), self.writing = self.writing, None
        self.disk = record, deepcopy(truth)
        for fragment in storing:
            merge, refused = self.closing.pop(fragment)
            self.truth.versions[fragment] += 1
            for c in merge.contributions:
                if c.learner not in refused:
                    del self.open[key_of(c)]
                    self.truth.settle(c, None, self.truth.versions[fragment])
            self.act(self.core.stored(self.now, fragment))
        self.act(self.core.recorded(self.now, record.serial))

    def crash(self, _: str) -> None:
        """Back to what the disk says, with or without the write under way. Learners that it knows live on."""
        if self.random.random() < 0.5:
            self.begin_write()
        if self.writing is not None and self.random.random() < 0.5:
            self.disk = self.writing[1], self.writing[2]
        record, truth = self.disk
        self.counts["crash with a version that is not published"] += truth.versions != self.truth.versions
        self.core = restarted(self.core, record, self.now, versions=truth.versions)
        self.truth = deepcopy(truth)
        self.writing, self.closing, self.open = None, {}, {}
        incarnations = {learner: member.incarnation for learner, member in self.core.members.items()}
        self.learners = {n: each for n, each in self.learners.items() if incarnations.get(n) == each.incarnation}
        for learner in self.learners.values():
            learner.acknowledged.clear()
        self.counts["crash"] += 1

    # --- learners ---

    def join(self, name: str) -> None:
        """Join: new, again, or in place of itself; the answer comes when the incarnation is durable."""
        self.end_write()
        incarnation, actions = self.core.joined(self.now, name)
        self.act(actions)
        self.begin_write()
        self.end_write()
        versions = [state.version for state in self.core.fragments]
        learner = LearnerCore(self.rules, versions, step=self.core.start_step(name))
        self.learners[name] = Learner(incarnation, learner)

    def step(self, name: str) -> None:
        if (learner := self.learners.get(name)) is None:
            return
        if learner.core.waiting():
            self.counts["waiting"] += 1
            return
        for fragment, version in learner.core.adoptions():
            for flight in learner.core.adopted(fragment, version):
                is_merged = self.is_merged(name, fragment, flight.number)
                assert flight.listed == is_merged
                self.counts["adopted without hearing"] += not flight.listed and not flight.is_rejected
        pace = self.core.standing(name).sync_every
        for send in learner.core.stepped(self.random.randint(1, 20), sync_every=pace):
            self.offer(name, send)

    def offer(self, name: str, send: Send) -> None:
        learner = self.learners[name]
        c = Contribution(
            name, learner.incarnation, send.fragment, send.number, send.round, send.base, send.tokens, send.steps,
            learner.core.tokens, send.discarded, step=learner.core.step,
        )  # fmt: skip
        learner.unsettled[c.fragment, c.number] = c
        if self.random.random() < 0.8:  # otherwise they are still on their way: contributions come in order
            for each in [c for number, c in learner.unsettled.items() if number not in learner.acknowledged]:
                self.deliver(each)

    def deliver(self, c: Contribution) -> None:
        if (learner := self.learners.get(c.learner)) is None:
            return
        learner.acknowledged.add((c.fragment, c.number))
        key, ledgers = key_of(c), self.ledgers()
        is_known = key in self.open or key in self.truth.settled
        answer, *actions = self.core.contributed(self.now, c)
        if is_known:
            assert answer == Acknowledge(c, duplicate=True)
            assert [each.merged for each in ledgers[c.learner]] == [each.merged for each in self.ledgers()[c.learner]]
            self.counts["known"] += 1
            self.counts["known, settled"] += key in self.truth.settled
        elif isinstance(answer, Acknowledge):
            assert not answer.duplicate
            self.open[key] = c
        self.act([answer, *actions])

    def send_again(self, name: str) -> None:
        """All of them, newer before older too."""
        if (learner := self.learners.get(name)) is not None:
            again = list(learner.unsettled.values())
            self.random.shuffle(again)
            for c in again:
                self.deliver(c)

    def beat(self, name: str) -> None:
        if (learner := self.learners.get(name)) is not None:
            is_blocked = learner.core.waiting() and learner.unsettled.keys() <= learner.acknowledged
            core, blocked_with = learner.core, learner.core.received_versions if is_blocked else ()
            report = Report(
                core.step, core.tokens, 0.1, bool(core.waiting()), steps=core.steps, blocked_with=blocked_with,
                confirmed=learner.confirmed,
            )  # fmt: skip
            self.act(self.core.heartbeat(self.now, name, learner.incarnation, report))

    def hear(self, name: str) -> None:
        """What stands; again and again."""
        if (learner := self.learners.get(name)) is not None:
            standing = self.core.standing(name)
            for verdict in standing.verdicts:
                self.judge(name, verdict)
            for fragment, version in standing.calls:
                if (send := learner.core.called(fragment, version)) is not None:
                    self.offer(name, send)

    def fetch(self, name: str) -> None:
        """A version that is newer than the learner's, with the verdicts that belong to it."""
        if (learner := self.learners.get(name)) is None:
            return
        fragment = self.random.randrange(FRAGMENTS)
        held, newest = learner.core.versions[fragment], self.core.fragments[fragment].version
        if held < newest:
            version = self.random.choice([held + 1, newest])
            for verdict in self.core.verdicts(name, fragment, version):
                self.judge(name, verdict)
            merged = max(
                (n for n in range(1, learner.confirmed[fragment] + 1) if self.is_in(learner, fragment, n, version)),
                default=0,
            )
            for flight in learner.core.received(fragment, version, merged):
                assert self.is_merged(name, fragment, flight.number)

    def judge(self, name: str, verdict: Verdict) -> None:
        """A verdict is heard: it is the true one, it is durable, and it stays."""
        learner, number = self.learners[name], (verdict.fragment, verdict.number)
        assert self.disk[1].verdicts[name, learner.incarnation, *number] == verdict
        assert learner.heard.setdefault(number, verdict) == verdict
        learner.unsettled.pop(number, None)
        if verdict.reason is not None and learner.core.rejected(*number, verdict.reason) is not None:
            assert learner.core.rejected(*number, verdict.reason) is None

    def disconnect(self, name: str) -> None:
        if name in self.learners:
            self.act(self.core.disconnected(self.now, name, self.learners[name].incarnation))

    def leave(self, name: str) -> None:
        if (learner := self.learners.pop(name, None)) is not None:
            self.left.add(name)
            self.act(self.core.left(self.now, name, learner.incarnation, tokens=learner.core.tokens))

    def time_passes(self, _: str) -> None:
        self.now += self.random.choice([0.1, 1.0, 4.0, 12.0])
        self.act(self.core.tick(self.now))

    @staticmethod
    def is_in(learner: Learner, fragment: int, number: int, version: int) -> bool:
        """Whether all contributions up to this number are in this version or an earlier one, except those rejected."""
        heard = [learner.heard[fragment, each] for each in range(1, number + 1)]
        return all(verdict.reason is not None or verdict.version <= version for verdict in heard)

    # --- what must hold ---

    def is_merged(self, name: str, fragment: int, number: int) -> bool:
        verdict = self.truth.verdicts.get((name, self.learners[name].incarnation, fragment, number))
        return verdict is not None and verdict.reason is None

    def ledgers(self) -> dict[str, list[Ledger]]:
        return deepcopy({name: account.ledgers for name, account in self.core.accounting.accounts.items()})

    def check(self) -> None:
        assert [state.version for state in self.core.fragments] == self.truth.versions
        assert set(self.core.accounting.open) == set(self.open)
        for name, ledgers in self.ledgers().items():
            for f, ledger in enumerate(ledgers):
                assert min([ledger.pending, ledger.merged, ledger.lost, *ledger.discarded.values()]) >= 0
                merged, discarded = 0, Ledger()
                for key, c in self.truth.settled.items():
                    if (c.learner, c.fragment) == (name, f):
                        reason = self.truth.verdicts[key].reason
                        merged += c.tokens if reason is None else 0
                        if reason is not None and reason not in KEPT:
                            discarded.discard(c.tokens, reason)
                        for given_up, tokens in c.discarded:
                            discarded.discard(tokens, given_up)
                assert ledger.merged == merged
                assert UNMERGED not in ledger.discarded or name in self.left
                discarded.discard(ledger.discarded.get(UNMERGED, 0), UNMERGED)
                assert ledger.discarded == discarded.discarded
                acknowledged = sum(c.accounted for c in self.open.values() if (c.learner, c.fragment) == (name, f))
                assert ledger.pending >= acknowledged
                assert name in self.core.members or ledger.pending == acknowledged
        for name, learner in self.learners.items():
            self.check_learner(name, learner)

    def check_learner(self, name: str, learner: Learner) -> None:
        for verdict in self.core.standing(name).verdicts:
            key = name, learner.incarnation, verdict.fragment, verdict.number
            assert self.disk[1].verdicts[key] == self.truth.verdicts[key] == verdict
        for (fragment, number), verdict in learner.heard.items():
            assert self.truth.verdicts[name, learner.incarnation, fragment, number] == verdict
        for work in learner.core.fragments:
            in_flight = sum(flight.tokens for flight in work.in_flight if not (flight.listed or flight.is_rejected))
            assert work.ledger.pending == work.pending_tokens + in_flight
            assert work.ledger.trained == learner.core.tokens


def variants(kind: type[Quorum]) -> list[Quorum]:
    """The default, and each of these options that it has."""
    options: list[dict[str, Any]] = [{"at_least": 2}, {"drop": 0.4}, {"late": "drop"}, {"grace": 0.0}]
    names = {each.name for each in fields(kind)}
    return [kind(), *(replace(kind(), **option) for option in options if option.keys() <= names)]


RULES: dict[str, Callable[[bool], Rules]] = {
    f"{quorum}, overlap={overlap}, {takes}": lambda keeps, q=quorum, o=overlap, t=takes: Rules(  # type: ignore[misc]
        q, Schedule(H, FRAGMENTS, o), "tokens", keeps_pending=keeps, one_at_a_time=t == "one at a time"
    )
    for kind in QUORUMS
    for quorum in variants(kind)
    for overlap, takes in ((0, "all"), (H, "one at a time"))
    if overlap == 0 or (quorum.at_least == 1 and not getattr(quorum, "drop", 0))
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name.startswith(tuple(f"{kind()}, " for kind in QUORUMS)) else [pytest.mark.slow]
        )
        for name in RULES
    ],
)
def test_the_accounts_balance_whatever_happens(name: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(6):
        life = Life(RULES[name](seed % 2 == 1), seed)
        life.live(300)
        life.calm_down()
        counts += life.counts
    for happened in ("Publish", "Evict", "Reject", "known", "known, settled", "crash"):
        assert counts[happened] >= 2, (happened, counts)
    if name.startswith("Called"):  # whose rounds of several fragments can close together
        assert counts["record with two versions"] >= 2, counts


def test_a_circle_with_a_round_that_lacks_learners_is_let_go() -> None:
    """Learners are an interval apart: one waits in a round that no other joins, the others in a later one."""
    [name] = [name for name, rules in RULES.items() if name.startswith("AllLive") and rules(True).quorum.at_least == 2]
    life = Life(RULES[name](True), 19)
    life.live(400)
    life.calm_down()
