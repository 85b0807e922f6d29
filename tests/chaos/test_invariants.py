"""Each invariant holds of a good run, and is broken by what it is there for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.facts import Facts, Injected, Record, StoredVersion, read_facts, stretches
from tests.chaos.invariants import INVARIANTS, OF_A_SOAK, STUCK_S, check
from tests.chaos.measures import lines, measured
from tests.chaos.plan import VIEWER_EVERY_S, ChaosPlan, Fault
from tests.chaos.processes import End
from tests.chaos.versions import BrokenInvariantError, Versions, check_ledger

from diloco import events as ev
from diloco.protocol.lineage import Epoch

NAMES = ("learner-0", "learner-1")


def version(t: float, number: int, *names: str) -> list[ev.Event]:
    """A version is merged of these learners' work and published."""
    num = len(names)
    return [
        ev.Merged(t=t, fragment=0, round=number - 1, version=number, contributors=names, weights=(1.0,) * num,
                  tokens=(10,) * num, steps=(1,) * num, units=(((number, number + 1),),) * num),
        ev.Published(t=t + 0.1, fragment=0, version=number, digest=f"d{number}", num_bytes=1),
    ]  # fmt: skip


def syncers_events() -> list[ev.Event]:
    """A syncer that publishes two versions, is killed at 20, serves again at 22, and publishes a third. learner-1 is
    killed at 30 and back at 34."""
    return [
        ev.SyncerStarted(t=1, run="r", address="x"),
        ev.Joined(t=2, learner="learner-0", incarnation=1),
        ev.Joined(t=2, learner="learner-1", incarnation=1),
        *version(5, 1, *NAMES),
        *version(15, 2, *NAMES),
        ev.SyncerStarted(t=22, run="r", address="x", versions=(2,)),
        *version(25, 3, *NAMES),
        *version(32, 4, "learner-0"),
        ev.Joined(t=34, learner="learner-1", incarnation=2),
        *version(35, 5, *NAMES),
        *(ev.Left(t=46, learner=name, incarnation=2) for name in NAMES),
    ]


HISTORY = [StoredVersion(0, number, f"d{number}", tokens) for number, tokens in enumerate((0, 20, 20, 20, 10, 20))]


REFUSED = ev.SyncerStarted(t=19, run="r", address="x", versions=(1,))
"""All that a syncer says that is started on an older copy, since no learner follows it."""


@pytest.fixture
def facts() -> Facts:
    held = [ev.Adopted(t=6, step=1, fragment=0, version=1, digest="d1")]
    learners = {name: [*life(name), *held] for name in NAMES}
    learners["learner-0"] += [finished(45, "learner-0", 20, seconds=43)]
    learners["learner-1"] += [run_started(34, "learner-1", 6), finished(45, "learner-1", 30, seconds=12)]
    return Facts(
        syncers_events(), learners, [HISTORY], stale=[[REFUSED]], refusals=2, epochs=[Epoch(1, (0,)), Epoch(2, (2,))],
        trained={"learner-0": 20, "learner-1": 34},
    )  # fmt: skip


def run_started(t: float, name: str, tokens: int) -> ev.RunStarted:
    return ev.RunStarted(t=t, who=name, run="r", learners=2, num_parameters=1, step=tokens, tokens=tokens,
                         role="learner", shard=0, method={})  # fmt: skip


def finished(t: float, name: str, tokens: int, seconds: float) -> ev.Finished:
    return ev.Finished(t=t, who=name, steps=tokens, tokens=tokens, seconds=seconds, reason="stopped")


def life(name: str) -> list[ev.Event]:
    """It has trained 8 tokens as of its last event."""
    steps = [ev.Stepped(t=t, step=t, loss=1, lr=1, tokens=t, tokens_per_s=1, gradient_norm=1) for t in (4, 8)]
    return [run_started(3, name, 0), *steps]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return good_end(tmp_path)


