"""`Learner` when the others do not do as hoped: refusals, merges without it, late answers, being given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco import Learner, Method
from diloco.core.codecs import codec_from_name, compress
from diloco.core.fragments import Layout, digest
from diloco.core.global_fragment import GlobalFragment
from diloco.core.update import Update
from diloco.errors import ConfigError
from diloco.exchange.base import (
    Arrived,
    Event,
    Exchange,
    FlatModel,
    Overview,
    Rejoined,
    Report,
    StartingState,
)
from diloco.learner.state_dict import _arrived_in, _arrived_out
from diloco.protocol.contribution import MISSED, OUT_OF_STEP, CallForWork, Contribution, Rejection


def held_of(theta: Tensor, version: int, outer_state: dict[str, Tensor] | None = None) -> GlobalFragment:
    return GlobalFragment(0, version, theta, outer_state or {}, None, digest(theta))


FEEDBACK = diloco.DiLoCo(sync_every=2, overlap=1, codec=("int4", "fp32"), error_feedback=True)


class Script(Exchange):
    """An exchange whose events a test scripts: the learner gets them at its next poll. Payloads wait for the test."""

    def __init__(self, *, step: int = 0, version: int = 0) -> None:
        self.inbox: deque[Event] = deque()
        self.offers: list[tuple[Contribution, Callable[[], Tensor]]] = []
        self.reports: list[Report] = []
        self.on_wait: Callable[[], None] | None = None
        self._step, self._version = step, version

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        self.num_elements = layout.fragments[0].numel
        return self.opened(1, self._step, self._version)

    def opened(self, incarnation: int, step: int, version: int) -> StartingState:
        return StartingState("me", incarnation, step, (held_of(self.theta(version), version),), {})

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self.offers.append((contribution, payload))

    def poll(self) -> Sequence[Event]:
        events = tuple(self.inbox)
        self.inbox.clear()
        return events

    def wait(self, timeout_s: float) -> None:
        assert self.on_wait is not None, "the learner would block forever"
        self.on_wait()

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        pass

    def theta(self, version: int) -> Tensor:
        """The global model at a version."""
        return torch.full((self.num_elements,), float(version))

    def publish(self, version: int, *contributors: str) -> None:
        update = Update(0, version - 1, version, contributors, (1.0,) * len(contributors), 1.0, "", lossless=True)
        self.inbox.append(Arrived(update, held_of(self.theta(version), version), self.merged(version, contributors)))

    def merged(self, version: int, contributors: Sequence[str]) -> int:
        """The newest of this learner's contributions that is in a version with these contributors."""
        return max((c.number for c, _ in self.offers if c.round < version), default=0) if "me" in contributors else 0


def start(method: Method = FEEDBACK, **opened: int) -> tuple[Script, Learner]:
    model = nn.Linear(40, 3)
    script = Script(**opened)
    return script, Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method, exchange=script)


def step(learner: Learner, times: int = 1) -> None:
    for _ in range(times):
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.add_(torch.randn_like(parameter))
        learner.step(tokens=10)


def residuals_of(learner: Learner) -> Any:
    return learner.state_dict()["residuals"]


def ledger_of(learner: Learner) -> dict[str, Any]:
    ledger: dict[str, Any] = learner.metrics()["ledger"][0]
    return ledger


def stands_at(learner: Learner, version: int) -> bool:
    return learner.versions == (version,) and all(bool((p == version).all()) for p in learner.model.parameters())


def test_a_merge_with_this_learner_keeps_the_residual() -> None:
    script, learner = start()
    step(learner, 2)
    ((contribution, payload),) = script.offers
    assert (contribution.round, contribution.base, contribution.tokens, contribution.steps) == (0, 0, 20, 2)
    sent = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    encoded, lost = compress(FEEDBACK.up, script.theta(0) - sent, None)
    assert torch.equal(payload(), encoded)
    script.publish(1, "me", "you")
    step(learner)
    assert stands_at(learner, 1)
    assert torch.equal(residuals_of(learner)["0"], lost)
    assert learner.metrics()["merges"] == 1
    assert ledger_of(learner) == {"trained": 30, "pending": 0, "merged": 20, "lost": 0, "discarded": {"overlap": 10}}


