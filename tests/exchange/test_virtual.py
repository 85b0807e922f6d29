"""Runs in virtual time with a network and with faults: what happens when, and that a synchronous run's bits do not
depend on it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import diloco
from diloco.core.method import Method
from diloco.core.quorum import Called
from diloco.errors import ConfigError, DrainedError
from diloco.exchange.local import Local, Lost, run_virtual
from diloco.exchange.virtual.delivery import Fault
from diloco.exchange.virtual.run import VirtualRun
from diloco.planning.network import Network, Route
from diloco.protocol.steering import Pool, PoolSchedule
from diloco.run.ports import NullObserver

NUM_PARAMETERS = 1000


@dataclass(frozen=True)
class Seen:
    """One learner's run: when its steps were over and what they did to its parameters, and its metrics."""

    times_s: list[float]
    parameters: list[Tensor]
    metrics: dict[str, object]
    steps: int


def life(
    method: Method, steps: int, *, bias: bool = False, overlaps: Sequence[int | None] = (None,) * 9
) -> Callable[[int, Local], Seen]:
    """Constant gradients of a learner's own, plain SGD. `overlaps`: of learners with an overlap of their own."""

    def live(index: int, exchange: Local) -> Seen:
        model = torch.nn.Linear(NUM_PARAMETERS, 1, bias=bias)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        times_s, seen = [], []
        overlap = overlaps[index]
        with diloco.Learner(model, optimizer, method=method, exchange=exchange, overlap=overlap) as learner:
            while learner.steps < steps and not learner.drained:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1.0 + index)
                optimizer.step()
                learner.step(tokens=10)
                times_s.append(exchange.now_s)
                seen.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
            return Seen(times_s, seen, learner.metrics(), learner.steps)

    return live


def world(
    learners: int = 2, *, step_s: float = 1.0, bit_per_s: float | Sequence[float] = math.inf, latency_s: float = 0.0,
    faults: Sequence[Fault] = ()
) -> VirtualRun:  # fmt: skip
    """Learners with links of their own. `bit_per_s`: of all of them, or of each learner's."""
    speeds = bit_per_s if isinstance(bit_per_s, Sequence) else [bit_per_s] * learners
    links = {f"{way}-{i}": speed for i, speed in enumerate(speeds) for way in ("up", "down")}
    network = Network(links, [Route((f"up-{i}",), (f"down-{i}",), latency_s) for i in range(learners)])
    names = [f"learner-{i}" for i in range(learners)]
    return VirtualRun(names, lambda *_: step_s, [0.0] * learners, network, faults)


MODEL_BITS = 4 * 8 * NUM_PARAMETERS
LINK: dict[str, float] = {"bit_per_s": 2 * MODEL_BITS, "latency_s": 0.125}
FP32 = {"codec": "fp32", "outer": diloco.SGD(lr=1.0)}


def test_a_round_takes_what_its_transfers_take() -> None:
    # A call takes two latencies, and 0.5 s more where a model goes with it. The first learner asks, uploads its model,
    # joins, fetches the model and the frozen tensors, and listens: 2.5 s. The other begins once the run has its model,
    # after 1 s, and uploads none. Every second step is followed by 0.5 s up, a notice, a request and 0.5 s down: four
    # latencies. In the first round the one that began waits for the one that joined.
    method = diloco.DiLoCo(sync_every=2, **FP32)
    expected = [([3.5, 6.25, 7.25, 9.75], 0.25, 8000), ([3.75, 6.25, 7.25, 9.75], 0.0, 4000)]
    for seen, (times_s, longer_s, join_bytes) in zip(
        run_virtual(life(method, 4), world(**LINK)), expected, strict=True
    ):
        assert isinstance(seen, Seen)
        assert seen.times_s == times_s
        assert seen.metrics["blocked_s"] == 2 * 1.5 + longer_s
        assert seen.metrics["num_bytes"] == {"joins": join_bytes, "contributions": 8000, "updates": 8000}


def test_an_overlap_hides_a_transfer_that_is_shorter() -> None:
    method = diloco.StreamingDiLoCo(sync_every=4, overlap=3, fragments=diloco.Whole(), mix=0.0, **FP32)
    for seen, begins_s in zip(run_virtual(life(method, 8), world(**LINK)), (2.5, 2.75), strict=True):
        assert isinstance(seen, Seen)
        assert seen.times_s == [begins_s + step for step in range(1, 9)]
        assert seen.metrics["blocked_s"] == 0.0


