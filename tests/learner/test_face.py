"""The public face of `Learner`: what its arguments and methods do, beside the algorithm, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.learner.test_learner import SGD, assert_same, differ, make_model, parameters_of, run, train_step
from tests.syncer.runs import RUN
from tests.syncer.runs import start as start_syncer
from torch import Tensor, nn

import diloco
from diloco import Learner
from diloco.errors import CheckpointError, ConfigError, LayoutError
from diloco.exchange.base import Exchange

DILOCO = diloco.DiLoCo(sync_every=2)


def attached(exchange: Exchange, index: int = 0, method: diloco.Method = DILOCO, **options: Any) -> Learner:
    model = make_model(index)
    return Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange, **options)


def alone(life: Callable[[Exchange], Any]) -> Any:
    """The result of a life of a single learner."""
    return diloco.run_local(lambda _, exchange: life(exchange), learners=1)[0]


# --- one learner, one exchange ----------------------------------------------------------------------------------------


def test_an_exchange_belongs_to_one_learner() -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange) as first:
            with pytest.raises(ConfigError, match="belongs to another Learner already; make a new one for every"):
                attached(exchange)
            run(first, 0, range(1, 4))
            assert first.versions == (1,)

    alone(life)


def test_a_state_that_does_not_fit_closes_the_learner_that_was_to_resume_from_it() -> None:
    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        if index == 0:
            with attached(exchange) as learner:
                run(learner, index, range(1, 6))  # would wait for the other after its second step
                return learner.metrics()
        with pytest.raises(CheckpointError, match="the checkpoint has no"):
            attached(exchange, index, resume={})
        return {}

    assert diloco.run_local(life, learners=2)[0]["versions"] == [2]


def test_a_state_of_a_rank_with_other_pieces_is_refused() -> None:
    """As after a change of the parallelism, with as many ranks as before."""

    def life(exchange: Exchange) -> None:
        with attached(exchange) as learner:
            state = learner.state_dict()
            own = state["parameters"].pop("0.weight")
            with pytest.raises(
                CheckpointError, match=r"has nothing of parameter '0\.weight', .* of the shape \(8, 4\)"
            ):
                learner.load_state_dict(state)
            state["parameters"]["0.weight"] = own[:4]
            with pytest.raises(CheckpointError, match=r"has a piece of the shape \(4, 4\) of parameter '0\.weight'"):
                learner.load_state_dict(state)
            run(learner, 0, range(1, 3))

    alone(life)


def test_what_a_closed_learner_still_does_and_what_it_refuses() -> None:
    def life(exchange: Exchange) -> None:
        learner = attached(exchange)
        run(learner, 0, range(1, 4))
        state, before = learner.state_dict(), learner.global_state_dict()
        learner.close()
        assert (learner.name, learner.steps, learner.versions, learner.drained) == ("learner-000", 3, (1,), False)
        assert learner.run_tokens == learner.metrics()["tokens"] == 30
        assert_same(learner.global_state_dict(), before)
        with learner.global_model():
            assert_same(parameters_of(learner.model), before)
        for call in (
            learner.step, learner.step_after_optimizer, learner.state_dict, lambda: learner.load_state_dict(state),
            learner.finish, learner.distributed_state_dict, lambda: learner.load_distributed_state_dict("nowhere"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="this learner is closed"):
                call()

    alone(life)


def test_a_closed_learner_of_a_syncer_still_tells_what_it_knows(tmp_path: Path) -> None:
    with start_syncer(tmp_path, DILOCO) as syncer:
        exchange = diloco.connect(syncer.address, run=RUN, learner="me", initialise=True)
        model = make_model()
        with Learner(model, SGD(model.parameters(), lr=0.1), exchange=exchange) as learner:
            run(learner, 0, range(1, 4))
            before = learner.global_state_dict()
    assert (learner.name, learner.steps, learner.versions, learner.drained) == ("me", 3, (1,), False)
    assert learner.metrics()["tokens"] == 30
    assert_same(learner.global_state_dict(), before)
    with pytest.raises(ConfigError, match="this learner is closed; save its state before close"):
        learner.state_dict()


def test_a_learner_that_is_refused_leaves_no_thread_behind(tmp_path: Path) -> None:
    with start_syncer(tmp_path, DILOCO) as syncer:
        model = make_model()
        with Learner(model, SGD(model.parameters()), exchange=diloco.connect(syncer.address, run=RUN, initialise=True)):
            pass
        before = {each for each in threading.enumerate() if each.name.startswith("diloco")}
        other = nn.Linear(3, 3)
        exchange = diloco.connect(syncer.address, run=RUN, learner="other")
        with pytest.raises(LayoutError, match="make the same model on all learners, with the same answers"):
            Learner(other, SGD(other.parameters()), exchange=exchange)
        assert {each for each in threading.enumerate() if each.name.startswith("diloco")} <= before


def test_an_address_is_no_exchange() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"exchange='127\.0\.0\.1:7700'\) is not an exchange; pass what diloco"):
        Learner(model, SGD(model.parameters()), exchange="127.0.0.1:7700")  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "shown"), [(diloco.DiLoCo, "DiLoCo"), ("DiLoCo", "'DiLoCo'")])
def test_a_preset_that_was_not_called_is_no_method(given: Any, shown: str) -> None:
    def life(exchange: Exchange) -> None:
        model = make_model()
        with pytest.raises(ConfigError, match=rf"method={shown}\) is not a method; call .*: diloco\.DiLoCo\(…\)"):
            Learner(model, SGD(model.parameters()), method=given, exchange=exchange)

    alone(life)


def test_losses_are_numbers_and_tokens_after_the_optimizer_come_from_a_function() -> None:
    def life(exchange: Exchange) -> None:
        model, wrong = make_model(), cast("Any", "x")
        with Learner(model, SGD(model.parameters()), method=DILOCO, exchange=exchange) as learner:
            for losses in ({"training_loss": wrong}, {"held_out_loss": wrong}):
                with pytest.raises(ConfigError, match=r"learner\.log\(…\) needs numbers.*'x'.*; pass losses as floats"):
                    learner.log(**losses)
            with pytest.raises(ConfigError, match=r"step_after_optimizer\(tokens='x'\) is not a function"):
                learner.step_after_optimizer(tokens=wrong)
            learner.step_after_optimizer(tokens=lambda: 3)

    alone(life)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_without_tokens_every_step_counts_one() -> None:
    def life(index: int, exchange: Exchange) -> tuple[int, int, dict[str, Tensor]]:
        method = diloco.DiLoCo(sync_every=2, weight=weight)
        with attached(exchange, index, method) as learner:
            for step in range(1, 5):
                train_step(learner.model, learner.optimizer, index, step)
                learner.step()
            return learner.metrics()["tokens"], learner.run_tokens, learner.global_state_dict()

    weight = "uniform"
    uniform = diloco.run_local(life, learners=2)
    weight = "tokens"
    by_steps = diloco.run_local(life, learners=2)
    assert [each[:2] for each in uniform] == [(4, 8), (4, 8)]
    assert_same(uniform, by_steps)


def accumulate(model: nn.Module, index: int, step: int) -> None:
    """Gradients of two micro-batches."""
    for micro in range(2):
        generator = torch.Generator().manual_seed(10_000 * index + 10 * step + micro)
        x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)
        (nn.functional.mse_loss(model(x), y) / 2).backward()


def someone_elses_loop(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, steps: int) -> None:
    for step in range(1, steps + 1):
        accumulate(model, index, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", [DILOCO, diloco.DataParallel(), diloco.StreamingDiLoCo(sync_every=2)], ids=str)
def test_a_loop_that_cannot_be_edited_trains_like_one_that_calls_step(method: diloco.Method) -> None:
    def by_hook(index: int, exchange: Exchange) -> Any:
        with attached(exchange, index, method) as learner:
            learner.step_after_optimizer(tokens=lambda: 12)
            someone_elses_loop(learner.model, learner.optimizer, index, 5)
            result = parameters_of(learner.model), learner.metrics()["tokens"], learner.steps, learner.versions
        someone_elses_loop(learner.model, learner.optimizer, index, 1)  # closed: the hook is gone
        return result

    def by_hand(index: int, exchange: Exchange) -> Any:
        with attached(exchange, index, method) as learner:
            for step in range(1, 6):
                accumulate(learner.model, index, step)
                learner.optimizer.step()
                learner.optimizer.zero_grad()
                learner.step(12)
            return parameters_of(learner.model), learner.metrics()["tokens"], learner.steps, learner.versions

    assert_same(diloco.run_local(by_hook, learners=2), diloco.run_local(by_hand, learners=2))


def test_tokens_may_be_a_tensor_and_must_be_a_number_of_them() -> None:
    def life(exchange: Exchange) -> int:
        with attached(exchange) as learner:
            for wrong in (-1, 1.5, float("nan"), "3", torch.tensor(2.0), torch.tensor([1, 2])):
                with pytest.raises(ConfigError, match=r"learner\.step\(tokens=.*\) is "):
                    learner.step(wrong)
            learner.step(torch.tensor([[1, 1], [1, 0]]).sum())
            learner.step(4)
            return learner.metrics()["tokens"]

    assert alone(life) == 7


def test_a_closure_computes_gradients_after_they_were_exchanged() -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange, method=diloco.DataParallel()) as learner:
            for call in (lambda: learner.optimizer.step(float), lambda: learner.optimizer.step(closure=float)):
                with pytest.raises(ConfigError, match=r"DataParallel.*SGD\.step\(closure\) computes others"):
                    call()
            learner.optimizer.step(None)

    alone(life)


def test_a_learner_that_steps_after_its_optimizer_is_not_stepped_by_hand() -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange) as learner:
            learner.step_after_optimizer()
            with pytest.raises(ConfigError, match="by itself; leave learner.step"):
                learner.step()
            with pytest.raises(ConfigError, match="called before"):
                learner.step_after_optimizer()
            someone_elses_loop(learner.model, learner.optimizer, 0, 3)
            assert learner.steps == learner.metrics()["tokens"] == 3

    alone(life)


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_gradient_scaler_skips_is_no_step(fused: bool) -> None:
    """A fused optimizer is called for an overflow too, and skips it itself."""

    def life(exchange: Exchange) -> None:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with Learner(model, optimizer, method=DILOCO, exchange=exchange) as learner:
            learner.step_after_optimizer()
            for step in range(1, 6):
                scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
                if step == 2:
                    model[0].weight.grad[0, 0] = torch.inf
                before = parameters_of(model)
                scaler.step(optimizer)
                assert differ(before, parameters_of(model)) == (step != 2)
                scaler.update()
                optimizer.zero_grad()
            assert learner.steps == 4

    alone(life)


# --- the global model in the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_global_weights_are_in_the_model_inside_the_block_and_its_own_again_after(dtype: torch.dtype) -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make_model(index).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Learner(model, optimizer, method=DILOCO, exchange=exchange) as learner:
            run(learner, index, range(1, 4))
            own, places = parameters_of(model), [p.data_ptr() for p in model.parameters()]
            with learner.global_model():
                assert differ(parameters_of(model), own)
                assert_same(parameters_of(model), learner.global_state_dict())
            assert_same(parameters_of(model), own)
            with pytest.raises(ZeroDivisionError), learner.global_model():
                raise ZeroDivisionError
            assert_same(parameters_of(model), own)
            assert places == [p.data_ptr() for p in model.parameters()]
            run(learner, index, range(4, 6))

    diloco.run_local(life, learners=2)


def test_tensors_that_a_hook_makes_of_the_parameters_are_global_too() -> None:
    """A fused projection whose state dict has it in parts, as torchtitan's attention."""

    class Fused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 6, bias=False)
            self.register_state_dict_post_hook(Fused.split)

        @staticmethod
        def split(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
            state[f"{prefix}q"], state[f"{prefix}k"] = state.pop(f"{prefix}weight").chunk(2)

    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = nn.Sequential(Fused(), nn.Linear(6, 1))
        with Learner(model, SGD(model.parameters(), lr=0.1), method=DILOCO, exchange=exchange) as learner:
            for _ in range(3):
                model(torch.full((2, 4), index + 1.0)).square().sum().backward()
                learner.optimizer.step()
                learner.step()
            state = learner.global_state_dict()
            assert not torch.equal(state["0.q"], model.state_dict()["0.q"])
            with learner.global_model():
                assert_same(model.state_dict(), state)
                assert_same(learner.global_state_dict(), state)
            return state

    one, other = diloco.run_local(life, learners=2)
    assert set(one) == {"0.q", "0.k", "1.weight", "1.bias"}
    assert_same(one, other)


def test_a_learner_does_not_train_or_save_with_the_global_weights_in_its_model() -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange) as learner:
            state = learner.state_dict()
            run(learner, 0, range(1, 2))
            with learner.global_model():
                for call in (learner.step, learner.state_dict, lambda: learner.load_state_dict(state)):
                    with pytest.raises(ConfigError, match="inside learner.global_model"):
                        call()
                with pytest.raises(ConfigError, match="inside learner.global_model"), learner.global_model():
                    pass
            run(learner, 0, range(2, 4))

    alone(life)


