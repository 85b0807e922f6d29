"""LeasedSampler: a user's DataLoader whose samples the run's syncer leases, each merged once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diloco
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Exchange
from diloco.exchange.local import Local
from diloco.protocol.leases import MERGED
from diloco.protocol.units import place_of_unit

N, BATCH, H = 96, 4, 3
METHOD = diloco.DiLoCo(sync_every=H)


class Samples(Dataset[torch.Tensor]):
    """Sample i is i."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def learner_of(exchange: Exchange, method: diloco.Method = METHOD, **keys: Any) -> diloco.Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    return diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=1e-4), method=method, exchange=exchange, **keys)


def train(learner: diloco.Learner, batches: Any, steps: int, seen: list[int], accumulate: int = 1) -> None:
    """Take steps, each on some batches; what is read is added to `seen`."""
    assert isinstance(learner.model, nn.Module)
    assert isinstance(learner.optimizer, torch.optim.Optimizer)
    for _ in range(steps):
        tokens = 0
        for _ in range(accumulate):
            batch = next(batches, None)
            if batch is None:
                return
            learner.model(batch / N).square().mean().backward()
            seen += [int(index) for index in batch[:, 0]]
            tokens += len(batch)
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        learner.step(tokens=tokens)


def status_of(exchange: Exchange) -> dict[str, Any]:
    assert isinstance(exchange, Local)
    assert exchange._run.driver is not None
    driver = exchange._run.driver
    return {**driver.status()["data"], "ranges": driver.core.leases.done}


def alive(body: Callable[[int, Exchange], Any], learners: int, **keys: Any) -> list[Any]:
    """`run_local`, and how the data stands once all have left."""
    kept: list[Exchange] = []

    def life(index: int, exchange: Exchange) -> Any:
        kept.append(exchange)
        return body(index, exchange)

    return [*diloco.run_local(life, learners=learners, **keys), status_of(kept[0])]


