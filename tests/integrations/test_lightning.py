"""`DilocoCallback` in real Lightning Trainers with a real syncer: learners, their checkpoints, what is refused."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.harness import (
    ROOT,
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
from tests.syncer.runs import RUN, method, num_live, position, start
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import diloco
from diloco import errors
from diloco.demo.plan import free_port
from diloco.event_log import read_events
from diloco.events import Left
from diloco.following.follower import newest_model
from diloco.syncer.server import Syncer

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from diloco.integrations.lightning import DilocoCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # the data are in memory
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),  # Lightning
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # torchdata
]


class Body:
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return (self(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Net(Body, lightning.LightningModule):  # type: ignore[misc, name-defined]
    pass


class Data(torch.utils.data.Dataset):
    def __init__(self, index: int, size: int = 1000) -> None:
        generator = torch.Generator().manual_seed(index)
        self.x, self.y = torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def fit(
    index: int, address: str, steps: int, directory: Path | None = None, *, resume: bool = False,
    net: Callable[[], Any] = Net, callbacks: tuple[Any, ...] = (), trainer: dict[str, Any] | None = None,
    library: Any = lightning, validates: bool = False, save_every: int = 12, **options: Any,
) -> Any:  # fmt: skip
    """A learner's life in Lightning: a Trainer that stops after `steps` and leaves its checkpoint in a directory."""
    module, generator = net(), torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    exchange = diloco.connect(address, run=RUN, learner=f"learner-{index}", initialise=index == 0 and not resume)
    OPENED.append(exchange)
    callback = DilocoCallback(exchange, tokens=lambda batch: len(batch[0]), **options)
    saved = None if directory is None else directory / f"of-{index}" / "saved.ckpt"
    if saved is not None:
        callbacks = (*callbacks, ModelCheckpoint(saved.parent, saved.stem, every_n_train_steps=save_every))
    it = library.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=saved is not None, callbacks=[callback, *callbacks], **(trainer or {}),
    )  # fmt: skip
    judged = torch.utils.data.DataLoader(Data(9), batch_size=5) if validates else None
    it.fit(module, StatefulDataLoader(Data(index), batch_size=5), judged, ckpt_path=saved if resume else None)
    return module, callback


OPENED: list[Any] = []
"""Exchanges of the learners of a test."""


def together(*lives: Callable[[], Any]) -> list[Any]:
    """Lives of learners in threads. The first that fails ends the others, which would wait for it."""
    OPENED.clear()
    with warnings.catch_warnings(), ThreadPoolExecutor(len(lives)) as pool:
        warnings.simplefilter("ignore")  # libraries that catch warnings in one thread change the filters of the others
        futures = [pool.submit(life) for life in lives]
        try:
            for life in as_completed(futures, timeout=300):
                life.result()
        except BaseException:
            for exchange in OPENED:
                exchange.close()
            raise
        return [life.result() for life in futures]


def two(tmp_path: Path, steps: int, given: diloco.Method | None = None, **options: Any) -> list[Any]:
    with start(tmp_path, given or method(at_least=2)) as syncer:
        return together(*(lambda i=i: fit(i, syncer.address, steps, **options) for i in range(2)))


def own(callback: DilocoCallback) -> dict[str, torch.Tensor]:
    """The learner's own parameters at its end."""
    return callback.state_dict()["ranks"][0]["parameters"]  # type: ignore[no-any-return]


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_both_learners_agree_to_the_bit(tmp_path: Path) -> None:
    (one, callback), (other, _) = two(tmp_path, 12)
    assert same(one.state_dict(), other.state_dict())
    assert callback.learner.metrics()["merges"] > 0


def test_accumulated_batches_are_one_step_with_the_tokens_of_all(tmp_path: Path) -> None:
    with start(tmp_path, method(at_least=2)) as syncer:
        trainer = {"accumulate_grad_batches": 3}
        lives = together(*(lambda i=i: fit(i, syncer.address, 8, trainer=trainer) for i in range(2)))
        assert position(syncer) == (8, 8 * 3 * 5 * 2)
    assert [callback.learner.steps for _, callback in lives] == [8, 8]


