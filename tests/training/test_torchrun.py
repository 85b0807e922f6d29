"""`torchrun -m diloco train`: ranks that are one learner, and ranks that are learners; real processes over gloo on the
CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.cli.train import _connector
from diloco.config import RunConfig, dump_config
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import Stepped
from diloco.exchange.base import Exchange
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import list_checkpoints, load_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.data.streams import Stream
from diloco.training.inner import InnerStep
from diloco.training.loop import Trainer
from diloco.training.model import build_model
from diloco.training.optimizers import make_optimizer, schedule_factor, untrained_parameters
from diloco.training.pretrained import checkpoint_state
from diloco.training.rank_group import RankGroup
from diloco.training.spec import LearnerSpec, StopRequest, Summary

pytestmark = pytest.mark.timeout(900)  # each test includes processes that import torch
Tiny = Callable[..., RunConfig]
DILOCO_6 = "method={preset='DiLoCo', sync_every=6, quorum={type='AllLive', at_least=2}}"


@contextmanager
def torchrun(config: RunConfig, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of `diloco train`."""
    directory.mkdir(exist_ok=True)
    (directory / "run.toml").write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "diloco"]
    with subprocess.Popen(
        [*command, "train", str(directory / "run.toml"), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    names = a.keys() & b.keys()  # a tied head has a name of its own in a state dict
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= names
    for name in names:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_are_stopped_together_and_resumed_by_one(tiny: Tiny, tmp_path: Path) -> None:
    # Two micro-batches of one rank are the halves that two ranks take, and the mean of two is exact in binary.
    whole = Trainer(
        tiny("train.accumulate=2", f"run.dir={tmp_path / 'one'}", "run.tokens=25_600"),
        LearnerSpec("baseline", role="baseline"),
    )
    whole.train()

    config = tiny("run.tokens=25_600", "train.log_every_s=0.01")
    with torchrun(config, tmp_path / "two", "--alone") as process:
        assert process.stdout is not None
        while " step " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks, at different moments of theirs
        process.communicate(timeout=300)
    (checkpoint,) = list_checkpoints(config.dir / "baseline" / "checkpoints")
    step = load_checkpoint(checkpoint)["step"]
    assert 0 < step < 100
    assert len(load_checkpoint(checkpoint)["random"]) == 2

    resumed = Trainer(
        tiny("train.accumulate=2", "run.tokens=25_600"),
        LearnerSpec("baseline", role="baseline", resume_from=checkpoint),
    )
    assert resumed.train().steps == 100
    assert_same(weights(whole), weights(resumed))
    losses = {e.step: e.loss for e in read_events(config.dir / "baseline" / "events.jsonl") if isinstance(e, Stepped)}
    alone = {
        e.step: e.loss for e in read_events(tmp_path / "one" / "baseline" / "events.jsonl") if isinstance(e, Stepped)
    }
    assert set(losses) == set(alone)
    # The mean over ranks is taken in fp64, over micro-batches in fp32.
    assert losses == pytest.approx(alone, rel=1e-6)


def run_pair(config: RunConfig) -> list[Summary]:
    """The same two learners in one process; the first takes its batches in two halves, as its two ranks do."""

    def life(index: int, exchange: Exchange) -> Summary:
        def attach(model: Any, optimizer: Any, steps: int, tokens: int, _: Any) -> diloco.Learner:
            return diloco.Learner(model, optimizer, method=method_from_table(config.method), exchange=exchange)

        train = config.train.model_copy(update={"accumulate": 2 - index})
        own = config.model_copy(update={"train": train})
        return Trainer(own, LearnerSpec(f"learner-{index}", shard=index), attach=attach).train()

    return diloco.run_local(life, learners=2)


@pytest.mark.slow
def test_a_learner_of_two_ranks_beside_one_of_one_rank_over_a_syncer(tiny: Tiny, tmp_path: Path) -> None:
    overrides = (
        DILOCO_6,
        "checkpoint.every_steps=6",
        "checkpoint.keep=9",
        "run.tokens=512_000",
        "run.steps=18",
        "schedule.steps=20",
    )
    reference = tiny(f"run.dir={tmp_path / 'local'}", *overrides)
    run_pair(reference)

    method = method_from_table(reference.method)
    with Syncer("tiny", method, Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        config = tiny(f"syncer.address={syncer.address}", *overrides)
        with torchrun(config, tmp_path / "job", "--shard", "0", "--initialise", "if-empty", "--json") as process:
            part = LearnerSpec("learner-1", shard=1)
            Trainer(config, part, attach=_connector(config, part, StopRequest())).train()
            summary = json.loads(finish(process))  # printed once
        assert syncer.driver.ask(lambda driver: driver.state.versions) == (3,)

    assert (summary["reason"], summary["steps"], summary["tokens"]) == ("steps", 18, 18 * 4 * 32)
    assert summary["metrics"]["merges"] == 3
    for step in (6, 12, 18):
        states = [
            checkpoint_state(each.dir / f"learner-{index}" / "checkpoints" / f"step-{step:010d}")
            for each in (reference, config)
            for index in range(2)
        ]
        for state in states[1:]:
            assert_same(states[0], state)
    assert not (config.dir / "learner-0-1").exists()
    steps = [e.step for e in read_events(config.dir / "learner-0" / "events.jsonl") if isinstance(e, Stepped)]
    assert steps == sorted(set(steps))  # one rank writes


def by_hand(config: RunConfig, steps: int) -> dict[str, Tensor]:
    """Six steps in data parallel and the rest by the run's method, each over the local exchange."""
    corpus = load_corpus(config.data)
    models = [build_model(config.model, corpus.vocab_size, 32, config.run.seed) for _ in range(2)]
    optimizers = [make_optimizer(model, config) for model in models]
    inner = [InnerStep(m, o, config.train, torch.device("cpu")) for m, o in zip(models, optimizers, strict=True)]
    streams = [Stream(corpus, 32, 2, [m], 4, config.run.seed, config.data.shared_fraction) for m in range(2)]

    def phase(method: diloco.Method, steps: range) -> dict[str, Tensor]:
        def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
            with diloco.Learner(models[index], optimizers[index], method=method, exchange=exchange) as learner:
                for step in steps:
                    inner[index].run(streams[index].next(), schedule_factor(config, step))
                    learner.step(tokens=128)
                return learner.global_state_dict()

        return diloco.run_local(life, learners=2)[0]

    phase(diloco.DataParallel(), range(1, 7))
    return phase(method_from_table(config.method), range(7, steps + 1))


@pytest.mark.slow
def test_ranks_that_are_learners_warm_up_in_data_parallel(tiny: Tiny, tmp_path: Path) -> None:
    overrides = ("warm_start.steps=6", "checkpoint.every_steps=6", "checkpoint.keep=9", DILOCO_6)
    config = tiny(*overrides, "data.shared_fraction=0.25")
    with torchrun(config, tmp_path / "job", "--collective") as process:
        finish(process)

    expected = by_hand(config, steps=18)
    for index in range(2):
        at = config.dir / f"learner-{index}" / "checkpoints" / "step-0000000018"
        assert_same(expected, checkpoint_state(at))
        assert load_checkpoint(at)["run_tokens"] == 18 * 256
        assert list_checkpoints(at.parent)[-1].name == "step-0000000020"  # 5,120 tokens, to the token


@pytest.mark.slow
def test_ranks_that_are_learners_resume_to_the_bit(tiny: Tiny, tmp_path: Path) -> None:
    overrides = ("warm_start.steps=6", "checkpoint.every_steps=4", "checkpoint.keep=9", DILOCO_6)
    config = tiny(*overrides, "data.shared_fraction=0.25")
    expected = by_hand(config, steps=20)
    for step in (None, 4, 16):  # from the start, from within the warm start, and from between two rounds
        for index in range(2):
            for checkpoint in list_checkpoints(config.dir / f"learner-{index}" / "checkpoints"):
                if checkpoint.name != f"step-{step:010d}":
                    shutil.rmtree(checkpoint)
        with torchrun(config, tmp_path / "job", "--collective", *(["--resume"] if step else [])) as process:
            finish(process)
        for index in range(2):
            assert_same(expected, checkpoint_state(config.dir / f"learner-{index}" / "checkpoints" / "step-0000000020"))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradients_cross_ranks_once_a_step_and_what_is_left_alone_stays(tiny: Tiny, group: dist.ProcessGroup) -> None:
    config = tiny("train.accumulate=4")
    model = build_model(config.model, 256, 32, config.run.seed)
    wrapped = DistributedDataParallel(model, process_group=group)
    crossings: list[int] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        crossings.append(bucket.index())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, hook)
    inner = InnerStep(wrapped, make_optimizer(model, config), config.train, torch.device("cpu"))
    batch = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        inner.run(batch, 1.0)
    assert len(crossings) == 3 * len(set(crossings))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inner.exclude(untrained_parameters(model, ["model.layers.*"]))
    inner.run(batch, 1.0)
    changed = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert changed == {name for name in before if name.startswith("model.layers.")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--collective"], "--collective needs torchrun"),
        (["--collective", "--alone"], "drop the other options"),
        (["--collective", "--shard", "0"], "drop the other options"),
    ],
)
def test_collective_without_ranks_is_refused(
    tiny: Tiny, tmp_path: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from diloco.cli import main

    (tmp_path / "run.toml").write_text(dump_config(tiny()), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.toml"), *arguments])
    assert ended.value.code == 2
    assert message in capfd.readouterr().err


def test_a_pool_has_no_effect_over_a_process_group_and_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from diloco.cli import main

    (tmp_path / "run.toml").write_text(dump_config(tiny("pool.schedule='ramp up'")), encoding="utf-8")
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("RANK", "0")):  # a rank of a torchrun, as far as it knows
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.toml"), "--collective"])
    assert ended.value.code == 2
    assert "[pool] needs a syncer" in capfd.readouterr().err


@pytest.mark.slow
def test_two_ranks_hold_a_part_of_the_experts_beside_a_process_with_the_others(tiny: Tiny, tmp_path: Path) -> None:
    mixture = "type='mixtral', num_local_experts=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2"
    overrides = (
        f"model={{{mixture}, num_attention_heads=2, num_key_value_heads=2}}",
        DILOCO_6.replace("sync_every=6", "sync_every=6, fragments={type='Experts', groups=4, trunk={type='Whole'}}"),
        "warm_start.steps=6", "checkpoint.every_steps=12", "run.tokens=512_000", "run.steps=24", "schedule.steps=24",
    )  # fmt: skip
    method = method_from_table(tiny(*overrides).method)
    with Syncer("tiny", method, Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        own, other = (
            tiny(f"syncer.address={syncer.address}", f"train.holds_experts='{held}'", *overrides)
            for held in ("0-3", "4-7")
        )
        with torchrun(other, tmp_path / "job", "--shard", "1", "--json") as process:
            part = LearnerSpec("learner-0", initialise=True)
            alone = Trainer(own, part, attach=_connector(own, part, StopRequest())).train()
            summary = json.loads(finish(process))
    assert (alone.metrics["versions"], summary["metrics"]["versions"]) == ([3, 3, -1, -1, 3], [-1, -1, 3, 3, 3])
    saved = load_checkpoint(list_checkpoints(other.dir / "learner-1" / "checkpoints")[-1])
    assert (saved["step"], saved["held"]) == (24, [4, 5, 6, 7])
    shapes = {each.shape for state in saved["optimizer"]["state"].values() for each in state.values()}
    assert torch.Size((4, 16, 24)) in shapes
    assert all(shape[:1] != (8,) for shape in shapes)

    ranks = RankGroup()
    ranks.size = 2
    with pytest.raises(ConfigError, match="a learner of several ranks that holds a part of the experts"):
        Trainer(own, part, ranks=ranks)