def test_a_merge_without_it_rolls_back() -> None:
    script, learner = start()
    step(learner, 2)
    script.offers[0][1]()
    script.publish(1, "you")
    step(learner)
    assert stands_at(learner, 1)
    assert residuals_of(learner) == {}
    assert learner.metrics()["merges"] == 0
    assert ledger_of(learner) == {"trained": 30, "pending": 0, "merged": 0, "lost": 0,
                                  "discarded": {"missed": 20, "overlap": 10}}  # fmt: skip
    step(learner)
    assert script.offers[1][0].base == 1
    assert script.offers[1][0].discarded == (("overlap", 10),)


def test_a_merge_without_it_rolls_back_before_the_state_is_saved() -> None:
    """The answer is here and not yet adopted: a resumed learner must not feed back what was never merged."""
    method = replace(FEEDBACK, sync_every=4, overlap=3)
    script, learner = start(method)
    step(learner, 4)
    script.offers[0][1]()
    script.publish(1, "you")
    assert learner.state_dict()["residuals"] == {}
    assert learner.versions == (0,)


def test_a_refusal_before_the_encoder_got_to_it() -> None:
    script, learner = start()
    step(learner, 2)
    script.inbox.append(Rejection(0, 1, MISSED))
    script.on_wait = lambda: script.publish(1, "you")  # the round's answer is waited for all the same
    step(learner)
    assert stands_at(learner, 1)
    assert ledger_of(learner)["discarded"] == {MISSED: 20, "overlap": 10}
    script.offers[0][1]()
    assert residuals_of(learner) == {}
    step(learner)
    assert script.offers[1][0].round == 1


def test_work_that_came_out_of_step_goes_with_the_next_contribution() -> None:
    script, learner = start()
    step(learner, 2)
    script.offers[0][1]()
    script.inbox.append(Rejection(0, 1, OUT_OF_STEP))
    step(learner)
    assert residuals_of(learner) == {}
    assert ledger_of(learner) == {"trained": 30, "pending": 30, "merged": 0, "lost": 0, "discarded": {}}
    step(learner)
    contribution = script.offers[1][0]
    assert (contribution.round, contribution.tokens, contribution.steps) == (0, 40, 4)
    script.publish(1, "me")
    step(learner)
    assert stands_at(learner, 1)


def test_work_that_came_out_of_step_is_kept_on_top_of_the_next_version() -> None:
    """Its tokens are pending again, so it must be in the parameters and in what is measured next."""
    method = replace(diloco.DiLoCo(sync_every=2, overlap=1), adopt=diloco.KeepDisplacement())
    script, learner = start(method)
    step(learner)
    script.inbox.append(Rejection(0, 1, OUT_OF_STEP))  # heard at the very boundary of the send
    step(learner)
    script.publish(1, "you")
    before = torch.cat([p.detach().flatten() for p in learner.model.parameters()])  # from version 0, which is 0
    learner.step(tokens=10)
    after = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    assert torch.equal(after, before + 1)
    learner.step(tokens=10)
    contribution, payload = script.offers[1]
    assert (contribution.base, contribution.tokens) == (1, 40)
    assert torch.equal(method.up.decode(payload(), len(after)), 1 - after)


def test_it_waits_only_for_what_is_due_and_says_so() -> None:
    script, learner = start()

    def answer() -> None:
        assert script.reports[-1].waiting
        script.publish(1, "me")

    step(learner, 2)
    assert learner.metrics()["num_blocked"] == 0
    script.on_wait = answer
    step(learner)
    assert stands_at(learner, 1)
    assert not script.reports[-1].waiting
    metrics = learner.metrics()
    assert metrics["num_blocked"] == 1
    assert 0 < metrics["blocked_s"] < 60


def test_without_waiting_a_late_answer_is_adopted_when_it_comes() -> None:
    script, learner = start(replace(FEEDBACK, wait=False))
    step(learner, 5)
    assert learner.versions == (0,)
    assert len(script.offers) == 1  # further work stays pending while the first answer is out
    script.publish(1, "me")
    step(learner)
    assert stands_at(learner, 1)
    assert ledger_of(learner) == {"trained": 60, "pending": 0, "merged": 20, "lost": 0, "discarded": {"overlap": 40}}


