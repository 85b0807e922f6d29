"""A learner stands still while its run is paused, and adopts afterwards what came meanwhile."""

from __future__ import annotations

import pytest
from tests.learner.test_blocked import Slow
from tests.learner.test_learner_events import Script, ledger_of, stands_at, start, step

import diloco
from diloco.errors import StoppedError
from diloco.exchange.base import Interrupted, Rejoined
from diloco.protocol.contribution import CallForWork, Drained, Hold


def paused(script: Script, *later: object) -> None:
    """The run is paused, and goes on once the learner waits; before that come the later events."""
    script.inbox.append(Hold(True))
    script.on_wait = lambda: script.inbox.extend([*later, Hold(False)])


def test_it_goes_on_when_the_run_does() -> None:
    script, learner = start(diloco.DiLoCo(sync_every=9))
    step(learner)
    paused(script)
    step(learner)
    waited, after = script.reports[-2:]
    assert (waited.waiting, waited.blocked_with) == (True, ())
    assert not after.waiting
    assert learner.metrics()["num_blocked"] == 1
    step(learner)
    assert learner.metrics()["num_blocked"] == 1


def test_what_comes_meanwhile_is_adopted_at_that_boundary() -> None:
    script, learner = start()
    step(learner, 2)
    script.inbox.append(Hold(True))

    def published() -> None:
        script.publish(1, "me", "you")
        script.inbox.append(Hold(False))

    script.on_wait = published
    step(learner)
    assert stands_at(learner, 1)
    assert ledger_of(learner)["merged"] == 20


def test_a_call_is_answered_meanwhile() -> None:
    script, learner = start(diloco.DecoupledDiLoCo(sync_every=2, fragments=diloco.Whole(), codec="fp32"))
    paused(script, CallForWork(0, 0))
    step(learner)
    assert [c.fragment for c, _ in script.offers] == [0]


def test_a_new_incarnation_does_not_stand_still_before_it_is_told() -> None:
    script, learner = start()
    script.inbox.append(Hold(True))
    script.on_wait = lambda: script.inbox.append(Rejoined(script.opened(2, 5, 3), "evicted"))
    step(learner)
    assert stands_at(learner, 3)


def test_it_does_not_stand_still_any_more_once_it_has_no_place_in_the_run() -> None:
    script, learner = start()
    script.inbox.append(Hold(True))
    script.on_wait = lambda: script.inbox.append(Drained())
    step(learner)
    assert learner.drained


def test_it_can_be_stopped() -> None:
    script, learner = start()
    script.inbox.append(Hold(True))
    script.on_wait = lambda: script.inbox.append(Interrupted())
    with pytest.raises(StoppedError):
        step(learner)


def test_it_says_so_after_10_s(caplog: pytest.LogCaptureFixture) -> None:
    class Paused(Slow):
        comes_at_s = 75.0

        def publish(self, version: int, *contributors: str) -> None:
            self.inbox.append(Hold(False))

    script = Paused()
    script.inbox.append(Hold(True))
    import torch

    model = torch.nn.Linear(4, 3)
    learner = diloco.Learner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(sync_every=9), exchange=script
    )
    step(learner)
    assert [record.getMessage() for record in caplog.records if "the run is paused" in record.getMessage()] == [
        f"learner me has been blocked after step 1 for {seconds} s: the run is paused." for seconds in (10, 20, 40)
    ]
