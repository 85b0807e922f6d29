"""docs/reliability.md is what benchmarks/results says, and says what is not measured."""

from __future__ import annotations

from benchmarks.reliability import NOT_MEASURED, PAGE, page, read_results


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_results())


def test_what_is_not_there_is_not_measured() -> None:
    empty = page({"chaos": [], "storms": []})
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
    held = {"hours": 1.5, "leaks": [], "stuck": [], "broken": []}
    assert "| longest soak | 1.50 h | no leak," in page({"chaos": [], "storms": [], "soak": held})
    leak = {**held, "leaks": ["syncer memory_bytes grows by 9e+06 an hour, 2e+07 so far"]}
    assert "| longest soak | 1.50 h | syncer memory_bytes grows" in page({"chaos": [], "storms": [], "soak": leak})


def test_takeovers_are_on_the_page_with_the_deadline_in_force() -> None:
    results = read_results()
    run = results["chaos"][0]
    recovery = {**run["recovery"], "takeover": {"num": 3, "median": 3.1, "worst": 4.6}}
    taken = {**run, "syncers": 2, "recovery": recovery, "lost_deadline_s": 2.5, "bytes_resumed": 131072}
    text = page({**results, "chaos": [run, taken]})
    assert "nothing else wrong | 3 | 3.10 s | 4.60 s | the lost deadline and 5 s (deadline 2.5 s) |" in text
    assert "131,072 bytes" in text