def test_given_up_it_starts_again_from_the_newest_model() -> None:
    script, learner = start()
    step(learner, 2)
    _, stale = script.offers[0]
    script.inbox.append(Rejoined(script.opened(incarnation=2, step=40, version=9), "nothing heard"))
    step(learner)
    assert stands_at(learner, 9)
    assert learner.steps == 40
    metrics = learner.metrics()
    assert (metrics["incarnation"], metrics["tokens"], metrics["merges"]) == (2, 0, 0)
    assert ledger_of(learner)["trained"] == 0
    step(learner, 2)
    stale()  # an encoder that comes to it only now leaves nothing to be fed back
    contribution, payload = script.offers[1]
    assert (contribution.incarnation, contribution.round, contribution.base, contribution.step) == (2, 9, 9, 42)
    sent = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    encoded, lost = compress(FEEDBACK.up, script.theta(9) - sent, None)
    assert torch.equal(payload(), encoded)
    script.publish(10, "me")
    step(learner)
    assert torch.equal(residuals_of(learner)["0"], lost)


def test_given_up_it_keeps_its_inner_optimizer_and_its_re_warm_up() -> None:
    """It is alive: its moments are not lost, and a schedule of its own is not begun again."""
    script = Script(step=40, version=9)
    model = nn.Linear(40, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, method=FEEDBACK, exchange=script, rewarm_steps=4)
    script.on_wait = lambda: script.publish(learner.versions[0] + 1, "me")
    factors = []
    for taken in range(6):
        if taken == 2:
            script.inbox.append(Rejoined(script.opened(incarnation=2, step=60, version=20), "nothing heard"))
        factors.append(learner.lr_factor)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        learner.step(tokens=10)
    assert learner.metrics()["incarnation"] == 2
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_given_up_while_a_round_waits_for_it_a_learner_takes_its_steps_again() -> None:
    """Its contribution after step 2 was lost with its incarnation, and the others cannot continue without it."""
    script, learner = start()
    step(learner, 2)
    script.inbox.append(
        Rejoined(replace(script.opened(incarnation=2, step=0, version=0), awaited=True), "nothing heard")
    )
    step(learner)
    assert learner.steps == 0
    step(learner, 2)
    assert [(c.incarnation, c.step) for c, _ in script.offers] == [(1, 2), (2, 2)]


def test_a_learner_that_has_finished_says_so_and_takes_no_more_steps() -> None:
    script, learner = start()
    step(learner, 1)
    assert not script.reports[-1].finished
    learner.finish()
    assert script.reports[-1] == Report(1, 10, None, waiting=False, finished=True, steps=1)
    with pytest.raises(ConfigError, match="has finished; make a new one"):
        learner.step(tokens=1)
    script.publish(1)
    learner.state_dict()
    assert script.reports[-1].finished
    learner.close()


def test_a_run_that_went_on_is_joined_where_it_is() -> None:
    script, learner = start()
    step(learner, 2)
    script.publish(1, "me")
    saved = learner.state_dict()

    same, resumed = start(version=1)
    assert resumed.load_state_dict(saved)
    assert (resumed.steps, resumed.versions) == (2, (0,))  # version 1 is here, and due after the next step
    step(resumed)
    assert stands_at(resumed, 1)
    assert same.offers == []

    ahead, late = start(version=5, step=30)
    assert not late.load_state_dict(saved)
    assert stands_at(late, 5)
    assert late.steps == 30
    assert late.metrics()["tokens"] == 0
    step(late, 2)
    assert (ahead.offers[0][0].round, ahead.offers[0][0].base) == (5, 5)


