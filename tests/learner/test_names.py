"""Canonical names: wrapped and plain learners meet, and what is exported loads into the plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.learner.test_learner import assert_same, parameters_of, train_step
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco import Learner
from diloco.core.fragments import describe, make_layout
from diloco.core.names import canonical_key, named_buffers, named_parameters
from diloco.exchange.base import Exchange


class Block(nn.Module):
    """With a child that is named like DDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.module(x)))


class Net(nn.Module):
    """Tied weights, a frozen parameter, buffers, and a block that occurs twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.again = self.blocks[0]
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("shift", torch.rand(3))
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) * self.scale + self.tied(x)
        for block in (*self.blocks, self.again):
            y = block(y)
        return self.head(y) + self.shift


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def checkpointed_blocks(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def compiled_block(model: nn.Module) -> nn.Module:
    model.blocks[1] = compiled(model.blocks[1])
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "a compiled block": compiled_block,
    "checkpointed blocks": checkpointed_blocks,
    "compiled and checkpointed": lambda model: compiled(checkpointed_blocks(model)),
    "DataParallel": nn.DataParallel,
    "compiled DDP": lambda model: compiled(DistributedDataParallel(checkpointed_blocks(model))),
}


@pytest.fixture(autouse=True)
def one_rank() -> object:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_names_without_wrappers_are_torchs() -> None:
    model = Net()
    assert_same(dict(named_parameters(model)), dict(model.named_parameters()))
    assert [name for name, _ in named_parameters(model)] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in named_buffers(model)] == [n for n, _ in model.named_buffers(remove_duplicate=False)]
    assert [canonical_key(model, key) for key in model.state_dict()] == list(model.state_dict())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_has_the_layout_of_the_plain_one(wrapper: str) -> None:
    plain, wrapped = Net(), WRAPPERS[wrapper](Net())
    assert describe(wrapped) == describe(plain)
    method = diloco.StreamingDiLoCo(fragments=diloco.ByLayer(layers=1))
    assert make_layout(wrapped, method.fragments).digest() == make_layout(plain, method.fragments).digest()
    assert [canonical_key(wrapped, key) for key in wrapped.state_dict()] == list(plain.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_learner_and_a_plain_one_train_one_model(wrapper: str) -> None:
    def life(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        plain = Net(index)
        model = WRAPPERS[wrapper](plain) if index == 0 else plain
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        method = diloco.DiLoCo(sync_every=2)
        with Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for step in range(1, 5):
                train_step(model, optimizer, index, step)
                learner.step()
            assert learner.versions == (2,)
            fresh = Net(99)
            fresh.load_state_dict(learner.global_state_dict())  # strict
            if index == 0:
                assert_same(parameters_of(fresh), dict(named_parameters(model)))
            saved = learner.state_dict()["parameters"]
            return learner.global_state_dict(), saved

    (first, mine), (second, theirs) = diloco.run_local(life, learners=2)
    assert_same(first, second)
    assert mine.keys() == theirs.keys()
    assert list(first) == list(Net().state_dict())


def test_a_wrapper_put_around_after_attaching_changes_nothing() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = Net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with Learner(model, optimizer, method=diloco.DiLoCo(sync_every=1), exchange=exchange) as learner:
            checkpointed_blocks(model)
            train_step(model, optimizer, index, 1)
            learner.step()
            assert list(learner.global_state_dict()) == list(Net().state_dict())

    diloco.run_local(life, learners=1)
