"""The family through the real `Learner`: degenerate identities, golden trajectories, and what must hold in any run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco import Learner, Method
from diloco.core.outer import Nesterov
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange

Life = Callable[[int, Exchange], dict[str, Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def life(method: Method, steps: int = 24, until_s: float | None = None, tokens: int = 10) -> Life:
    """Trains on data of its own; ends with parameters, global model and metrics."""

    def live(index: int, exchange: Exchange) -> dict[str, Any]:
        model, taken = Net(), 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
        with Learner(model, optimizer, method=method, exchange=exchange) as learner:
            while taken < steps if until_s is None else exchange.now_s < until_s:  # type: ignore[attr-defined]
                taken += 1
                generator = torch.Generator().manual_seed(1000 * index + learner.steps)
                x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=tokens)
            parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
            global_ = torch.cat([value.flatten() for value in learner.global_state_dict().values()])
            return {"parameters": parameters, "global": global_, "metrics": learner.metrics()}

    return live


class Constant:
    """One weight and a constant gradient: every trajectory can be written down."""

    def __init__(self, method: Method, steps: int, gradient: float = 1.0, tokens: int = 1) -> None:
        self.method, self.steps, self.gradient, self.tokens = method, steps, gradient, tokens

    def __call__(self, index: int, exchange: Exchange) -> list[tuple[float, float]]:
        """(parameter, global value) after every step."""
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        with Learner(model, optimizer, method=self.method, exchange=exchange) as learner:
            for _ in range(self.steps):
                model.weight.grad = torch.full((1, 1), self.gradient)
                optimizer.step()
                learner.step(tokens=self.tokens)
                seen.append((model.weight.item(), learner.global_state_dict()["weight"].item()))
        return seen


FRAGMENTS = diloco.Named([["layers.0.*"], ["layers.1.*", "layers.2.*"]])


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [diloco.Whole(), FRAGMENTS], ids=["whole", "two"])
@pytest.mark.parametrize("intervals", [1, 2])
def test_eager_with_one_learner_is_diloco_without_delay(intervals: int, fragments: Any) -> None:
    outer = Nesterov(lr=0.6, momentum=0.8)
    eager = diloco.EagerDiLoCo(sync_every=4, intervals=intervals, outer=outer, fragments=fragments)
    plain = diloco.DiLoCo(sync_every=4, outer=outer, fragments=fragments)
    [one], [other] = (diloco.run_local(life(each), learners=1) for each in (eager, plain))
    assert torch.equal(one["parameters"], other["parameters"])


def test_delayed_is_an_overlap_of_a_whole_interval_wherever_the_outer_step_is_taken() -> None:
    outer = Nesterov(lr=0.5, momentum=0.7)
    delayed = diloco.DelayedDiLoCo(sync_every=4, outer=outer, fragments=FRAGMENTS)
    overlapped = diloco.DiLoCo(sync_every=4, overlap=4, outer=outer, fragments=FRAGMENTS)
    for one, other in zip(*(diloco.run_local(life(each), learners=3) for each in (delayed, overlapped)), strict=True):
        for key in ("parameters", "global"):
            assert torch.equal(one[key], other[key])


@pytest.mark.parametrize("fragments", [diloco.Whole(), FRAGMENTS], ids=["whole", "two"])
def test_decoupled_in_step_is_diloco(fragments: Any) -> None:
    """K = M, equal speeds, mean, no latency."""
    outer = Nesterov(lr=0.6, momentum=0.8)
    plain = diloco.DiLoCo(sync_every=6, outer=outer, fragments=fragments)
    decoupled = diloco.DecoupledDiLoCo(
        sync_every=6, outer=outer, fragments=fragments, codec="fp32", weight="uniform", merge=diloco.Mean(),
        quorum=diloco.Called(at_least=3),
    )  # fmt: skip
    for one, other in zip(*(diloco.run_local(life(each), learners=3) for each in (plain, decoupled)), strict=True):
        assert torch.equal(one["parameters"], other["parameters"])
        assert one["metrics"]["versions"] == other["metrics"]["versions"]


def test_one_learner_pushes_what_diloco_would() -> None:
    outer = Nesterov(lr=0.6, momentum=0.8)
    pushed = diloco.AsyncDiLoCo(learners=1, sync_every=6, outer=diloco.DelayedNesterov(lr=0.6, momentum=0.8, buffer=1))
    plain = diloco.DiLoCo(sync_every=6, outer=outer)
    [one], [other] = (diloco.run_local(life(each), learners=1) for each in (pushed, plain))
    assert torch.equal(one["parameters"], other["parameters"])


def test_without_a_send_between_keeping_the_displacement_changes_nothing() -> None:
    """One learner whose outer step takes its displacement as it is: nothing is lost, so nothing has to be kept."""
    kept = replace(diloco.LocalSGD(sync_every=6, overlap=2), adopt=diloco.KeepDisplacement())
    [one], [alone] = (diloco.run_local(life(each), learners=1) for each in (kept, diloco.LocalSGD(sync_every=1000)))
    torch.testing.assert_close(
        one["parameters"], alone["parameters"], rtol=1e-4, atol=1e-5
    )  # anchor − (anchor − θ) rounds


def test_top_k_of_everything_is_lossless() -> None:
    plain = diloco.DiLoCo(sync_every=6)
    all_of_it = diloco.DiLoCo(sync_every=6, codec=("topk-4096", "fp32"))
    for one, other in zip(*(diloco.run_local(life(each), learners=2) for each in (plain, all_of_it)), strict=True):
        assert torch.equal(one["parameters"], other["parameters"])


# --- golden trajectories ----------------------------------------------------------------------------------------------


def test_a_whole_interval_of_overlap_counts_no_work_twice() -> None:
    """Constant gradient 1, outer SGD(1): every interval moves the global model by −H, from the first on."""
    method = diloco.LocalSGD(sync_every=3, overlap=3)
    for seen in diloco.run_local(Constant(method, 15), learners=2):
        assert [global_ for _, global_ in seen] == [0.0] * 5 + [-3.0] * 3 + [-6.0] * 3 + [-9.0] * 3 + [-12.0]


def test_eager_trajectory() -> None:
    """H = 2, outer SGD(1), two learners with gradients 1 and 3: each steps with its own newest half and the other's
    last."""

    def life_of(index: int, exchange: Exchange) -> list[float]:
        method = diloco.EagerDiLoCo(sync_every=2, outer=diloco.SGD(lr=1.0))
        return [value for value, _ in Constant(method, 6, gradient=(1.0, 3.0)[index])(index, exchange)]

    first, second = diloco.run_local(life_of, learners=2)
    # after step 2: Δ = 2 and 6, nothing has arrived: −1 and −3. After 4: half of the own 2, 6 and of the other's 6, 2:
    # −4. After 6 again.
    assert first == [-1.0, -1.0, -2.0, -5.0, -6.0, -9.0]
    assert second == [-3.0, -3.0, -6.0, -7.0, -10.0, -11.0]


@pytest.mark.parametrize("gradients", [(1.0, 1.0), (1.0, 3.0)], ids=["equal", "other"])
@pytest.mark.parametrize("intervals", [1, 2])
def test_eager_learners_with_weights_do_not_part(gradients: tuple[float, float], intervals: int) -> None:
    """Weights 3/4 and 1/4 in every mean. What a learner adds of its own it takes away again, so that after every send
    its parameters are the means before and half of its own newest outer gradient (two of them where two are on their
    way)."""
    rounds, every = 6, 2
    method = diloco.EagerDiLoCo(sync_every=every, intervals=intervals, outer=diloco.SGD(lr=1.0), weight="tokens")

    def life_of(index: int, exchange: Exchange) -> list[float]:
        seen = Constant(method, rounds * every, gradients[index], tokens=(3, 1)[index])(index, exchange)
        return [value for value, _ in seen[every - 1 :: every]]

    own = [every * gradient for gradient in gradients]
    mean = 0.75 * own[0] + 0.25 * own[1]
    expected = [
        [-(max(0, sends - intervals) * mean + min(intervals, sends) * each / 2) for sends in range(1, rounds + 1)]
        for each in own
    ]
    assert diloco.run_local(life_of, learners=2) == expected


def test_a_displacement_is_kept_on_top_of_the_answer() -> None:
    """H = 4, τ = 2, outer SGD(0.5), gradient 1: after step 4 Δ = 4 is sent, after 6 the answer −2 comes with −2 on top
    of it."""
    method = replace(diloco.DiLoCo(sync_every=4, overlap=2, outer=diloco.SGD(lr=0.5)), adopt=diloco.KeepDisplacement())
    [seen] = diloco.run_local(Constant(method, 10), learners=1)
    # sent after 4: 4 → −2; after 6: −2 − 2 = −4; after 8: −6, Δ = 4 → −4; after 10: −4 − 2 = −6
    assert [value for value, _ in seen] == [-1.0, -2.0, -3.0, -4.0, -5.0, -4.0, -5.0, -6.0, -7.0, -6.0]
    assert [global_ for _, global_ in seen][5] == -2.0


def test_a_tensor_is_averaged_over_those_who_train_it() -> None:
    """Two learners with gradient 1, one of which trains only the first weight: the second moves as far as the first."""

    def live(index: int, exchange: Exchange) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        trains = ["0.*"] if index == 1 else None
        optimizer = torch.optim.SGD(model.parameters() if index == 0 else model[0].parameters(), lr=1.0)
        with Learner(
            model, optimizer, method=diloco.LocalSGD(sync_every=2), exchange=exchange, trains=trains
        ) as learner:
            for _ in range(4):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                learner.step(tokens=1)
            return [value.item() for value in learner.global_state_dict().values()]

    assert diloco.run_local(live, learners=2) == [[-4.0, -4.0], [-4.0, -4.0]]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    def live(index: int, exchange: Exchange) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        Learner(model, optimizer, method=diloco.DiLoCo(), exchange=exchange, trains=["layers.*"])

    with pytest.raises(ConfigError, match=r"trains='layers\.\*' matches no parameter"):
        diloco.run_local(live, learners=1)


def test_eager_learners_train_the_whole_model() -> None:
    """Their own part of a mean would be another one for every tensor."""

    def live(index: int, exchange: Exchange) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        Learner(model, optimizer, method=diloco.EagerDiLoCo(), exchange=exchange, trains=["layers.0.*"])

    with pytest.raises(ConfigError, match="or use DelayedDiLoCo"):
        diloco.run_local(live, learners=1)


# --- what holds in any run --------------------------------------------------------------------------------------------


EVERY = {
    "DiLoCo": diloco.DiLoCo(sync_every=6),
    "Streaming": diloco.StreamingDiLoCo(sync_every=6, overlap=2, fragments=FRAGMENTS, mix=0.3),
    "Delayed": diloco.DelayedDiLoCo(sync_every=6, fragments=FRAGMENTS),
    "Eager": diloco.EagerDiLoCo(sync_every=6, fragments=FRAGMENTS, codec="int4", error_feedback=True),
    "Decoupled": diloco.DecoupledDiLoCo(sync_every=6, fragments=FRAGMENTS, codec="int4", error_feedback=True),
    "Decoupled, kept": diloco.DecoupledDiLoCo(sync_every=6, fragments=FRAGMENTS, adopt=diloco.KeepDisplacement()),
    "Async": diloco.AsyncDiLoCo(learners=4, sync_every=6, fragments=FRAGMENTS, merge=diloco.HeLoCo()),
    "Sparse": diloco.SparseLoCo(sync_every=6),
    "screened": replace(diloco.DiLoCo(sync_every=6), screen=diloco.NormOutliers(1.05)),
    "dropping": diloco.DiLoCo(sync_every=6, quorum=diloco.AllLive(drop=0.4)),
}  # fmt: skip


ALIKE = ["DiLoCo", "Delayed", "Decoupled, kept", "Sparse", "screened"]
"""Whose rounds are counted as another one's."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in EVERY]
)
def test_learners_of_any_speed_come_and_go_and_no_token_vanishes(name: str) -> None:
    def live(index: int, exchange: Exchange) -> dict[str, Any]:
        return life(EVERY[name], until_s=60.0 if index != 1 else 33.0)(index, exchange)

    speeds = [1.0, 1.1, 1.7, 2.6]
    results = diloco.run_local(live, learners=4, step_s=speeds, starts_s=[0.0, 0.0, 0.0, 14.3])
    again = diloco.run_local(live, learners=4, step_s=speeds, starts_s=[0.0, 0.0, 0.0, 14.3])
    for result, same in zip(results, again, strict=True):
        assert torch.equal(result["parameters"], same["parameters"])
        assert torch.isfinite(result["parameters"]).all()
        metrics = result["metrics"]
        assert metrics["merges"] > 0
        for ledger in metrics["ledger"]:
            accounted = ledger["pending"] + ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
            assert accounted == ledger["trained"] == metrics["tokens"]
            assert ledger["pending"] >= 0
        if not EVERY[name].wait:
            assert metrics["num_blocked"] == 0
    assert results[3]["metrics"]["steps"] > 14  # a late joiner starts at the run's step


