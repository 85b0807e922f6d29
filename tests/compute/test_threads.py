"""Threads that work through runs: the order of results, of errors, and of what is under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from diloco.compute.threads import ThreadMap, num_cores


@pytest.fixture(params=[1, 2, 3])
def each(request: pytest.FixtureRequest) -> Iterator[ThreadMap]:
    threads = ThreadMap(request.param)
    yield threads
    threads.close()


@pytest.mark.parametrize("num_items", [0, 1, 2, 50])
def test_results_are_in_the_order_of_items(each: ThreadMap, num_items: int) -> None:
    assert list(each(lambda i: i * i, range(num_items))) == [i * i for i in range(num_items)]
    assert list(each(str, iter("ab"))) == ["a", "b"]  # and again


def test_an_error_comes_in_its_place_once_no_call_is_under_way(each: ThreadMap) -> None:
    under_way, seen = set[int](), list[int]()

    def compute(i: int) -> int:
        under_way.add(i)
        try:
            if i in (5, 7):
                raise ArithmeticError(i)
            torch.randn(200_000).sort()
            return i
        finally:
            under_way.discard(i)

    with pytest.raises(ArithmeticError, match="5"):
        seen.extend(each(compute, range(1000)))
    assert seen == [0, 1, 2, 3, 4]
    assert not under_way


def test_items_are_not_far_ahead_of_results(each: ThreadMap) -> None:
    taken = list[int]()
    results = iter(each(lambda i: i, (taken.append(i) or i for i in range(100))))
    next(results)
    assert len(taken) <= 2 * each.num_threads + 2


def test_whoever_stops_early_leaves_nothing_under_way() -> None:
    each, begun, go_on = ThreadMap(2), threading.Event(), threading.Event()
    finished = list[int]()

    def compute(i: int) -> int:
        if i:
            begun.set()
            assert go_on.wait(60)
            finished.append(i)
        return i

    results = each(compute, range(3))
    assert next(iter(results)) == 0
    assert begun.wait(60)
    closing = threading.Thread(target=results.close)  # type: ignore[attr-defined]
    closing.start()
    assert closing.is_alive()  # until the calls under way have ended
    go_on.set()
    closing.join()
    assert 1 in finished
    each.close()


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_torch_threads")
def test_a_thread_that_cannot_be_started_is_an_error_and_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(ThreadMap(3)(lambda i: i, range(5)))
    assert [thread.is_alive() for thread in started] == [False]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_torch_threads")
def test_each_thread_computes_by_one_core_and_others_as_before() -> None:
    each = ThreadMap(2)
    assert list(each(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
    assert torch.get_num_threads() == 2
    found = list[int]()
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]
    each.close()


def test_threads_are_started_for_two_items() -> None:
    each, caller = ThreadMap(2), threading.get_ident()
    assert list(each(lambda _: threading.get_ident(), range(1))) == [caller]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("diloco-runs")]
    assert caller not in list(each(lambda _: threading.get_ident(), range(2)))
    each.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("diloco-runs")]


def test_there_is_a_core() -> None:
    assert num_cores() >= 1
