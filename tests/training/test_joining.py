"""The trainer's learners join a run under way: from their checkpoint, or with the run's model and a re-warm-up."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.processes import until
from tests.training.test_stopping import serve

from diloco.cli import main
from diloco.cli.train import _connector
from diloco.config import RunConfig, dump_config
from diloco.event_log import read_events
from diloco.events import CheckpointUnusable, Event, RunStarted, Stepped
from diloco.protocol.contribution import Budget
from diloco.syncer.server import Syncer
from diloco.training.checkpoint import list_checkpoints, newest_usable, save_checkpoint
from diloco.training.loop import Trainer
from diloco.training.optimizers import learning_rate
from diloco.training.progress import ProgressDisplay
from diloco.training.spec import LearnerSpec, StopRequest, Summary

Tiny = Callable[..., RunConfig]
STEPS = 150


class Pacer(ProgressDisplay):
    """Holds the founder of the run after step 19, until the awaited learner has trained.

    Attributes:
        awaited: the name of that learner.
        is_over: the test has ended; nothing is awaited.
    """

    def __init__(self, syncer: Syncer) -> None:
        self._syncer = syncer
        self.trainer: Trainer
        self.is_under_way, self.awaited, self.is_over = threading.Event(), "", False

    def is_due(self) -> bool:
        if self.trainer.learner.steps == 19:
            self.is_under_way.set()
            until(lambda: self.is_over or self._has_trained(), "the other learner does not train")
        return False

    def _has_trained(self) -> bool:
        member = self._syncer.driver.ask(lambda driver: driver.core.members.get(self.awaited))
        return member is not None and member.tokens > 0


@contextmanager
def under_way(tiny: Tiny, tmp_path: Path, *overrides: str) -> Iterator[tuple[RunConfig, Pacer]]:
    """A run that another learner trains."""
    given = tiny("method={preset='DiLoCo', sync_every=6}")
    budget = Budget(512_000, STEPS)
    with serve(given, tmp_path / "state", budget=budget) as syncer, ThreadPoolExecutor(1) as pool:
        config = tiny(
            "method={preset='DiLoCo', sync_every=6}", f"syncer.address={syncer.address}", f"run.tokens={budget.tokens}",
            f"run.steps={STEPS}", f"schedule.steps={STEPS}", *overrides,
        )  # fmt: skip
        pacer, part = Pacer(syncer), LearnerSpec("founder", initialise=True)
        pacer.trainer = Trainer(config, part, attach=_connector(config, part, StopRequest()), progress=pacer)
        training: Future[Summary] = pool.submit(pacer.trainer.train)
        try:
            until(lambda: pacer.is_under_way.is_set() or training.done(), "the founder does not train")
            yield config, pacer
        finally:
            pacer.is_over = True
        assert training.result(300).steps == STEPS


def events_of(config: RunConfig, name: str) -> list[Event]:
    return list(read_events(config.dir / name / "events.jsonl"))


def check_joined(events: list[Event], config: RunConfig, rewarm_steps: int = 5) -> None:
    """A fresh inner optimizer: the rates of a re-warm-up, at the run's place in the schedule."""
    (started,) = [each for each in events if isinstance(each, RunStarted)]
    assert started.step >= 6
    stepped = [each for each in events if isinstance(each, Stepped)]
    assert stepped
    assert [each.step for each in stepped] == list(range(started.step + 1, STEPS + 1))
    for number, event in enumerate(stepped, 1):
        assert event.lr == pytest.approx(min(1.0, number / rewarm_steps) * learning_rate(config, event.step))