class Adversarial(Net):
    """Two optimizers, both of which step in every batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        return [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in self.layers], []


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")  # the state after it is meant
@pytest.mark.parametrize(("net", "num_optimizers"), [(Net, 1), (Adversarial, 2)])
def test_resume_from_a_checkpoint_has_the_bits_of_no_interruption(
    net: type[Net], num_optimizers: int, tmp_path: Path
) -> None:
    """In Lightning's order: the module, this callback's state, then the optimizers. In the middle of an epoch, with a
    send in flight. Lightning counts the steps of all optimizers."""
    given, end, stop = method(at_least=2, codec="e3m0"), 22 * num_optimizers, 12 * num_optimizers
    both = {"net": net, "save_every": stop}
    undisturbed = two(tmp_path / "undisturbed", end, given, **both)
    with start(tmp_path, given) as syncer:
        together(*(lambda i=i: fit(i, syncer.address, stop, tmp_path, **both) for i in range(2)))
        again = together(*(lambda i=i: fit(i, syncer.address, end, tmp_path, resume=True, **both) for i in range(2)))
    for (mine, callback), (theirs, other) in zip(again, undisturbed, strict=True):
        assert same(mine.state_dict(), theirs.state_dict())  # the global model
        assert same(own(callback), own(other))
        assert callback.learner.steps == other.learner.steps == 22


class Judged(Net):
    """Keeps the weights that were validated, by the trainer's step."""

    def on_fit_start(self) -> None:
        self.judged: dict[int, dict[str, torch.Tensor]] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.judged[self.global_step] = {name: value.clone() for name, value in self.state_dict().items()}


@pytest.mark.parametrize("validate", ["global", "local"])
def test_validation_is_of_the_global_model_unless_told_otherwise(validate: str, tmp_path: Path) -> None:
    trainer = {"val_check_interval": 7, "num_sanity_val_steps": 0, "limit_val_batches": 1}  # then nothing is on its way
    (one, _), (other, _) = two(tmp_path, 7, net=Judged, trainer=trainer, validate=validate, validates=True)
    assert one.judged.keys() == other.judged.keys() == {7}
    assert same(one.judged[7], other.judged[7]) == (validate == "global")


class Manual(Net):
    """Steps its optimizer by itself, after every second batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_counts_the_batches_in_which_an_optimizer_steps(tmp_path: Path) -> None:
    with start(tmp_path, method(at_least=2)) as syncer:
        lives = together(*(lambda i=i: fit(i, syncer.address, 8, net=Manual) for i in range(2)))
        assert position(syncer) == (8, 8 * 2 * 5 * 2)
    (one, _), (other, _) = lives
    assert same(one.state_dict(), other.state_dict())


class Overflowing(Net):
    """Its second batch has gradients that are not finite, which the scaler skips."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 else loss


def test_a_step_that_the_scaler_skips_is_none(tmp_path: Path) -> None:
    def trainer() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        plugin = lightning.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        return {"plugins": [plugin], "limit_train_batches": 9, "max_epochs": 1}

    with start(tmp_path, method(at_least=2)) as syncer:
        lives = together(*(
            lambda i=i: fit(i, syncer.address, -1, net=Overflowing, trainer=trainer()) for i in range(2)
        ))  # fmt: skip
        assert position(syncer) == (8, 9 * 5 * 2)
    (one, callback), (other, _) = lives
    assert callback.learner.steps == 8
    assert same(one.state_dict(), other.state_dict())


def test_it_works_with_the_package_of_the_older_name(tmp_path: Path) -> None:
    older = pytest.importorskip("pytorch_lightning")

    class Older(Body, older.LightningModule):  # type: ignore[misc, name-defined]
        pass

    (one, callback), (other, _) = two(tmp_path, 8, net=Older, library=older)
    assert same(one.state_dict(), other.state_dict())
    assert callback.learner.metrics()["merges"] > 0


class FSDPOnTheCPU(lightning.strategies.FSDPStrategy):  # type: ignore[misc, name-defined]
    """Lightning itself refuses `FSDPStrategy` on the CPU, by its exact type."""