def test_where_gradients_are_exchanged_the_model_is_the_global_one() -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange, method=diloco.DataParallel()) as learner:
            run(learner, 0, range(1, 3))
            own = parameters_of(learner.model)
            with learner.global_model():
                assert_same(parameters_of(learner.model), own)

    alone(life)


# --- several models and optimizers ------------------------------------------------------------------------------------


def test_several_models_and_optimizers_are_one_learner() -> None:
    """As the same models inside one module with one optimizer."""

    def parts(seed: int) -> dict[str, nn.Module]:
        torch.manual_seed(seed)
        return {"generator": nn.Linear(2, 4), "discriminator": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))}

    def play(generator: nn.Module, discriminator: nn.Module, optimizers: list[SGD], index: int, step: int) -> None:
        noise = torch.randn(5, 2, generator=torch.Generator().manual_seed(100 * index + step))
        discriminator(generator(noise)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    method = diloco.StreamingDiLoCo(
        sync_every=4, overlap=1, fragments=diloco.Named([["generator.*"], ["discriminator.*"]])
    )

    def by_name(index: int, exchange: Exchange) -> Any:
        models = parts(index)
        optimizers = [SGD(model.parameters(), lr=0.1) for model in models.values()]
        with Learner(models, optimizers, method=method, exchange=exchange) as learner:
            for step in range(1, 9):
                play(*models.values(), optimizers, index, step)
                learner.step()
            return learner.global_state_dict(), {name: parameters_of(model) for name, model in models.items()}

    def in_one(index: int, exchange: Exchange) -> Any:
        models = parts(index)
        both = nn.ModuleDict(models)
        optimizer = SGD(both.parameters(), lr=0.1)
        with Learner(both, optimizer, method=method, exchange=exchange) as learner:
            for step in range(1, 9):
                play(*models.values(), [optimizer], index, step)
                learner.step()
            return learner.global_state_dict(), {name: parameters_of(model) for name, model in models.items()}

    by_names = diloco.run_local(by_name, learners=2)
    assert_same(by_names, diloco.run_local(in_one, learners=2))
    assert list(by_names[0][0])[:2] == ["generator.weight", "generator.bias"]


def test_the_parts_of_a_model_are_exchanged_as_the_whole() -> None:
    """As the stages that a rank of a pipeline holds: with the names, the layout and the bits of the whole model."""

    class Part(nn.Module):
        """Layers of a model, with a frozen tensor and a buffer, under the names that they have in it."""

        def __init__(self, index: int, layers: range) -> None:
            super().__init__()
            torch.manual_seed(index)
            whole = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
            self.layers = nn.ModuleDict({str(layer): whole[layer] for layer in layers})
            for layer in self.layers.values():
                layer[0].bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = torch.tanh(layer(x))
            return x

    def life(index: int, exchange: Exchange, cut: bool) -> Any:
        parts = [Part(index, range(1)), Part(index, range(1, 3))] if cut else [Part(index, range(3))]
        optimizers = [SGD([p for p in part.parameters() if p.requires_grad], lr=0.1) for part in parts]
        buffers = {"layers.0.*": "average", "*": "local"}
        method = diloco.StreamingDiLoCo(sync_every=4, overlap=1, fragments=diloco.Balanced(2))
        model = parts if cut else parts[0]
        with Learner(model, optimizers, method=method, exchange=exchange, buffers=buffers) as learner:
            for step in range(1, 9):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * index + step))
                for part in parts:
                    x = part(x)
                x.square().sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                learner.step()
            own = {name: value.clone() for part in parts for name, value in part.state_dict().items()}
            with learner.global_model():
                swapped = {name: value.clone() for part in parts for name, value in part.state_dict().items()}
            return learner.global_state_dict(), swapped, own, learner.layout.digest()

    def lives(cut: tuple[bool, bool]) -> Any:
        return diloco.run_local(lambda index, exchange: life(index, exchange, cut[index]), learners=2)

    whole, mixed = lives((False, False)), lives((True, False))
    assert_same(mixed, whole)
    exported, swapped, own, _ = mixed[0]
    assert exported.keys() == own.keys()
    assert_same(exported, swapped)
    assert not torch.equal(own["layers.2.0.weight"], exported["layers.2.0.weight"])


