"""What training changes beside the parameters: refused by name, averaged with them, or each learner's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import update_bn

import diloco
from diloco import Learner
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import Exchange
from diloco.learner.frozen import FrozenState
from diloco.learner.pieces import Units, read_dtensor
from diloco.learner.roles import described

FAR = diloco.DiLoCo(sync_every=1000)


def train_step(model: nn.Module, inner: torch.optim.Optimizer, index: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * index + step)
    x = torch.randn(8, 4, generator=generator) * (1 + index)
    inner.zero_grad()
    model(x).square().mean().backward()
    inner.step()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def attach(
    model: nn.Module,
    method: diloco.Method = FAR,
    steps: int = 3,
    after: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> int:
    """Train one learner. `after` runs between the inner step and the boundary. Returns the boundaries passed."""
    passed = 0

    def life(index: int, exchange: Exchange) -> None:
        nonlocal passed
        inner = SGD(trained(model), lr=0.1)
        with Learner(model, inner, method=method, exchange=exchange, **options) as learner:
            for step in range(1, steps + 1):
                train_step(model, inner, index, step)
                after(step)
                learner.step(tokens=8)
                passed += 1

    try:
        diloco.run_local(life, learners=1)
    except (ConfigError, LayoutError) as error:
        error.add_note(str(passed))
        raise
    return passed


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Router(nn.Module):
    """A bias that balances experts, moved after each step by a rule and not by a gradient."""

    def __init__(self, *, as_parameter: bool, assigned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.assigned = nn.Linear(4, 3), assigned
        if as_parameter:
            self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
        else:
            self.register_buffer("bias", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.bias

    def balance(self, amount: float) -> None:
        if self.assigned:
            self.bias = self.bias + amount
        else:
            self.bias.add_(amount)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (normed(), "1.running_mean"),
        (nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)), "1.running_mean"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)), "1.running_mean"),
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))), "0.parametrizations.weight.0._u"),
        (nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))), "0.weight_u"),
    ],
    ids=["batch norm", "synchronised batch norm", "instance norm", "spectral norm", "spectral norm by a hook"],
)  # fmt: skip
def test_what_is_known_to_change_is_refused_by_name_when_the_learner_attaches(model: nn.Module, name: str) -> None:
    for parameter in model.parameters():
        assert parameter.requires_grad
    model.append(nn.Linear(3, 2))
    with pytest.raises(LayoutError, match=rf"'{name}'.*buffers='average'.*buffers='local'") as refused:
        attach(model)
    assert refused.value.__notes__ == ["0"]


@pytest.mark.parametrize("static", ["exchange", "digest"])
def test_statistics_that_stand_still_are_accepted(static: str) -> None:
    assert attach(normed().eval(), static=static) == 3
    still = normed()
    still[1].momentum = 0.0
    assert attach(still, static=static) == 3
    assert attach(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)), static=static) == 3


@pytest.mark.parametrize("static", ["exchange", "digest"])
def test_statistics_that_begin_to_move_later_are_refused_at_the_first_boundary(static: str) -> None:
    """Where a trainer calls `model.train()` once it has attached: after one step, not after 1000."""
    model = normed().eval()
    model[0].register_forward_pre_hook(lambda module, _: model.train() and None)
    with pytest.raises(LayoutError, match=r"'1\.running_mean'") as refused:
        attach(model, static=static)
    assert refused.value.__notes__ == ["0"]


@pytest.mark.parametrize("as_parameter", [False, True])
@pytest.mark.parametrize("method", [FAR, diloco.DataParallel(average="parameters")], ids=["diloco", "data parallel"])
def test_a_router_bias_is_refused_at_the_first_boundary(as_parameter: bool, method: diloco.Method) -> None:
    model = Router(as_parameter=as_parameter)
    with pytest.raises(LayoutError, match=r"'bias'.*'average'.*'local'") as refused:
        attach(model, method, after=lambda step: model.balance(0.1))
    assert refused.value.__notes__ == ["0"]


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ("mean", "buffers='mean'.*'refuse', 'average' or 'local'"),
        (None, "buffers=None is not valid; use 'refuse'"),
        ({"1.*": "keep"}, r"buffers='keep' of '1\.\*'"),
        ({"2.running_*": "average"}, r"'2\.running_\*'.*matches no buffer"),
    ],
)
def test_an_answer_that_is_none_is_refused(buffers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(normed(), buffers=buffers)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'1\.running_mean'.*DataParallel.*buffers='local'"):
        attach(normed(), diloco.DataParallel(), buffers="average")
    wide = normed()
    wide[1].running_var = wide[1].running_var.double()
    with pytest.raises(ConfigError, match=r"'1\.running_var' is float64"):
        attach(wide, buffers="average")
    with pytest.raises(ConfigError, match="static='digests'"):
        attach(normed(), buffers="local", static="digests")


# --- averaged ---------------------------------------------------------------------------------------------------------


def lives(
    make: Callable[[int], nn.Module], method: diloco.Method, steps: int, buffers: Any, learners: int = 2
) -> list[dict[str, dict[str, Tensor]]]:
    """Per learner its state before the last boundary and after it, and the global one."""

    def life(index: int, exchange: Exchange) -> dict[str, dict[str, Tensor]]:
        model = make(index)
        inner = SGD(trained(model), lr=0.05)
        found = {}
        with Learner(model, inner, method=method, exchange=exchange, buffers=buffers) as learner:
            found["joined"] = copies(model.state_dict())
            for step in range(1, steps + 1):
                train_step(model, inner, index, step)
                if isinstance(model, Router):
                    model.balance(0.1 * (index + 1))
                found["before"] = copies(model.state_dict())
                learner.step(tokens=8)
            found |= {"after": copies(model.state_dict()), "global": learner.global_state_dict()}
        return found

    return diloco.run_local(life, learners=learners)


def copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def of_index(index: int) -> nn.Module:
    model = normed()
    model[1].running_mean.fill_(float(index))
    return model


def test_averaged_statistics_are_the_mean_under_nesterov() -> None:
    first, second = lives(of_index, diloco.DiLoCo(sync_every=2), 4, "average")
    assert not torch.equal(first["before"]["1.running_var"], second["before"]["1.running_var"])
    for name in ("1.running_mean", "1.running_var"):
        mean = (first["before"][name] + second["before"][name]) / 2
        for each in (first, second):
            torch.testing.assert_close(each["after"][name], mean)
            assert torch.equal(each["after"][name], each["global"][name])
    weight = (first["before"]["0.weight"] + second["before"]["0.weight"]) / 2
    assert not torch.allclose(first["after"]["0.weight"], weight)  # parameters take the outer step
    assert first["after"]["1.num_batches_tracked"] == 4


@pytest.mark.parametrize(("as_parameter", "assigned"), [(False, False), (False, True), (True, False)])
def test_an_averaged_router_bias(as_parameter: bool, assigned: bool) -> None:
    first, second = lives(
        lambda _: Router(as_parameter=as_parameter, assigned=assigned), diloco.DiLoCo(sync_every=2), 3,
        {"bias": "average"},
    )  # fmt: skip
    torch.testing.assert_close(first["global"]["bias"], torch.full((3,), 0.3))  # the mean of 0.2 and 0.4
    torch.testing.assert_close(first["after"]["bias"], torch.full((3,), 0.4))  # and one step of its own
    torch.testing.assert_close(second["after"]["bias"], torch.full((3,), 0.5))


def test_a_pattern_answers_for_what_it_names_only() -> None:
    model = Router(as_parameter=True)
    model.norm = nn.BatchNorm1d(3)
    with pytest.raises(LayoutError, match=r"'norm\.running_mean'"):
        attach(model, buffers={"bias": "average"})
    assert attach(model, buffers={"bias": "average", "norm.*": "local"}, after=lambda step: model.balance(0.1)) == 3


def test_an_averaged_buffer_of_two_names_is_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.a, self.b = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.b.running_mean = self.a.running_mean

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.linear(x)))

    first, _ = lives(lambda _: Shared(), diloco.DiLoCo(sync_every=2), 3, "average")
    assert torch.equal(first["global"]["a.running_mean"], first["global"]["b.running_mean"])
    assert not torch.equal(first["global"]["b.running_mean"], first["after"]["b.running_mean"])


# --- local ------------------------------------------------------------------------------------------------------------


def test_local_statistics_begin_as_the_initial_learners_and_stay_each_learners_own() -> None:
    first, second = lives(of_index, diloco.DiLoCo(sync_every=2), 4, "local")
    assert torch.equal(second["joined"]["1.running_mean"], torch.zeros(3))
    for each in (first, second):
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(each["after"][name], each["before"][name])
            assert torch.equal(each["after"][name], each["global"][name])
    assert not torch.equal(first["after"]["1.running_var"], second["after"]["1.running_var"])


@pytest.mark.parametrize("buffers", ["local", {"parametrizations.*": "local"}])
def test_local_spectral_norm(buffers: Any) -> None:
    def make(index: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    first, second = lives(make, diloco.DiLoCo(sync_every=2), 4, buffers)
    assert not torch.equal(
        first["after"]["parametrizations.weight.0._u"], second["after"]["parametrizations.weight.0._u"]
    )
    original = "parametrizations.weight.original"
    assert torch.equal(first["after"][original], second["after"][original])


def test_a_learner_that_comes_back_keeps_its_own_statistics() -> None:
    """Its run has gone on without it: the parameters are the run's, the statistics and counters its own."""
    saved: dict[str, Any] = {}
    resumed: dict[str, Tensor] = {}

    def life(index: int, exchange: Exchange) -> None:
        model = normed()
        inner = SGD(model.parameters(), lr=0.05)
        with Learner(model, inner, method=diloco.DiLoCo(sync_every=4), exchange=exchange, buffers="local") as learner:
            if index == 1:
                assert not learner.load_state_dict(saved)
                resumed.update(copies(model.state_dict()))
            for step in range(1, 9 if saved else 4):
                train_step(model, inner, index, step)
                learner.step(tokens=8)
            if not saved:
                saved.update(learner.state_dict())

    diloco.run_local(life, learners=1)
    assert sorted(saved["counters"]) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    diloco.run_local(life, learners=2, starts_s=[0.0, 5.5])
    for name, value in saved["counters"].items():
        assert torch.equal(resumed[name], value)


