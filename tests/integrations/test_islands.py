"""A job of two ranks in a stack is one learner, beside a single process; its checkpoints hold every rank's part."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.harness import SAVE_EVERY, Example, assert_same, end_all, model_of, running, serve

from diloco.events import Joined, Left, read_events

pytestmark = pytest.mark.timeout(240)

ACCELERATE = Example("accelerate", "accelerate", ("accelerate", "torchdata.stateful_dataloader"), tokens=(6656, 3328))
TRANSFORMERS = Example("transformers", "transformers", ("datasets", "transformers.trainer"), tokens=(3328, 1600))


@pytest.mark.parametrize(("example", "how"), [
    pytest.param(ACCELERATE, (), marks=pytest.mark.slow),
    (ACCELERATE, ("--fsdp",)),
    (TRANSFORMERS, ()),
])  # fmt: skip
def test_two_ranks_are_one_learner_and_resume_exactly(example: Example, how: tuple[str, ...], tmp_path: Path) -> None:
    finals = []
    for directory, kill_after in ((tmp_path / "whole", None), (tmp_path / "killed", SAVE_EVERY + 1)):
        outputs = [directory / f"learner-{index}" for index in range(2)]
        with serve(directory / "syncer") as syncer, running() as scripts:
            started = example.island(scripts, syncer, outputs[0], "--initialise", *how, kill_after=kill_after)
            started.append(example.learner(scripts, syncer, 1, outputs[1], kill_after=kill_after))
            if kill_after is not None:
                end_all(started, expect=-9)
                started = example.island(scripts, syncer, outputs[0], "--resume", *how)
                started.append(example.learner(scripts, syncer, 1, outputs[1], "--resume"))
            end_all(started)
        assert_same(model_of(outputs[0]), model_of(outputs[1]))
        finals.append(model_of(outputs[0]))
        if kill_after is None:
            events = list(read_events(directory / "syncer" / "events.jsonl"))
            assert len([event for event in events if isinstance(event, Joined)]) == 2
            tokens = {event.learner: event.tokens for event in events if isinstance(event, Left)}
            assert tokens == dict(zip(("learner-0", "learner-1"), example.tokens, strict=True))
    assert_same(*finals)