def test_parts_of_one_model_hold_no_tensor_twice() -> None:
    def life(exchange: Exchange) -> None:
        model = make_model()
        with pytest.raises(ConfigError, match=r"two parts of the model have a tensor '0\.bias'.*\{name: model\}"):
            Learner([model, make_model(1)], SGD(model.parameters()), method=DILOCO, exchange=exchange)

    alone(life)


def test_the_hook_is_on_the_last_of_several_optimizers() -> None:
    def life(exchange: Exchange) -> None:
        model = make_model()
        optimizers = [SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters())]
        with Learner(model, optimizers, method=DILOCO, exchange=exchange) as learner:
            learner.step_after_optimizer()
            for _ in range(3):
                model(torch.ones(2, 4)).square().sum().backward()
                optimizers[0].step()
                steps = learner.steps
                optimizers[1].step()
                assert learner.steps == steps + 1

    alone(life)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda model: ({}, SGD(model.parameters())), r"model=\{\}\) is not a model"),
        (lambda model: ([], SGD(model.parameters())), r"model=\[\]\) is not a model"),
        (lambda model: ({"a.b": model}, SGD(model.parameters())), r"'a\.b'.*choose another"),
        (lambda model: ({"train": model}, SGD(model.parameters())), "'train'.*choose another"),
        (lambda model: ({"a": 3}, SGD(model.parameters())), "'a'.*choose another"),
        (lambda model: (3, SGD(model.parameters())), r"model=3\) is not a model; pass a module, modules by name"),
        (lambda model: ([3], SGD(model.parameters())), r"has a int; pass the parts of a model, as modules"),
        (lambda model: (model.to("meta"), SGD(model.parameters())), r"'0\.weight' is on the meta device"),
        (lambda model: (nn.LazyLinear(3), SGD(model.parameters())), "'weight' has no shape yet.*run one batch"),
        (lambda model: (model, []), "needs optimizers, and got none"),
        (lambda model: (model, [SGD(model.parameters()), "adamw"]), "needs optimizers, and got SGD, str; pass"),
        (lambda model: (model, SimpleNamespace(param_groups=[])), "needs optimizers, and got SimpleNamespace; pass"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(make: Callable[[nn.Module], Any], text: str) -> None:
    def life(exchange: Exchange) -> None:
        with pytest.raises(ConfigError, match=text):
            Learner(*make(make_model()), method=DILOCO, exchange=exchange)

    alone(life)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_refused() -> None:
    def life(exchange: Exchange) -> None:
        model = nn.ModuleDict({"scripted": torch.jit.script(nn.Linear(4, 3))})
        with pytest.raises(ConfigError, match=r"ScriptModule.*before torch\.jit\.script, or use torch\.compile"):
            Learner(model, SGD(model.parameters()), method=DILOCO, exchange=exchange)

    alone(life)


def test_each_of_several_optimizers_is_checked() -> None:
    def life(exchange: Exchange) -> None:
        model, other = make_model(), make_model()
        first = SGD(model.parameters(), lr=0.1)
        for optimizers, method, text in (
            ([first, SGD(other.parameters(), lr=0.1)], DILOCO, r"SGD trains 6 tensor\(s\) that are not parameters"),
            ([first, torch.optim.AdamW(model.parameters())], diloco.DataParallel(average="parameters"), "AdamW keeps"),
            ([first, first], diloco.DataParallel(), r"2 optimizers.*Chained"),
        ):
            with pytest.raises(ConfigError, match=text):
                Learner(model, optimizers, method=method, exchange=exchange)

    alone(life)


# --- the model stays the one that was attached ------------------------------------------------------------------------


def replace(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def replace_module(model: nn.Module) -> None:
    model[2] = nn.Linear(8, 3)


def add(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3))


def add_statistics(model: nn.Module) -> None:
    model.append(nn.BatchNorm1d(3, affine=False))


def replace_statistics(model: nn.Module) -> None:
    model[4] = nn.BatchNorm1d(3, affine=False)


def remove_statistics(model: nn.Module) -> None:
    model[4].running_var = None


def widen(model: nn.Module) -> None:
    model.double()


def remove(model: nn.Module) -> None:
    del model[2].bias
    model[2].bias = None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replace, r"'2\.weight' was replaced.*in place, or close this learner and attach a new one"),
        (replace_module, r"'2\.weight' was replaced"),
        (add, r"'5\.weight' was added.*close this learner and attach a new one"),
        (remove, r"'2\.bias' was removed"),
        (add_statistics, r"buffer '5\.running_mean' was added.*attach a new one"),
        (replace_statistics, r"buffer '4\.running_mean' was replaced with its module.*attach a new one"),
        (remove_statistics, r"buffer '4\.running_var' was removed.*attach a new one"),
        (widen, r"'0\.weight' is .* in torch.float64, and was .* in torch.float32 .*; bring the model into its dtype"),
    ],
)
@pytest.mark.parametrize(
    "method", [DILOCO, diloco.StreamingDiLoCo(sync_every=4, overlap=0, fragments=diloco.Balanced(2))]
)
def test_a_tensor_that_is_not_the_one_attached_is_refused_by_name(
    change: Callable[[nn.Module], None], text: str, method: diloco.Method
) -> None:
    def life(exchange: Exchange) -> None:
        model = nn.Sequential(*make_model(), nn.BatchNorm1d(3, affine=False).eval())
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            run(learner, 0, range(1, 2))
            change(learner.model)
            with pytest.raises(LayoutError, match=text):
                learner.step()

    alone(life)


