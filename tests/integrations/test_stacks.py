"""Every stack: two learners over a real syncer train and agree, resume exactly, and come back after SIGKILL."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integrations.harness import (
    ROOT,
    RUN,
    SAVE_EVERY,
    STEPS,
    Example,
    Process,
    Scripts,
    assert_same,
    end_all,
    model_of,
    running,
    serve,
    until_it_has_a_model,
)
from tests.syncer.runs import versions_of

from diloco.event_log import read_events
from diloco.events import Left, Merged
from diloco.following.follower import newest_model
from diloco.syncer.server import Syncer

pytestmark = pytest.mark.timeout(900)  # processes that import what the stacks import

EXAMPLES = (
    Example("`for` loop", "plain", ("torchdata.stateful_dataloader",), tokens=(3328, 3328), length=()),
    Example("accelerate", "accelerate", ("accelerate", "torchdata.stateful_dataloader"), tokens=(3328, 3328)),
    Example("transformers", "transformers", ("datasets", "transformers.trainer"), tokens=(1600, 1600)),
    Example("TRL", "trl", ("datasets", "peft", "trl.trainer.sft_trainer"), tokens=(1459, 1764)),  # without padding
    Example("Lightning", "lightning", ("lightning", "torchdata.stateful_dataloader"), tokens=(3328, 3328)),
    Example(
        "torchtitan",
        "torchtitan",
        ("torch.distributed.checkpoint",),
        tokens=(3328, 3328),
        runner="torchtitan_cpu.py",
        optimizers=2,
    ),
)

SIGKILLED = -9


def test_the_table_has_a_row_for_every_stack() -> None:
    """Each row says yes to what the tests below find, and how many lines the example marks."""
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "integrations.md").read_text().splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 8}
    for example in EXAMPLES:
        link = f"[{example.name}](../{example.script.relative_to(ROOT)})"
        assert cells[example.stack][1:] == [link, "yes", "yes", "yes", "yes", str(example.num_lines)]
    assert len(cells) == len(EXAMPLES) + 2  # the head, and the line below it


def start_both(
    example: Example, scripts: Scripts, syncer: Syncer, directory: Path, *arguments: str, kill_after: int | None = None
) -> list[Process]:
    """The two learners of a run, which has the first one's model before the second starts."""
    first = example.learner(scripts, syncer, 0, directory / "learner-0", *arguments, kill_after=kill_after)
    until_it_has_a_model(syncer, first)
    second = example.learner(scripts, syncer, 1, directory / "learner-1", *arguments, kill_after=kill_after)
    return [first, second]


def assert_agree(directory: Path, syncer: Syncer) -> None:
    """Both learners have saved the run's newest model, to the bit."""
    for index in range(2):
        assert_same(model_of(directory / f"learner-{index}"), newest_model(syncer.address, run=RUN).state_dict())


PARAMETERS = [pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in EXAMPLES]
"""For `make test` the adapters are tested beside this file, in one process."""


@pytest.fixture(scope="module", params=PARAMETERS)
def example(request: pytest.FixtureRequest) -> Example:
    example: Example = request.param
    if example.name == "torchtitan" and find_spec("torchtitan") is None:
        pytest.skip("torchtitan needs an environment of its own: make torchtitan")
    return example


@pytest.fixture(scope="module")
def whole(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an interruption."""
    directory = tmp_path_factory.mktemp(example.name)
    with serve(directory / "syncer", steps=STEPS) as syncer, running() as scripts:
        end_all(start_both(example, scripts, syncer, directory))
        assert_agree(directory, syncer)
    return directory


def test_two_learners_train_and_agree_to_the_bit(example: Example, whole: Path) -> None:
    """Both are in every merge, and have counted the optimizer steps and the tokens of all micro-batches."""
    events = list(read_events(whole / "syncer" / "events.jsonl"))
    merged = [(e.fragment, e.version, e.contributors) for e in events if isinstance(e, Merged)]
    assert sorted(merged) == [(f, v, ("learner-0", "learner-1")) for f in (0, 1) for v in (1, 2, 3)]
    tokens = {e.learner: e.tokens for e in events if isinstance(e, Left)}
    assert tokens == dict(zip(("learner-0", "learner-1"), example.tokens, strict=True))


def test_resume_is_exact(example: Example, whole: Path, tmp_path: Path) -> None:
    """Both learners are killed in the step after their checkpoint, and resumed in the stack's own order, by the same
    commands."""
    with serve(tmp_path / "syncer", steps=STEPS) as syncer, running() as scripts:
        end_all(start_both(example, scripts, syncer, tmp_path, kill_after=SAVE_EVERY + 1), expect=SIGKILLED)
        end_all(start_both(example, scripts, syncer, tmp_path))
        assert_agree(tmp_path, syncer)
    assert_same(model_of(whole / "learner-0"), model_of(tmp_path / "learner-0"))


@pytest.mark.parametrize("resume", [True, False], ids=["from its checkpoint", "without a checkpoint"])
def test_a_killed_learner_returns(example: Example, resume: bool, tmp_path: Path) -> None:
    """The run has gone on since the checkpoint; the other learner is never interrupted."""
    with serve(tmp_path / "syncer", steps=STEPS) as syncer, running() as scripts:
        first, second = (tmp_path / f"learner-{index}" for index in range(2))
        stays = example.learner(scripts, syncer, 0, first)
        until_it_has_a_model(syncer, stays)
        killed = example.learner(scripts, syncer, 1, second, kill_after=STEPS - 1)
        end_all([killed], expect=SIGKILLED)
        if not resume:
            second.rename(tmp_path / "lost")
        returns = example.learner(scripts, syncer, 1, second)
        end_all([stays, returns])
        told = [line for line in returns.said.splitlines() if "re-warms its learning rate over 5 steps" in line]
        assert len(told) == (not resume), returns.said
        assert "re-warms" not in stays.said + killed.said
        assert versions_of(syncer) == [3, 3]
        assert_agree(tmp_path, syncer)


@pytest.mark.slow
def test_an_adapter_of_peft_is_what_travels(tmp_path: Path) -> None:
    """With `static="digest"` the base model stays where it is; the adapters agree to the bit."""
    example = next(each for each in EXAMPLES if each.name == "trl")
    with serve(tmp_path / "syncer", steps=STEPS) as syncer, running() as scripts:
        end_all(start_both(example, scripts, syncer, tmp_path, "--lora"))
        run = newest_model(syncer.address, run=RUN).state_dict()
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in run} == {"q_proj", "v_proj"}
    adapters = [load_file(tmp_path / f"learner-{index}" / "adapter_model.safetensors") for index in range(2)]
    assert_same(*adapters)
    assert_same(adapters[0], {name.replace(".default", ""): value for name, value in run.items()})
