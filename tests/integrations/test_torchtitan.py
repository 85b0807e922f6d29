"""torchtitan jobs as learners, beside what `test_stacks.py` tries: `make torchtitan`.

The device is the CPU, by the shims of `torchtitan_cpu.py`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.integrations.harness import (
    METHOD,
    ROOT,
    RUN,
    SAVE_EVERY,
    STEPS,
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
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import diloco
from diloco.demo.plan import free_port
from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import Left
from diloco.following.follower import newest_model
from diloco.syncer.server import Syncer

is_here = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan needs an environment of its own: make torchtitan"
)
RUNNER = ROOT / "tests" / "integrations" / "torchtitan_cpu.py"


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed here")
def test_without_torchtitan_the_error_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"diloco\[torchtitan\]"):
        importlib.import_module("diloco.integrations.torchtitan")


@is_here
def test_an_attachment_is_options_of_the_command_line(tmp_path: Path) -> None:
    """As torchtitan's own parser makes them; and a job with a trainer of its own is refused."""
    script = tmp_path / "options.py"
    script.write_text(OPTIONS)
    with running() as scripts:
        end_all([scripts.start(RUNNER, str(script), log=tmp_path / "log")])


OPTIONS = """
from dataclasses import dataclass

import tyro
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from diloco.errors import ConfigError
from diloco.integrations.torchtitan import Attachment, DilocoTrainer, attach

job = attach(llama3_debugmodel(), Attachment(syncer="127.0.0.1:7700", run="demo"))
args = ["--diloco.initialise", "if-empty", "--diloco.learner", "paris", "--diloco.trains", "layers.0.*", "norm.weight"]
args += ["--diloco.buffers", "*.expert_bias_E", "average", "*.scale", "local"]
chosen = tyro.cli(type(job), default=job, args=args)
assert type(chosen) is DilocoTrainer.Config
assert chosen.diloco == Attachment(
    syncer="127.0.0.1:7700", run="demo", learner="paris", initialise="if-empty",
    trains=["layers.0.*", "norm.weight"],
    buffers={"*.expert_bias_E": "average", "*.scale": "local"},
)
assert chosen.training == llama3_debugmodel().training


class Special(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


try:
    attach(Special.Config(), job.diloco)
except ConfigError as error:
    assert "derive it from DilocoTrainer" in str(error)
else:
    raise AssertionError
"""


