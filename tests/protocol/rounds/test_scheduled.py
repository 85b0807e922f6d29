"""Scheduled rounds: which learners are merged, which are waited for and until when, and what people are told."""

import itertools

import pytest
from tests.protocol.driving import restarted

from diloco.core.presets import StreamingDiLoCo
from diloco.core.quorum import QUORUMS, AllLive
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.protocol.contribution import Contribution
from diloco.protocol.learner import LearnerCore
from diloco.protocol.rounds.base import Rules
from diloco.protocol.rounds.scheduled import decide
from diloco.protocol.syncer import SyncerCore

NOW = 10.0
DEADLINES = {"a": 16.0, "b": 13.25, "c": 40.0, "d": 9.0}

# contributed, members, at_least -> merge, wait until, reason
TABLE = [
    ("ab", "ab", 1, "ab", None, "all 2 learners of the round have contributed"),
    ("a", "a", 1, "a", None, "all 1 learners of the round have contributed"),
    ("ba", "ab", 1, "ab", None, "all 2 learners of the round have contributed"),
    ("abc", "ab", 1, "abc", None, "all 3 learners of the round have contributed"),  # a joiner that came in time
    ("a", "", 1, "a", None, "all 1 learners of the round have contributed"),  # every member is gone, the work is not
    ("a", "ab", 1, None, 13.25, "waiting for b; b is given up in 3.2 s"),
    ("c", "abc", 1, None, 13.25, "waiting for a, b; b is given up in 3.2 s"),
    ("ab", "abd", 1, None, 9.0, "waiting for d; d is given up in 0.0 s"),  # overdue; the next tick gives it up
    ("c", "ab", 1, None, 13.25, "waiting for a, b; b is given up in 3.2 s"),  # a joiner alone decides nothing
    ("a", "a", 2, None, None, "1 of at least 2 learners have contributed"),
    ("ac", "a", 2, "ac", None, "all 2 learners of the round have contributed"),
    ("ab", "abc", 2, None, 40.0, "waiting for c; c is given up in 30.0 s"),
    ("abc", "abc", 4, None, None, "3 of at least 4 learners have contributed"),
]


@pytest.mark.parametrize(("contributed", "members", "at_least", "merge", "wait_until", "reason"), TABLE)
def test_decisions(
    contributed: str, members: str, at_least: int, merge: str | None, wait_until: float | None, reason: str
) -> None:
    decision = decide(NOW, contributed, members, DEADLINES, at_least)
    assert decision.merge == (None if merge is None else tuple(merge))
    assert decision.wait_until == wait_until
    assert decision.reason == reason


def test_learners_that_have_ended_count_for_at_least() -> None:
    decision = decide(NOW, "b", "b", DEADLINES, 3, {"d", "c"})
    assert decision.merge == ("b",)
    assert decision.reason == "all 1 learners of the round have contributed; c, d ended at its step or later"
    decision = decide(NOW, "b", "b", DEADLINES, 3, {"c"})
    assert decision.merge is None
    assert decision.reason == "1 of at least 3 learners have contributed; c ended at its step or later"
    assert decide(NOW, "b", "ab", DEADLINES, 2, {"c"}).merge is None  # it waits for a member all the same


def test_the_order_of_arrival_never_matters() -> None:
    answers = {decide(NOW, order, "abc", DEADLINES) for order in itertools.permutations("abc")}
    assert {answer.merge for answer in answers} == {("a", "b", "c")}


@pytest.mark.parametrize("at_least", [0, -1, 1.5, True])
def test_a_quorum_of_no_learner_is_refused(at_least: object) -> None:
    with pytest.raises(ConfigError, match="at_least"):
        AllLive(at_least=at_least)  # type: ignore[arg-type]


def test_a_quorum_is_a_value() -> None:
    assert QUORUMS.read(AllLive(at_least=3).to_dict()) == AllLive(at_least=3)
    with pytest.raises(ConfigError, match="did you mean 'at_least'"):
        QUORUMS.read({"type": "AllLive", "atleast": 3})


def test_how_far_ahead_a_contribution_may_be_follows_from_its_learners_own_overlap() -> None:
    """An overlap of a whole interval keeps one answer on its way; the record keeps the overlap over a restart."""
    core = SyncerCore(Rules.of(StreamingDiLoCo(sync_every=4, overlap=1), 1), [0])
    core.joined(0.0, "a", ready=True)
    core.joined(0.0, "b", ready=True, overlap=4)
    again = restarted(core, core.saved(), 0.0)
    for run in (core, again):
        for learner in "ab":
            run.contributed(1.0, contribution(learner, number=1, round_=0, step=4))
        ahead = {
            learner: run.contributed(2.0, contribution(learner, number=2, round_=1, step=8))[0] for learner in "ab"
        }
        assert [type(answer).__name__ for answer in ahead.values()] == ["Reject", "Acknowledge"]


def contribution(learner: str, *, number: int, round_: int, step: int) -> Contribution:
    """Measured from version 0, on 10 tokens."""
    return Contribution(learner, 1, 0, number, round_, 0, 10, 4, trained=10 * number, step=step)


@pytest.mark.parametrize("wait", [False, True])
def test_fragments_are_sent_together_where_the_schedule_says_so_and_learners_wait(wait: bool) -> None:
    """One that does not wait keeps its work while too many answers are on their way."""
    together, apart = Schedule(4, 2, 0, (4, 4)), Schedule(4, 2, 0)
    assert LearnerCore(Rules(AllLive(), together, wait=wait), [0, 0]).sends_together == wait
    assert not LearnerCore(Rules(AllLive(), apart, wait=wait), [0, 0]).sends_together