# --- frozen and unfrozen later ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", ["exchange", "digest"])
def test_a_parameter_unfrozen_later_is_refused_at_the_next_boundary(static: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))

    def unfreeze(step: int) -> None:
        if step == 2:
            model[0].weight.requires_grad_(True)

    with pytest.raises(LayoutError, match=r"'0\.weight' requires a gradient.*before attaching") as refused:
        attach(model, after=unfreeze, static=static)
    assert refused.value.__notes__ == ["1"]


def test_a_parameter_frozen_later_is_refused_at_its_next_send() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def freeze(step: int) -> None:
        if step == 2:
            model[0].weight.requires_grad_(False)

    with pytest.raises(LayoutError, match=r"'0\.weight' requires no gradient any more.*trains=") as refused:
        attach(model, diloco.DiLoCo(sync_every=2), steps=9, after=freeze)
    assert refused.value.__notes__ == ["3"]  # trained in the interval before


def test_parameters_that_are_frozen_now_and_then_are_trained() -> None:
    """As in a GAN: at each boundary the discriminator is frozen, and it has been trained."""
    generator, critic = nn.Linear(4, 3), nn.Linear(3, 2)
    model = nn.Sequential(generator, critic)

    def turns(step: int) -> None:
        critic.requires_grad_(True)
        SGD(critic.parameters(), lr=0.1).zero_grad()
        critic(torch.randn(8, 3)).square().mean().backward()
        SGD(critic.parameters(), lr=0.1).step()
        critic.requires_grad_(False)

    assert attach(model, diloco.DiLoCo(sync_every=2), steps=6, after=turns) == 6