def test_a_group_that_went_on_is_joined_where_it_is_whatever_it_saves() -> None:
    """An elastic group keeps the run's state itself, and brings it to those who join."""

    class Group(Script):
        def state_dict(self) -> dict[str, Any]:
            return {"run": "as it was"}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("the group would go back")

    method = diloco.DiLoCo(sync_every=2)
    model = nn.Linear(40, 3)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method, exchange=Group())
    step(learner)
    saved = learner.state_dict()
    model = nn.Linear(40, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = Learner(model, optimizer, method=method, exchange=Group(version=3, step=7))
    assert not late.load_state_dict(saved)
    assert stands_at(late, 3)
    assert late.steps == 7


def test_an_answer_that_was_fetched_whole_is_saved_whole() -> None:
    """Resumed without its outer state, an eager learner would not start the fragment again from the run's values."""
    update = Update(0, 3, 4, ("a", "b"), (1.0, 2.0), 1.0, "", lossless=True)
    arrived = Arrived(update, held_of(torch.ones(3), 4, {"momentum": torch.rand(3)}), 3)
    again = _arrived_in(_arrived_out(arrived))
    assert (again.update, again.merged, again.mean) == (update, 3, None)
    assert (again.held.version, again.held.digest) == (4, arrived.held.digest)
    assert torch.equal(again.held.outer_state["momentum"], arrived.held.outer_state["momentum"])


class EagerScript(Script):
    """Two learners that take outer steps of their own; means and outer states come as the test says."""

    overview = Overview(num_live=2)

    def opened(self, incarnation: int, step: int, version: int) -> StartingState:
        zeros = torch.zeros(self.num_elements)
        return StartingState("me", incarnation, step, (held_of(zeros, version, {"momentum": zeros}),), {})

    def publish_mean(self, version: int, mean: float | None, *contributors: str, start: float | None = None) -> None:
        """`start`: the version is fetched whole, the global model all this, with this momentum."""
        update = Update(0, version - 1, version, contributors, (1.0,) * len(contributors), 1.0, "", lossless=True)
        theta = torch.full((self.num_elements,), 0.0 if start is None else start)
        held = held_of(theta, version, {} if start is None else {"momentum": theta})
        merged = self.merged(version, contributors)
        given = None if mean is None else torch.full((self.num_elements,), mean)
        self.inbox.append(Arrived(update, held, merged, given))


EAGER = diloco.EagerDiLoCo(sync_every=2, outer=diloco.Nesterov(lr=1.0, momentum=0.5))


def eager(script: EagerScript) -> Callable[[float], float]:
    """Takes an inner step down by so much; returns the parameters, which are all the same."""
    model = nn.Linear(40, 3)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), method=EAGER, exchange=script)

    def down(by: float) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(by)
        learner.step(tokens=10)
        (value,) = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
        return float(value)

    return down


class Outer:
    """Nesterov with lr 1 and momentum 1/2 on one number."""

    def __init__(self, value: float = 0.0, momentum: float = 0.0) -> None:
        self.value, self.momentum = value, momentum

    def step(self, gradient: float) -> float:
        self.momentum = 0.5 * self.momentum + gradient
        self.value -= gradient + 0.5 * self.momentum
        return self.value


@pytest.mark.parametrize("contributors", [("me", "you"), ("you",), ("me",)], ids=" and ".join)
def test_an_eager_learner_takes_away_what_it_added_whatever_the_mean_lists(contributors: tuple[str, ...]) -> None:
    script, outer = EagerScript(), Outer()
    down = eager(script)
    down(1.0)
    assert down(3.0) == outer.step(4.0 / 2)  # Δ = 4, and two are live
    script.overview = Overview(num_live=4)
    script.publish_mean(1, 16.0, *contributors)
    down(1.0)
    assert down(7.0) == outer.step(16.0 - 4.0 / 2 + 8.0 / 4)
    script.publish_mean(2, 0.0, *contributors)
    down(0.0)
    assert down(0.0) == outer.step(0.0 - 8.0 / 4)


def test_an_eager_learner_takes_a_mean_that_comes_when_it_sends_nothing() -> None:
    """A joiner between two rounds of the others. Without that mean it would stay apart from them for good."""
    script, outer = EagerScript(version=3, step=2), Outer()
    down = eager(script)
    script.publish_mean(4, 16.0, "you")
    assert down(1.0) == outer.step(16.0) - 1.0  # its work stays on top
    assert down(3.0) == outer.step(4.0 / 2)
    assert script.offers[0][0].base == 4


