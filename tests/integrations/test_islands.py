"""A job of two ranks in a stack is one learner, beside a single process; its checkpoints hold every rank's part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integrations.harness import (
    SAVE_EVERY,
    STEPS,
    Example,
    assert_same,
    end_all,
    model_of,
    running,
    serve,
    until_it_has_a_model,
    worlds,
)

from diloco.event_log import read_events
from diloco.events import Joined, Left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARDING = ("torch.distributed.checkpoint", "torch.distributed.fsdp")
ACCELERATE = Example(
    "accelerate", "accelerate", (*SHARDING, "torchdata.stateful_dataloader", "diloco.integrations.accelerate"),
    tokens=(6656, 3328), runner="fsdp_cpu.py",
)  # fmt: skip
TRANSFORMERS = Example(
    "transformers", "transformers", (*SHARDING, "datasets", "transformers.trainer", "diloco.integrations.transformers"),
    tokens=(3328, 1600), runner="fsdp_cpu.py",
)  # fmt: skip


@pytest.mark.parametrize(("example", "how"), [
    (ACCELERATE, ()),
    (ACCELERATE, ("--fsdp", "FULL_STATE_DICT")),
    (ACCELERATE, ("--fsdp", "SHARDED_STATE_DICT")),
    (TRANSFORMERS, ()),
    (TRANSFORMERS, ("--fsdp", "FULL_STATE_DICT")),
    (TRANSFORMERS, ("--fsdp", "SHARDED_STATE_DICT")),
])  # fmt: skip
def test_two_ranks_are_one_learner_and_resume_exactly(example: Example, how: tuple[str, ...], tmp_path: Path) -> None:
    finals = []
    for directory, kill_after in ((tmp_path / "whole", None), (tmp_path / "killed", SAVE_EVERY + 1)):
        outputs = [directory / f"learner-{index}" for index in range(2)]
        with serve(directory / "syncer", steps=STEPS) as syncer, running() as scripts:
            started = example.island(scripts, syncer, outputs[0], *how, kill_after=kill_after)
            until_it_has_a_model(syncer, started[0])
            started.append(example.learner(scripts, syncer, 1, outputs[1], kill_after=kill_after))
            if kill_after is not None:
                end_all(started, expect=-9)
                started = example.island(scripts, syncer, outputs[0], *how)
                started.append(example.learner(scripts, syncer, 1, outputs[1]))
            end_all(started)
        assert any(outputs[0].rglob("pytorch_model_fsdp*")) == bool(how)  # it was sharded
        assert_same(model_of(outputs[0]), model_of(outputs[1]))
        if example is TRANSFORMERS:
            first, second = (re.findall(r"'eval_loss': '(\S+)'", started[index].said) for index in (0, 2))
            assert float(first[-1]) == pytest.approx(float(second[-1]), rel=1e-3)
        finals.append(model_of(outputs[0]))
        if kill_after is None:
            events = list(read_events(directory / "syncer" / "events.jsonl"))
            assert len([event for event in events if isinstance(event, Joined)]) == 2
            tokens = {event.learner: event.tokens for event in events if isinstance(event, Left)}
            assert tokens == dict(zip(("learner-0", "learner-1"), example.tokens, strict=True))
    assert_same(*finals)


@pytest.mark.parametrize("flags", [
    ("bf16", "tied"),
    ("lora",),
])  # fmt: skip
def test_what_a_trainer_is_used_with_when_it_shards(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Both learners save the same model: the best one, or adapters on a frozen base. It is evaluated after training."""
    script, trainer = (Path(__file__).with_name(f"{name}.py") for name in ("fsdp_cpu", "trainer_ranks"))
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        processes = [
            scripts.start(
                script, str(trainer), syncer.address, name, str(tmp_path / name), *flags, *more,
                imports=(*TRANSFORMERS.imports, "peft"), log=tmp_path / f"{index}.log", environment=world,
            )
            for index, (name, more, world) in enumerate([
                *(("learner-0", ("initialise",), world) for world in worlds()), ("learner-1", (), {}),
            ])
        ]  # fmt: skip
        end_all(processes)
    finals = [load_file(next((tmp_path / f"learner-{index}" / "final").glob("*.safetensors"))) for index in range(2)]
    if "tied" in flags:
        assert torch.equal(finals[0].pop("lm_head.weight"), finals[0]["model.embed_tokens.weight"])
    assert_same(*finals)
    said = [re.findall(r"^best (\S+) loss (\S+)$", processes[index].said, re.MULTILINE)[0] for index in (0, 2)]
    assert said[0][0] == said[1][0]
    assert float(said[0][1]) == pytest.approx(float(said[1][1]), rel=2e-3)
