"""`AcceleratedLearner` with a real Accelerator: what counts as a step, its schedule, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from tests.integrations.harness import RUN, TIMEOUT_S, serve
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import diloco
from diloco.errors import CheckpointError, ConfigError
from diloco.integrations.accelerate import AcceleratedLearner, is_first_copy, num_copies
from diloco.integrations.common import load_part
from diloco.syncer.server import Syncer
from diloco.training.checkpoint import save_checkpoint

METHOD = diloco.StreamingDiLoCo(sync_every=4, overlap=1, fragments=diloco.Balanced(2))


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with serve(tmp_path / "syncer", METHOD) as syncer:
        yield syncer


class Loop:
    """A loop with accelerate."""

    def __init__(
        self, syncer: Syncer, accumulate: int = 1, scaler: Any = None, *, learner: str = "a", initialise: bool = True
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = scaler
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        exchange = diloco.connect(
            syncer.address, run=RUN, learner=learner, initialise=initialise, join_timeout_s=TIMEOUT_S
        )
        self.learner = AcceleratedLearner(
            self.accelerator, self.model, self.optimizer, self.scheduler, exchange=exchange
        )

    def step(self, scale: float = 1.0) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(scale * self.model(torch.ones(2, 4)).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.learner.step(tokens=8)

    @property
    def counted(self) -> tuple[int, int]:
        return self.learner.steps, self.learner.metrics()["tokens"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.learner.close()


def test_a_step_is_one_of_the_optimizer_with_the_tokens_of_its_micro_batches(syncer: Syncer) -> None:
    with Loop(syncer, accumulate=3) as loop:
        for _ in range(7):
            loop.step()
        assert loop.counted == (2, 6 * 8)


def test_a_step_that_the_scaler_skips_counts_without_tokens(syncer: Syncer) -> None:
    with Loop(syncer, scaler=torch.amp.GradScaler("cpu", init_scale=2.0)) as loop:
        before = [parameter.clone() for parameter in loop.model.parameters()]
        loop.step(scale=float("inf"))
        assert loop.accelerator.optimizer_step_was_skipped
        assert all(map(torch.equal, before, loop.model.parameters()))
        assert loop.counted == (1, 0)
        loop.step()
        assert loop.counted == (2, 8)


def test_a_late_learner_starts_its_schedule_at_the_runs_step(syncer: Syncer) -> None:
    with Loop(syncer) as first:
        for _ in range(4):
            first.step()
        first.learner.state_dict()  # the syncer has answered what was sent after the fourth
        first.learner.finish()
        with Loop(syncer, learner="b", initialise=False) as second:
            assert second.learner.steps == 4
            assert second.scheduler.get_last_lr() == pytest.approx([0.1 / 5])


def test_a_checkpoint_between_micro_batches_is_refused(syncer: Syncer, tmp_path: Path) -> None:
    with Loop(syncer, accumulate=2) as loop:
        loop.step()
        with pytest.raises(ConfigError, match="between two micro-batches"):
            loop.accelerator.save_state(tmp_path / "checkpoint")
        loop.step()
        loop.accelerator.save_state(tmp_path / "checkpoint")
    with Loop(syncer, accumulate=2, initialise=False) as again:
        again.accelerator.load_state(tmp_path / "checkpoint")
        assert again.learner.steps == 1
        again.step()
        again.step()
        with pytest.raises(ConfigError, match="load the state before the first one"):
            again.accelerator.load_state(tmp_path / "checkpoint")


def test_a_checkpoint_without_the_learners_state_is_refused(syncer: Syncer, tmp_path: Path) -> None:
    with Loop(syncer) as loop:
        loop.accelerator.save_state(tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / "diloco").rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError):
            loop.accelerator.load_state(tmp_path / "checkpoint")


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdp1_is_refused(process_group: None, syncer: Syncer) -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match=r"\(FSDP1\) flattens .* fsdp_version=2 in accelerate"):
        AcceleratedLearner(accelerator, model, optimizer, exchange=diloco.connect(syncer.address, run=RUN))


@pytest.mark.parametrize("rank", range(8))
def test_ranks_that_share_a_batch_count_it_once(rank: int) -> None:
    """Of 8 ranks, 2 that divide the data, each over 2 of tensor and 2 of context parallelism."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        sizes = ParallelismConfig(dp_shard_size=2, tp_size=2, cp_size=2)
        assert is_first_copy(sizes, sizes.build_device_mesh("cpu")) == (rank in (0, 4))
        assert num_copies(sizes) == 4
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_of_fewer_ranks_is_refused(tmp_path: Path) -> None:
    """By each rank that has no part in it; those that have one hear from each other (`Learner.load_state_dict`)."""
    for rank in range(2):
        save_checkpoint(tmp_path / "diloco" / f"rank-{rank}", 7, {"steps": 7, "learner": {}}, keep=1)
    assert load_part(tmp_path, 1, num_ranks=3) == {"steps": 7, "learner": {}}
    with pytest.raises(CheckpointError, match="of 2 ranks, and this one has 3; use the same number"):
        load_part(tmp_path, 2, num_ranks=3)


def test_an_optimizer_that_was_not_prepared_is_refused(syncer: Syncer) -> None:
    model = nn.Linear(2, 2)
    exchange = diloco.connect(syncer.address, run=RUN, initialise=True)
    with pytest.raises(ConfigError, match="is not prepared"):
        AcceleratedLearner(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters()), exchange=exchange)