@pytest.mark.parametrize(
    ("trainer", "callbacks", "message"),
    [
        ({"strategy": FSDPOnTheCPU()}, (), "FSDPOnTheCPU.* ModelParallelStrategy"),
        ({}, (lightning.callbacks.StochasticWeightAveraging(0.1),), "StochasticWeightAveraging"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run_is_joined(
    trainer: dict[str, Any], callbacks: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        fit(0, "127.0.0.1:1", 4, trainer=trainer, callbacks=callbacks)


def test_a_failing_training_step_leaves_the_run(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise RuntimeError("in the middle of training")
            return super().training_step(batch, batch_idx)

    with start(tmp_path, method()) as syncer:
        with pytest.raises(RuntimeError, match="in the middle"):
            fit(0, syncer.address, 8, net=Failing)
        assert num_live(syncer) == 0


def test_a_callback_trains_once(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        callback = DilocoCallback(diloco.connect(syncer.address, run=RUN, learner="once", initialise=True))
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[callback],
        )  # fmt: skip
        module, loader = Net(), StatefulDataLoader(Data(0), batch_size=5)
        trainer.fit(module, loader)
        trainer.fit_loop.epoch_loop.max_steps = 8
        with pytest.raises(errors.ConfigError, match="has already trained"):
            trainer.fit(module, loader)


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.delitem(sys.modules, "diloco.integrations.lightning")
    with pytest.raises(errors.ConfigError, match=re.escape("diloco[lightning]")):
        importlib.import_module("diloco.integrations.lightning")


IMPORTS = (
    "lightning", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "diloco.integrations.lightning",
)  # fmt: skip


def start_learner(
    scripts: Scripts, syncer: Syncer, directory: Path, index: int, kind: str, ranks: int, *arguments: str,
    kill_after: int | None = None,
) -> list[Process]:  # fmt: skip
    """A learner of one or more ranks, as torchrun starts them."""
    name = f"learner-{index}"
    world = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": name,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
    }  # fmt: skip
    return [
        scripts.start(
            ROOT / "tests" / "integrations" / "lightning_ranks.py", syncer.address, name, str(STEPS), str(SAVE_EVERY),
            str(directory / name), kind, *arguments, log=directory / f"{name}-{len(scripts.started)}.log",
            imports=IMPORTS, kill_after=kill_after,
            environment={key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()},
        )
        for rank in range(ranks)
    ]  # fmt: skip


def assert_validated(model: dict[str, torch.Tensor], said: str, dtype: torch.dtype) -> None:
    """At the run's end, this model was."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in model.items()})
    loss = layers.to(dtype)(torch.ones(5, 4, dtype=dtype)).float().square().mean().item()
    found = re.search(rf"^validated {STEPS} (\S+)$", said, re.MULTILINE)
    assert found is not None, said
    assert float(found[1]) == pytest.approx(loss, rel=1e-5)


KINDS = {
    "ddp": (2, 2, 2, torch.float32),
    "fsdp": (2, 1, 2, torch.bfloat16),
    "fsdp-one-file": (2, 2, 2, torch.bfloat16),
    "tensor": (2, 2, 1, torch.float32),
}
"""Ranks before and after the interruption, batches that they have in a step, and the type that they compute in."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [pytest.param(each, marks=pytest.mark.slow) for each in KINDS])
def test_ranks_are_one_learner_and_resume_together(kind: str, tmp_path: Path) -> None:
    """Two ranks and a single process train one run, and validate its model. All are killed and resumed, with as many
    ranks or others, and end with the bits of a run without an interruption."""
    ranks, ranks_after, batches, dtype = KINDS[kind]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
        with serve(directory / "syncer") as syncer, running() as scripts:
            kill_after, expect = (None, 0) if directory is whole else (SAVE_EVERY + 1, -9)
            job = start_learner(scripts, syncer, directory, 0, kind, ranks, "--initialise", kill_after=kill_after)
            other = start_learner(scripts, syncer, directory, 1, "one", 1, kill_after=kill_after)
            end_all([*job, *other], expect=expect)
            if directory is broken:
                job = start_learner(scripts, syncer, directory, 0, kind, ranks_after, "--resume")
                other = start_learner(scripts, syncer, directory, 1, "one", 1, "--resume")
                end_all([*job, *other])
            final = newest_model(syncer.address, run=RUN).state_dict()
        for index, (processes, precision) in enumerate([(job, dtype), (other, torch.float32)]):
            assert_same(model_of(directory / f"learner-{index}"), final)
            assert_validated(final, processes[0].said, precision)
    assert_same(model_of(broken / "learner-0"), model_of(whole / "learner-0"))
    tokens = {e.learner: e.tokens for e in read_events(whole / "syncer" / "events.jsonl") if isinstance(e, Left)}
    assert tokens == {"learner-0": batches * STEPS * 5, "learner-1": STEPS * 5}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_job_that_was_killed_returns(tmp_path: Path) -> None:
    """From its checkpoint, when the run has gone on."""
    with serve(tmp_path / "syncer") as syncer, running() as scripts:
        stays = start_learner(scripts, syncer, tmp_path, 1, "one", 1, "--initialise")
        killed = start_learner(scripts, syncer, tmp_path, 0, "fsdp", 2, kill_after=STEPS - 1)
        end_all(killed, expect=-9)
        returns = start_learner(scripts, syncer, tmp_path, 0, "fsdp", 2, "--resume")
        end_all([*stays, *returns])
        assert "the run has advanced since step 6" in returns[0].said
        for index in range(2):
            assert_same(model_of(tmp_path / f"learner-{index}"), newest_model(syncer.address, run=RUN).state_dict())