@pytest.mark.slow
@pytest.mark.parametrize("rewarm_steps", [5, 1, 8])
def test_a_new_machine_begins_with_the_runs_model(tiny: Tiny, tmp_path: Path, rewarm_steps: int) -> None:
    given = [] if rewarm_steps == 5 else [f"train.rewarm_steps={rewarm_steps}"]
    with under_way(tiny, tmp_path, *given) as (config, pacer):
        part = LearnerSpec("late", shard=1)
        late = Trainer(config, part, attach=_connector(config, part, StopRequest()))
        pacer.awaited = "late"
        late.train()
    check_joined(events_of(config, "late"), config, rewarm_steps)
    state = late.optimizer.state
    first = next(each for each in events_of(config, "late") if isinstance(each, Stepped)).step
    assert {int(each["step"]) for each in state.values()} == {STEPS - first + 1}
    founded = [each for each in events_of(config, "founder") if isinstance(each, Stepped)]
    assert [each.lr for each in founded] == [learning_rate(config, each.step) for each in founded]


def test_a_late_joiners_schedule_and_data_start_where_the_run_is(tiny: Tiny, tmp_path: Path) -> None:
    with under_way(tiny, tmp_path, "train.rewarm_steps=0") as (config, pacer):
        part = LearnerSpec("late", shard=1)
        late = Trainer(config, part, attach=_connector(config, part, StopRequest()))
        pacer.awaited = "late"
        late.train()
    started, *rest = events_of(config, "late")
    assert isinstance(started, RunStarted)
    assert 6 <= started.step < STEPS  # what the syncer surely knows of the other: its contribution after step 6
    stepped = [event for event in rest if isinstance(event, Stepped)]
    assert [event.step for event in stepped] == list(range(started.step + 1, STEPS + 1))
    for event in stepped:  # at the run's step, whatever the learner adopts meanwhile
        assert event.lr == learning_rate(config, event.step)
    assert late._training.stream.position == pacer.trainer._training.stream.position == STEPS * 4


def damage(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "tensors.safetensors").read_bytes())
    content[-3] ^= 1
    (checkpoint / "tensors.safetensors").write_bytes(content)


def age(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"format": 3}))


def train(run_file: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_file), "--name", "back", "--shard", "1", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_kept_aside_and_the_learner_joins_anew(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with under_way(tiny, tmp_path, "checkpoint.every_steps=2") as (config, pacer):
        run_file = tmp_path / "run.toml"
        run_file.write_text(dump_config(config))
        assert train(run_file, "--set", "run.steps=23") == 0
        older, newer = list_checkpoints(config.dir / "back" / "checkpoints")
        damage(newer)

        (config.dir / "back" / "events.jsonl").unlink()
        assert train(run_file, "--resume", "--set", f"run.steps={int(older.name[5:]) + 1}") == 0
        events = events_of(config, "back")
        (unusable,) = [each for each in events if isinstance(each, CheckpointUnusable)]
        kept = newer.with_name(f"unusable-{newer.name}")
        assert (unusable.path, unusable.kept) == (str(newer), str(kept))
        assert kept.is_dir()
        said = capfd.readouterr().out
        assert "cannot use its checkpoint" in said
        assert f"from {older}" in said

        for checkpoint in list_checkpoints(config.dir / "back" / "checkpoints"):
            age(checkpoint)
        (config.dir / "back" / "events.jsonl").unlink()
        with serve(config, tmp_path / "empty") as empty:
            address = f"syncer.address={empty.address}"
            assert train(run_file, "--resume", "--initialise", "once", "--set", address) == 1
        assert "no model to give the run" in capfd.readouterr().err
        pacer.awaited = "back"
        assert train(run_file, "--initialise", "if-empty") == 0
        assert "has a model, at step" in capfd.readouterr().err
    check_joined(events_of(config, "back"), config)


def test_what_is_set_aside_keeps_a_name_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        age(save_checkpoint(tmp_path, 7, {"value": 1.0}, keep=2).path)
        found, unusable = newest_usable(tmp_path)
        assert found is None
        assert "checkpoint format 3" in unusable[0].error
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "unusable-step-0000000007", "unusable-step-0000000007.2",
    ]  # fmt: skip
