"""The trainer over a syncer that leases the data: every window is merged once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import diloco
from diloco.cli.train import _connector
from diloco.config import RunConfig
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import Data, Merged
from diloco.exchange.base import Exchange
from diloco.exchange.dialling import fetch_status
from diloco.exchange.virtual.delivery import Fault
from diloco.simulation.virtual_run import Scenario, simulate
from diloco.store.objects import open_store, read_manifest
from diloco.store.reading import ObjectReader
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import list_checkpoints
from diloco.training.loop import Trainer
from diloco.training.rank_group import RankGroup
from diloco.training.spec import LearnerSpec, StopRequest

Tiny = Callable[..., RunConfig]
LEASES = ("method={preset='DiLoCo', sync_every=6}", "data.deal=leases", "data.lease_steps=3")
BATCH = 4  # sequences of a learner's step


def serve(config: RunConfig, directory: Path) -> Syncer:
    return Syncer(config.run.name, method_from_table(config.method), Options("127.0.0.1:0", directory))


def learner_of(config: RunConfig, part: LearnerSpec) -> Trainer:
    return Trainer(config, part, attach=_connector(config, part, StopRequest()))


def durable_leases(directory: Path) -> dict[str, Any]:
    """Of the record on the disk."""
    objects = open_store(directory)
    manifest = read_manifest(objects)
    assert manifest.record is not None
    with ObjectReader(objects) as reader:
        record, _ = reader.record(manifest.record, len(manifest.fragments))
    assert record is not None
    leases: dict[str, Any] = record["leases"]
    return leases


def merged_units(directory: Path) -> list[int]:
    """Of the versions of fragment 0, from the syncer's events: units in the order merged."""
    merges = {it.version: it for it in read_events(directory / "events.jsonl") if isinstance(it, Merged)}
    return [
        unit
        for version in sorted(merges)
        for ranges in merges[version].units
        for first, stop in ranges
        for unit in range(first, stop)
    ]


def test_learners_of_a_run_read_each_window_once_after_the_warm_start(tiny: Tiny, tmp_path: Path) -> None:
    with serve(tiny(*LEASES), tmp_path / "state") as syncer, ThreadPoolExecutor(2) as pool:
        config = tiny(
            *LEASES, f"syncer.address={syncer.address}", "warm_start.steps=2", "run.tokens=512_000", "run.steps=26"
        )
        first = pool.submit(learner_of(config, LearnerSpec("a", initialise=True)).train)
        second = pool.submit(learner_of(config, LearnerSpec("b")).train)
        assert first.result().steps == second.result().steps == 26
        data = fetch_status(syncer.address, run="tiny")["data"]
    units = sorted(merged_units(tmp_path / "state"))
    assert data["before"] == 2 * 2 * BATCH
    assert len(units) == len(set(units)) == data["fragments"][0]["merges"] == data["fragments"][0]["fates"]["merged"]
    assert min(units) == data["before"]
    [only] = data["passes"]
    assert only["done"] == len(units) + data["before"]
    assert only["done"] + only["leased"] + only["free"] == data["num_units"]
    assert durable_leases(tmp_path / "state")["totals"] == data["fragments"]
    assert any(isinstance(event, Data) for event in read_events(tmp_path / "state" / "events.jsonl"))


def test_a_resumed_learner_neither_repeats_nor_skips(tiny: Tiny, tmp_path: Path) -> None:
    part = LearnerSpec("a", initialise=True)
    with serve(tiny(*LEASES), tmp_path / "state") as syncer:
        at = (*LEASES, f"syncer.address={syncer.address}", "run.tokens=512_000", "schedule.steps=20")
        config = tiny(*at, "run.steps=8", "checkpoint.every_steps=8")
        learner_of(config, part).train()  # two steps are pending
        assert durable_leases(tmp_path / "state")["returned"] == [
            [6 * BATCH, durable_leases(tmp_path / "state")["frontier"]]
        ]
        (checkpoint,) = list_checkpoints(config.dir / "a" / "checkpoints")
        learner_of(tiny(*at, "run.steps=12"), replace(part, initialise=False, resume_from=checkpoint)).train()
        data = fetch_status(syncer.address, run="tiny")["data"]
    assert merged_units(tmp_path / "state") == list(range(12 * BATCH))
    assert data["fragments"] == [{"fates": {"merged": 12 * BATCH}, "merges": 12 * BATCH, "repeated": 0}]
    assert data["unclaimed"] == 0


def test_learners_in_one_process_lease_too(tiny: Tiny) -> None:
    config = tiny(*LEASES)

    def life(index: int, exchange: Exchange) -> tuple[int, dict[str, Any]]:
        def attach(model: Any, optimizer: Any, steps: int, tokens: int, _: Any) -> diloco.Learner:
            return diloco.Learner(model, optimizer, method=method_from_table(config.method), exchange=exchange)

        summary = Trainer(config, LearnerSpec(f"pair-{index}"), attach=attach).train()
        return summary.steps, exchange._run.driver.status()["data"]  # type: ignore[attr-defined]

    (steps, data), _ = diloco.run_local(life, learners=2)
    assert steps == 20
    assert data["fragments"][0]["fates"] == {"merged": 2 * 18 * BATCH}


def test_a_simulated_run_leases_through_a_death(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(*LEASES, "checkpoint.every_steps=2", "run.tokens=512_000", "run.steps=40", "schedule.steps=40")
    scene = Scenario(lambda *_: 1.0, faults=[Fault(1, 10.5, 25.0)])
    simulate({"a": config, "b": config}, scene, tmp_path / "played")
    events = read_events(tmp_path / "played" / "syncer" / "events.jsonl")
    units = [unit for it in events if isinstance(it, Merged) for ranges in it.units for unit in numbers(ranges)]
    assert len(units) == len(set(units)) > 40 * BATCH
    [*_, last] = [it for it in read_events(tmp_path / "played" / "syncer" / "events.jsonl") if isinstance(it, Data)]
    assert last.returned > 0
    assert last.done == len(units)


def numbers(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [unit for first, stop in ranges for unit in range(first, stop)]


def test_leases_need_a_syncer(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match='"leases" needs a syncer'):
        Trainer(tiny(*LEASES), LearnerSpec("whole", role="baseline"))
    with pytest.raises(ConfigError, match='"leases" needs a syncer'):
        Trainer(tiny(*LEASES), LearnerSpec("lone", role="isolated"))
    with pytest.raises(ConfigError, match='"leases" needs a syncer'):
        Trainer(tiny(*LEASES), LearnerSpec("a"), peers=RankGroup())
    with pytest.raises(ConfigError, match='lease_steps has no effect without deal = "leases"'):
        tiny("data.lease_steps=3")