def test_an_eager_learner_that_fetches_a_version_whole_has_added_nothing_to_it() -> None:
    script = EagerScript()
    down = eager(script)
    down(1.0)
    down(3.0)
    script.publish_mean(1, None, "me", "you", start=-8.0)
    down(1.0)
    outer = Outer(-8.0, -8.0)
    assert down(7.0) == outer.step(8.0 / 2)
    script.publish_mean(2, 16.0, "me", "you")
    down(0.0)
    assert down(0.0) == outer.step(16.0 - 8.0 / 2)


PUSHED = diloco.AsyncDiLoCo(sync_every=2, learners=1, dynamic_steps=False)
CALLED = diloco.DecoupledDiLoCo(sync_every=2, fragments=diloco.Whole(), codec="fp32")


@pytest.mark.parametrize("method", [PUSHED, CALLED], ids=["pushed", "called"])
def test_resumed_it_does_not_wait_for_what_the_old_incarnation_sent(method: Method) -> None:
    """A contribution without a verdict must not keep the learner from sending and adopting, or it would train alone."""
    script, learner = start(method)
    script.inbox += [CallForWork(0, 0)] if method is CALLED else []
    step(learner, 2)
    assert len(script.offers) == 1
    again, resumed = start(method)
    resumed.model.load_state_dict(learner.model.state_dict())
    assert resumed.load_state_dict(learner.state_dict())
    before = torch.cat([p.detach().flatten() for p in resumed.model.parameters()])
    again.inbox += [CallForWork(0, 0)] if method is CALLED else []
    step(resumed, 2)
    after = torch.cat([p.detach().flatten() for p in resumed.model.parameters()])
    ((contribution, payload),) = again.offers
    assert (contribution.round, contribution.base) == (0, 0)
    assert contribution.tokens == 10 * contribution.steps == (20 if method is PUSHED else 10)
    if method is PUSHED:  # what was sent went with the old incarnation: the syncer has it, or it is lost
        assert torch.equal(method.up.decode(payload(), len(before)), before - after)
    again.publish(1, "me")
    step(resumed)
    assert stands_at(resumed, 1)
    assert ledger_of(resumed)["pending"] >= 0


@pytest.mark.parametrize("method", [PUSHED, CALLED], ids=["pushed", "called"])
def test_a_residual_is_saved_as_it_was_last_committed(method: Method) -> None:
    """What is on its way when a checkpoint is taken may be merged or not, and the resumed learner is not told."""
    method = replace(method, up=codec_from_name("int4"), error_feedback=True)
    script, learner = start(method)

    def contribute() -> None:
        script.inbox += [CallForWork(0, learner.versions[0])] if learner.method.name == "DecoupledDiLoCo" else []
        step(learner, 2)
        script.offers[-1][1]()

    contribute()
    assert learner.state_dict()["residuals"] == {}  # the first one is on its way
    script.publish(1, "me")
    step(learner)
    committed = learner.state_dict()["residuals"]["0"].clone()
    assert committed.any()
    contribute()
    assert len(script.offers) == 2
    saved = learner.state_dict()
    assert torch.equal(saved["residuals"]["0"], committed)
    _, resumed = start(method, version=1)
    resumed.model.load_state_dict(learner.model.state_dict())
    assert resumed.load_state_dict(saved)
    assert torch.equal(resumed.state_dict()["residuals"]["0"], committed)
    script.publish(2, "me")
    step(learner)
    assert not torch.equal(learner.state_dict()["residuals"]["0"], committed)


def test_nothing_is_kept_of_the_model_it_started_from() -> None:
    """A learner that joined holds its anchors, not a second copy of everything."""
    _, learner = start()
    assert learner._start_model is not None
    step(learner)
    assert learner._start_model is None


def test_snapshots_are_taken_at_the_boundary() -> None:
    """What is encoded later is what the parameters were when they were sent."""
    script, learner = start(diloco.DiLoCo(sync_every=2, overlap=2))
    step(learner, 2)
    sent = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    step(learner)
    payload = script.offers[0][1]()
    assert torch.equal(payload.view(torch.float32), script.theta(0) - sent)
