"""Leases of the run's data: each unit merged once, over joins, deaths, rejections and restarts of the syncer."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError, PayloadError
from diloco.protocol.contribution import KEPT, LATE, MISSED, OUT_OF_STEP, OUTLIER, OVERLAP, Contribution
from diloco.protocol.leases import UNHELD, Ask, DataSet, Grant, Leases, rolled_back
from diloco.protocol.unit_queue import UnitQueue
from diloco.protocol.units import KEPT_VERSIONS, MERGED, Ranges, common, count, is_set, minus, ranges_of, split, union

DATA = DataSet(num_units=40, passes=0, digest="d")


# --- ranges -----------------------------------------------------------------------------------------------------------

NUMBERS = st.sets(st.integers(0, 60))


def numbers(ranges: Ranges) -> set[int]:
    return {number for first, stop in ranges for number in range(first, stop)}


def as_ranges(its: set[int]) -> Ranges:
    return ranges_of((number, number + 1) for number in its)


@given(NUMBERS, NUMBERS, st.integers(0, 70))
def test_ranges_are_sets(a: set[int], b: set[int], num: int) -> None:
    one, other = as_ranges(a), as_ranges(b)
    results = union(one, other), common(one, other), minus(one, other), *split(one, num)
    assert [numbers(each) for each in results[:3]] == [a | b, a & b, a - b]
    assert numbers(results[3]) == set(sorted(a)[:num])
    assert numbers(results[4]) == set(sorted(a)[num:])
    assert count(one) == len(a)
    assert all(is_set(each) and each == ranges_of(each) for each in results)
    assert not is_set(((0, 2), (2, 3)))
    assert not is_set(((1, 1),))
    assert not is_set(((-1, 1),))


# --- a run ------------------------------------------------------------------------------------------------------------


class Learner:
    """One incarnation: the units that it has, what it has trained and not sent by fragment, what was overwritten, and
    the fragments that it holds."""

    def __init__(self, name: str, incarnation: int, num_fragments: int, holds: frozenset[int]) -> None:
        self.name, self.incarnation, self.holds = name, incarnation, holds
        self.asks = 0
        self.held: list[int] = []
        self.pending: list[set[int]] = [set() for _ in range(num_fragments)]
        self.overwritten: list[set[int]] = [set() for _ in range(num_fragments)]
        self.numbers = [0] * num_fragments
        self.sent: dict[tuple[int, int], Contribution] = {}  # by fragment and number, without a verdict

    def state(self) -> tuple[list[set[int]], list[set[int]]]:
        return [set(its) for its in self.pending], [set(its) for its in self.overwritten]


class World:
    """Leases, learners, and what truly became of each unit in each fragment."""

    def __init__(self, num_fragments: int, passes: int) -> None:
        self.num_fragments = num_fragments
        self.data = DataSet(40, passes, "d")
        self.leases = Leases(num_fragments)
        self.open: list[Contribution] = []
        self.learners: dict[str, Learner] = {}
        self.incarnations: Counter[str] = Counter()
        self.holds: dict[str, frozenset[int]] = {}  # that its next incarnation holds; all, where it says nothing
        self.checkpoints: dict[str, tuple[list[set[int]], list[set[int]]]] = {}
        self.merges: Counter[tuple[int, int]] = Counter()  # by unit and fragment
        self.versions: list[list[set[int]]] = [[] for _ in range(num_fragments)]  # the units in each
        self.known_from = [0] * num_fragments  # a repair goes back to this version at most

    def join(self, name: str, *, resumes: bool) -> None:
        self.end(name)
        self.incarnations[name] += 1
        holds = self.holds.get(name, frozenset(range(self.num_fragments)))
        learner = self.learners[name] = Learner(name, self.incarnations[name], self.num_fragments, holds)
        saved = self.checkpoints.get(name)
        if not resumes or saved is None:
            self.checkpoints.pop(name, None)
            return
        pending, overwritten = saved
        claim = tuple(as_ranges(a | b) for a, b in zip(pending, overwritten, strict=True))
        claimed = numbers(self.ask(learner, 4, claim).claimed)
        learner.pending = [its & claimed for its in pending]
        learner.overwritten = [its & claimed for its in overwritten]

    def ask(self, learner: Learner, num: int, claim: tuple[Ranges, ...] = ()) -> Grant:
        learner.asks += 1
        ask = Ask(learner.asks, num, self.data, claim)
        free_before = minus(self.everything(), union(self.leases.leased, self.leases.done))
        grant = self.leases.ask(learner.name, learner.incarnation, ask, held=learner.holds)
        assert self.leases.ask(learner.name, learner.incarnation, ask, held=learner.holds) == grant  # a retransmission
        assert minus(union(grant.units, grant.claimed), free_before) == ()
        learner.held += sorted(numbers(grant.units))
        return grant

    def everything(self) -> Ranges:
        end = 40 * self.data.passes if self.data.passes else self.leases.frontier + 100
        return ((0, end),)

    def train(self, name: str, num: int) -> None:
        learner = self.learners[name]
        units, learner.held = set(learner.held[:num]), learner.held[num:]
        for fragment in learner.holds:
            learner.pending[fragment] |= units

    def overwrite(self, name: str, fragment: int) -> None:
        learner = self.learners[name]
        learner.overwritten[fragment] |= learner.pending[fragment]
        learner.pending[fragment] = set()

    def send(self, name: str, fragment: int) -> None:
        learner = self.learners[name]
        learner.numbers[fragment] += 1
        units, overwritten = as_ranges(learner.pending[fragment]), as_ranges(learner.overwritten[fragment])
        c = Contribution(
            name, learner.incarnation, fragment, learner.numbers[fragment], 0, 0, 1, 1, step=1, units=units,
            overwritten=overwritten,
        )  # fmt: skip
        learner.pending[fragment], learner.overwritten[fragment] = set(), set()
        learner.sent[fragment, c.number] = c
        self.arrive(c)

    def arrive(self, c: Contribution) -> None:
        self.leases.check(c, self.open)
        self.open.append(c)
        if c.units:
            with pytest.raises(PayloadError, match="not leased to incarnation"):
                self.leases.check(c, self.open)

    def verdict(self, index: int, reason: str | None) -> None:
        c = self.open.pop(index)
        versions = self.versions[c.fragment]
        if reason is None:
            self.merges.update((unit, c.fragment) for unit in numbers(c.units))
            versions.append(numbers(c.units))
            self.known_from[c.fragment] = max(self.known_from[c.fragment], len(versions) - KEPT_VERSIONS)
        self.leases.decided(c, reason, self.open, version=len(versions))
        learner = self.learners.get(c.learner)
        if learner is not None and learner.incarnation == c.incarnation:
            del learner.sent[c.fragment, c.number]
            if reason in KEPT:
                learner.pending[c.fragment] |= numbers(c.units)

    def end(self, name: str) -> None:
        if (learner := self.learners.pop(name, None)) is not None:
            self.leases.ended(name, learner.incarnation, self.open)

    def restart(self) -> None:
        """Open contributions are forgotten: learners that live send theirs again."""
        record = json.loads(json.dumps(self.leases.after([], self.open).saved()))
        self.leases, self.open = Leases(self.num_fragments), []
        self.leases.restore(record, {(it.name, it.incarnation) for it in self.learners.values()})
        for learner in self.learners.values():
            for key in sorted(learner.sent):
                self.arrive(learner.sent[key])

    def repair(self, fragment: int, num_lost: int) -> None:
        """The newest versions of a fragment are lost, and all learners are gone."""
        versions = self.versions[fragment]
        left = max(self.known_from[fragment], len(versions) - num_lost)
        self.merges.subtract((unit, fragment) for units in versions[left:] for unit in units)
        self.merges += Counter()  # those that are left
        del versions[left:]
        record = json.loads(json.dumps(self.leases.after([], self.open).saved()))
        record = json.loads(json.dumps(rolled_back(record, [len(each) for each in self.versions])))
        self.leases, self.open, self.learners = Leases(self.num_fragments), [], {}
        self.leases.restore(record, ())

    def check(self) -> None:
        leases = self.leases
        status = leases.status()
        if status is None:
            return
        done, leased, returned = map(numbers, (leases.done, leases.leased, leases.returned))
        assert len(done) + len(leased) + len(returned) == leases.frontier
        assert sum(count(lease.units) for lease in leases.leases.values()) == len(leased)
        for each in status["passes"]:
            assert each["done"] + each["leased"] + each["free"] == 40
        for left in leases.left.values():
            assert numbers(left.units) <= returned
        for fragment, totals in enumerate(leases.totals):
            assert sum(totals.fates.values()) == len(done)
            waiting = sum(count(it.fates[fragment].get(MERGED, ())) for it in leases.leases.values())
            merges = sum(num for (_, at), num in self.merges.items() if at == fragment)
            assert totals.merges == merges == totals.fates[MERGED] + waiting + totals.repeated
        for learner in self.learners.values():
            if (lease := leases.leases.get((learner.name, learner.incarnation))) is not None:
                unheld = [lease.units == its.get(UNHELD, ()) for its in lease.fates]
                assert not lease.units or unheld == [f not in learner.holds for f in range(self.num_fragments)]
                assert not set.intersection(*(numbers(lease.settled(f)) for f in learner.holds))  # done, or free again
        merged = {unit for unit, _ in self.merges}
        assert done <= merged  # nothing is skipped
        before_pass = {unit for unit in range(leases.frontier) if unit // 40 < status["passes_done"]}
        assert before_pass <= done


REASONS = st.sampled_from([None, None, None, None, MISSED, LATE, OUTLIER, OUT_OF_STEP])
NAMES = st.sampled_from("abc")
EVENTS = st.one_of(
    st.tuples(st.just("join"), NAMES, st.booleans()),
    st.tuples(st.just("ask"), NAMES, st.integers(1, 30)),
    st.tuples(st.just("train"), NAMES, st.integers(1, 8)),
    st.tuples(st.just("train"), NAMES, st.integers(1, 8)),
    st.tuples(st.just("overwrite"), NAMES, st.integers(0, 1)),
    st.tuples(st.just("send"), NAMES, st.integers(0, 1)),
    st.tuples(st.just("send"), NAMES, st.integers(0, 1)),
    st.tuples(st.just("verdict"), st.integers(0, 9), REASONS),
    st.tuples(st.just("verdict"), st.integers(0, 9), REASONS),
    st.tuples(st.just("checkpoint"), NAMES, st.none()),
    st.tuples(st.just("end"), NAMES, st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
    st.tuples(st.just("repair"), st.integers(0, 1), st.integers(1, KEPT_VERSIONS)),
)


def happen(world: World, what: str, a: Any, b: Any) -> None:
    match what:
        case "join":
            world.join(a, resumes=b)
        case "verdict" if a < len(world.open):
            world.verdict(a, b)
        case "restart" if world.leases.data is not None:
            world.restart()
        case "repair" if world.leases.data is not None and a < world.num_fragments:
            world.repair(a, b)
        case _ if a not in world.learners:
            pass
        case "ask":
            world.ask(world.learners[a], b)
        case "train":
            world.train(a, b)
        case "overwrite" if b < world.num_fragments:
            world.overwrite(a, b)
        case "send" if b < world.num_fragments:
            world.send(a, b)
        case "checkpoint" if not world.learners[a].sent:
            world.checkpoints[a] = world.learners[a].state()
        case "end":
            world.end(a)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2), st.integers(0, 2), st.lists(EVENTS, max_size=80))
def test_all_adds_up_whatever_happens(num_fragments: int, passes: int, events: list[tuple[str, Any, Any]]) -> None:
    world = World(num_fragments, passes)
    for what, a, b in events:
        happen(world, what, a, b)
        world.check()
    # In the end one learner trains what is left of two passes: each unit is merged once, but for those that came back.
    for name in "abc":
        world.end(name)
    while world.open:
        world.verdict(0, None)
    world.data = DataSet(40, world.leases.data.passes if world.leases.data is not None else 2, "d")
    world.join("z", resumes=False)
    while minus(((0, 80),), world.leases.done) and numbers(world.ask(world.learners["z"], 30).units):
        world.train("z", 30)
        for fragment in range(num_fragments):
            world.send("z", fragment)
            world.verdict(0, None)
        world.check()
    end = 40 * (world.data.passes or 2)
    assert minus(((0, end),), world.leases.done) == ()
    for fragment, totals in enumerate(world.leases.totals):
        times = [world.merges[unit, fragment] for unit in numbers(world.leases.done)]
        assert sum(max(0, each - 1) for each in times) <= totals.repeated
        missing = sum(each == 0 for each in times)
        assert missing == sum(num for fate, num in totals.fates.items() if fate != MERGED)


def gets_on(world: World, draw: Random, name: str, fragment: int, *, repairs: float) -> None:
    """One event, drawn so that most units are done when a repair comes. `repairs`: its weight."""
    what = draw.choices(
        ["ask", "train", "send", "verdict", "overwrite", "checkpoint", "end", "restart", "repair"],
        [3, 6, 8, 14, 1, 4, 0.7, 0.3, repairs],
    )[0]
    match what:
        case "ask":
            happen(world, what, name, draw.randint(1, 12))
        case "train":
            happen(world, what, name, draw.randint(1, 6))
        case "verdict":
            happen(world, what, 0, draw.choice([None, None, None, LATE, OUT_OF_STEP]))
        case "repair":
            happen(world, what, fragment, draw.randint(1, KEPT_VERSIONS - 1))
        case _:
            happen(world, what, name, fragment)


def test_what_a_repair_loses_comes_back() -> None:
    """As above, with events that get on: most units are done when a repair comes."""
    num_lost = num_repeated = 0
    for seed in range(80):
        draw = Random(seed)
        world = World(1 + seed % 2, 0)
        for _ in range(150):
            name, fragment = draw.choice("ab"), draw.randrange(world.num_fragments)
            if name not in world.learners:
                world.join(name, resumes=draw.random() < 0.8)
            gets_on(world, draw, name, fragment, repairs=1)
            world.check()
        num_lost += world.leases.num_lost
        num_repeated += sum(totals.repeated for totals in world.leases.totals)
    assert num_lost > 100
    assert num_repeated > 100


def test_all_adds_up_where_learners_hold_parts() -> None:
    """As above; one that comes back holds something else now and then, and goes on from its checkpoint if it does not.
    All hold the last fragment."""
    parts = [frozenset(held) for held in ({0, 2}, {1, 2}, {2}, {0, 1, 2})]
    num_claimed = num_unclaimed = 0
    for seed in range(80):
        draw = Random(seed)
        world = World(3, 0)
        for _ in range(150):
            name = draw.choice("abc")
            if name not in world.learners:
                before = world.holds.get(name)
                world.holds[name] = draw.choice(parts) if before is None or draw.random() < 0.3 else before
                world.join(name, resumes=world.holds[name] == before and draw.random() < 0.8)
                num_claimed += sum(map(len, world.learners[name].pending))
            fragment = draw.choice(sorted(world.learners[name].holds))
            gets_on(world, draw, name, fragment, repairs=0.3)
            world.check()
        num_unclaimed += world.leases.num_unclaimed
        num_done = count(world.leases.done)
        assert all(totals.fates.total() == num_done for totals in world.leases.totals)
    assert num_claimed > 100
    assert num_unclaimed > 10


def two_fragments() -> tuple[World, Learner]:
    world = World(2, 0)
    world.join("a", resumes=False)
    world.ask(world.learners["a"], 10)
    world.train("a", 6)
    return world, world.learners["a"]


def test_a_death_between_two_fragments_repeats_what_the_first_had_merged() -> None:
    world, _ = two_fragments()
    world.send("a", 0)
    world.verdict(0, None)
    assert world.leases.done == ()
    world.end("a")
    assert world.leases.returned == ((0, 10),)
    assert [it.repeated for it in world.leases.totals] == [6, 0]
    world.join("b", resumes=False)
    assert world.ask(world.learners["b"], 12).units == ((0, 12),)  # what came back goes first


def test_what_a_fragment_gives_up_is_done_if_another_has_merged_it_and_comes_back_if_none_has() -> None:
    world, _ = two_fragments()
    world.send("a", 0)
    world.verdict(0, None)
    world.overwrite("a", 1)
    world.train("a", 2)
    world.send("a", 1)
    assert world.leases.done == ()  # no verdict yet
    world.verdict(0, LATE)
    assert world.leases.done == ((0, 6),)
    assert [dict(it.fates) for it in world.leases.totals] == [{MERGED: 6}, {OVERLAP: 6}]
    world.send("a", 0)
    world.verdict(0, OUTLIER)
    assert world.leases.returned == ((6, 8),)


def test_an_acknowledged_contribution_outlives_its_learner_and_not_the_syncer() -> None:
    world, _ = two_fragments()
    world.send("a", 0)
    world.send("a", 1)
    world.end("a")
    assert world.leases.leased == ((0, 6),)
    world.verdict(0, None)
    world.verdict(0, None)
    assert world.leases.done == ((0, 6),)
    assert world.leases.leases == {}

    world, _ = two_fragments()
    world.send("a", 0)
    world.send("a", 1)
    world.end("a")
    world.restart()
    assert world.leases.returned == ((0, 10),)


def test_a_record_with_a_version_has_the_fates_that_come_with_it() -> None:
    world, _ = two_fragments()
    for fragment in (0, 1):
        world.send("a", fragment)
    first, second = world.open
    world.leases.decided(first, None, [second], version=1)
    record = json.loads(json.dumps(world.leases.after([(second, None, 1)], []).saved()))
    assert world.leases.done == ()  # not published yet
    both = [(first, None, 0), (second, None, 0)]
    fresh, _ = two_fragments()
    for fragment in (0, 1):
        fresh.send("a", fragment)
    fresh.end("a")  # its units wait for both verdicts, in whatever order they come
    lone = Leases(2)
    lone.restore(json.loads(json.dumps(fresh.leases.after(both, []).saved())), ())
    assert lone.done == ((0, 6),)
    again = Leases(2)
    again.restore(record, {("a", 1)})
    assert again.done == ((0, 6),)
    world.leases.decided(second, None, [], version=1)
    assert json.loads(json.dumps(world.leases.saved())) == record


def test_a_record_does_not_change_once_it_is_taken() -> None:
    world, _ = two_fragments()
    world.send("a", 0)
    taken = world.leases.saved()
    before = json.dumps(taken)
    world.verdict(0, None)
    assert json.dumps(taken) == before


def test_a_resumed_learner_gets_its_units_back_with_their_fates() -> None:
    world, learner = two_fragments()
    world.send("a", 0)
    world.verdict(0, None)
    world.checkpoints["a"] = learner.state()
    world.end("a")
    world.join("a", resumes=True)
    assert world.learners["a"].pending == [set(), set(range(6))]
    assert world.leases.totals[0].repeated == 0
    world.send("a", 1)
    world.verdict(0, None)
    assert world.leases.done == ((0, 6),)

    world, learner = two_fragments()
    world.checkpoints["a"] = learner.state()
    world.end("a")
    world.join("b", resumes=False)
    assert world.ask(world.learners["b"], 4).units == ((0, 4),)
    world.join("a", resumes=True)
    assert world.learners["a"].pending == [{4, 5}, {4, 5}]
    assert world.leases.num_unclaimed == 4


def test_the_data_ends_and_comes_back() -> None:
    leases = Leases(1)
    data = DataSet(10, 2, "d", unit_tokens=3)
    assert leases.ask("a", 1, Ask(1, 15, data), tokens_before=14).units == ((4, 19),)
    assert leases.ask("b", 1, Ask(1, 15, data)).units == ((19, 20),)
    assert leases.ask("b", 1, Ask(2, 15, data)).units == ()
    status = leases.status()
    assert status is not None
    assert status["passes"] == [
        {"pass": 0, "done": 4, "leased": 6, "free": 0},
        {"pass": 1, "done": 0, "leased": 10, "free": 0},
    ]
    leases.ended("a", 1, [])
    assert leases.ask("b", 1, Ask(3, 100, data)).units == ((4, 19),)


def test_requests_that_make_no_sense_are_refused() -> None:
    leases = Leases(2)
    leases.ask("a", 1, Ask(1, 5, DATA))
    with pytest.raises(ConfigError, match=r"'b' has data of 41 units .* run has data of 40 units"):
        leases.ask("b", 1, Ask(1, 5, DataSet(41, 0, "d")))
    with pytest.raises(PayloadError, match="number leases 1, 2, 3"):
        leases.ask("c", 1, Ask(0, 5, DATA))
    for ask in (Ask(3, 5, DATA), Ask(0, 5, DATA), Ask(2, 0, DATA), Ask(2, 2**20 + 1, DATA)):
        with pytest.raises(PayloadError, match="number leases 1, 2, 3"):
            leases.ask("a", 1, ask)
    for ask in (Ask(2, 5, DATA, claim=((), ())), Ask(2, 5, DATA, claim=((),))):
        with pytest.raises(PayloadError, match="claims units"):
            leases.ask("a", 1, ask)
    with pytest.raises(PayloadError, match="data of 0 units"):
        leases.ask("a", 1, Ask(2, 5, DataSet(0, 0, "d")))

    def c(units: Ranges, overwritten: Ranges = (), incarnation: int = 1) -> Contribution:
        return Contribution("a", incarnation, 0, 1, 0, 0, 1, 1, step=1, units=units, overwritten=overwritten)

    leases.check(c(((0, 3),), ((3, 5),)), [])
    for bad in (c(((4, 6),)), c(((0, 1),), incarnation=2), c((), ((7, 8),))):
        with pytest.raises(PayloadError, match="not leased to incarnation"):
            leases.check(bad, [])
    with pytest.raises(PayloadError, match="send each in one of the two"):
        leases.check(c(((0, 3),), ((2, 5),)), [])


def test_a_learner_asks_again_before_it_takes_the_data_to_have_ended() -> None:
    queue = UnitQueue(DATA, 6)
    assert queue.ask([()]) == Ask(1, 6, DATA)
    queue.granted(Grant(1, ((0, 4),)))
    assert queue.ask([()]) == Ask(2, 6, DATA)
    queue.granted(Grant(2, ()))
    assert queue.draw(3) == [0, 1, 2]
    assert queue.ask([()]) is None  # not ahead
    assert queue.ask([()], at_least=3) == Ask(3, 6, DATA)
    assert not queue.has(3)
    queue.granted(Grant(3, ((20, 22),)))  # came back meanwhile
    assert queue.draw(3) == [3, 20, 21]
    assert queue.ask([()], at_least=3) == Ask(4, 6, DATA)
    queue.granted(Grant(4, ()))
    assert queue.has(3)
    assert queue.draw(3) == []


def test_a_new_incarnation_claims_what_was_drawn_and_keeps_what_it_gets() -> None:
    queue = UnitQueue(DATA, 6)
    queue.ask([()])
    queue.granted(Grant(1, ((0, 12),)))
    for _ in range(3):
        queue.draw(2)
    queue.take()
    queue.start_over()
    assert not queue.is_sure
    assert queue.ask([(), ((30, 31),)]) == Ask(1, 6, DATA, (((0, 6),), ((0, 6), (30, 31))))
    assert not queue.is_sure
    queue.granted(Grant(1, ((20, 26),), claimed=((1, 3), (30, 31))))
    assert queue.trained() == ((1, 2),)
    assert queue.trained() is None  # no batch since
    queue.put_back()
    assert queue.draw(3) == [2, 20, 21]


def test_a_batch_is_taken_without_some_of_its_units() -> None:
    queue = UnitQueue(DATA, 6)
    queue.ask([()])
    queue.granted(Grant(1, ((0, 12),)))
    queue.draw(4)
    queue.draw(2)
    assert queue.take(((1, 3), (5, 6))) == ((0, 1), (3, 4))
    assert queue.trained() == ((0, 1), (3, 4))
    assert queue.take() == ((4, 6),)


def test_a_status_is_short_where_each_unit_is_a_pass() -> None:
    leases = Leases(1)
    leases.ask("a", 1, Ask(1, 2**20, DataSet(1, 0, "d")))
    status = leases.status()
    assert status is not None
    assert (status["passes_begun"], len(status["passes"])) == (2**20, 16)


def test_hundreds_of_millions_of_units_cost_little() -> None:
    leases = Leases(4)
    data = DataSet(10**8, 0, "d")
    for number in range(1, 500):
        [(first, stop)] = leases.ask("a", 1, Ask(number, 2**19, data)).units
        for fragment in range(4):
            c = Contribution("a", 1, fragment, number, 0, 0, 1, 1, step=1, units=((first, stop),))
            leases.check(c, [])
            leases.decided(c, None, [], version=number)
    assert count(leases.done) == 499 * 2**19
    assert len(json.dumps(leases.saved())) < 2000


def test_a_claim_has_no_fate_of_a_version_that_was_lost() -> None:
    world, learner = two_fragments()
    world.send("a", 0)
    world.verdict(0, None)
    world.checkpoints["a"] = learner.state()  # the work in the second fragment is pending
    world.end("a")
    world.repair(0, 1)
    world.check()
    world.join("a", resumes=True)
    world.check()
    assert world.learners["a"].pending == [set(), set()]  # the first fragment lacks them: they are trained anew
    assert world.leases.num_unclaimed == 6