def test_nobody_waits_for_the_slowest_where_the_syncer_calls() -> None:
    speeds = [1.0, 1.0, 1 / 0.6, 2.5]
    taken = {
        name: [
            each["metrics"]["tokens"]
            for each in diloco.run_local(life(EVERY[name], until_s=100.0), learners=4, step_s=speeds)
        ]
        for name in ("DiLoCo", "Decoupled")
    }
    assert taken["Decoupled"] == [1000, 1000, 600, 400]
    assert max(taken["DiLoCo"]) <= 480  # all at the pace of the slowest


def test_who_is_dropped_goes_on_from_its_own_parameters_and_is_measured_from_the_new_global_model() -> None:
    quorum, num_rounds, learners = diloco.AllLive(drop=0.5, drop_seed=3), 12, 3
    names = [f"learner-{index:03d}" for index in range(learners)]

    def live(index: int, exchange: Exchange) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        method = diloco.DiLoCo(sync_every=2, outer=diloco.SGD(lr=0.5), quorum=quorum)
        with Learner(model, torch.optim.SGD(model.parameters(), lr=1.0), method=method, exchange=exchange) as learner:
            for _ in range(2 * num_rounds):
                model.weight.grad = torch.full_like(model.weight, 2.0**index)
                learner.optimizer.step()
                learner.step(tokens=1)
            return float(learner.global_state_dict()["weight"])

    theta, own, num_dropped = 0.0, [0.0] * learners, 0
    for round_ in range(num_rounds):
        own = [each - 2 * 2.0**index for index, each in enumerate(own)]
        present = set(range(learners))
        for index in range(learners):
            if len(present) > 1 and quorum.drops(names[index], 0, round_):
                present.remove(index)
        theta -= 0.5 * sum(theta - own[index] for index in present) / len(present)
        own = [theta if index in present else each for index, each in enumerate(own)]
        num_dropped += learners - len(present)
    assert num_dropped > 10
    assert diloco.run_local(live, learners=learners) == [pytest.approx(theta, rel=1e-5)] * learners  # 24 fp32 sums


