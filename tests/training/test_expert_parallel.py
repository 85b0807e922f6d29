"""Expert parallelism in the reference trainer: ranks of torchrun that share the experts of a mixture, over gloo on the
CPU, beside single processes over a real syncer."""

import copy
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.test_mixtures import BIAS, KINDS
from torch import Tensor, nn

import diloco
from diloco.cli.train import _connector
from diloco.config import RunConfig, dump_config
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import Evaluated, Routed, RunStarted, Stepped
from diloco.exchange.base import Exchange
from diloco.following.follower import newest_model
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import list_checkpoints, load_checkpoint
from diloco.training.expert_parallel import shard_experts
from diloco.training.learners import AnyLearner
from diloco.training.loop import Trainer
from diloco.training.mixture import buffer_roles
from diloco.training.model import build_model
from diloco.training.pretrained import checkpoint_state
from diloco.training.progress import ProgressDisplay
from diloco.training.spec import LearnerSpec, StopRequest, Summary

pytestmark = pytest.mark.timeout(900)  # each test includes processes that import torch
Tiny = Callable[..., RunConfig]
METHOD = "method={preset='DiLoCo', sync_every=6, quorum={type='AllLive', at_least=2}}"
ALONE = "method={preset='DiLoCo', sync_every=6}"
APART = "method.fragments={type='Experts', groups=2, every=2}"
TOLERANCE = 1e-5
"""Of parameters at a learning rate of 0.004: sums over ranks have another order than in one process. Measured: 2.4e-7
after 18 steps, 1.4e-6 after 60."""


@pytest.fixture
def mixture(tiny: Tiny) -> Callable[..., RunConfig]:
    """The tiny run with a mixture, whose learner-0 shares its experts over two ranks."""

    def make(*overrides: str, learner: str | None = None, kind: str = "deepseek_v3") -> RunConfig:
        sizes = "hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, "
        model = KINDS[kind].replace("{", "{" + sizes + "num_key_value_heads=2, ")
        shared = "learner={learner-0={train={expert_parallel=2}}}"
        return tiny(model, "run.tokens=512_000", "schedule.steps=20", shared, *overrides, learner=learner)

    return make


