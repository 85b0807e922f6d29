"""The syncers of whole storms, replayed from their journals: every decision and every digest is the same, and whatever
is changed in a journal is found."""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

import pytest
from tests.storms.journals import StormJournal
from tests.storms.plans import plan_of
from tests.storms.runs import firsts, quiet
from tests.storms.steered import SteeredStorm
from tests.storms.world import Storm

from diloco.errors import RestartedError
from diloco.protocol.members import Deadlines
from diloco.protocol.syncer import SyncerCore
from diloco.run.driver import Driver
from diloco.run.journal.replay import Findings
from diloco.run.ports import is_event

PER_TEST = 12

CHANGE_NOTHING = {"fetch", "status"}
"""Public methods of the driver that only answer."""


@cache
def storm(seed: int, *, with_payloads: bool = True, steered: bool = False, **kind: bool) -> StormJournal:
    journal = StormJournal(with_payloads=with_payloads)
    its_type = SteeredStorm if steered else Storm
    with quiet():
        its_type(plan_of(seed, steered=steered, **kind), journal=journal).run()
    return journal


@pytest.mark.slow
def test_every_event_of_the_driver_is_recorded() -> None:
    methods = {name: method for name, method in inspect.getmembers(Driver, inspect.isfunction) if name[0] != "_"}
    assert {name for name, method in methods.items() if not is_event(method)} == CHANGE_NOTHING
    assert is_event(Driver.__init__)
    seeds = (*range(PER_TEST), 35, 49)  # with an upload that is cut off, and with a syncer that is stopped
    of_kinds = storm(0, leased=True), storm(0, steered=True), storm(30_001, groups=True), storm(0, dealt=True)
    journals = [*map(storm, seeds), *of_kinds]
    recorded = {json.loads(entry)["e"] for journal in journals for entry in journal.entries}
    events = {name for name, method in methods.items() if is_event(method)} | {
        "__init__", "#check", "#close", "#initialise", "#put", "#commit",
    }  # fmt: skip
    assert recorded == events - {"end"}  # of which no entry outlives the process


