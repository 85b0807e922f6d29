"""dev/reliability.md is what benchmarks/results says, and says what is not measured."""

from __future__ import annotations

from typing import Any

from benchmarks.reliability import PAGE, read_results
from benchmarks.reliability_page import NOT_MEASURED, page

NONE: dict[str, Any] = {"chaos": [], "standby": [], "roles": [], "groups": [], "storms": [], "made": []}
"""Nothing is measured."""


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_results())


def test_what_is_not_there_is_not_measured() -> None:
    empty = page(NONE)
    assert empty.count(NOT_MEASURED) >= 8
    assert "0 of 1,000" in empty


def test_what_broke_is_on_the_page() -> None:
    results = read_results()
    run = results["chaos"][0]
    broken = {
        **run, "holds": False, "versions_lost": 3,
        "invariants": {**run["invariants"], "no published version is lost": ["version 3 is lost"]},
    }  # fmt: skip
    text = page({**results, "chaos": [broken]})
    assert "no: no published version is lost" in text
    assert "| published versions lost |" in text


def test_what_a_soak_found_is_on_the_page() -> None:
    held: dict[str, Any] = {"seconds": 5400.0, "invariants": {"no process or directory leaks": []}}
    assert "| longest soak | 1.50 h | no leak," in page({**NONE, "soak": held})
    grows = ["syncer memory_bytes grows by 9e+06 an hour, 2e+07 so far"]
    leak = {**held, "invariants": {"no process or directory leaks": grows}}
    assert "| longest soak | 1.50 h | syncer memory_bytes grows" in page({**NONE, "soak": leak})


def test_times_to_come_back_are_on_the_page_with_their_bound() -> None:
    results = read_results()
    run = results["chaos"][0]
    recovery = {**run["recovery"], "survivor": {"num": 3, "median": 3.1, "worst": 4.6}}
    back = {**run, "recovery": recovery, "survivor_bound_s": 5.0, "bytes_resumed": 131072}
    text = page({**NONE, "chaos": [back]})
    due = "two step times and the deadline; the worst met it in 1 of 1 runs"
    assert f"kill -9 | 3 | 3.10 s | 4.60 s | {due} |" in text
    recovery["survivor"]["worst"] = 7.6
    assert "the worst met it in 0 of 1 runs" in page({**NONE, "chaos": [back]})
    assert "131,072 bytes" in text


def test_two_syncers_are_on_the_page() -> None:
    run = {
        "seed": 3, "seconds": 50.0, "num_faults": 3, "faults": {"kill first": 2, "kill first, and requests": 1},
        "versions": [4, 5], "epoch": 4, "lease_s": 3.0, "takeovers": [["kill first", 3.5], ["kill first", 4.5]],
    }  # fmt: skip
    text = page({**NONE, "standby": [run]})
    assert "| of two syncers over a bucket, or of the bucket | 3 of 200 | 3 survived |" in text
    assert "| published versions lost | of 9 | 0 |" in text
    assert "| 3 | 3 | 50 s | 9 | 0 | 4 |" in text
    assert "| kill first | SIGKILL until the standby serves; back as its standby | 2 | 1 |" in text
    assert "| kill first | 2 | 4.00 s | 4.50 s |" in text


def test_heartbeats_beside_bulk_are_on_the_page() -> None:
    row = {
        "queue_ms": 4000, "bulk": True, "seconds": 20.0, "heartbeats": 120, "unanswered": 0, "median_s": 0.053,
        "worst_s": 0.068, "lost_s": 6.0, "evictions": 2, "up": 0.97, "down": 0.961,
    }  # fmt: skip
    control = {"rate": "10mbit", "learners": 3, "machine": {"cores": 2, "load": 1.5}, "rows": [row]}
    text = page({**NONE, "control": control})
    assert "| 4000 ms | yes | 120 | 53 ms | 68 ms | 6,000 ms | 0 | 2 | 97% | 96% |" in text
    assert "3 learners over 10mbit each way, on 2 cores at a load of 1.5:" in text


def test_where_a_stopped_learner_was_blocked_is_on_the_page() -> None:
    row = {"place": "push", "times": 5, "saved_s": 0.25, "saved_worst_s": 0.5, "gone_s": 0.75, "gone_worst_s": 1.25}
    text = page({**NONE, "stopping": [row]})
    assert "| a push, over a network that takes nothing | 5 | 0.25 s | 0.50 s | 0.75 s | 1.25 s |" in text


def test_storms_that_failed_are_said_to_fail_or_not_on_todays_code() -> None:
    storm: dict[str, Any] = {
        "storms": 10, "first": 1, "seconds": 2.0, "processes": 2, "faults": {"cut": 3},
        "leased": False, "standby": False, "goes_back": False, "failed": ["seed 7: ...", "seed 4: ..."],
    }  # fmt: skip
    none = {**NONE, "storms": [storm]}
    assert "on a later commit: not measured." in page(none)
    text = page({**none, "again": {"tried": [4, 7], "failed": [7]}})
    assert "of the 2 that failed, 1 (7) fail on" in text
    assert "| 2 failed; tried again later, 1 did |" in text
    text = page({**none, "again": {"tried": [4], "failed": []}})
    assert "on a later commit: not measured." in text
    assert "| 2 failed |" in text