def test_dropped_work_stays_with_its_learner() -> None:
    results = diloco.run_local(life(diloco.DiLoCo(sync_every=6, quorum=diloco.AllLive(drop=0.5)), steps=60), learners=4)
    merges = [result["metrics"]["merges"] for result in results]
    assert 10 < sum(merges) < 35  # of 40
    for result in results:
        for ledger in result["metrics"]["ledger"]:
            assert ledger["discarded"] == {}  # what was dropped was sent later, or is pending


def test_dropped_work_stays_with_learners_of_any_speed() -> None:
    method = diloco.DiLoCo(sync_every=4, quorum=diloco.AllLive(drop=0.5))
    for result in diloco.run_local(life(method, until_s=60.0), learners=3, step_s=[0.5, 1.0, 2.3]):
        [ledger] = result["metrics"]["ledger"]
        assert ledger["discarded"] == {}
        assert ledger["merged"] > 0


def test_an_outlier_is_refused_with_its_learner_named() -> None:
    def live(index: int, exchange: Exchange) -> dict[str, Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0 if index == 2 else 0.05)
        method = replace(diloco.DiLoCo(sync_every=3), screen=diloco.NormOutliers(3.0))
        with Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for step in range(9):
                generator = torch.Generator().manual_seed(100 * index + step)
                x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=10)
            return learner.metrics()

    first, _, bad = diloco.run_local(live, learners=3)
    assert first["ledger"][0]["discarded"] == {}
    assert bad["ledger"][0]["discarded"]["outlier"] > 0
    assert bad["merges"] < first["merges"]