@pytest.mark.parametrize("speed", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
def test_each_sample_is_merged_once_in_every_pass(speed: tuple[float, ...]) -> None:
    method = METHOD if len(set(speed)) == 1 else diloco.AsyncDiLoCo(sync_every=H)

    def life(index: int, exchange: Exchange) -> list[int]:
        seen: list[int] = []
        with learner_of(exchange, method) as learner:
            sampler = diloco.LeasedSampler(learner, N, BATCH, seed=5)
            batches = sampler.batches(DataLoader(Samples(), batch_sampler=sampler))
            steps = 12 * H if len(set(speed)) == 1 else 3 * H * (6 - int(speed[index]))
            train(learner, batches, steps, seen)
        return seen

    *seen, data = alive(life, 3, step_s=speed)
    trained = Counter(index for its in seen for index in its)
    num = trained.total()
    done = [unit for first, stop in data["ranges"] for unit in range(first, stop)]
    assert trained == Counter(place_of_unit(unit, N, 5) for unit in done)
    for totals in data["fragments"]:
        assert totals["fates"] == {MERGED: num}
        assert totals["repeated"] == 0
    for each in data["passes"]:
        assert each["done"] + each["leased"] + each["free"] == N
    assert data["passes_done"] * N <= num


def test_what_workers_have_prepared_and_no_step_has_seen_does_not_count() -> None:
    def life(index: int, exchange: Exchange) -> list[int]:
        seen: list[int] = []
        with warnings.catch_warnings(), learner_of(exchange) as learner:
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            sampler = diloco.LeasedSampler(learner, N, BATCH)
            loader = DataLoader(Samples(), batch_sampler=sampler, num_workers=2, prefetch_factor=4)
            train(learner, sampler.batches(loader), H, seen, accumulate=2)
            train(learner, sampler.batches(loader), H, seen)  # what the first iteration had prepared is drawn again
        return seen

    seen, data = alive(life, 1)
    assert len(seen) == len(set(seen)) == 3 * H * BATCH
    assert [it["fates"] for it in data["fragments"]] == [{MERGED: 3 * H * BATCH}]
    assert data["passes"][0] == {"pass": 0, "done": 3 * H * BATCH, "leased": 0, "free": N - 3 * H * BATCH}


def test_the_data_ends_after_its_passes() -> None:
    def life(index: int, exchange: Exchange) -> list[int]:
        seen: list[int] = []
        with learner_of(exchange, diloco.DiLoCo(sync_every=1)) as learner:
            sampler = diloco.LeasedSampler(learner, N, 5, passes=2, lease_batches=3)
            train(learner, sampler.batches(DataLoader(Samples(), batch_sampler=sampler)), 1000, seen)
            learner.finish()
        return seen

    one, two, data = alive(life, 2)
    assert Counter(one + two) == dict.fromkeys(range(N), 2)
    assert (data["passes_done"], data["num_passes"]) == (2, 2)
    assert [it["fates"] for it in data["fragments"]] == [{MERGED: 2 * N}]


def test_what_an_overlap_overwrites_in_the_only_fragment_is_trained_again() -> None:
    def life(index: int, exchange: Exchange) -> list[int]:
        seen: list[int] = []
        with learner_of(exchange, diloco.DiLoCo(sync_every=4, overlap=1)) as learner:
            sampler = diloco.LeasedSampler(learner, N, BATCH, lease_batches=1)
            train(learner, sampler.batches(DataLoader(Samples(), batch_sampler=sampler)), 41, seen)
        return seen

    _, data = alive(life, 1)
    assert data["passes_done"] == 1
    [totals] = data["fragments"]
    assert totals["fates"] == {MERGED: 4 * BATCH + 9 * 3 * BATCH}  # one step of four is overwritten
    assert totals["repeated"] == 0
    assert data["returned"] > 9 * BATCH


def test_a_run_in_one_process_cannot_go_back_with_leased_data() -> None:
    def life(index: int, exchange: Exchange, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        with learner_of(exchange) as learner:
            if saved is not None:
                learner.load_state_dict(saved)
            sampler = diloco.LeasedSampler(learner, N, BATCH)
            train(learner, sampler.batches(DataLoader(Samples(), batch_sampler=sampler)), 4, [])
            return learner.state_dict()

    [saved] = diloco.run_local(life, learners=1)
    with pytest.raises(CheckpointError, match="^a run in one process cannot go back to a checkpoint with leased data"):
        diloco.run_local(partial(life, saved=saved), learners=1)


def test_what_cannot_lease_is_refused() -> None:
    def life(index: int, exchange: Exchange) -> None:
        with learner_of(exchange) as learner:
            for keys in ({"num_samples": 0}, {"batch_size": 0}, {"passes": 0}, {"lease_batches": 0}):
                with pytest.raises(ConfigError, match="needs 1 or more"):
                    diloco.LeasedSampler(learner, **{"num_samples": N, "batch_size": BATCH, **keys})  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="a seed >= 0, and"):
                diloco.LeasedSampler(learner, N, BATCH, ranks=(2, 2))
            diloco.LeasedSampler(learner, N, BATCH)
            with pytest.raises(ConfigError, match="lease once, before the first step"):
                diloco.LeasedSampler(learner, N, BATCH)
            with pytest.raises(ConfigError, match="no batch of leased data was taken"):
                learner.step(tokens=1)

    alive_without_data(life)

    def gradients(index: int, exchange: Exchange) -> None:
        with learner_of(exchange, diloco.DataParallel()) as learner:
            with pytest.raises(ConfigError, match="a method that exchanges outer gradients"):
                diloco.LeasedSampler(learner, N, BATCH)

    alive_without_data(gradients)


def alive_without_data(body: Callable[[int, Exchange], None]) -> None:
    diloco.run_local(body, learners=1)


def test_learners_with_other_data_are_refused() -> None:
    def life(index: int, exchange: Exchange) -> None:
        with learner_of(exchange) as learner:
            sampler = diloco.LeasedSampler(learner, N + index, BATCH)
            train(learner, sampler.batches(DataLoader(Samples(), batch_sampler=sampler)), H, [])

    with pytest.raises(ConfigError, match="has data of 97 units .* but the run has data of 96 units"):
        diloco.run_local(life, learners=2)