def good_end(tmp_path: Path) -> Record:
    ledger = {"trained": 100, "merged": 90, "pending": 0, "lost": 4, "discarded": {"overlap": 6}}
    data = {
        "num_units": 10, "passes_done": 1, "passes": [{"pass": 1, "done": 3, "leased": 0, "free": 7}],
        "fragments": [{"fates": {"merged": 12, "overlap": 1}, "merges": 9}],
    }  # fmt: skip
    replayed = {"events": 5, "decisions_equal": 5, "skipped": 0, "difference": None, "merges_equal": 2}
    return Record(
        plan=ChaosPlan(tmp_path, 1, 30.0, 2, 8.0, 1.0),
        lost_s=2.0,
        calm=(3.0, 18.0),
        troubled=(18.0, 40.0),
        injected=(
            Injected(Fault(2.0, "kill syncer", "syncer", 1.0, 0.5), 20.0, 21.0, True),
            Injected(Fault(12.0, "kill learner", "learner-1", 1.0, 0.5), 30.0, 31.0, True),
        ),
        ends=(End("syncer", 20.1, -9), End("learner-1", 30.1, -9)),
        settled=True,
        status={"tokens": 100, "fragments": [{"fragment": 0, "ledger": ledger}], "data": data},
        exit_codes={"syncer": 0, **dict.fromkeys(NAMES, 143)},
        state={"starts": True, "problems": []},
        replays=({"found": replayed, "exit_code": 0, "said": ""},),
        state_dirs=(tmp_path / "syncer",),
        stale_dirs=(tmp_path / "stale-1",),
        failures=(),
        curves={},
    )


def test_a_good_run_breaks_none(record: Record, facts: Facts) -> None:
    assert [finding.broken for finding in check(record, facts)] == [()] * len(INVARIANTS)


def with_status(record: Record, change: Callable[[dict[str, Any]], object]) -> Record:
    status = json.loads(json.dumps(record.status))
    change(status)
    return replace(record, status=status)


def with_event(facts: Facts, event: ev.Event) -> Facts:
    return replace(facts, syncer=sorted([*facts.syncer, event], key=lambda each: each.t))


def ledger(status: dict[str, Any]) -> dict[str, Any]:
    return status["fragments"][0]["ledger"]