@pytest.mark.parametrize("first", firsts(0, 60, PER_TEST, PER_TEST))
def test_storms_are_replayed(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        findings = storm(seed).replay().findings
        assert (findings.difference, findings.gaps) == (None, []), seed
        assert findings.num_equal == findings.num_entries > 0
        assert findings.num_merges_equal == findings.num_merges


def test_storms_with_orders_are_replayed() -> None:
    ordered: set[str] = set()
    for seed in range(5):
        journal = storm(seed, steered=True)
        ordered |= {json.loads(entry)["a"]["order"]["what"] for entry in journal.entries if '"e":"steer"' in entry}
        findings = journal.replay().findings
        assert (findings.difference, findings.gaps) == (None, []), seed
        assert findings.num_equal == findings.num_entries > 0
    assert ordered == {"pause", "resume", "evict", "quorum"}


def test_storms_with_leased_data_are_replayed() -> None:
    for seed in range(4):
        findings = storm(seed, leased=True).replay().findings
        assert (findings.difference, findings.gaps) == (None, []), seed
        assert findings.num_equal == findings.num_entries > 0


@pytest.mark.parametrize("kind", [pytest.param("held", marks=pytest.mark.slow), "dealt"])
def test_storms_with_held_parts_are_replayed(kind: str) -> None:
    plans = {seed: plan_of(seed, **{kind: True}) for seed in range(20)}
    seeds = [seed for seed, plan in plans.items() if not (plan.standby or plan.goes_back or plan.steered)]
    for seed in seeds[:3]:
        findings = storm(seed, **{kind: True}).replay().findings
        assert (findings.difference, findings.gaps) == (None, []), seed
        assert findings.num_equal == findings.num_entries > 0
        assert findings.num_merges_equal == findings.num_merges


def test_storms_with_groups_are_replayed() -> None:
    for seed in (30_001, 30_004, 30_005):
        findings = storm(seed, groups=True).replay().findings
        assert (findings.difference, findings.gaps) == (None, []), seed
        assert findings.num_equal == findings.num_entries > 0


def test_the_replayed_storms_restart_and_merge_a_lot() -> None:
    each = [storm(seed).replay().findings for seed in range(PER_TEST)]
    assert sum(it.num_boots for it in each) > 1.3 * PER_TEST
    assert sum(it.num_merges for it in each) > 5 * PER_TEST


@pytest.mark.parametrize("seed", [1, 9, 23])
def test_decisions_alone_are_replayed_without_payloads(seed: int) -> None:
    findings = storm(seed, with_payloads=False).replay().findings
    assert findings.difference is None
    assert findings.num_equal == findings.num_entries
    assert findings.num_merges_equal == 0 < findings.num_merges


def entries_of(seed: int, event: str) -> list[int]:
    return [index for index, entry in enumerate(storm(seed).entries) if json.loads(entry)["e"] == event]


def changed(seed: int, index: int, **changes: Any) -> Findings:
    """The findings where one entry says something else."""
    entries = list(storm(seed).entries)
    entries[index] = json.dumps(json.loads(entries[index]) | changes, separators=(",", ":"), ensure_ascii=False)
    return storm(seed).replay(entries).findings


@pytest.mark.parametrize("seed", range(12))
def test_a_byte_of_a_payload_is_found(seed: int) -> None:
    journal = storm(seed)
    merged = {json.loads(journal.entries[index])["x"]["payload"] for index in entries_of(seed, "#check")}
    name = f"contribution-{min(merged)}"
    whole = journal.kept[name]
    try:
        journal.kept[name] = bytes([whole[0] ^ 1]) + whole[1:]
        difference = journal.replay().findings.difference
    finally:
        journal.kept[name] = whole
    assert difference is not None
    assert "#check" in difference or "end of a check" in difference


@pytest.mark.parametrize(
    "event", ["heartbeat", "join", "connected", "begin_push", "complete_push", "tick", "#check", "#put", "#commit"]
)
def test_a_dropped_event_is_found(event: str) -> None:
    for seed in (1, 9, 23):
        for index in entries_of(seed, event)[:3]:
            entries = list(storm(seed).entries)
            del entries[index]
            if index == len(entries):  # the last entry: a killed syncer may not have written it
                continue
            assert storm(seed).replay(entries).findings.difference is not None, (seed, index)


def test_another_outcome_is_found_with_both_sides() -> None:
    index = entries_of(1, "#close")[0]
    found = json.loads(storm(1).entries[index])["r"]
    other = {**found, "update": {**found["update"], "digest": "0" * 64}}
    difference = changed(1, index, r=other).difference
    assert difference is not None
    assert f"end of a close of fragment {found['update']['fragment']}" in difference
    assert "0000000000000000" in difference
    assert found["update"]["digest"][:16] in difference


@pytest.mark.parametrize("event", ["heartbeat", "tick", "connected", "#commit"])
def test_another_time_is_found(event: str) -> None:
    for index in entries_of(9, event)[-3:]:
        entry = json.loads(storm(9).entries[index])
        assert changed(9, index, t=entry["t"] + 1e-6).difference is not None


def test_a_gap_is_said_and_the_next_syncer_is_replayed() -> None:
    seed = next(seed for seed in range(40) if storm(seed).replay().findings.num_boots > 1)
    journal = storm(seed)
    second = next(index for index in entries_of(seed, "__init__") if index)
    gap = json.dumps({"e": "#gap", "missing": 3})
    entries = [*journal.entries[:4], gap, *journal.entries[7:]]
    findings = journal.replay(entries).findings
    assert findings.difference is None
    assert findings.gaps == ["3 entries are missing, at entry 4"]
    assert findings.num_skipped == second - 7
    assert findings.num_equal == findings.num_entries == 4 + len(journal.entries) - second


def test_a_reworded_reason_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of diloco words the evictions, the closed rounds and the refusals."""
    journals = [storm(seed) for seed in range(PER_TEST)]
    entries = [json.loads(entry) for journal in journals for entry in journal.entries]
    reasons = {decided.split()[0]: each["w"] for each in entries if "w" in each for decided in each["d"]}
    assert {"evicts", "refuses:"} <= set(reasons)
    assert all(isinstance(reason, str) and " " in reason for each in reasons.values() for reason in each)
    passed, close = Deadlines.passed, SyncerCore._close
    monkeypatch.setattr(Deadlines, "passed", lambda *given: passed(*given) and "in other words")
    monkeypatch.setattr(SyncerCore, "_close", lambda *given: close(*given[:-1], "in other words"))
    monkeypatch.setattr("diloco.run.driver.RestartedError", lambda _: RestartedError("in other words"))
    for journal in journals:
        findings = journal.replay().findings
        assert (findings.difference, findings.gaps) == (None, [])
        assert findings.num_equal == findings.num_entries


def test_an_end_of_a_journal_that_lacks_versions_is_found() -> None:
    """A copy of the journal, cut anywhere, beside the newest versions."""
    journal = storm(1)
    whole = journal.replay()
    assert whole.driver is not None
    model = whole.driver.state.model
    stored = [(model.held(index).version, model.held(index).digest) for index in range(len(model.versions))]
    epoch = whole.driver.lineage.epoch
    whole.finish(stored, epoch)
    assert (whole.findings.difference, whole.findings.gaps) == (None, [])
    whole.finish([(version - 1, "of a copy that was put back") for version, _ in stored], epoch)
    assert whole.findings.difference is None
    closes = entries_of(1, "#close")
    assert len(closes) > 3
    for index in closes[-3:]:
        cut = journal.replay(journal.entries[:index])
        cut.finish(stored, epoch + 1)
        assert cut.findings.gaps[-1].endswith(f"another syncer has claimed the run since, in epoch {epoch + 1}")
        assert cut.findings.difference is None
        cut.finish(stored, epoch)
        assert "its end is missing" in str(cut.findings.difference)
    whole.finish([(version, "0" * 64) for version, _ in stored], epoch)
    assert "its end is missing" in str(whole.findings.difference)


def test_a_state_that_was_put_back_is_said() -> None:
    """The last syncer starts a second time, as from a copy."""
    for seed in range(40):
        journal = storm(seed)
        if len(boots := entries_of(seed, "__init__")) > 1 and '"#close"' in "".join(journal.entries[boots[-1] :]):
            entries = [*journal.entries, *journal.entries[boots[-1] :]]
            findings = journal.replay(entries).findings
            assert findings.difference is None
            assert "the state was rolled back from versions" in findings.gaps[0]
            assert findings.num_equal == findings.num_entries == len(entries)
            return
    pytest.fail("no storm has restarted")


def test_a_journal_that_lacks_a_version_is_found() -> None:
    """As if the syncer had not waited for its journal before it published."""
    for seed in range(40):
        journal = storm(seed)
        boots = entries_of(seed, "__init__")
        commits = [index for index in entries_of(seed, "#commit") if "publishes version" in journal.entries[index]]
        if len(boots) > 1 and (published := [index for index in commits if index < boots[-1]]):
            before = max(index for index in entries_of(seed, "#close") if index < published[-1])
            entries = [*journal.entries[:before], *journal.entries[boots[-1] :]]
            difference = journal.replay(entries).findings.difference
            assert difference is not None
            assert "a part of the journal is missing" in difference
            return
    pytest.fail("no storm has restarted after a commit")
