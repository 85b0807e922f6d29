"""torchtitan jobs as learners, beside what `test_stacks.py` tries: `make torchtitan`.

The device is the CPU, by the shims of `torchtitan_cpu.py`.
"""

from __future__ import annotations

import importlib
import re
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.integrations.harness import (
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
)

from diloco.errors import ConfigError
from diloco.events import Left, read_events
from diloco.exchange.remote import fetch_model
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
args = ["--diloco.initialise", "--diloco.learner", "paris", "--diloco.trains", "layers.0.*", "norm.weight"]
chosen = tyro.cli(type(job), default=job, args=args)
assert type(chosen) is DilocoTrainer.Config
assert chosen.diloco == Attachment(
    syncer="127.0.0.1:7700", run="demo", learner="paris", initialise=True, trains=["layers.0.*", "norm.weight"]
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


def start_ranks(
    scripts: Scripts, syncer: Syncer, directory: Path, index: int, ranks: int, *arguments: str, kill_after: int | None
) -> list[Process]:
    """A learner of one or more ranks, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    output = directory / f"learner-{index}"
    output.mkdir(exist_ok=True)
    world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        scripts.start(
            RUNNER, str(ROOT / "examples" / "integrations" / "torchtitan" / "train.py"), syncer.address,
            "--shard", str(index), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--output", str(output),
            *arguments, log=directory / f"learner-{index}-{len(scripts.started)}.log",
            kill_after=None if kill_after is None else 2 * kill_after,  # the container of optimizers is one too
            environment={key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()},
        )
        for rank in range(ranks)
    ]  # fmt: skip


@is_here
@pytest.mark.timeout(240)
def test_validation_is_of_the_global_model(tmp_path: Path) -> None:
    """Both learners find the same losses on the same data, at a step where they have own weights and nothing is on its
    way."""
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        started = [
            *start_ranks(scripts, syncer, tmp_path, 0, 1, "--initialise", kill_after=None),
            *start_ranks(scripts, syncer, tmp_path, 1, 1, kill_after=None),
        ]
        end_all(started)
    one, other = (dict(re.findall(r"validate step: +(\d+) +loss: +([\d.]+)", each.said)) for each in started)
    assert one["5"] == other["5"] != one["1"]


@is_here
@pytest.mark.timeout(600)
def test_the_ranks_of_fsdp2_are_one_learner_and_resume_together(tmp_path: Path) -> None:
    """A job of two ranks, which shard the parameters, and one of a single rank train one run. All are killed and
    resumed, and end with the bits of a run without an interruption."""

    def both(*arguments: str, kill_after: int | None = None) -> list[Process]:
        resumes = [each for each in arguments if each == "--resume"]
        return [
            *start_ranks(scripts, syncer, directory, 0, 2, *arguments, kill_after=kill_after),
            *start_ranks(scripts, syncer, directory, 1, 1, *resumes, kill_after=kill_after),
        ]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
        with serve(directory / "syncer") as syncer, running() as scripts:
            if directory is broken:
                end_all(both("--initialise", kill_after=SAVE_EVERY + 1), expect=-9)
                assert (directory / "learner-0" / "checkpoint" / f"step-{SAVE_EVERY}" / "__1_0.distcp").exists()
                end_all(both("--initialise", "--resume"))  # the command can stay the same
            else:
                end_all(both("--initialise"))
            for index in range(2):
                assert_same(model_of(directory / f"learner-{index}"), fetch_model(syncer.address, run=RUN))
    assert_same(model_of(broken / "learner-0"), model_of(whole / "learner-0"))
    tokens = {e.learner: e.tokens for e in read_events(whole / "syncer" / "events.jsonl") if isinstance(e, Left)}
    assert tokens == dict.fromkeys(("learner-0", "learner-1"), STEPS * 8 * 32)
