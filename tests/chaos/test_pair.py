"""What must hold of two syncers: of a good run, and what breaks each of it. And how long a takeover took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.facts import Facts, Injected, Record, StoredVersion
from tests.chaos.invariants import check
from tests.chaos.measures import headline, measured
from tests.chaos.plan import ChaosPlan, Fault
from tests.chaos.processes import End
from tests.chaos.test_invariants import HISTORY, NAMES, good_end, version

from diloco import events as ev
from diloco.protocol.lineage import Epoch


def started(t: float, *versions: int) -> ev.SyncerStarted:
    return ev.SyncerStarted(t=t, run="r", address="x", versions=versions)


def stands(t: float, standing: str, epoch: int) -> ev.StandingChanged:
    return ev.StandingChanged(t=t, standing=standing, epoch=epoch, why="")


def joined(t: float, learner: str, incarnation: int) -> ev.Joined:
    return ev.Joined(t=t, learner=learner, incarnation=incarnation)


FIRST: list[ev.Event] = [
    started(1), joined(2, "learner-0", 1), joined(2, "learner-1", 1), stands(3, "paired", 1),
    *version(5, 1, *NAMES), *version(15, 2, *NAMES),
    started(28, 2), stands(29, "waiting", 1), stands(30, "following", 3),
]  # fmt: skip
"""Killed at 20, back at 28 as the standby."""

SECOND: list[ev.Event] = [
    started(2), stands(3, "following", 1), stands(23, "proposing", 1), stands(23.5, "installing", 2),
    stands(24, "alone", 2), *version(25, 3, *NAMES), stands(30, "paired", 3), *version(32, 4, "learner-0"),
    *version(35, 5, *NAMES),
]  # fmt: skip
"""It takes over at 24."""


TRAINED = dict.fromkeys(NAMES, 0)
"""Their logs do not say either."""


def facts_of(first: list[ev.Event], second: list[ev.Event], **more: Any) -> Facts:
    learners = {
        name: [ev.Adopted(t=6, step=1, fragment=0, version=1, digest="d1"),
               ev.Adopted(t=26, step=9, fragment=0, version=3, digest="d3")]
        for name in NAMES
    }  # fmt: skip
    syncers = {"syncer": sorted(first, key=lambda it: it.t), "standby": sorted(second, key=lambda it: it.t)}
    both = sorted([*first, *second], key=lambda it: it.t)
    epochs = Epoch(1, (0,)), Epoch(2, (2,)), Epoch(3, (3,))
    good = Facts(both, learners, [HISTORY, HISTORY], syncers=syncers, standby=HISTORY, epochs=epochs, trained=TRAINED)
    return replace(good, **more)


@pytest.fixture
def facts() -> Facts:
    return facts_of(FIRST, SECOND)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    end = good_end(tmp_path)
    return replace(
        end,
        plan=ChaosPlan(tmp_path, 1, 30.0, 2, 8.0, 1.0, standby=True),
        injected=(Injected(Fault(2.0, "kill first", "syncer", 8.0, 0.5), 20.0, 27.0, True),),
        ends=(End("syncer", 20.1, -9),),
        exit_codes={**end.exit_codes, "standby": 0},
        states={name: {"starts": True, "problems": []} for name in ("syncer", "standby")},
        replays=2 * end.replays,
        stale_dirs=(),
        state_dirs=(("syncer", tmp_path / "syncer"), ("standby", tmp_path / "standby")),
    )


def broken(record: Record, facts: Facts) -> list[str]:
    return [finding.name for finding in check(record, facts) if not finding.holds]


def test_a_good_takeover_breaks_none(record: Record, facts: Facts) -> None:
    assert broken(record, facts) == []


def forked(number: int) -> list[StoredVersion]:
    return [replace(row, digest="other") if row.version == number else row for row in HISTORY]


LOST, TWICE = "no published version is lost", "every version is published once"
EPOCHS, SAME = "each epoch has one syncer", "both syncers have the same history"
TAKEOVER = "a standby takes over when it must"

BREAKS = [
    # the first has published what the one that took over has never had
    (LOST, facts_of([*FIRST, ev.Published(t=18, fragment=0, version=6, digest="d6", num_bytes=1)], SECOND)),
    # both have published version 3, each its own
    (LOST, facts_of([*FIRST, ev.Published(t=19, fragment=0, version=3, digest="other", num_bytes=1)], SECOND)),
    # learners have held version 3, and the line has other bits there
    (LOST, facts_of(FIRST, [it for it in SECOND if not isinstance(it, ev.Published)],
                    stores=[HISTORY, forked(3)], standby=forked(3))),
    (TWICE, facts_of([*FIRST, ev.Published(t=31, fragment=0, version=3, digest="d3", num_bytes=1)], SECOND)),
    # the old first goes on in its epoch after the other one has begun a later one
    (EPOCHS, facts_of([*FIRST, ev.Published(t=26, fragment=0, version=4, digest="d4", num_bytes=1)],
                      [it for it in SECOND if not (isinstance(it, ev.Published) and it.version == 4)])),
    # both publish in epoch 2
    (EPOCHS, facts_of([*FIRST[:-2], stands(26, "alone", 2), *version(31, 4, "learner-0"), *FIRST[-1:]],
                      [it for it in SECOND if it.t < 32 or it.t >= 35])),
    # one that follows publishes
    (EPOCHS, facts_of([*FIRST, *version(32, 4, "learner-0")], [it for it in SECOND if it.t < 32 or it.t >= 35])),
    # an epoch that goes back
    (EPOCHS, facts_of([*FIRST, stands(33, "following", 2)], SECOND)),
    (EPOCHS, facts_of(FIRST, SECOND, epochs=(Epoch(1, (0,)), Epoch(1, (2,)), Epoch(3, (3,))))),
    (TAKEOVER, facts_of(FIRST, [it for it in SECOND if it.t < 23 or it.t > 27])),
    # an epoch that begins where nothing was wrong
    (TAKEOVER, facts_of(FIRST, [*SECOND, stands(10, "alone", 2)])),
    (SAME, facts_of(FIRST, SECOND, standby=HISTORY[:-1])),
    (SAME, facts_of(FIRST, SECOND, standby=forked(2))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts"), BREAKS)
def test_an_invariant_of_two_syncers_is_broken(name: str, facts: Facts, record: Record) -> None:
    assert name in broken(record, facts)


def test_an_end_of_either_syncer_has_its_cause(record: Record, facts: Facts) -> None:
    ended = replace(record, ends=(*record.ends, End("standby", 33.0, -9)))
    assert broken(ended, facts) == ["no process ends by itself"]
    both = Injected(Fault(14.0, "kill both", "pair", 1.0, 0.5), 32.9, 34.0, True)
    assert broken(replace(ended, injected=(*record.injected, both)), facts) == []


def test_what_a_takeover_took(record: Record, facts: Facts) -> None:
    found = measured(record, facts, check(record, facts))
    assert found["recovery"]["takeover"] == {"num": 1, "median": 4.0, "worst": 4.0}
    assert found["recovery"]["takeover_published"] == {"num": 1, "median": 5.1, "worst": 5.1}
    assert "two syncers" in headline(found)

    learner = Injected(Fault(3.0, "kill learner", "learner-1", 1.0, 0.5), 22.0, 23.0, True)
    found = measured(replace(record, injected=(*record.injected, learner)), facts, check(record, facts))
    assert found["recovery"]["takeover"] is None
    assert found["recovery"]["takeover_amid_faults"] == {"num": 1, "median": 4.0, "worst": 4.0}


def test_a_standby_that_takes_over_as_the_old_first_returns_has_taken_over(record: Record) -> None:
    at_once = facts_of(FIRST, [stands(24, "paired", 3) if it.t == 24 else it for it in SECOND])
    found = measured(record, at_once, check(record, at_once))
    assert found["recovery"]["takeover"] == {"num": 1, "median": 4.0, "worst": 4.0}
    assert found["recovery"]["syncer"] is None


@pytest.mark.parametrize(("kind", "target"), [("kill standby", "standby"), ("kill both", "pair")])
def test_a_takeover_after_the_next_fault_of_a_syncer_is_not_counted(
    kind: str, target: str, record: Record, facts: Facts
) -> None:
    killed = Injected(Fault(4.0, kind, target, 1.0, 0.5), 22.0, 23.0, True)
    found = measured(replace(record, injected=(*record.injected, killed)), facts, check(record, facts))
    assert found["recovery"]["takeover_amid_faults"] is None
