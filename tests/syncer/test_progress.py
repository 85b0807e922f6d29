"""What a syncer writes down of how its run goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.core import CollectorRegistry
from tests.syncer.runs import RUN, Net, Raw, method, start
from tests.syncer.test_faults import until

import diloco
from diloco import events as ev
from diloco.errors import ConfigError
from diloco.event_log import EventLog, read_events
from diloco.protocol.members import Claim, Evaluation, Report
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.progress import ProgressLog


def status(tokens: int, step: int) -> dict[str, Any]:
    member = {
        "incarnation": 1, "step": step, "tokens": tokens, "live": True, "healthy": True, "waiting": False,
        "drained": False, "finished": False, "heard": True, "step_s": 0.5, "silent_s": 0.1, "versions": [2],
        "experts": None, "holds_part": False,
    }  # fmt: skip
    ledger = {"trained": tokens, "merged": tokens - 20, "pending": 15, "lost": 0, "discarded": {"overlap": 5}}
    return {
        "run_id": "0" * 32, "initialised": True, "step": step, "tokens": tokens, "learners": {"a": member},
        "fragments": [{"ledger": ledger}, {"ledger": ledger}], "experts": None, "groups": None,
    }  # fmt: skip


class World:
    """A syncer's run at a moment of its own clock."""

    def __init__(self, path: Path) -> None:
        self.now, self.status = 0.0, status(100, 5)
        self.metrics = SyncerMetrics("demo")
        self.log = EventLog(path, who="syncer")
        self.progress = ProgressLog(self.log, self.metrics, lambda: self.status, 1000, clock=lambda: self.now)

    def sample(self, name: str) -> float | None:
        registry: CollectorRegistry = self.metrics.registry
        return registry.get_sample_value(name)

    def written(self) -> list[ev.Event]:
        return read_events(self.log.path)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = World(tmp_path / "events.jsonl")
    yield world
    world.log.close()


def test_progress_is_written_while_anything_moves(world: World) -> None:
    world.progress.write()
    world.progress.write()
    world.status = status(400, 20)
    world.progress.write()
    first, second = world.written()
    assert isinstance(first, ev.Progress)
    assert isinstance(second, ev.Progress)
    assert (first.tokens, second.tokens) == (100, 400)
    assert second.learners["a"].versions == (2,)
    assert second.ledger == {"merged": 760, "pending": 30, "lost": 0, "discarded: overlap": 10}


def test_experts_that_no_learner_trains_are_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def write(*untrained: tuple[int, int]) -> ev.Progress:
        world.status["experts"] = {"number": 8, "untrained": [list(pair) for pair in untrained]}
        world.progress.write()
        newest = world.written()[-1]
        assert isinstance(newest, ev.Progress)
        return newest

    world.status["learners"]["a"]["experts"] = [[0, 3], [6, 8]]
    assert write((3, 4), (5, 6)).untrained == ((3, 4), (5, 6))
    assert write((3, 4), (5, 6)).learners["a"].experts == ((0, 3), (6, 8))
    assert (write().num_experts, write().untrained) == (8, ())
    warnings = [each.getMessage() for each in caplog.records]
    assert warnings == ["no live learner trains experts 3, 5: nothing is merged into them"]


def test_speed_and_time_to_go_are_those_of_the_last_minute(world: World) -> None:
    world.progress.write()
    assert world.sample("diloco_run_tokens_total") == 100
    assert world.sample("diloco_tokens_per_second") is None
    world.now, world.status = 10.0, status(400, 20)
    world.progress.write()
    assert world.sample("diloco_tokens_per_second") == 30.0
    assert world.sample("diloco_eta_seconds") == (1000 - 400) / 30.0
    world.now = 100.0
    world.progress.write()
    world.now = 160.0
    world.progress.write()
    assert world.sample("diloco_tokens_per_second") == 0.0
    assert world.sample("diloco_eta_seconds") is None


def test_what_heartbeats_tell_is_kept_and_an_evaluation_written_once(world: World) -> None:
    report = Report(training_loss=2.5, evaluation=Evaluation(loss=2.25, run_tokens=90))
    world.progress.record(Claim("a"), report)
    world.progress.record(Claim("a"), report)
    world.progress.record(Claim("a"), Report())
    assert [event for event in world.written() if isinstance(event, ev.Reported)] == world.written()
    assert len(world.written()) == 1
    moment = world.progress.newest()
    assert moment is not None
    assert moment.learners["a"].training_loss == 2.5
    world.progress.write()
    assert world.sample("diloco_held_out_loss") == 2.25
    world.progress.record(Claim("a"), Report(evaluation=Evaluation(loss=2.0, run_tokens=190)))
    assert len([event for event in world.written() if isinstance(event, ev.Reported)]) == 2


def test_blocked_seconds_are_counted_from_what_a_process_told_first(world: World) -> None:
    def count(*told: tuple[int, float]) -> object:
        for process, blocked_s in told:
            world.progress.record(Claim("a", process=process), Report(blocked_s=blocked_s))
        world.progress.write()
        return world.metrics.registry.get_sample_value("diloco_blocked_seconds_total", {"learner": "a"})

    assert count((7, 100.0)) == 0.0  # before this syncer's start, where they were counted
    assert count((7, 101.5), (7, 101.5), (7, 103.0)) == 3.0
    assert count((8, 0.0), (8, 2.0)) == 5.0  # another process begins at nothing


def test_what_a_learner_logs_reaches_the_syncers_events_and_page(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(tmp_path, method()) as syncer:
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            learner.log(training_loss=3.5, held_out_loss=3.25)
            until(lambda: _reported(tmp_path), "the evaluation in the events")
            moment = syncer.progress.newest()
            assert moment is not None
            assert moment.learners["a"].training_loss == 3.5
            learner.log(held_out_loss=3.0)  # its goodbye says so, whether a heartbeat comes before it or not
        with pytest.raises(ConfigError, match="this learner is closed"):
            learner.log(training_loss=1.0)
    assert [(each.by, each.tokens, each.loss) for each in _reported(tmp_path)] == [("a", 0, 3.25), ("a", 0, 3.0)]


def _reported(tmp_path: Path) -> list[ev.Reported]:
    events = read_events(tmp_path / "state" / "events.jsonl")
    return [event for event in events if isinstance(event, ev.Reported)]


def test_a_report_that_fails_is_logged_and_the_next_one_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_bytes, failures = SyncerMetrics.set_bytes, iter([OSError("no metrics now")])

    def fails_once(self: SyncerMetrics, totals: Any) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        set_bytes(self, totals)

    monkeypatch.setattr(SyncerMetrics, "set_bytes", fails_once)
    with start(tmp_path, method()) as syncer:
        Raw(syncer.address).initialise()
        events = tmp_path / "state" / "events.jsonl"
        until(lambda: any(isinstance(event, ev.Traffic) for event in read_events(events)), "the bytes in the events")
        assert "Syncer._report failed; the run continues" in caplog.text