# --- beside the training ----------------------------------------------------------------------------------------------


def test_a_learner_that_is_evicted_takes_the_runs_frozen_tensors_and_keeps_its_own() -> None:
    model = normed().append(nn.Linear(2, 2).requires_grad_(False))
    layout = described(model, FAR, "local", "exchange", read_dtensor).layout(FAR)
    frozen = FrozenState(model, layout, Units(layout))
    first = frozen.values()
    frozen.adopt(first)
    model[1].running_var.fill_(7.0)
    model[1].num_batches_tracked.fill_(9)
    model[3].weight.data.zero_()
    frozen.adopt(first)
    assert model[1].running_var.tolist() == [7.0] * 3
    assert model[1].num_batches_tracked == 9
    assert torch.equal(model[3].weight, first["3.weight"])


def test_the_global_model_has_the_averaged_statistics_and_the_learners_come_back() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = normed()
        inner = SGD(model.parameters(), lr=0.05)
        method = diloco.DiLoCo(sync_every=2)
        with Learner(model, inner, method=method, exchange=exchange, buffers="average") as learner:
            for step in range(1, 4):
                train_step(model, inner, index, step)
                learner.step(tokens=8)
            own, wanted = copies(model.state_dict()), learner.global_state_dict()
            assert not torch.equal(own["1.running_var"], wanted["1.running_var"])
            with learner.global_model():
                assert all(torch.equal(each, wanted[name]) for name, each in model.state_dict().items())
            assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())

    diloco.run_local(life, learners=2)


def test_statistics_taken_of_the_global_model_are_not_the_learners_own_after() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = of_index(index)
        inner = SGD(model.parameters(), lr=0.1)
        with Learner(model, inner, method=diloco.DiLoCo(sync_every=2), exchange=exchange, buffers="local") as learner:
            for step in range(1, 4):
                train_step(model, inner, index, step)
                learner.step()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with learner.global_model():
                update_bn([torch.randn(6, 4)], model)
                assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    diloco.run_local(life, learners=2)


def test_names_are_canonical_and_of_several_models() -> None:
    """Compiled and plain learners meet, and patterns match the names that errors and exports have."""

    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = normed()
        given = torch.compile(model, backend="eager") if index else model
        inner = SGD(model.parameters(), lr=0.05)
        with Learner(
            {"net": given}, inner, method=diloco.DiLoCo(sync_every=2), exchange=exchange,
            buffers={"net.1.running_*": "average"},
        ) as learner:  # fmt: skip
            for step in range(1, 5):
                train_step(model, inner, index, step)
                learner.step(tokens=8)
            return learner.global_state_dict()

    first, second = diloco.run_local(life, learners=2)
    assert "net.1.running_mean" in first
    assert all(torch.equal(each, second[name]) for name, each in first.items())