@dataclass(frozen=True)
class Island:
    """A job of torchtitan.

    Attributes:
        num_ranks: its processes.
        options: of the example and of torchtitan's command line.
        num_parts: parts of the model, each with an optimizer, that a rank holds.
    """

    num_ranks: int
    options: tuple[str, ...] = ()
    num_parts: int = 1

    def start(
        self, scripts: Scripts, syncer: Syncer, directory: Path, index: int, *, kill_after: int | None = None
    ) -> list[Process]:
        """Start it as learner `index`, with the environment that torchrun makes."""
        output = directory / f"learner-{index}"
        output.mkdir(exist_ok=True)
        world = {"WORLD_SIZE": self.num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        return [
            scripts.start(
                RUNNER, str(ROOT / "examples" / "integrations" / "torchtitan" / "train.py"), syncer.address,
                "--shard", str(index), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--output", str(output),
                *self.options, log=directory / f"learner-{index}-{len(scripts.started)}.log",
                # torchtitan's container of optimizers is one too
                kill_after=None if kill_after is None else (self.num_parts + 1) * kill_after,
                environment={key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()},
            )
            for rank in range(self.num_ranks)
        ]  # fmt: skip


def sized(**degrees: int) -> tuple[str, ...]:
    """Options for degrees of parallelism."""
    named = ((f"--parallelism.{name.replace('_', '-')}-degree", str(degree)) for name, degree in degrees.items())
    return tuple(chain.from_iterable(named))


LAYERS = ("--layers", "2")
EXPERTS = (*LAYERS, "--model", "deepseek_v3", "--diloco.buffers", "average")
INTERLEAVED = ("--parallelism.pipeline-parallel-schedule", "Interleaved1F1B")  # two stages on each rank

SINGLE = Island(1, LAYERS)
FSDP = Island(2, LAYERS)
HSDP = Island(
    4,
    (*LAYERS, *sized(data_parallel_replicate=2, data_parallel_shard=2), "--training.local-batch-size", "2"),
)
TP = Island(2, (*LAYERS, *sized(tensor_parallel=2)))
FSDP_AND_TP = Island(4, (*LAYERS, *sized(data_parallel_shard=2, tensor_parallel=2)))
STAGES = Island(2, (*LAYERS, *sized(pipeline_parallel=2)))
VIRTUAL_STAGES = Island(2, (*LAYERS, *sized(pipeline_parallel=2), *INTERLEAVED), num_parts=2)

ISLANDS = {
    "stages, TP": (STAGES, TP, SINGLE),
    "virtual stages, HSDP": (VIRTUAL_STAGES, HSDP, SINGLE),
    "FSDP2 with TP, FSDP2": (FSDP_AND_TP, FSDP, SINGLE),
    "experts": (Island(2, (*EXPERTS, *sized(expert_parallel=2))), Island(1, EXPERTS)),
}


def start_all(
    islands: Sequence[Island], scripts: Scripts, syncer: Syncer, directory: Path, *, kill_after: int | None = None
) -> list[Process]:
    """Learner 0 begins the run; the command of a job that returns is the same."""
    started: list[Process] = []
    for index, island in enumerate(islands):
        started += island.start(scripts, syncer, directory, index, kill_after=kill_after)
        until_it_has_a_model(syncer, started[0])
    return started


def saved_model(directory: Path) -> dict[str, Tensor]:
    """The tensors of the model in torchtitan's last checkpoint, under its own keys."""
    dcp_to_torch_save(directory / "checkpoint" / f"step-{STEPS}", directory / "whole.pt")
    saved: dict[str, Tensor] = torch.load(directory / "whole.pt")
    return saved


def assert_all_have_the_model(directory: Path, syncer: Syncer, num_learners: int) -> None:
    """Each learner ends with the run's newest model, and so does its last checkpoint."""
    run = newest_model(syncer.address, run=RUN).state_dict()
    for index in range(num_learners):
        output = directory / f"learner-{index}"
        model, checkpoint = model_of(output), saved_model(output)
        biases = {name: run[name] for name in run if name.endswith("expert_bias_E")}  # the example saves no buffers
        assert_same(model | biases, run)
        same = run.keys() & checkpoint.keys()
        assert_same({name: checkpoint[name] for name in same}, {name: run[name] for name in same})
        assert biases.keys() <= same
        assert all(".wqkv." in name for name in run.keys() - same)  # which torchtitan saves in three


@is_here
@pytest.mark.timeout(900)
@pytest.mark.parametrize("islands", ISLANDS.values(), ids=ISLANDS)
def test_the_ranks_of_a_job_are_one_learner_and_resume_together(islands: tuple[Island, ...], tmp_path: Path) -> None:
    """Jobs of different parallelism train one run. All are killed and resumed, and end with the bits of a run without
    an interruption."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    method = replace(METHOD, quorum=diloco.AllLive(at_least=len(islands)))
    for directory in (whole, broken):
        directory.mkdir()
        with serve(directory / "syncer", method) as syncer, running() as scripts:
            if directory is broken:
                end_all(start_all(islands, scripts, syncer, directory, kill_after=SAVE_EVERY + 1), expect=-9)
                for index, island in enumerate(islands):
                    saved = directory / f"learner-{index}" / "checkpoint" / f"step-{SAVE_EVERY}"
                    assert len(list(saved.glob("__*_0.distcp"))) == island.num_ranks
                end_all(start_all(islands, scripts, syncer, directory))
            else:
                end_all(start_all(islands, scripts, syncer, directory))
            assert_all_have_the_model(directory, syncer, len(islands))
    assert_same(model_of(broken / "learner-0"), model_of(whole / "learner-0"))
    tokens = {e.learner: e.tokens for e in read_events(whole / "syncer" / "events.jsonl") if isinstance(e, Left)}
    assert tokens == {f"learner-{index}": STEPS * 8 * 32 for index in range(len(islands))}


@is_here
@pytest.mark.timeout(900)
def test_a_killed_pipeline_returns(tmp_path: Path) -> None:
    """The run has gone on since its checkpoint; the other learner is never interrupted."""
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        stays = SINGLE.start(scripts, syncer, tmp_path, 0)
        until_it_has_a_model(syncer, stays[0])
        end_all(VIRTUAL_STAGES.start(scripts, syncer, tmp_path, 1, kill_after=STEPS - 1), expect=-9)
        end_all([*stays, *VIRTUAL_STAGES.start(scripts, syncer, tmp_path, 1)])
        assert versions_of(syncer) == [3, 3]
        assert_all_have_the_model(tmp_path, syncer, 2)


@is_here
@pytest.mark.timeout(900)
def test_the_ranks_of_context_parallel_share_the_tokens(tmp_path: Path) -> None:
    """torchtitan wants blocks of 128 tokens on each rank."""
    job = ("--training.seq-len", "256", "--training.local-batch-size", "1", "--training.global-batch-size", "1")
    islands = (Island(2, (*job, *sized(context_parallel=2))), Island(1, job))
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        end_all(start_all(islands, scripts, syncer, tmp_path))
        assert_all_have_the_model(tmp_path, syncer, 2)
    tokens = [event.tokens for event in read_events(tmp_path / "syncer" / "events.jsonl") if isinstance(event, Left)]
    assert tokens == [STEPS * 256] * 2


@is_here
def test_a_mixture_needs_an_answer_for_its_router(tmp_path: Path) -> None:
    """Before it dials."""
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        [job] = started = Island(1, (*LAYERS, "--model", "deepseek_v3")).start(scripts, syncer, tmp_path, 0)
        end_all(started, expect=1)
    assert "ConfigError: torchtitan updates 'layers.1.moe.expert_bias_E'" in job.said
    assert "--diloco.buffers" in job.said


@is_here
@pytest.mark.timeout(900)
def test_validation_is_of_the_global_model(tmp_path: Path) -> None:
    """A single process and a pipeline find the same losses on the same data, at a step where they have own weights and
    nothing is on its way."""
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        single, _, last = started = start_all((SINGLE, STAGES), scripts, syncer, tmp_path)
        end_all(started)
    one, other = (dict(re.findall(r"validate step: +(\d+) +loss: +([\d.]+)", each.said)) for each in (single, last))
    assert float(one["5"]) == pytest.approx(float(other["5"]), abs=0.001)  # sums of other micro-batches
    assert abs(float(one["5"]) - float(one["1"])) > 0.1
