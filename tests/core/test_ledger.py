"""No token vanishes: whatever happens, pending + merged + discarded + lost is what was trained."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy

import pytest

from diloco.core.contribution import OUT_OF_STEP, Contribution
from diloco.core.ledger import Ledger, total
from diloco.core.members import Member
from diloco.core.presets import DiLoCo
from diloco.core.rounds import Accept, Action, Evict, Reject
from diloco.core.syncer import SyncerCore


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


NAMES = ("a", "b", "c")
FRAGMENTS = 2
H = 4
EVENTS = {  # and how often
    "train": 10, "contribute": 30, "contribute_again": 10, "go_on": 20, "join": 3, "leave": 1, "disconnect": 2, "time_passes": 4,
    "crash": 2, "save_the_roster": 2, "abandon": 1,
}  # fmt: skip


class Books:
    """Learners that do what they like in any order, a syncer, and a second set of books kept by hand.

    By hand: for each learner and fragment what its living incarnation has not accounted for (`fresh`), which contributions the syncer
    has taken and not settled (`given`), and what it merged and refused.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = SyncerCore(DiLoCo(sync_every=H, overlap=H), [0] * FRAGMENTS)
        self.now = 0.0
        self.tokens = dict.fromkeys(NAMES, 0)  # of the living incarnation
        self.fresh = {(name, f): 0 for name in NAMES for f in range(FRAGMENTS)}
        self.merged = dict.fromkeys(self.fresh, 0)
        self.refused = dict.fromkeys(self.fresh, 0)
        self.given: set[Contribution] = set()
        self.settled: list[Contribution] = []
        self.run_tokens = 0
        self.counts: Counter[str] = Counter()
        for name in NAMES:
            self.join(name)
        self.save()

    def live(self, num_events: int) -> None:
        for event in self.random.choices(list(EVENTS), list(EVENTS.values()), k=num_events):
            getattr(self, event)(self.random.choice(NAMES))
            self.check()

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            self.counts[type(action).__name__] += 1
            if isinstance(action, Evict):
                self.gone(action.learner)

    def gone(self, name: str) -> None:
        self.tokens[name] = 0
        for f in range(FRAGMENTS):
            self.fresh[name, f] = 0

    # --- events ---

    def join(self, name: str) -> None:
        """For the first time, after it is gone, or in place of itself."""
        self.act(self.core.joined(self.now, name)[1])
        self.gone(name)

    def train(self, name: str) -> None:
        if name in self.core.members:
            tokens = self.random.randint(0, 50)
            self.tokens[name] += tokens
            for f in range(FRAGMENTS):
                self.fresh[name, f] += tokens
            if self.random.random() < 0.7:
                self.act(
                    self.core.heartbeat(
                        self.now, name, self.core.incarnations[name], step=self.core.step, tokens=self.tokens[name], step_s=0.1,
                        waiting=self.random.random() < 0.3,
                    )
                )  # fmt: skip

    def contribute(self, name: str) -> None:
        """All work since the contribution before, of which a part was overwritten. Sometimes for a wrong round, or out of step."""
        if name not in self.core.members:
            return
        self.train(name)
        fragment = self.random.randrange(FRAGMENTS)
        fresh = self.fresh[name, fragment]
        overwritten = self.random.randint(0, min(20, fresh))
        ahead = self.random.choices([0, 1, -1, 2], [8, 4, 1, 1])[0]
        base_ahead = 0 if ahead == 1 or self.random.random() < 0.8 else -1
        version = self.core.fragments[fragment].version
        c = Contribution(
            name, self.core.incarnations[name], fragment, version + ahead, version + base_ahead, fresh - overwritten, 1,
            self.tokens[name], (("overlap", overwritten),) if overwritten else (),
            step=self.core.step + self.random.choice([1, 1, 1, 0]),
        )  # fmt: skip
        answer, *actions = self.core.contributed(self.now, c)
        assert isinstance(answer, Reject) or c.accounted == 0 or not answer.duplicate
        self.counts[answer.reason if isinstance(answer, Reject) else "Accept"] += 1
        self.fresh[name, fragment] = 0
        if isinstance(answer, Accept) and not answer.duplicate:
            self.given.add(c)
        elif isinstance(answer, Reject) and answer.reason == OUT_OF_STEP:
            self.refused[name, fragment] += overwritten
            self.fresh[name, fragment] = c.tokens
        else:
            self.refused[name, fragment] += c.accounted
            self.settled.append(c)
        self.act(actions)

    def contribute_again(self, _: str) -> None:
        """The answer was lost with the connection. Whatever it is this time, the books are as before."""
        again = [c for c in [*self.settled, *self.given] if self.core.incarnations[c.learner] == c.incarnation]
        if again:
            c = self.random.choice(sorted(again, key=repr))
            if c.learner in self.core.members and (
                c in self.given or c.round < self.core.fragments[c.fragment].version
            ):
                books = deepcopy(self.core.books.ledgers)
                answer, *actions = self.core.contributed(self.now, c)
                assert c not in self.given or answer == Accept(c, duplicate=True)
                self.act(actions)
                assert self.core.books.ledgers == books
                self.counts["again"] += 1

    def go_on(self, _: str) -> None:
        """Tensor work or a disk is done."""
        busy = [f for f, state in enumerate(self.core.fragments) if state.phase != "open"]
        if not busy:
            return
        fragment = self.random.choice(busy)
        state = self.core.fragments[fragment]
        if state.phase == "merging":
            self.core.merged(fragment)
            return
        for c in state.rounds[state.version].contributions.values():
            self.given.remove(c)
            self.settled.append(c)
            self.merged[c.learner, fragment] += c.tokens
            self.refused[c.learner, fragment] += c.accounted - c.tokens
        for c in state.rounds[state.version].missed:
            self.given.remove(c)
            self.settled.append(c)
            self.refused[c.learner, fragment] += c.accounted
            self.counts["missed"] += 1
        actions = self.core.stored(self.now, fragment)
        self.save()
        self.act(actions)

    def abandon(self, _: str) -> None:
        """The sum overflows."""
        for fragment, state in enumerate(self.core.fragments):
            if state.phase == "merging":
                for c in [c for c in self.given if c.fragment == fragment]:
                    self.given.remove(c)
                    self.refused[c.learner, fragment] += c.accounted
                self.act(self.core.abandoned(self.now, fragment, "not finite"))
                return

    def disconnect(self, name: str) -> None:
        self.act(self.core.disconnected(self.now, name, self.core.incarnations[name]))

    def leave(self, name: str) -> None:
        if name in self.core.members:
            self.act(self.core.left(self.now, name, self.core.incarnations[name], tokens=self.tokens[name]))
            self.gone(name)

    def time_passes(self, _: str) -> None:
        self.now += self.random.choice([0.1, 1.0, 4.0])
        self.act(self.core.tick(self.now))

    def save(self) -> None:
        """With a version: it, the books that belong to it, and who is here."""
        core = self.core
        self.disk = deepcopy((
            [f.version for f in core.fragments], core.books.durable_ledgers(), list(core.members.values()), core.incarnations, core.step,
            [f.step for f in core.fragments], self.merged, self.refused,
        ))  # fmt: skip

    def save_the_roster(self, _: str) -> None:
        """Between versions; some may be on their way to the disk."""
        self.save()
        self.counts["storing"] += any(state.phase == "storing" for state in self.core.fragments)

    def crash(self, _: str) -> None:
        """Back to what the disk says; so do the learners, to keep the second books simple. What was acknowledged is fresh again."""
        versions, ledgers, roster, incarnations, step, round_steps, self.merged, self.refused = deepcopy(self.disk)
        members = [
            Member(m.learner, m.incarnation, m.step, self.now, self.now, connected=False, ready=True, tokens=m.tokens)
            for m in roster
        ]
        self.core = SyncerCore(
            self.core.method,
            versions,
            roster=members,
            incarnations=incarnations,
            ledgers=ledgers,
            step=step,
            round_steps=round_steps,
        )
        self.given.clear()
        self.settled.clear()
        for name in NAMES:
            self.gone(name)
        for m in roster:
            self.tokens[m.learner] = m.tokens
            for f in range(FRAGMENTS):
                self.fresh[m.learner, f] = ledgers[m.learner][f].pending
        self.run_tokens = 0
        self.counts["crash"] += 1

    # --- what must hold ---

    def check(self) -> None:
        assert self.core.books.run_tokens >= self.run_tokens
        self.run_tokens = self.core.books.run_tokens
        for name, books in self.core.books.ledgers.items():
            for f, ledger in enumerate(books):
                storing = self.core.fragments[f].phase == "storing"
                given = sum(c.accounted for c in self.given if (c.learner, c.fragment) == (name, f))
                assert ledger.trained == ledger.pending + ledger.merged + sum(ledger.discarded.values()) + ledger.lost
                assert min([ledger.pending, ledger.merged, ledger.lost, *ledger.discarded.values()]) >= 0
                if not storing:
                    assert ledger.merged == self.merged[name, f]
                    assert sum(ledger.discarded.values()) == self.refused[name, f]
                    assert ledger.pending >= given
                    assert name in self.core.members or ledger.pending == given
                elif name not in self.core.members:
                    state = self.core.fragments[f]
                    waiting = [c for c in state.rounds[state.version].missed if c.learner == name]
                    if early := state.rounds.get(state.version + 1):
                        waiting += [c for c in early.contributions.values() if c.learner == name]
                    assert ledger.pending == sum(c.accounted for c in waiting)


def test_the_books_balance_whatever_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in range(120):
        books = Books(seed)
        books.live(200)
        counts += books.counts
    for happened in (
        "Accept", "version", "missed", "out of step", "twice in one round", "Merge", "Publish", "Reject", "Evict", "again", "crash",
        "storing",
    ):  # fmt: skip
        assert counts[happened] >= 20, (happened, counts)


@pytest.mark.parametrize("discarded", [0, 20])
def test_a_contribution_accounts_for_what_it_holds_and_what_was_given_up(discarded: int) -> None:
    c = Contribution("a", 1, 0, 0, 0, 80, 8, 100, (("overlap", discarded),), step=8)
    assert c.accounted == 80 + discarded
