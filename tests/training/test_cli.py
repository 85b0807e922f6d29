"""`diloco train` and `diloco export`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import diloco
from diloco.cli import main
from diloco.cli._preflight import with_usable_checkpoint
from diloco.config import RunConfig, dump_config
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import save_checkpoint
from diloco.training.loop import CHECKPOINTS
from diloco.training.rank_group import ranks_of_process
from diloco.training.spec import LearnerSpec

Tiny = Callable[..., RunConfig]
Run = Callable[..., "Done"]
DILOCO = [sys.executable, "-m", "diloco"]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line in this process: starting one costs seconds of imports each time."""

    def call(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *capfd.readouterr())

    return call


@pytest.fixture
def run_file(tiny: Tiny, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(dump_config(tiny("train.threads=1", "train.log_every_s=0.01")), encoding="utf-8")
    return path


def test_train_alone_and_export_its_checkpoint(run: Run, run_file: Path, tmp_path: Path) -> None:
    done = run("train", str(run_file), "--alone", "--json", "--set", "checkpoint.every_steps=10")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["tokens"], summary["reason"]) == (20, 5_120, "budget")
    assert 0 < summary["held_out_loss"] < 5.6
    assert "baseline step" in done.stderr

    checkpoint = tmp_path / "run" / "baseline" / "checkpoints" / "step-0000000020"
    done = run("export", str(run_file), str(tmp_path / "out"), "--checkpoint", str(checkpoint), "--json")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.num_parameters() == json.loads(done.stdout)["num_parameters"]
    file = tmp_path / "model.safetensors"
    done = run("export", str(run_file), "--raw", str(file), "--checkpoint", str(checkpoint), "--json")
    assert json.loads(done.stdout) == {"file": str(file), "num_tensors": len(model.state_dict())}
    exported = load_file(file)
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[name], each) for name, each in model.state_dict().items())


@pytest.mark.slow
def test_a_signal_ends_training_with_a_checkpoint_to_resume_from(run: Run, run_file: Path, tmp_path: Path) -> None:
    command = [*DILOCO, "train", str(run_file), "--alone", "--set", "run.tokens=2560000", "--set", "schedule.steps=20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "baseline step" in process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert "baseline trained" in rest
    (checkpoint,) = (tmp_path / "run" / "baseline" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    to_go = ["--set", f"run.tokens={(step + 3) * 256}", "--set", "schedule.steps=20"]
    done = run("train", str(run_file), "--alone", "--resume", "--json", *to_go)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == step + 3


@pytest.mark.slow
def test_a_supervised_part_is_the_same_command_at_its_start_when_stopped_and_after(
    run: Run, run_file: Path, tmp_path: Path
) -> None:
    given = ["train", str(run_file), "--alone", "--supervised", "--set", "schedule.steps=20"]
    with subprocess.Popen(
        [*DILOCO, *given, "--set", "run.tokens=2560000"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "baseline step" in process.stdout.readline()
        process.terminate()
        process.terminate()  # torchrun passes on what Slurm has told every process of a step
        assert "baseline trained" in process.stdout.read()
    assert process.returncode == 143  # not done
    (checkpoint,) = (tmp_path / "run" / "baseline" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    done = run(*given, "--json", "--set", f"run.tokens={(step + 3) * 256}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == (step + 3) * 256  # it went on from its checkpoint


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "train.global_bach=3"], 2, 'unknown key "train.global_bach"; did you mean "global_batch"?'),
        ([], 2, "--shard is missing; give each learner its own of 0 to 1"),
        (["--alone", "--isolated"], 2, "two different controls"),
        (["--alone", "--initialise", "once"], 2, "--initialise has no effect"),
        (["--alone", "--resume"], 1, "there is no checkpoint"),
        (["--alone", "--supervised", "--resume"], 2, "--supervised itself decides when to resume"),
    ],
)
def test_wrong_use_is_one_sentence(run: Run, run_file: Path, arguments: list[str], code: int, message: str) -> None:
    done = run("train", str(run_file), *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.startswith("diloco: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_the_runs_method_cannot_cut_is_one_sentence(run: Run, run_file: Path, tmp_path: Path) -> None:
    with Syncer("tiny", diloco.DecoupledDiLoCo(), Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        arguments = ("--set", f"syncer.address={syncer.address}", "--set", f"run.dir={tmp_path / 'run'}")
        done = run("train", str(run_file), "--shard", "0", "--initialise", "if-empty", *arguments)
    assert done.returncode == 2
    advice = 'set [method] fragments = { type = "Balanced", num_fragments = 20 } in the run file'
    *_, said = done.stderr.splitlines()
    assert said.startswith("diloco: Balanced(24) is more fragments than the 20 trainable tensors of the model; ")
    assert advice in said
    assert "Traceback" not in done.stderr


def test_a_learner_beyond_the_planned_ones_is_told_what_it_reads(run: Run, run_file: Path) -> None:
    short = ("--set", "run.tokens=512", "--set", "schedule.warmup_steps=0")
    done = run("train", str(run_file), "--shard", "5", "--isolated", *short)
    assert done.returncode == 0, done.stderr
    assert "the run is planned for 2 learners; as an additional one it reads shard 1, in its own order" in done.stderr


def test_export_says_what_is_wrong(run: Run, run_file: Path, tmp_path: Path) -> None:
    done = run("export", str(run_file), str(tmp_path / "out"), "--store", str(tmp_path))
    assert done.returncode == 2
    assert "there is no run in" in done.stderr


def test_a_part_that_resumes_gives_the_run_its_model_only_if_it_is_empty(tiny: Tiny, tmp_path: Path) -> None:
    """Also where no syncer has told yet whether the run has one."""
    config = tiny()
    save_checkpoint(config.dir / "a" / CHECKPOINTS, 4, {"x": torch.ones(1)}, keep=1)
    with ranks_of_process("cpu") as job:
        for initialise in ("if-empty", True, False):
            part = LearnerSpec("a", initialise=initialise, supervised=True)  # type: ignore[arg-type]
            found = with_usable_checkpoint(config, part, job)
            assert (found.initialise, found.resume_from is None) == (initialise, False)
        assert with_usable_checkpoint(config, replace(part, name="new", initialise="if-empty"), job).initialise is False
