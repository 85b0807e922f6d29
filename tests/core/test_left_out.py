"""Contributions that a merge leaves out: lost on purpose, refused by a screen, or late where late work is dropped."""

from __future__ import annotations

import pytest

from diloco.core.contribution import DROPPED, OUTLIER, Contribution
from diloco.core.method import Method
from diloco.core.presets import DecoupledDiLoCo, DiLoCo
from diloco.core.rounds import Accept, AllLive, Called, Merge, Publish, Reject, Store
from diloco.core.syncer import SyncerCore

NEARLY_ALL = 1 - 2**-40


def contribution(learner: str, round_: int, *, base: int | None = None, step: int | None = None) -> Contribution:
    """10 tokens a step, 4 steps."""
    step = 4 * (round_ + 1) if step is None else step
    return Contribution(learner, 1, 0, round_, round_ if base is None else base, 40, 4, 10 * step, step=step)


# --- dropped ----------------------------------------------------------------------------------------------------------------


def dropping(*learners: str, at_least: int = 1) -> SyncerCore:
    core = SyncerCore(DiLoCo(sync_every=4, quorum=AllLive(at_least=at_least, drop=NEARLY_ALL)), [0])
    for learner in learners:
        core.joined(0.0, learner, ready=True)
    return core


def test_dropped_contributions_are_left_out_when_their_round_closes() -> None:
    core = dropping("a", "b", "c")
    for learner in "ab":
        assert isinstance(core.contributed(0.0, contribution(learner, 0))[0], Accept)
    accept, *rejects, merge, _ = core.contributed(0.0, contribution("c", 0))
    assert isinstance(accept, Accept)
    assert rejects == [Reject(contribution("a", 0), DROPPED), Reject(contribution("b", 0), DROPPED)]
    assert isinstance(merge, Merge)
    assert merge.contributions == (contribution("c", 0),)
    assert core.merged(0) == [Store(0, 1)]
    assert {learner: books[0].pending for learner, books in core.books.ledgers.items()} == {"a": 40, "b": 40, "c": 0}


def test_never_fewer_than_k_are_left() -> None:
    core = dropping("a", "b", "c", at_least=2)
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    _, reject, merge, _ = core.contributed(0.0, contribution("c", 0))
    assert reject == Reject(contribution("a", 0), DROPPED)
    assert isinstance(merge, Merge)
    assert [c.learner for c in merge.contributions] == ["b", "c"]


def test_who_would_be_dropped_is_merged_when_the_others_leave() -> None:
    """Had it been sent away at once, nobody would be in the round, and it would wait for the next one for ever."""
    core = dropping("a", "b")
    core.contributed(0.0, contribution("a", 0))
    merge, _ = core.left(0.0, "b", 1, tokens=0)
    assert isinstance(merge, Merge)
    assert merge.contributions == (contribution("a", 0),)


# --- refused ----------------------------------------------------------------------------------------------------------------


CALLED = DecoupledDiLoCo(sync_every=4, quorum=Called(at_least=2, grace=0.0))


def refusing(method: Method) -> SyncerCore:
    """ "b" is refused; the version is not stored yet."""
    core = SyncerCore(method, [0])
    for learner in "ab":
        core.joined(0.0, learner, ready=True)
    for learner in "ab":
        core.heartbeat(0.0, learner, 1, step=4, tokens=40, step_s=1.0, waiting=False)
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    assert core.merged(0, ["b"]) == [Store(0, 1)]
    return core


@pytest.mark.parametrize("method", [DiLoCo(sync_every=4), CALLED], ids=["scheduled", "called"])
def test_who_is_refused_is_told_when_the_version_is_durable(method: Method) -> None:
    core = refusing(method)
    before = core.books.durable_ledgers()["b"][0]
    assert (before.pending, before.discarded) == (40, {})
    assert core.stored(1.0, 0)[:2] == [Reject(contribution("b", 0), OUTLIER), Publish(0, 1, ("a",))]
    after = core.books.durable_ledgers()["b"][0]
    assert (after.pending, after.discarded) == (0, {OUTLIER: 40})


def test_what_was_refused_is_not_taken_for_late_work_when_it_is_sent_again() -> None:
    """It was not heard that it is refused."""
    core = refusing(CALLED)
    core.stored(1.0, 0)
    assert core.contributed(2.0, contribution("b", 0))[0] == Reject(contribution("b", 0), OUTLIER)
    assert core.fragments[0].rounds == {}
    assert core.books.ledgers["b"][0].discarded == {OUTLIER: 40}