def test_a_buffer_that_is_gone_at_the_first_boundary_is_named() -> None:
    def life(exchange: Exchange) -> None:
        model = make_model()
        model.register_buffer("scale", torch.ones(3))
        with Learner(model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(), exchange=exchange) as learner:
            del model.scale
            with pytest.raises(LayoutError, match="no tensor 'scale' any more.*attach a new one"):
                learner.step()

    alone(life)


@pytest.mark.parametrize("swapped", [False, True], ids=["added", "swapped"])
def test_what_an_optimizer_is_given_later_is_refused(swapped: bool) -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange) as learner:
            run(learner, 0, range(1, 2))
            groups = learner.optimizer.param_groups
            if swapped:  # as libraries for mixed precision do when they come late
                groups[0]["params"] = [nn.Parameter(each.detach().clone()) for each in groups[0]["params"]]
            else:
                learner.optimizer.add_param_group({"params": nn.Linear(3, 3).parameters()})
            with pytest.raises(ConfigError, match=r"SGD trains \d tensor\(s\) that are not parameters of the model"):
                learner.step()

    alone(life)


def test_a_model_whose_tensors_are_not_contiguous_initialises_a_run() -> None:
    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = make_model(index)
        model.register_buffer("base", torch.arange(6.0).view(2, 3).t() + index)
        with Learner(model, SGD(model.parameters(), lr=0.1), method=DILOCO, exchange=exchange) as learner:
            run(learner, index, range(1, 3))
            return learner.global_state_dict()

    one, other = diloco.run_local(life, learners=2)
    assert_same(one, other)
    assert torch.equal(one["base"], torch.arange(6.0).view(2, 3).t())


def test_what_moves_or_casts_nothing_changes_nothing() -> None:
    def life(exchange: Exchange) -> None:
        with attached(exchange) as learner:
            learner.model.to("cpu").float().eval().requires_grad_(True)
            learner.model[2].weight.data = learner.model[2].weight.data.clone()
            run(learner, 0, range(1, 4))

    alone(life)