def test_a_run_begins_when_its_model_is_there() -> None:
    """Killed while it sends the model, the first learner leaves no run behind, and the next one begins it."""
    method = diloco.DiLoCo(sync_every=2, **FP32)
    lost, seen = run_virtual(life(method, 4), world(**LINK, faults=[Fault(0, 0.5)]))
    assert isinstance(lost, Lost)
    assert isinstance(seen, Seen)
    assert seen.times_s[0] == 0.5 + 2.5 + 1.0


@pytest.mark.parametrize(
    "method",
    [
        diloco.DiLoCo(sync_every=3),
        diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=diloco.Whole(), codec="int4"),
        diloco.EagerDiLoCo(sync_every=3, codec="int8"),
    ],
    ids=lambda method: method.name,
)
def test_a_network_changes_no_bit_of_a_synchronous_run(method: Method) -> None:
    at_once = diloco.run_local(life(method, 14), learners=2)
    carried = run_virtual(life(method, 14), world(bit_per_s=MODEL_BITS / 3, latency_s=0.7))
    for one, other in zip(at_once, carried, strict=True):
        assert isinstance(other, Seen)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


def test_a_network_changes_no_bit_where_one_learner_overlaps_a_whole_interval() -> None:
    """While it fetches the large fragment, two versions of the small one are published."""
    method = diloco.StreamingDiLoCo(
        sync_every=4, overlap=1, fragments=diloco.Balanced(2), codec=("int4", "fp32"),
        quorum=diloco.AllLive(at_least=2),  # they begin together
    )  # fmt: skip
    lives = life(method, 18, bias=True, overlaps=[None, 4])
    far = world(bit_per_s=[math.inf, MODEL_BITS / 5])
    for one, other in zip(diloco.run_local(lives, learners=2), run_virtual(lives, far), strict=True):
        assert isinstance(other, Seen)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


def test_a_learner_knows_of_the_run_what_the_syncer_told_it_last() -> None:
    """The other learner joins in its fourth step. Half a second is on the way between a report and its answer."""
    method = diloco.DiLoCo(sync_every=4, **FP32)
    network = Network({}, [Route((), (), 0.25)] * 2)

    def live(index: int, exchange: Local) -> list[tuple[float, int, int | None]]:
        model = torch.nn.Linear(NUM_PARAMETERS, 1, bias=False)
        told = []
        with diloco.Learner(model, torch.optim.SGD(model.parameters()), method=method, exchange=exchange) as learner:
            while learner.steps < 8:
                learner.step(tokens=10)
                told.append((exchange.now_s, exchange.overview.num_live, exchange.overview.run_tokens))
        return told

    first, second = run_virtual(live, VirtualRun(["a", "b"], lambda *_: 1.0, [0.0, 3.0], network))
    assert first == [
        (4.0, 1, 0), (5.0, 1, 10), (6.0, 1, 20), (8.5, 2, 60),
        (9.5, 2, 60), (10.5, 2, 70), (11.5, 2, 90), (13.5, 2, 140),
    ]  # fmt: skip
    assert second == [(6.5, 2, 20), (8.5, 2, 60), (9.5, 2, 60), (10.5, 2, 80), (11.5, 2, 100), (13.5, 2, 140)]


def test_learners_of_called_rounds_are_never_blocked_however_slow_the_network() -> None:
    method = diloco.DecoupledDiLoCo(
        sync_every=4, overlap=2, fragments=diloco.Whole(), quorum=Called(at_least=1), **FP32
    )
    slow = world(bit_per_s=MODEL_BITS / 5, latency_s=0.5)
    for seen in run_virtual(life(method, 40), slow):
        assert isinstance(seen, Seen)
        assert seen.metrics["blocked_s"] == 0.0
        assert seen.metrics["merges"] > 0  # type: ignore[operator]
        assert all(later - earlier == 1.0 for earlier, later in zip(seen.times_s, seen.times_s[1:], strict=False))


def test_a_killed_learner_is_waited_for_until_its_deadline_and_comes_back_to_the_run() -> None:
    # It is killed in its fourth step, and its connection breaks. The other waits after its own fourth, until 5 steps
    # have passed; back, it joins at the run's step.
    method = diloco.DiLoCo(sync_every=4, **FP32)
    first, second = run_virtual(life(method, 60), world(faults=[Fault(1, 3.5, 30.25)]))
    assert isinstance(first, Seen)
    assert isinstance(second, Seen)
    assert first.times_s[2:5] == [3.0, 8.5, 9.5]
    assert second.times_s[0] == 31.25
    assert second.metrics["incarnation"] == 2
    assert second.steps == first.steps == 60
    assert len(second.times_s) < 60


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("halving", [(1, 24), (1, 24), (1, 12), (1, 12)]), ("doubling", [(1, 24), (1, 24), (13, 24), (13, 24)])],
)
def test_a_pool_says_how_many_learners_of_a_process_train(schedule: PoolSchedule, steps: list[tuple[int, int]]) -> None:
    method = diloco.DiLoCo(sync_every=4, **FP32)
    runs = diloco.run_local(life(method, 24), learners=4, pool=diloco.Pool(schedule, 4, 24))
    # A learner that waits for a place asks about once a second, so it may begin a step after the pool has grown.
    for seen, (first, last) in zip(runs, steps, strict=True):
        assert seen.steps == last
        assert 0 <= last + 1 - len(seen.times_s) - first <= 2
        assert seen.metrics["tokens"] == seen.metrics["ledger"][0]["merged"]  # type: ignore[index]