@contextmanager
def torchrun(config: RunConfig, num_ranks: int, *arguments: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The ranks of learner-0."""
    run_file = config.dir.parent / "job.toml"
    run_file.write_text(dump_config(config), encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--max-restarts", str(restarts), "-m", "diloco", "train", str(run_file), "--name", "learner-0", "--shard", "0",
    ]  # fmt: skip
    # Otherwise torchrun gives the ranks that it starts again the store with the addresses of those that are gone.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read the process's lines up to one with this text."""
    assert process.stdout is not None
    while text not in process.stdout.readline():
        assert process.poll() is None, process.stderr and process.stderr.read()


def reference(config: RunConfig, learners: int, num_ranks: int) -> None:
    """The same learners in one process; the first takes its batches in as many parts as its ranks do."""

    def life(index: int, exchange: Exchange) -> Summary:
        def attach(model: Any, optimizer: Any, steps: int, tokens: int, _: Any) -> AnyLearner:
            method = method_from_table(config.method)
            return diloco.Learner(model, optimizer, method=method, exchange=exchange, buffers=buffer_roles(model))

        train = config.train.model_copy(update={"accumulate": 1 if index else num_ranks})
        own = config.model_copy(update={"train": train})
        return Trainer(own, LearnerSpec(f"learner-{index}", shard=index), attach=attach).train()

    diloco.run_local(life, learners=learners)


def assert_near(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "cut"),
    [
        pytest.param("deepseek_v3", 2, (), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 4, (APART,), marks=pytest.mark.slow),
        pytest.param("mixtral", 2, (APART,), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, (), marks=pytest.mark.slow),
    ],
)
def test_a_learner_that_shares_its_experts_beside_a_single_process(
    mixture: Callable[..., RunConfig], tmp_path: Path, kind: str, num_ranks: int, cut: tuple[str, ...]
) -> None:
    mixture = partial(mixture, kind=kind)
    overrides = [METHOD, *cut, "run.steps=18", "checkpoint.every_steps=6", "checkpoint.keep=9"]
    overrides.append("evaluate.every_steps=9")
    if kind == "deepseek_v3":
        overrides.append("train.bias_speed=0.03125")
    local = mixture(f"run.dir={tmp_path / 'local'}", *overrides)
    reference(local, 2, num_ranks)
    with Syncer("tiny", method_from_table(local.method), Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        shared = (f"syncer.address={syncer.address}", *overrides)
        config, part = mixture(*shared, learner="learner-1"), LearnerSpec("learner-1", shard=1)
        with torchrun(mixture(*shared), num_ranks, "--initialise", "if-empty") as process:
            Trainer(config, part, attach=_connector(config, part, StopRequest())).train()
            finish(process)
        newest = newest_model(syncer.address, run="tiny").state_dict()
    for step in (6, 12, 18):
        states = [
            checkpoint_state(each.dir / f"learner-{index}" / "checkpoints" / f"step-{step:010d}")
            for each in (local, config)
            for index in range(2)
        ]
        for name, value in states[2].items():
            assert torch.equal(value, states[3][name]), name  # what is merged and adopted is the same to the bit
        assert_near(states[2], states[0])
        assert (BIAS in states[2]) == (kind == "deepseek_v3")
    for name, value in newest.items():
        assert torch.equal(value, states[2][name]), name

    def logged(each: RunConfig) -> tuple[dict[int, float], dict[int, float], list[Routed]]:
        found = list(read_events(each.dir / "learner-0" / "events.jsonl"))
        return (
            {event.step: event.loss for event in found if isinstance(event, Stepped)},
            {event.step: event.loss for event in found if isinstance(event, Evaluated)},
            [event for event in found if isinstance(event, Routed)],
        )

    (trained, held_out, routed), expected = logged(config), logged(local)
    assert trained == pytest.approx(expected[0], rel=1e-6)
    assert held_out == pytest.approx(expected[1], rel=1e-6)
    assert [event.tokens for event in routed] == [event.tokens for event in expected[2]]  # of all experts and ranks


@pytest.mark.slow
def test_a_rank_is_killed_and_the_run_goes_on(mixture: Callable[..., RunConfig], tmp_path: Path) -> None:
    overrides = (ALONE, "run.learners=1", "run.steps=60", "checkpoint.every_steps=6", "train.log_every_s=0.01")
    method = method_from_table(mixture(*overrides).method)
    with Syncer("tiny", method, Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        config = mixture(f"syncer.address={syncer.address}", *overrides)
        with torchrun(config, 2, "--supervised", "--initialise", "if-empty", restarts=1) as process:
            wait_for(process, "step 7 ")  # the first checkpoint is written
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            finish(process)
        newest = newest_model(syncer.address, run="tiny").state_dict()
    starts = [e for e in read_events(config.dir / "learner-0" / "events.jsonl") if isinstance(e, RunStarted)]
    assert len(starts) == 2
    assert starts[1].step >= 6
    state = checkpoint_state(config.dir / "learner-0" / "checkpoints" / "step-0000000060")
    for name, value in newest.items():
        assert torch.equal(value, state[name]), name


class Stopping(ProgressDisplay):
    """Stops its trainer after some steps. `said`: the sentences about it."""

    def __init__(self, steps: int) -> None:
        self.said: list[str] = []
        self.request = StopRequest()
        self._steps = steps

    def is_due(self) -> bool:
        return True

    def show(self, status: str) -> None:
        self._steps -= 1
        if self._steps == 0:
            self.request.set()

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.slow
def test_a_learner_is_resumed_on_other_numbers_of_ranks(mixture: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Two ranks, one process, four ranks; each continues exactly where the one before was stopped."""
    overrides = (ALONE, APART, "run.learners=1", "run.steps=60", "schedule.steps=60")
    single = mixture(f"run.dir={tmp_path / 'local'}", *overrides, "checkpoint.every_steps=60")
    reference(single, 1, 1)
    with ExitStack() as opened:
        shared = _stopped_between_rounds(mixture, single, (*overrides, "train.log_every_s=0.01"), tmp_path, opened)
        config = mixture(*shared)
        (checkpoint,) = list_checkpoints(config.dir / "learner-0" / "checkpoints")
        step = load_checkpoint(checkpoint)["step"]
        assert 3 <= step < 50

        progress, part = Stopping(4), LearnerSpec("learner-0", resume_from=checkpoint, initialise="if-empty")
        attach = _connector(single_of(config), part, progress.request)
        alone = Trainer(single_of(config), part, attach, progress, stop_request=progress.request)
        assert alone.train().reason == "stopped"
        assert f"learner-0 resumes at step {step} from {checkpoint}" in progress.said
        checkpoint = list_checkpoints(config.dir / "learner-0" / "checkpoints")[-1]
        step = load_checkpoint(checkpoint)["step"]

        config = mixture(*shared, "checkpoint.every_steps=60")
        with torchrun(config, 4, "--initialise", "if-empty") as process:
            out = finish(process)
        assert re.search(rf"learner-0 resumes at step {step} from \S+\n", out)
    expected = checkpoint_state(single.dir / "learner-0" / "checkpoints" / "step-0000000060")
    state = checkpoint_state(config.dir / "learner-0" / "checkpoints" / "step-0000000060")
    assert_near(state, expected)


def _stopped_between_rounds(
    mixture: Callable[..., RunConfig], single: RunConfig, overrides: Sequence[str], tmp_path: Path, opened: ExitStack
) -> tuple[str, ...]:
    """Two ranks that were stopped: the overrides of their run, whose syncer is `opened`.

    If the signal comes while they wait for a merge, the run goes on without them, and their checkpoint is not continued
    exactly. Such a run is left, and another one begun.
    """
    while True:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        options = Options("127.0.0.1:0", folder / "state")
        syncer = opened.enter_context(Syncer("tiny", method_from_table(single.method), options))
        shared = (f"syncer.address={syncer.address}", f"run.dir={folder / 'run'}", *overrides)
        with torchrun(mixture(*shared), 2, "--initialise", "if-empty") as process:
            wait_for(process, " step 3 ")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=300)
        if "while it waited for others" not in out:
            return shared


def single_of(config: RunConfig) -> RunConfig:
    """The configuration without ranks that share experts."""
    return config.model_copy(update={"learner": {}})


def test_what_cannot_share_experts_is_refused(mixture: Callable[..., RunConfig], tiny: Tiny) -> None:
    model = build_model(mixture().model, 256, 32, 0)
    tied = copy.deepcopy(model)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    for given, size, num_ranks, message in [
        (model, 2, 1, r"train.expert_parallel = 2 needs a learner of several ranks; start it as torchrun"),
        (model, 2, 3, r"train.expert_parallel = 2 does not divide the learner's 3 ranks"),
        (model, 3, 6, r"train.expert_parallel = 3 does not divide the 8 experts of model.layers.1.mlp"),
        (build_model(tiny().model, 256, 32, 0), 2, 2, "needs a mixture of experts, and LlamaForCausalLM has none"),
        (tied, 2, 2, "set model.tie_word_embeddings = false before the run has a model"),
        (nn.Linear(2, 2), 2, 2, "needs a mixture of experts, and Linear has none"),
    ]:
        with pytest.raises(ConfigError, match=message):
            shard_experts(given, size, num_ranks)
    with pytest.raises(ConfigError, match="train.expert_parallel"):
        tiny("train.expert_parallel=1")
    with pytest.raises(ConfigError, match="needs a learner of several ranks"):
        Trainer(tiny("train.expert_parallel=2"), LearnerSpec("baseline", role="baseline"))