def forgotten(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, with_event(facts, ev.SyncerStarted(t=28, run="r", address="x", versions=(2,)))


def twice(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, with_event(facts, ev.Published(t=26, fragment=0, version=2, digest="d2", num_bytes=1))


def began_twice(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, epochs=[*facts.epochs, facts.epochs[-1]])


def gap(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, stores=[[row for row in HISTORY if row.version != 1]])


def gap_without_a_word(record: Record, facts: Facts) -> tuple[Record, Facts]:
    """Of a database that was damaged on purpose, but what is missing was never published."""
    fault = Injected(Fault(9.0, "damage state", "syncer", 1.0, 0.5), 27.0, 27.5, True)
    history = [StoredVersion(0, 7, "d7", 10)]
    return replace(record, injected=(*record.injected, fault)), replace(facts, stores=[HISTORY, history])


def foreign(record: Record, facts: Facts) -> tuple[Record, Facts]:
    event = ev.Adopted(t=7, step=1, fragment=0, version=2, digest="other")
    return record, replace(facts, learners={**facts.learners, "learner-1": [event]})


def unpublished(record: Record, facts: Facts) -> tuple[Record, Facts]:
    event = ev.Adopted(t=7, step=1, fragment=0, version=9, digest="d9")
    return record, replace(facts, learners={**facts.learners, "learner-1": [event]})


def copy_worked_for(record: Record, facts: Facts) -> tuple[Record, Facts]:
    event = ev.Contributed(t=20, learner="learner-0", fragment=0, round=1, base=1, tokens=10, steps=1, num_bytes=1)
    return record, replace(facts, stale=[[REFUSED, event]])


def copy_not_refused(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, refusals=0)


def copy_published(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, stale=[[REFUSED, *version(21, 2, "learner-0")]])


def token_vanished(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: ledger(status).update(lost=3)), facts


def token_stays(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: ledger(status).update(lost=3, pending=1)), facts


def counted_otherwise(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: ledger(status).update(merged=89, lost=5)), facts


def counted_twice(record: Record, facts: Facts) -> tuple[Record, Facts]:
    """learner-1 was killed after 8 tokens and at most 4 more, and has trained 24 since."""
    return record, replace(facts, trained={**facts.trained, "learner-1": 37})


def counted_short(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, trained={**facts.trained, "learner-0": 19})


def killed_uncounted(record: Record, facts: Facts) -> tuple[Record, Facts]:
    """learner-1 was killed long after it had 8 tokens, and has trained 24 since."""
    return record, replace(facts, trained={**facts.trained, "learner-1": 31})


def counts_nothing(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, trained={})


def said_nothing(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return replace(record, status={}), facts


def unit_vanished(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: status["data"]["passes"][0].update(free=6)), facts


def unit_leased(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: status["data"]["passes"][0].update(free=6, leased=1)), facts


def unit_without_fate(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: status["data"]["fragments"][0]["fates"].update(merged=11)), facts


def unit_merged_unseen(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return with_status(record, lambda status: status["data"]["fragments"][0].update(merges=10)), facts


def was_suspended(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return replace(record, settled=False), facts


def failed(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return replace(record, ends=(*record.ends, End("learner-0", 33.0, 1))), facts


def ended_uncalled(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return replace(record, ends=(*record.ends, End("learner-0", 33.0, -11))), facts


def ended_badly(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return replace(record, exit_codes={**record.exit_codes, "learner-0": 1}), facts


def excepted(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return record, replace(facts, tracebacks={"learner-0": ["OSError: [Errno 27] File too large"]})


def damaged(record: Record, facts: Facts) -> tuple[Record, Facts]:
    problems = [{"file": "f", "what": "is damaged"}]
    return replace(record, state={"starts": False, "problems": problems}), facts


def differs(record: Record, facts: Facts) -> tuple[Record, Facts]:
    found = {**record.replays[0]["found"], "difference": "entry 3"}
    return replace(record, replays=({"found": found, "exit_code": 1, "said": ""},)), facts


def decided_otherwise(record: Record, facts: Facts) -> tuple[Record, Facts]:
    found = {**record.replays[0]["found"], "decisions_equal": 4}
    return replace(record, replays=({"found": found, "exit_code": 0, "said": ""},)), facts


def unreplayed(record: Record, facts: Facts) -> tuple[Record, Facts]:
    return replace(record, replays=({"found": {}, "exit_code": 1, "said": "no journal"},)), facts


BREAKS = {
    "no published version is lost": (forgotten,),
    "every version is published once": (twice,),
    "epochs grow": (began_twice,),
    "the history has no gap": (gap, gap_without_a_word),
    "learners hold what was published": (foreign, unpublished),
    "no learner follows an older copy": (copy_worked_for, copy_published, copy_not_refused),
    "every token is accounted for": (
        token_vanished,
        token_stays,
        counted_otherwise,
        counted_twice,
        counted_short,
        killed_uncounted,
        counts_nothing,
        said_nothing,
    ),
    "every unit of data has one fate": (unit_vanished, unit_leased, unit_without_fate, unit_merged_unseen),
    "the run goes on": (was_suspended,),
    "no process ends by itself": (failed, ended_uncalled, ended_badly),
    "no process shows an exception": (excepted,),
    "the state at the end is whole": (damaged,),
    "the journal replays": (differs, decided_otherwise, unreplayed),
}


def test_every_invariant_can_break() -> None:
    assert list(BREAKS) == [name for name, *_ in INVARIANTS]


@pytest.mark.parametrize(("name", "break_it"), [(name, each) for name, them in BREAKS.items() for each in them])
def test_an_invariant_is_broken(name: str, break_it: Any, record: Record, facts: Facts) -> None:
    findings = {finding.name: finding for finding in check(*break_it(record, facts))}
    assert not findings[name].holds


def test_a_full_disk_takes_its_part_of_the_history_with_it(record: Record, facts: Facts) -> None:
    full = with_event(gap(record, facts)[1], ev.Gap(t=16, missing=1))
    assert broken_by(record, full, "the history has no gap") == ()


def test_a_version_that_only_a_start_names_is_the_same_for_all(record: Record, facts: Facts) -> None:
    """A kill kept it from being logged as published."""
    logged = [it for it in facts.syncer if not (isinstance(it, ev.Published) and it.version == 2)]
    stores = [row for row in stretches(logged)[0] if row.version]
    assert [(row.version, row.digest, row.tokens) for row in stores[:3]] == [(1, "d1", 20), (2, "", 20), (3, "d3", 20)]

    def holding(*digests: str) -> Facts:
        held = [ev.Adopted(t=23, step=2, fragment=0, version=2, digest=digest) for digest in digests]
        learners = {name: [*facts.learners[name], each] for name, each in zip(NAMES, held, strict=True)}
        return replace(facts, syncer=logged, stores=[stores], learners=learners)

    for name in ("the history has no gap", "learners hold what was published"):
        assert broken_by(record, holding("d2", "d2"), name) == ()
    assert len(broken_by(record, holding("d2", "other"), "learners hold what was published")) == 1


def test_a_run_that_went_back_has_two_stretches() -> None:
    events = [
        *syncers_events()[:-2], ev.SyncerStarted(t=50, run="r", address="x", versions=(3,)), *version(55, 4, *NAMES),
    ]  # fmt: skip
    first, second = stretches(events)
    assert [(row.version, row.tokens) for row in first] == [(0, 0), (1, 20), (2, 20), (3, 20), (4, 10), (5, 20)]
    assert [(row.version, row.digest, row.tokens) for row in second] == [(3, "d3", 20), (4, "d4", 20)]


TOKENS = "every token is accounted for"


def test_what_may_be_counted_otherwise(record: Record, facts: Facts) -> None:
    """A state that went back has forgotten some, and a goodbye that no syncer heard has record of none."""
    short, killed = counted_short(record, facts)[1], killed_uncounted(record, facts)[1]
    assert len(broken_by(record, short, TOKENS)) == len(broken_by(record, killed, TOKENS)) == 1
    for kind, target, span, less in (
        ("restore", "syncer", (27.0, 27.5), short), ("restore", "syncer", (27.0, 27.5), killed),
        ("kill syncer", "syncer", (44.0, 45.5), short), ("kill syncer", "syncer", (28.0, 28.5), killed),
        ("partition", "learner-1", (25.0, 28.5), killed),
    ):  # fmt: skip
        hit = replace(record, injected=(*record.injected, Injected(Fault(1.0, kind, target, 1.0, 0.5), *span, True)))
        assert broken_by(hit, less, TOKENS) == ()
    gone = [each for each in facts.syncer if not isinstance(each, ev.Left)]
    assert broken_by(record, replace(short, syncer=gone), TOKENS) == ()


def test_without_room_for_events_a_learner_trains_on_until_it_ends(record: Record, facts: Facts) -> None:
    more = replace(facts, trained={**facts.trained, "learner-1": 8 + 22 + 4 + 24})
    assert len(broken_by(record, more, TOKENS)) == 1
    full = Injected(Fault(9.0, "fill learner's disk", "learner-1", 9.0, 0.5), 25.0, 34.0, True)
    assert broken_by(replace(record, injected=(*record.injected, full)), more, TOKENS) == ()
    begun_unseen = [each for each in facts.learners["learner-1"] if not isinstance(each, ev.RunStarted) or each.t < 30]
    step = ev.Stepped(t=40, who="learner-1", step=9, loss=1, lr=1, tokens=20, tokens_per_s=1, gradient_norm=1)
    unseen = replace(more, learners={**facts.learners, "learner-1": [*begun_unseen, step]})
    assert broken_by(record, unseen, TOKENS) == ()


def test_a_process_that_never_trained_ends_no_other_ones_life(record: Record, facts: Facts) -> None:
    """It says what its checkpoint has, which may be what the killed one had."""
    ended = [*life("learner-1"), finished(33, "learner-1", 8, seconds=2)]
    events = [*ended, *facts.learners["learner-1"][len(life("learner-1")) :]]
    learners, trained = {**facts.learners, "learner-1": events}, {**facts.trained, "learner-1": 36}
    assert broken_by(record, replace(facts, trained=trained, learners=learners), TOKENS) == ()


def test_units_are_not_compared_after_a_repair(record: Record, facts: Facts) -> None:
    record, facts = unit_merged_unseen(record, facts)
    damaged = Injected(Fault(9.0, "damage state", "syncer", 1.0, 0.5), 27.0, 27.5, True)
    assert len(broken_by(record, facts, "every unit of data has one fate")) == 1
    record = replace(record, injected=(*record.injected, damaged))
    assert broken_by(record, facts, "every unit of data has one fate") == ()


def test_units_are_not_compared_where_an_event_of_a_merge_is_missing(record: Record, facts: Facts) -> None:
    record, facts = unit_merged_unseen(record, facts)
    events = [each for each in facts.syncer if not (isinstance(each, ev.Merged) and each.version == 3)]
    assert broken_by(record, replace(facts, syncer=events), "every unit of data has one fate") == ()


def test_a_process_may_give_way_to_another_one_of_its_name(record: Record, facts: Facts) -> None:
    """Both have been refused, and one was killed in the end."""
    ends = End("learner-0", 33.0, 1), End("learner-0-twin", 35.0, 1)
    named = replace(record, ends=(*record.ends, *ends))
    assert len(broken_by(named, facts, "no process ends by itself")) == 2
    fault = Injected(Fault(13.0, "same name", "learner-0", 5.0, 0.5), 31.0, 36.0, True)
    assert broken_by(replace(named, injected=(*record.injected, fault)), facts, "no process ends by itself") == ()
    later = replace(record, ends=(*record.ends, End("learner-0", 900.0, 1)), injected=(*record.injected, fault))
    assert len(broken_by(later, facts, "no process ends by itself")) == 1


def test_a_learner_may_end_where_it_meets_an_older_copy(record: Record, facts: Facts) -> None:
    ended = replace(record, ends=(*record.ends, End("learner-0", 33.0, 1)))
    for span, holds in (((32.0, 34.0), True), ((33.5, 35.0), False), ((20.0, 27.0), False)):
        stale = Injected(Fault(13.0, "stale copy", "syncer", 5.0, 0.5), *span, True)
        assert (
            broken_by(replace(ended, injected=(*record.injected, stale)), facts, "no process ends by itself") == ()
        ) == holds


def broken_by(record: Record, facts: Facts, name: str) -> tuple[str, ...]:
    return next(finding.broken for finding in check(record, facts) if finding.name == name)


@pytest.mark.parametrize("kind", ["restore", "damage state"])
def test_a_run_may_go_back_where_its_state_was_replaced(kind: str, record: Record, facts: Facts) -> None:
    fault = Injected(Fault(9.0, kind, "syncer", 1.0, 0.5), 27.0, 27.5, True)
    back = with_event(facts, ev.SyncerStarted(t=28, run="r", address="x", versions=(2,)))
    back = replace(back, syncer=[event for event in back.syncer if event.t < 32])
    found = {each.name: each for each in check(replace(record, injected=(*record.injected, fault)), back)}
    assert found["no published version is lost"].holds
    assert found["every version is published once"].holds


def test_the_line_of_a_restored_run_is_in_two_databases(facts: Facts) -> None:
    first = [row for row in HISTORY if row.version <= 3]
    second = [StoredVersion(0, 2, "d2", 20), StoredVersion(0, 3, "other", 7)]
    line = replace(facts, stores=[first, second]).line
    assert {row.version: row.tokens for row in line} == {0: 0, 1: 20, 2: 20, 3: 7}


def test_what_a_run_comes_to(record: Record, facts: Facts) -> None:
    findings = check(record, facts)
    found = measured(record, facts, findings)
    assert found["num_faults"] == found["num_survived"] == 2
    assert found["holds"]
    assert found["recovery"]["syncer"] == {"num": 1, "median": 2.0, "worst": 2.0}
    assert found["recovery"]["syncer_from_its_start"] == {"num": 1, "median": 1.0, "worst": 1.0}
    assert found["recovery"]["learner"] == {"num": 1, "median": 5.0, "worst": 5.0}
    assert found["recovery"]["survivor"] == {"num": 1, "median": 2.0, "worst": 2.0}
    assert found["participation"] == {"learner-0": 1.0, "learner-1": 2 / 3}
    assert found["step_s"] == 1.0
    assert found["survivor_bound_s"] == 4.0
    assert found["goodput"]["ratio"] == pytest.approx((50 / 22) / (40 / 15))
    assert "growth" not in found
    json.dumps(found)
    said = "\n".join(lines(found))
    assert "2 faults in 22 s on a syncer and 2 learners: 2 survived" in said
    assert "until the next one serves: 1, 2.00, 2.00" in said


def test_what_breaks_an_invariant_is_said(record: Record, facts: Facts) -> None:
    record, facts = excepted(record, facts)
    found = measured(record, facts, check(record, facts))
    assert not found["holds"]
    assert "        learner-0: OSError: [Errno 27] File too large" in lines(found)


# --- a soak


@pytest.fixture
def soaked(record: Record) -> Record:
    steady = [(10.0 * index, 3e8) for index in range(360)]
    curves = {"syncer (7) memory_bytes": steady, "disk journal_bytes": [(at, 10.0 * at) for at, _ in steady]}
    return replace(record, plan=replace(record.plan, soak=True), curves=curves)


@pytest.fixture
def viewed(facts: Facts) -> Facts:
    return replace(facts, answers={name: {"answered": 9, "UnreachableError": 1} for name in VIEWER_EVERY_S})


def broken_of_a_soak(record: Record, facts: Facts) -> dict[str, tuple[str, ...]]:
    return {finding.name: finding.broken for finding in check(record, facts) if not finding.holds}


def test_a_good_soak_breaks_none(soaked: Record, viewed: Facts) -> None:
    found = measured(soaked, viewed, check(soaked, viewed))
    assert found["holds"]
    assert set(found["seen"]) == {name for name, *_ in (*INVARIANTS, *OF_A_SOAK)}
    assert found["growth"]["syncer (7) memory_bytes"]["per_hour"] == 0
    assert "syncer (7) memory_bytes" in "\n".join(lines(found))


def test_a_leak_breaks_a_soak(soaked: Record, viewed: Facts) -> None:
    leak = [(at, value + 2e4 * at) for at, value in soaked.curves["syncer (7) memory_bytes"]]
    curves = {**soaked.curves, "syncer (7) memory_bytes": leak}
    broken = broken_of_a_soak(replace(soaked, curves=curves), viewed)
    assert broken == {
        "no process or directory leaks": ("syncer (7) memory_bytes grows by 7.2e+07 an hour, 5.36e+07 so far",)
    }


def test_a_viewer_that_is_never_answered_breaks_a_soak(soaked: Record, viewed: Facts) -> None:
    refused = replace(viewed, answers={**viewed.answers, "metrics": {"URLError": 9}})
    broken = broken_of_a_soak(soaked, refused)
    assert broken == {"every viewer is answered": ("the viewer 'metrics' was never answered",)}


def test_a_fragment_that_gets_no_version_is_stuck(soaked: Record, viewed: Facts) -> None:
    work = {"learner": "a", "round": 0, "base": 0, "tokens": 1, "steps": 1, "num_bytes": 1}

    def contributed(fragment: int, t: float) -> ev.Contributed:
        return ev.Contributed(t=t, fragment=fragment, **work)

    def published(fragment: int, t: float) -> ev.Published:
        return ev.Published(t=t, fragment=fragment, version=1, digest="d", num_bytes=1)

    def stuck(events: list[ev.Event]) -> tuple[str, ...]:
        return broken_of_a_soak(soaked, replace(viewed, syncer=events)).get("no fragment is stuck", ())

    good: list[ev.Event] = [contributed(0, 1), contributed(1, 1), published(0, 5), published(1, 5)]
    assert stuck(good) == ()
    late = [*good, contributed(0, 4 + STUCK_S), published(0, 900)]
    assert stuck(late) == ("fragment 0 had no new version for 895 s",)
    assert stuck([*good, contributed(1, 6 + STUCK_S)]) == ("fragment 1 had no new version for 121 s",)
    assert stuck([contributed(0, 1), contributed(0, 2 + STUCK_S)]) == ("fragment 0 had no new version for 121 s",)


# --- what is read


def test_what_a_second_process_of_a_name_has_held_is_read(record: Record, tmp_path: Path) -> None:
    held = ev.Adopted(t=6, step=1, fragment=0, version=1, digest="d1")
    for place in (tmp_path / "learner-0", tmp_path / "twins" / "1" / "learner-0"):
        place.mkdir(parents=True)
        (place / "events.jsonl").write_text(held.model_dump_json() + "\n")
    facts = read_facts(record)
    assert [name for name, _ in facts.holdings] == ["learner-0", "twins/1/learner-0"]


def test_tracebacks_are_read_from_logs(record: Record, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner-0.log").write_text(
        'joins\nTraceback (most recent call last):\n  File "x", line 1\n    boom()\nValueError: no\ngoes on\n'
    )
    assert read_facts(record).tracebacks == {"learner-0": ["ValueError: no"]}


# --- what storms share


def test_versions_follow_each_other() -> None:
    versions = Versions()
    versions.initial(0, "a")
    versions.durable(0, 1, "b")
    versions.published(0, 1)
    versions.held("learner-0", 0, 1, "b")
    for broken in (
        lambda: versions.initial(0, "a"), lambda: versions.durable(0, 1, "b"), lambda: versions.durable(0, 3, "d"),
        lambda: versions.published(0, 2), lambda: versions.published(0, 0), lambda: versions.restored(0, 0, "a"),
        lambda: versions.restored(0, 1, "x"), lambda: versions.held("learner-0", 0, 1, "x"),
    ):  # fmt: skip
        with pytest.raises(BrokenInvariantError):
            broken()


def test_a_run_that_went_back_on_purpose_goes_on_from_there() -> None:
    versions = Versions()
    versions.initial(0, "a")
    versions.durable(0, 1, "b")
    versions.published(0, 1)
    assert versions.went_back([0]) == 1
    versions.restored(0, 0, "a")
    versions.durable(0, 1, "other")
    versions.published(0, 1)
    versions.held("learner-0", 0, 1, "b")
    versions.held("learner-0", 0, 1, "other")


def test_a_ledger_adds_up_or_not() -> None:
    good = {"trained": 10, "pending": 1, "merged": 5, "lost": 2}
    check_ledger("x", good, {"overlap": 2})
    for bad in ({**good, "trained": 11}, {**good, "pending": -1, "merged": 7}):
        with pytest.raises(BrokenInvariantError):
            check_ledger("x", bad, {"overlap": 2})
