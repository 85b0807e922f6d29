"""static="digest": a frozen base that every learner brings is compared when it joins, and nothing of it crosses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import diloco
from diloco import Learner
from diloco.core.layout import spec_of
from diloco.errors import LayoutError
from diloco.exchange.base import Exchange
from diloco.learner.frozen import FrozenBase, base_tensor, digest_of

WIDTH = 256


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, a table, a quantized weight and a counter beside it."""

    def __init__(self, *, base: int = 0, adapter: int = 0) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("table", torch.rand(WIDTH))
        self.quantized = nn.Parameter(torch.randint(0, 255, (WIDTH,), dtype=torch.uint8), requires_grad=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.base.weight
        self.register_buffer("calls", torch.tensor(0))
        torch.manual_seed(adapter)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.base(x) + self.tied(x) * self.table + self.b(self.a(x)) * 0.1


ADAPTER = {"a.weight", "b.weight"}
NUM_TRAINED = 4 * WIDTH
NUM_BASE_BYTES = 4 * (WIDTH * WIDTH + 2 * WIDTH) + WIDTH


def train(model: nn.Module, index: int, exchange: Exchange, steps: int = 5, **options: Any) -> Learner:
    inner = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    learner = Learner(model, inner, method=diloco.DiLoCo(sync_every=2), exchange=exchange, **options)
    with learner:
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * index + step)
            inner.zero_grad()
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            inner.step()
            learner.step(tokens=4)
    return learner


def test_only_the_adapters_travel_and_are_exported() -> None:
    def life(index: int, exchange: Exchange) -> dict[str, dict[str, Any]]:
        found = {}
        for static in ("digest",):
            model = Adapted(adapter=index)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            learner = train(model, index, exchange, static=static)
            found = {"num_bytes": learner.metrics()["num_bytes"], "global": learner.global_state_dict()}
            for name in before.keys() - ADAPTER - {"calls"}:
                assert torch.equal(model.state_dict()[name], before[name])
        return found

    first, second = diloco.run_local(life, learners=2)
    for each in (first, second):
        assert set(each["global"]) == ADAPTER | {"calls"}
        assert each["num_bytes"]["contributions"] == 2 * 4 * NUM_TRAINED
    assert second["num_bytes"]["joins"] < 4 * NUM_TRAINED + 500
    assert torch.equal(first["global"]["a.weight"], second["global"]["a.weight"])
    fresh = Adapted(adapter=9)
    missing, unexpected = fresh.load_state_dict(first["global"], strict=False)
    assert not unexpected
    assert ADAPTER.isdisjoint(missing)


def test_by_default_the_base_is_sent_and_exported() -> None:
    def life(index: int, exchange: Exchange) -> tuple[int, set[str]]:
        learner = train(Adapted(base=index, adapter=index), index, exchange)
        return learner.metrics()["num_bytes"]["joins"], set(learner.global_state_dict())

    _, (num_bytes, names) = diloco.run_local(life, learners=2)
    assert num_bytes > NUM_BASE_BYTES
    assert names == set(Adapted().state_dict())


@pytest.mark.slow
def test_a_learner_copies_nothing_of_its_base() -> None:
    """Storage of tensors that the learner adds to those of the model, by what Python can reach."""

    def held_bytes() -> int:
        gc.collect()
        found = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (Tensor, torch.nn.Parameter)  # others' tensors, as torch.compile's, may have no storage
        }
        return sum(found.values())

    def life(static: str) -> Callable[[int, Exchange], int]:
        def run(index: int, exchange: Exchange) -> int:
            model = Adapted()
            inner = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            before = held_bytes()
            with Learner(
                model,
                inner,
                method=diloco.DiLoCo(sync_every=2),
                exchange=exchange,
                static=static,  # type: ignore[arg-type]
            ):
                return held_bytes() - before

        return run

    [exchanged] = diloco.run_local(life("exchange"), learners=1)
    [digested] = diloco.run_local(life("digest"), learners=1)
    assert exchanged > NUM_BASE_BYTES
    assert digested < 10 * 4 * NUM_TRAINED < NUM_BASE_BYTES


@pytest.mark.parametrize(
    ("others", "options", "words"),
    [
        ({"base": 1}, {"static": "digest"}, "'quantized' is .* with digest .* and .* with digest"),
        (
            {},
            {"static": "exchange"},
            r"'quantized' is .*digest.*, which each learner brings, on .* and .*uint8 on",
        ),
    ],
    ids=["another base", "another answer"],
)
def test_a_difference_is_refused_by_name(others: dict[str, int], options: dict[str, str], words: str) -> None:
    def life(index: int, exchange: Exchange) -> None:
        if index == 0:
            train(Adapted(), index, exchange, static="digest")
        else:
            train(Adapted(**others), index, exchange, **options)

    with pytest.raises(LayoutError, match=words):
        diloco.run_local(life, learners=2)


# --- the check at each send -------------------------------------------------------------------------------------------


def watched(tensor: Tensor) -> tuple[dict[str, Tensor], FrozenBase]:
    tensors = {"w": tensor}
    return tensors, FrozenBase([base_tensor(spec_of("w", tensor), tensor)], lambda name: tensors[name])


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "in place": lambda tensors: tensors["w"][17, 3].add_(1.0),
    "in place, all through .data": lambda tensors: tensors["w"].data.mul_(2.0),
    "assigned": lambda tensors: tensors.update(w=tensors["w"] * 2),
    "assigned through .data": lambda tensors: setattr(tensors["w"], "data", tensors["w"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_base_that_training_changes_is_refused_by_name(name: str) -> None:
    tensors, base = watched(nn.Parameter(torch.rand(100, 100), requires_grad=False))
    base.check(0, 1)
    CHANGES[name](tensors)
    with pytest.raises(LayoutError, match=r"'w'.*static='digest'"):
        base.check(0, 1)


@torch.no_grad()
def test_loading_the_same_base_again_is_no_change() -> None:
    tensors, base = watched(nn.Parameter(torch.rand(100, 100), requires_grad=False))
    tensors["w"].copy_(tensors["w"].clone())
    base.check(0, 1)
    tensors["w"] = tensors["w"].clone()
    base.check(0, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(()), torch.empty(0), torch.rand(3).bfloat16(), torch.rand(70, 3).t(),
        torch.rand(4, 4).to(torch.float8_e4m3fn), torch.randint(0, 9, (5, 5)), torch.tensor([True, False]),
        torch.rand(3, dtype=torch.complex64),
    ],
    ids=str,
)  # fmt: skip
def test_a_base_of_any_shape_and_dtype(tensor: Tensor) -> None:
    tensors, base = watched(tensor)
    base.check(0, 1)
    assert digest_of(tensor) == digest_of(tensor.clone().contiguous())
    if tensor.numel():
        tensors["w"] = torch.zeros_like(tensor)
        with pytest.raises(LayoutError):
            base.check(0, 1)


def test_a_base_made_under_inference_mode() -> None:
    with torch.inference_mode():
        tensor = torch.rand(3)
    _, base = watched(tensor)
    base.check(0, 1)


def test_an_in_place_change_during_training_ends_the_run() -> None:
    class Drifting(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.base.bias += 0.01
            return super().forward(x)

    def life(index: int, exchange: Exchange) -> None:
        train(Drifting(), index, exchange, static="digest")

    with pytest.raises(LayoutError, match=r"'base\.bias'.*static='digest'"):
        diloco.run_local(life, learners=1)
