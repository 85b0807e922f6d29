"""`[evaluate] tasks`: lm-eval in a process beside training, and where its scores come to."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.syncer.runs import RUN, Net, method, start
from tests.syncer.test_faults import until

import diloco
from diloco import events as ev
from diloco.config import RunConfig
from diloco.core.session.requests import Scores, TaskScore
from diloco.errors import ConfigError, PayloadError
from diloco.event_log import read_events
from diloco.report.story import Story
from diloco.run.sense import check_scores
from diloco.training.loop import Trainer
from diloco.training.part import Part
from diloco.training.tasks import runs_tasks, write_tensors

Tiny = Callable[..., RunConfig]
TASKS = ("evaluate.tasks=['diloco_brackets']", "evaluate.tasks_limit=20")


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    from diloco.config import parse_config

    def config(*overrides: str) -> RunConfig:
        text = (
            "[run]\nname = 'tiny'\ntokens = 5120\n[data]\nsequence_length = 32\n[train]\nglobal_batch = 8\n"
            "threads = 1\n"
            "[model]\nhidden_size = 16\nintermediate_size = 16\nnum_hidden_layers = 1\nnum_attention_heads = 2\n"
            "num_key_value_heads = 2\n[schedule]\nwarmup_steps = 2\n[evaluate]\nsequences = 8\nsample_bytes = 0\n"
        )
        return parse_config(text, overrides=[f"run.dir='{tmp_path}/run'", *overrides])

    return config


def test_a_run_has_scores_of_its_model_at_the_end(tiny: Tiny, tmp_path: Path) -> None:
    summary = Trainer(tiny(*TASKS, "evaluate.every_steps=10"), Part("whole", role="baseline")).train()
    events = read_events(tmp_path / "run" / "whole" / "events.jsonl")
    scored = [event for event in events if isinstance(event, ev.Scored)]
    assert not [event for event in events if isinstance(event, ev.NotScored)]
    assert scored[-1].step == summary.steps == 20
    assert scored[-1].tokens == summary.run_tokens
    assert set(scored[-1].scores) == {"diloco_brackets"}
    score = scored[-1].scores["diloco_brackets"]
    assert score.num == 20
    assert 0 <= score.score <= 1
    assert isinstance(events[-1], ev.Finished)
    assert not (tmp_path / "run" / "whole" / "tasks").exists()


def test_an_unknown_task_is_said_and_training_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    keys = ("evaluate.tasks=['diloco_brackets']", f"evaluate.task_files=['{tmp_path}/nowhere']")
    summary = Trainer(tiny(*keys), Part("whole", role="baseline")).train()
    assert summary.reason == "budget"
    (event,) = (e for e in read_events(tmp_path / "run" / "whole" / "events.jsonl") if isinstance(e, ev.NotScored))
    assert "is not a directory of task files" in event.error


def test_one_learner_runs_them_and_controls_do(tiny: Tiny) -> None:
    config = tiny(*TASKS)
    assert [runs_tasks(config, Part("a", shard=shard)) for shard in (0, 1)] == [True, False]
    named = tiny(*TASKS, "evaluate.tasks_learner='b'")
    assert [runs_tasks(named, Part(name, shard=0)) for name in ("a", "b")] == [False, True]
    assert runs_tasks(named, Part("whole", role="baseline"))
    assert not runs_tasks(tiny(), Part("a"))


def test_what_cannot_be_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="tasks_limit has no effect without tasks"):
        tiny("evaluate.tasks_limit=5")
    with pytest.raises(ConfigError, match="names a task twice"):
        tiny("evaluate.tasks=['a', 'a']")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'diloco\[eval\]'"):
        Trainer(tiny(*TASKS), Part("whole", role="baseline"))


def test_tensors_come_back_from_the_file(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(7), "d": torch.empty(0, 2),
        "e": torch.randn(4, 3).t(),
    }  # fmt: skip
    write_tensors(tmp_path / "model.safetensors", state)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def scores(*tasks: TaskScore, run_tokens: int = 5) -> Scores:
    return Scores(tasks, run_tokens)


@pytest.mark.parametrize(
    "told",
    [
        scores(), scores(*(TaskScore(f"t{n}", 0.5, None, 1) for n in range(33))),
        scores(TaskScore("a", 0.5, None, 1), TaskScore("a", 0.5, None, 1)), scores(TaskScore("", 0.5, None, 1)),
        scores(TaskScore("a" * 81, 0.5, None, 1)), scores(TaskScore("a\x1b", 0.5, None, 1)),
        scores(TaskScore("a", math.nan, None, 1)), scores(TaskScore("a", 0.5, math.inf, 1)),
        scores(TaskScore("a", 0.5, -0.1, 1)), scores(TaskScore("a", 0.5, None, 2**60)),
        scores(TaskScore("a", 0.5, None, 1), run_tokens=2**60),
    ],
)  # fmt: skip
def test_scores_that_make_no_sense_are_refused(told: Scores) -> None:
    check_scores("a", scores(TaskScore("a", 0.5, 0.1, 1)))
    with pytest.raises(PayloadError):
        check_scores("a", told)


def test_what_a_learner_tells_reaches_the_syncers_events_metrics_and_page(tmp_path: Path) -> None:
    model = Net()
    with start(tmp_path, method()) as syncer:
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            learner.log(scores=Scores((TaskScore("brackets", 0.75, 0.125, 12),), 90))
            until(lambda: told(tmp_path), "the scores in the events")
            with pytest.raises(ConfigError, match="cannot be told"):
                learner.log(scores={"brackets": math.nan})
            syncer.progress.write()
            found = syncer.progress._metrics.registry.get_sample_value("diloco_task_score", {"task": "brackets"})
            assert found == 0.75
    story = Story()
    for event in read_events(tmp_path / "state" / "events.jsonl"):
        story.take(event)
    story.take(ev.Scored(who="a", step=1, tokens=90, scores=told(tmp_path)[0].scores))  # the learner's own file
    (shown,) = story.since(0)["scores"]
    assert (shown["task"], shown["who"], shown["points"]) == ("brackets", "global model", [[90, 0.75]])
    assert (shown["error"], shown["num"]) == (0.125, 12)


def told(tmp_path: Path) -> list[ev.ReportedScores]:
    events = read_events(tmp_path / "state" / "events.jsonl")
    return [event for event in events if isinstance(event, ev.ReportedScores)]