def test_a_pool_that_is_too_small_for_a_round_is_refused() -> None:
    method = diloco.DiLoCo(sync_every=4, quorum=diloco.AllLive(at_least=2))
    with pytest.raises(ConfigError, match="1 of 2 learners at times, and a round needs 2"):
        diloco.run_local(life(method, 24), learners=2, pool=diloco.Pool("ramp up", 2, 24))


LIVE = {
    "scheduled": diloco.DiLoCo(sync_every=10, **FP32),
    "called": diloco.DecoupledDiLoCo(
        sync_every=10, overlap=2, fragments=diloco.Whole(), quorum=Called(at_least=1), **FP32
    ),
    "pushed": diloco.AsyncDiLoCo(sync_every=10, learners=2, dynamic_steps=False),
}


@dataclass
class Taken:
    """By all lives of all learners: steps that ended, and what loading a state changed."""

    steps: int = 0
    exact: list[bool] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)


def resuming(method: Method, steps: int, taken: Taken, saved: dict[int, Any]) -> Callable[[int, Local], dict[str, Any]]:
    """Saves its state after every step, and begins with the state saved last."""

    def live(index: int, exchange: Local) -> dict[str, Any]:
        model = torch.nn.Linear(NUM_PARAMETERS, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            if index in saved:
                model.load_state_dict(saved[index]["model"])
                before = exchange.state_dict()
                taken.exact.append(learner.load_state_dict(saved[index]["learner"]))
                after = exchange.state_dict()
                taken.moved += ["clock"] if after["core"]["rounds"] != before["core"]["rounds"] else []
                for key in ("version", "theta"):
                    old, new = (each["fragments"]["0"][key] for each in (before, after))
                    taken.moved += [] if torch.equal(torch.as_tensor(old), torch.as_tensor(new)) else [key]
            while learner.steps < steps:
                model.weight.grad = torch.full_like(model.weight, 1.0 + index)
                optimizer.step()
                learner.step(tokens=10)
                taken.steps += 1
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                saved[index] = {"model": weights, "learner": learner.state_dict()}
            return learner.metrics()

    return live


@pytest.mark.parametrize("name", LIVE)
def test_a_state_loaded_into_a_run_that_went_on_counts_no_token_twice_and_moves_nothing(name: str) -> None:
    """Killed between two rounds, a learner comes back before the next: the run holds the versions of its checkpoint,
    and is further."""
    taken = Taken()
    lives = run_virtual(resuming(LIVE[name], 35, taken, {}), world(faults=[Fault(1, 13.5, 15.25)]))
    assert max(seen["run_tokens"] for seen in lives if not isinstance(seen, Lost)) == 10 * taken.steps
    assert taken.moved == []
    assert taken.exact == [False]


@pytest.mark.parametrize("name", LIVE)
def test_an_old_state_does_not_take_a_run_back_that_others_train(name: str) -> None:
    saved: dict[int, Any] = {}
    run_virtual(resuming(LIVE[name], 25, Taken(), saved), world())
    taken = Taken()
    late = VirtualRun(["learner-0", "learner-1"], lambda *_: 1.0, [0.0, 3.5])
    first, second = run_virtual(resuming(LIVE[name], 45, taken, {1: saved[1]}), late)
    assert not isinstance(first, Lost)
    assert not isinstance(second, Lost)
    assert max(first["run_tokens"], second["run_tokens"]) == 10 * taken.steps
    assert taken.moved == []
    assert taken.exact == [False]


@pytest.mark.parametrize("name", LIVE)
def test_a_late_learner_brings_its_books_to_a_run_that_its_checkpoint_is_of(name: str) -> None:
    """All were saved at one moment; the first one is restored and trains before the second one starts."""
    saved: dict[int, Any] = {}
    before, taken = Taken(), Taken()
    run_virtual(resuming(LIVE[name], 14, before, saved), world())
    late = VirtualRun(["learner-0", "learner-1"], lambda *_: 1.0, [0.0, 3.5])
    first, second = run_virtual(resuming(LIVE[name], 45, taken, saved), late)
    assert taken.exact == [True, True]
    assert not isinstance(first, Lost)
    assert not isinstance(second, Lost)
    assert max(first["run_tokens"], second["run_tokens"]) == 10 * (before.steps + taken.steps)


class BrokenObserver(NullObserver):
    """Fails at whatever it is told."""

    def joined(self, learner: str, incarnation: int, step: int, experts: object) -> None:
        raise ArithmeticError(learner)

    def published(self, *_: object, **__: object) -> None:
        raise ArithmeticError("published")


def test_an_observer_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    method = diloco.DiLoCo(sync_every=4, **FP32)
    names = ["learner-0", "learner-1"]
    seen = run_virtual(life(method, 20), VirtualRun(names, lambda *_: 1.0, [0.0, 0.0], observer=BrokenObserver()))
    assert [each.metrics["versions"] for each in seen if isinstance(each, Seen)] == [[5], [5]]
    assert caplog.text.count("BrokenObserver.published failed") == 1


POOL = Pool("halving", 2, 40)


def test_a_learner_that_was_cut_off_when_the_pool_shrank_ends_as_one_that_is_drained() -> None:
    """Its eleventh step takes so long that it is evicted, and the other is past the middle of the run when it ends."""
    method = diloco.DiLoCo(sync_every=4, **FP32)
    names = ["learner-0", "learner-1"]
    run = VirtualRun(names, lambda i, step: 20.0 if (i, step) == (1, 10) else 1.0, [0.0, 0.0], pool=POOL)

    def live(index: int, exchange: Local) -> tuple[int, list[Any]]:
        model = torch.nn.Linear(NUM_PARAMETERS, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            while learner.steps < 40 and not learner.drained:
                if (index, learner.steps) == (1, 10):
                    run.wires[1].break_all()
                learner.step(tokens=10)
            if index == 1:
                with pytest.raises(ConfigError, match="has finished"):
                    learner.step(tokens=10)
            learner.finish()
            learner.state_dict()
            return learner.steps, learner.metrics()["ledger"]

    first, second = run_virtual(live, run)
    assert not isinstance(first, Lost)
    assert not isinstance(second, Lost)
    assert first[0] == 40
    assert second == (11, [{"trained": 110, "merged": 80, "pending": 0, "lost": 30, "discarded": {}}])


def test_a_learner_that_comes_back_when_the_pool_has_shrunk_fails() -> None:
    method = diloco.DiLoCo(sync_every=4, **FP32)
    run = VirtualRun(["first", "second"], lambda *_: 1.0, [0.0, 0.0], faults=[Fault(1, 10.5, 30.5)], pool=POOL)
    with pytest.raises(DrainedError, match="taken by first; it has shrunk, so train without second"):
        run_virtual(life(method, 40), run)


def test_a_learner_that_does_not_come_back_ends_lost_and_the_others_go_on() -> None:
    method = diloco.DiLoCo(sync_every=4, **FP32)
    first, second = run_virtual(life(method, 20), world(faults=[Fault(1, 0.0)]))
    assert isinstance(first, Seen)
    assert isinstance(second, Lost)
    assert first.steps == 20


def test_a_learner_may_be_killed_again_before_it_is_back() -> None:
    method = diloco.DiLoCo(sync_every=4, **FP32)
    faults = [Fault(1, 2.5, 10.25), Fault(1, 5.0, 40.5), Fault(1, 41.0, 45.5)]
    _, second = run_virtual(life(method, 60), world(faults=faults))
    assert isinstance(second, Seen)
    assert second.times_s[0] == 46.5


def test_the_same_world_gives_the_same_run() -> None:
    method = diloco.DecoupledDiLoCo(sync_every=4, overlap=2, fragments=diloco.Whole(), codec="int4")

    def once() -> list[Seen | Lost]:
        shaky = world(3, bit_per_s=MODEL_BITS / 3, latency_s=0.3, faults=[Fault(2, 7.7, 31.3)])
        return run_virtual(life(method, 50), shaky)

    for one, other in zip(once(), once(), strict=True):
        assert isinstance(one, Seen)
        assert isinstance(other, Seen)
        assert one.times_s == other.times_s
        assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


@pytest.mark.parametrize(("at_s", "back_s"), [(-1.0, None), (math.nan, None), (2.0, 1.0), (2.0, math.inf)])
def test_impossible_faults_are_refused(at_s: float, back_s: float | None) -> None:
    with pytest.raises(ConfigError, match="learner 3 is killed at"):
        Fault(3, at_s, back_s)
