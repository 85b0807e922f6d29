"""Training a part of a mixture: which experts, rows that keep their bits, and the tokens routed to experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from tests.learner.mixtures import EXPERTS, Mixture, backward, mixture, train_step
from tests.learner.test_learner import assert_same
from tests.syncer.runs import LearnerThreads, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import diloco
from diloco import Learner
from diloco.core.fragments import make_layout
from diloco.core.quorum import AllLive
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.experts import UntrainedRows
from diloco.learner.frozen import exchanged_tensors
from diloco.learner.pieces import Units, read_dtensor
from diloco.learner.roles import described
from diloco.training.optimizers import Chained, Muon

CUT = diloco.Experts(groups=2, trunk=diloco.Whole())
FUSED = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
"""Parameters of a block whose rows are experts."""


def method_of(sync_every: int, **options: Any) -> diloco.Method:
    return diloco.DiLoCo(sync_every=sync_every, fragments=CUT, offsets=(sync_every,) * 3, **options)


FAR = method_of(1000)


def rows(model: nn.Module, experts: Iterable[int]) -> dict[str, Tensor]:
    """The rows of some experts in all fused parameters."""
    return {
        name: each.detach()[list(experts)].clone() for name, each in model.named_parameters() if name.endswith(FUSED)
    }


# --- what a learner trains --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "experts"), [("0", {0}), ("1-2", {1, 2}), ("0,2-3", {0, 2, 3}), ("0-3", {0, 1, 2, 3})]
)
def test_experts_and_patterns_choose_tensors(text: str, experts: set[int]) -> None:
    """A pattern names units or the parameters that they are rows of; both choices apply."""

    def life(index: int, exchange: Exchange, patterns: list[str] | None) -> set[str]:
        model = mixture()
        with Learner(
            model, torch.optim.SGD(model.parameters()), method=FAR, exchange=exchange, buffers="local",
            trains=patterns if index == 0 else None, trains_experts=text if index == 0 else None,
        ) as learner:  # fmt: skip
            trained = learner._driver._trained
            return {
                name
                for fragment, own in zip(learner.layout.fragments, trained, strict=True)
                for at, name in enumerate(fragment.names)
                if own is None or at in own
            }

    for patterns, cut in ((None, FUSED), (["*.experts.gate_up_proj", "*.down_proj.?", "embed.*"], FUSED[:2])):
        found = diloco.run_local(lambda i, exchange, patterns=patterns: life(i, exchange, patterns), learners=2)[0]
        names = {f"layers.{layer}.{name}.{expert}" for layer in range(2) for name in cut for expert in experts}
        trunk = {"embed.weight"} if patterns else {"embed.weight", "head.weight", "head.bias"}
        assert found == names | trunk


def listed() -> nn.Module:
    """Experts as modules in a list, and no router."""
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))  # type: ignore[assignment]
    model.head = nn.Linear(3, 2)
    return model


def attach(text: Any, method: diloco.Method = FAR, make: Callable[[], nn.Module] = mixture, **options: Any) -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make()
        optimizer = options.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
        with Learner(
            model, optimizer, method=method, exchange=exchange, buffers="local", trains_experts=text
        ):  # fmt: skip
            pass

    diloco.run_local(life, learners=options.get("learners", 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"trains_experts='' is not a list of numbers; write it as \"0-15\" or \"0,3,8-11\"\."),
        ("0-", "trains_experts='0-' is not a list"),
        ("3-1", "trains_experts='3-1' is not a list"),
        ("all", "trains_experts='all' is not a list"),
        ((0, 1), r"trains_experts=\(0, 1\) is not a list"),
        ("0-2,1", "trains_experts='0-2,1' names 1 twice; name each number once"),
        ("3,3", "names 3 twice"),
        ("0-4", "trains_experts='0-4' names expert 4, and the model's are 0 to 3; name those only"),
        ("999999999", "names expert 999999999"),
    ],
)
@pytest.mark.parametrize("make", [mixture, listed])
def test_a_text_that_names_no_experts_of_the_model_is_refused(
    text: Any, reason: str, make: Callable[[], nn.Module]
) -> None:
    with pytest.raises(ConfigError, match=reason):
        attach(text, make=make)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (diloco.DiLoCo(), r"finds no experts, since DiLoCo cuts the model by Whole\(\); use a method .* \[method\] "),
        (diloco.EagerDiLoCo(sync_every=2), "since EagerDiLoCo cuts .*use a method that exchanges outer gradients"),
        (diloco.DataParallel(), "since DataParallel cuts .*use a method that exchanges outer gradients"),
        (diloco.DataParallel(average="parameters"), "since DataParallel cuts .*use a method that exchanges outer"),
    ],
)
def test_a_method_that_cannot_merge_a_part_is_refused(method: diloco.Method, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        attach("0", method)


def test_a_checkpoint_of_a_dense_model_is_refused_before_anything_is_joined() -> None:
    method = method_of(2)

    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model, plain = nn.Linear(3, 2), diloco.DiLoCo(sync_every=2)
        with Learner(model, torch.optim.SGD(model.parameters()), method=plain, exchange=exchange) as learner:
            return learner.state_dict()

    [dense] = diloco.run_local(life, learners=1)

    def attach(index: int, exchange: Exchange) -> None:
        model = mixture()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"method": method, "exchange": exchange, "buffers": "local"}
        with pytest.raises(CheckpointError, match="another model, another cut of it, or other experts"):
            Learner(model, optimizer, resume=dense, **options)
        Learner(model, optimizer, **options).close()  # the exchange is not taken

    diloco.run_local(attach, learners=1)


def test_an_optimizer_without_hooks_cannot_keep_rows() -> None:
    def wrapped(parameters: Any, lr: float) -> Any:
        return schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=lr))

    with pytest.raises(ConfigError, match="ScheduleFreeWrapper calls no hooks"):
        attach("0", optimizer=wrapped)
    attach("0-3", optimizer=wrapped)


@pytest.mark.parametrize("texts", [("0", "2-3"), ("0", "0")])
def test_an_expert_that_no_learner_trains_is_an_error(texts: tuple[str, str]) -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = mixture()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Learner(
            model, optimizer, method=FAR, exchange=exchange, buffers="local", trains_experts=texts[index]
        ) as learner:
            backward(model, 0, 1)
            learner.step()

    with pytest.raises(ConfigError, match=r"no learner trains expert 1 \('layers.0.gate.weight.1'\).*trains_experts"):
        diloco.run_local(life, learners=2)


@pytest.fixture
def one_rank() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_over_a_process_group_too() -> None:
    model = mixture()
    options: Any = {"method": FAR, "buffers": "local"}
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="no learner trains expert 3"):
        Learner(model, optimizer, exchange=diloco.Collective(), trains_experts="0-2", **options)
    Learner(model, optimizer, exchange=diloco.Collective(), trains_experts="0-3", **options).close()


# --- rows that are not trained ----------------------------------------------------------------------------------------


def adamw(parameters: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3, **options)


def muon(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Muon for the matrices of experts, AdamW for the rest."""
    fused = [each for each in parameters if each.ndim == 3]
    others = [each for each in parameters if each.ndim != 3]
    inner = Muon([torch.zeros(2, 2, requires_grad=True)], lr=0.02, weight_decay=0.3)
    inner.param_groups[0]["params"] = fused
    return Chained([inner, adamw(others)])


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "AdamW": lambda parameters: adamw(parameters, foreach=False),
    "AdamW, foreach": lambda parameters: adamw(parameters, foreach=True),
    "AdamW, fused": lambda parameters: adamw(parameters, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Muon by expert": muon,
    "schedule-free AdamW": lambda parameters: schedulefree.AdamWScheduleFree(
        parameters, lr=0.02, weight_decay=0.3, warmup_steps=3
    ),
    "schedule-free SGD": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_keep_their_bits_and_the_others_are_trained_alone(name: str, accumulate: int) -> None:
    """The trained rows have the bits of an optimizer that has only these rows.

    The fused AdamW rounds an element by its place in the tensor, so its rows are compared with those of an optimizer
    that has the others too, with the same gradients.
    """
    trained, others, steps = [0, 2], [1, 3], 12
    held = range(EXPERTS) if name == "AdamW, fused" else trained

    def life(index: int, exchange: Exchange) -> None:
        if index == 1:
            attach_and_leave(exchange)
            return
        model = mixture()
        parameters = dict(model.named_parameters())
        optimizer = OPTIMIZERS[name](list(parameters.values()))
        alone = {
            key: nn.Parameter(each.detach()[held].clone() if key.endswith(FUSED) else each.detach().clone())
            for key, each in parameters.items()
        }
        reference = OPTIMIZERS[name](list(alone.values()))
        for each in (optimizer, reference):
            if hasattr(each, "train"):
                each.train()
        before = rows(model, others)
        with Learner(model, optimizer, method=FAR, exchange=exchange, buffers="local", trains_experts="0,2") as learner:
            for step in range(1, steps + 1):
                for part in range(accumulate):
                    backward(model, 0, accumulate * step + part)
                for key, each in parameters.items():
                    assert each.grad is not None
                    if key.endswith(FUSED):
                        assert not each.grad[others].any()
                        alone[key].grad = each.grad[held].clone()
                    else:
                        alone[key].grad = each.grad.clone()
                optimizer.step()
                optimizer.zero_grad()
                reference.step()
                learner.step()
                assert_same(rows(model, others), before)
                for key, each in parameters.items():
                    own, its = each.detach(), alone[key].detach()
                    if key.endswith(FUSED):
                        own, its = own[trained], its[trained] if len(its) == EXPERTS else its
                    assert torch.equal(own, its), (step, key)
            if hasattr(optimizer, "eval"):
                optimizer.eval()
                assert_same(rows(model, others), before)
                optimizer.train()
                assert_same(rows(model, others), before)
            assert not torch.equal(parameters["layers.0.gate.weight"], mixture().layers[0].gate.weight)

    def attach_and_leave(exchange: Exchange) -> None:
        model = mixture()
        Learner(model, torch.optim.SGD(model.parameters()), method=FAR, exchange=exchange, buffers="local").close()

    diloco.run_local(life, learners=2)


def test_without_the_hooks_an_optimizer_moves_rows_that_get_no_gradient() -> None:
    """Why the values are written back: this is what the tests above would find otherwise."""
    model = mixture()
    optimizer, before = adamw(list(model.parameters())), rows(model, [1])
    for step in range(1, 3):
        backward(model, 0, step)
        for name, each in model.named_parameters():
            if name.endswith(FUSED):
                assert each.grad is not None
                each.grad[1] = 0
        optimizer.step()
    assert all(not torch.equal(each, before[name]) for name, each in rows(model, [1]).items())


def test_gradients_that_are_clipped_scaled_or_set_by_hand_leave_the_rows() -> None:
    """The norm is that of the trained rows; an overflow in other rows skips no step."""

    def life(index: int, exchange: Exchange) -> None:
        model = mixture()
        optimizer = adamw(list(model.parameters()))
        if index == 1:
            Learner(model, optimizer, method=FAR, exchange=exchange, buffers="local").close()
            return
        before = rows(model, [1, 2, 3])
        with Learner(model, optimizer, method=FAR, exchange=exchange, buffers="local", trains_experts="0") as learner:
            backward(model, 0, 1)
            gradients = {name: each.grad for name, each in model.named_parameters()}
            own = [each[0] if name.endswith(FUSED) else each for name, each in gradients.items() if each is not None]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert norm > 0.01
            torch.testing.assert_close(nn.utils.get_total_norm(own), torch.tensor(0.01))  # of the trained rows alone
            optimizer.step()
            optimizer.zero_grad()
            learner.step()
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            weight, moved = model.layers[0].experts.down_proj, model.head.weight.detach().clone()
            hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([2]), torch.inf))
            scaler.scale(model(torch.arange(8).view(2, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            learner.step()
            hook.remove()
            assert scaler.get_scale() == 8.0
            assert not torch.equal(model.head.weight, moved)
            for each in model.parameters():
                each.grad = torch.ones_like(each)
            optimizer.step()
            learner.step()
            assert optimizer.state[weight]["exp_avg"][1:].count_nonzero() == 0
            assert optimizer.state[weight]["exp_avg"][0].all()
        assert_same(rows(model, [1, 2, 3]), before)
        optimizer.step()  # the learner is closed, and its hooks are gone
        assert not torch.equal(rows(model, [1])["layers.0.gate.weight"], before["layers.0.gate.weight"][:1])

    diloco.run_local(life, learners=2)


def test_experts_in_a_list_are_kept_whole() -> None:
    def life(index: int, exchange: Exchange) -> None:
        torch.manual_seed(0)
        model = listed()
        optimizer = adamw(list(model.parameters()))
        text = "0-1" if index == 0 else "2-3"
        with Learner(model, optimizer, method=FAR, exchange=exchange, trains_experts=text) as learner:
            before = {name: each.detach().clone() for name, each in model.named_parameters()}
            for step in range(3):
                x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
                model.head(sum(each(x) for each in model.experts)).square().sum().backward()  # type: ignore[operator, union-attr]
                optimizer.step()
                optimizer.zero_grad()
                learner.step()
            moved = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
            own = (0, 1) if index == 0 else (2, 3)
            expected = {f"experts.{expert}.{kind}" for expert in own for kind in ("weight", "bias")}
            assert moved == expected | {"head.weight", "head.bias"}

    diloco.run_local(life, learners=2)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "schedule-free AdamW"])
def test_each_expert_is_merged_over_those_who_train_it(name: str) -> None:
    """Two learners train two experts each, and the trunk together. The outer step adopts the mean."""
    texts, steps = ("0-1", "2-3"), 3
    method = method_of(steps, outer=diloco.SGD(lr=1.0))

    def life(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = mixture()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        if hasattr(optimizer, "train"):
            optimizer.train()
        with Learner(
            model, optimizer, method=method, exchange=exchange, buffers="local", trains_experts=texts[index]
        ) as learner:
            for step in range(1, steps + 1):
                train_step(model, optimizer, index, step)
                sent = {key: each.detach().clone() for key, each in model.named_parameters()}
                learner.step()
            adopted = {key: each.detach().clone() for key, each in model.named_parameters()}
            others = [expert for expert in range(EXPERTS) if expert // 2 != index]
            if hasattr(optimizer, "eval"):  # the other model of a schedule-free optimizer has the adopted rows too
                kept = rows(model, others)
                optimizer.eval()
                assert_same(rows(model, others), kept)
                optimizer.train()
            train_step(model, optimizer, index, steps + 1)
            assert_same(rows(model, others), {key: adopted[key][others] for key in rows(model, others)})
            return sent, adopted

    (first, adopted), (second, of_second) = diloco.run_local(life, learners=2)
    assert_same(adopted, of_second)
    start = dict(mixture().named_parameters())
    for key, value in adopted.items():
        expected = (
            torch.cat([first[key][:2], second[key][2:]]) if key.endswith(FUSED) else (first[key] + second[key]) / 2
        )
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, start[key]), key


def chosen_in(model: Mixture) -> list[Tensor]:
    """Counts the tokens of each expert by hooks of its own: [experts] for each block, cumulative."""
    counts = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in model.layers]

    def count(block: int, module: nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            counts[block] += torch.bincount(output[2].flatten(), minlength=EXPERTS)

    for block, layer in enumerate(model.layers):
        layer.gate.register_forward_hook(partial(count, block))
    return counts


def pending_of(learner: Learner) -> list[list[int]]:
    """By fragment, the routed tokens in the learner's state that no contribution has."""
    return [work["pending_routed"] for work in learner.state_dict()["core"]["fragments"]]


def test_tokens_routed_to_experts_are_counted_from_send_to_send() -> None:
    """Evaluation does not count; the state of a learner has those that were not sent; adoption overwrites them."""
    method = diloco.StreamingDiLoCo(sync_every=4, overlap=1, fragments=CUT, offsets=(4, 4, 4), mix=0.0)

    def life(index: int, exchange: Exchange) -> None:
        model = mixture(index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = chosen_in(model)
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="local") as learner:
            expected = torch.zeros(2, EXPERTS, dtype=torch.int64)
            assert not any(pending_of(learner)[2])
            for step in range(1, 10):
                before = torch.stack(counts)
                train_step(model, optimizer, index, step)
                with torch.no_grad():
                    model(torch.zeros(1, 4, dtype=torch.int64))
                expected += torch.stack(counts) - before
                learner.step(tokens=21)
                if step in (4, 5, 8, 9):  # it was sent, or adopted and the work since the send was overwritten
                    expected.zero_()
                for fragment, own in enumerate(pending_of(learner)[:2]):
                    names = learner.layout.fragments[fragment].names
                    found = dict(zip(names, own or [0] * len(names), strict=True))
                    for block in range(2):
                        for expert in (2 * fragment, 2 * fragment + 1):
                            for each in FUSED:
                                assert found[f"layers.{block}.{each}.{expert}"] == expected[block, expert], step

    diloco.run_local(life, learners=2)


def test_an_expert_counts_by_the_tokens_that_were_routed_to_it() -> None:
    """With weights by tokens, an expert's merge is weighted by its own tokens; that of the trunk by all."""
    steps = 3
    method = method_of(steps, outer=diloco.SGD(lr=1.0), weight="tokens")

    def life(index: int, exchange: Exchange) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model = mixture()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        counts = chosen_in(model)
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="local") as learner:
            for step in range(1, steps + 1):
                for _ in range(1 + index):
                    backward(model, index, step)
                optimizer.step()
                optimizer.zero_grad()
                sent = {key: each.detach().clone() for key, each in model.named_parameters()}
                learner.step(tokens=21 * (1 + index))
            return counts, sent, {key: each.detach().clone() for key, each in model.named_parameters()}

    (counts, first, adopted), (others, second, _) = diloco.run_local(life, learners=2)
    for block in range(2):
        share = counts[block] / (counts[block] + others[block])
        assert share.isfinite().all()
        assert (share - 1 / 3).abs().max() > 0.02  # the share of the tokens is a third
        for name in FUSED:
            key = f"layers.{block}.{name}"
            weight = share.view(-1, *[1] * (first[key].dim() - 1))
            torch.testing.assert_close(adopted[key], weight * first[key] + (1 - weight) * second[key])
    torch.testing.assert_close(adopted["head.weight"], first["head.weight"] / 3 + second["head.weight"] * 2 / 3)


def test_a_real_syncer_computes_what_virtual_time_does(tmp_path: Path) -> None:
    """Parts, routed tokens and empty contributions over gRPC: the same bits."""
    texts, steps = ("0-1", "1-3", None), 6
    cut = diloco.Experts(groups=4, every=2, down="bf16")
    method = diloco.DiLoCo(sync_every=3, fragments=cut, weight="tokens", quorum=AllLive(at_least=3))

    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = mixture(0)
        optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
        with Learner(
            model, optimizer, method=method, exchange=exchange, buffers="average", trains_experts=texts[index]
        ) as learner:
            for step in range(1, steps + 1):
                train_step(model, optimizer, index, step)
                learner.step(tokens=21)
            assert learner.finish(timeout_s=600.0, ends_run=True)
            sent = learner.metrics()["num_bytes"]["contributions"]
            assert (sent == whole) == (index == 2)
            return learner.global_state_dict()

    layout = described(mixture(), method, "average", "exchange", read_dtensor).layout(method)
    sends = [sum(p in method.schedule(len(layout.fragments)).sends(step) for step in range(1, steps + 1))
             for p in range(len(layout.fragments))]  # fmt: skip
    whole = sum(4 * each.numel * num for each, num in zip(layout.fragments, sends, strict=True))
    in_process = diloco.run_local(life, learners=3)
    with start(tmp_path, method) as syncer, LearnerThreads(3) as threads:
        exchanges = [threads.connect(syncer.address, learner=f"l{index}", initialise=index == 0) for index in range(3)]
        futures = [threads.submit(life, index, exchange) for index, exchange in enumerate(exchanges)]
        over_grpc = [each.result(timeout=600) for each in futures]
    for each in over_grpc:
        assert_same(each, in_process[0])


@pytest.mark.usefixtures("one_rank")
def test_rows_of_sharded_parameters_are_kept() -> None:
    """FSDP2 calls the hooks of gradients on its shards."""
    model = mixture()
    layout = make_layout(model, CUT)
    untrained = [
        place.spec
        for fragment in layout.fragments
        for place in fragment.tensors
        if diloco.Experts.expert_of(place.spec) in (1, 3)
    ]
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    optimizer = adamw(list(model.parameters()))
    kept = UntrainedRows(exchanged_tensors(model, layout), untrained, Units(layout), [optimizer])
    hooks = kept.hooks()
    weight = model.layers[0].experts.down_proj
    assert isinstance(weight, DTensor)
    before = weight.to_local().detach().clone()
    for step in range(1, 4):
        for part in range(2):
            backward(model, part, step)
        gradient = weight.grad.to_local()
        assert [bool(each.any()) for each in gradient] == [True, False, True, False]
        optimizer.step()
        optimizer.zero_grad()
        changed = [not torch.equal(a, b) for a, b in zip(weight.to_local(), before, strict=True)]
        assert changed == [True, False, True, False]
    for each in hooks:
        each.remove()
