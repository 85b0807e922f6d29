"""`DilocoCallback` in a Trainer: what the Trainer evaluates, saves and ends with, what it counts, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tests.integrations.harness import RUN, TIMEOUT_S, assert_same, serve
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import diloco
from diloco.errors import CheckpointError, ConfigError
from diloco.event_log import read_events
from diloco.events import Left
from diloco.integrations.transformers import DilocoCallback
from diloco.syncer.server import Syncer

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

METHOD = diloco.StreamingDiLoCo(sync_every=4, overlap=1, fragments=diloco.Balanced(2))
"""Mixed adoption: a learner's own weights are never the global ones."""


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with serve(tmp_path / "syncer", METHOD) as syncer:
        yield syncer


def data(num_rows: int = 40) -> Dataset:
    rows = [[(7 * row + 3 * column) % 32 for column in range(8)] for row in range(num_rows)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8,
        )
    )  # fmt: skip


def dial(syncer: Syncer, *, initialise: bool = True, learner: str = "a") -> Any:
    return diloco.connect(syncer.address, run=RUN, learner=learner, initialise=initialise, join_timeout_s=TIMEOUT_S)


def make(
    directory: Path, callback: TrainerCallback | list[TrainerCallback], *, model: nn.Module | None = None,
    rows: int = 40, **values: Any,
) -> Trainer:  # fmt: skip
    """A Trainer of 10 steps of two batches of 2 windows of 8 tokens."""
    settings: dict[str, Any] = {
        "max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "save_strategy": "no", **values,
    }  # fmt: skip
    arguments = TrainingArguments(
        str(directory / "out"), report_to="none", use_cpu=True, disable_tqdm=True, seed=3, **settings
    )
    callbacks = callback if isinstance(callback, list) else [callback]
    return Trainer(
        tiny() if model is None else model, arguments, train_dataset=data(rows), eval_dataset=data(8),
        callbacks=callbacks,
    )  # fmt: skip


def copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


class Watch(TrainerCallback):
    """Keeps what is in the model at an event, and what the learner says then."""

    def __init__(self, callback: DilocoCallback) -> None:
        self.callback = callback
        self.at: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.said: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.losses: dict[int, float] = {}

    def _keep(self, event: str, state: TrainerState, model: nn.Module) -> None:
        assert self.callback.learner is not None
        self.at[event, state.global_step] = copy(model)
        self.said[event, state.global_step] = self.callback.learner.global_state_dict()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._keep("begin", state, given["model"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._keep("evaluate", state, given["model"])
        self.losses[state.global_step] = given["metrics"]["eval_loss"]


def loaded(directory: Path) -> dict[str, Tensor]:
    return dict(LlamaForCausalLM.from_pretrained(directory).state_dict())


def test_the_global_model_is_evaluated_saved_and_left_in_the_model(syncer: Syncer, tmp_path: Path) -> None:
    callback = DilocoCallback(dial(syncer))
    watch = Watch(callback)
    trainer = make(
        tmp_path, [watch, callback], eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=6
    )
    trainer.train()
    assert sorted(step for event, step in watch.at if event == "evaluate") == [3, 6, 9, 10]
    for step in (3, 6, 9, 10):
        assert_same(watch.at["evaluate", step], watch.said["evaluate", step])
    own = watch.at["begin", 6]
    assert any(not torch.equal(own[name], value) for name, value in watch.said["begin", 6].items())
    assert_same(loaded(tmp_path / "out" / "checkpoint-6"), watch.said["evaluate", 6])
    assert callback.learner is not None
    final = callback.learner.global_state_dict()
    assert_same(copy(trainer.model), final)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(watch.losses[10])
    trainer.save_model()
    assert_same(loaded(tmp_path / "out"), final)


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_model_is_the_best_global_one(strategy: str, syncer: Syncer, tmp_path: Path) -> None:
    callback = DilocoCallback(dial(syncer))
    watch = Watch(callback)
    trainer = make(
        tmp_path, [watch, callback], eval_strategy="steps", eval_steps=2, save_strategy=strategy, save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,  # so that it is not the last
    )  # fmt: skip
    trainer.train()
    best = max(watch.losses, key=watch.losses.__getitem__)
    assert best < 10
    assert_same(copy(trainer.model), watch.said["evaluate", best])


def test_epochs_and_tokens_of_every_micro_batch(syncer: Syncer, tmp_path: Path) -> None:
    """Two epochs of 5 batches, the last of one window: 3 optimizer steps each, and 9 windows of 8 tokens."""
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, callback, rows=9, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    trainer.train()
    assert callback.learner is not None
    assert (callback.learner.steps, callback.learner.metrics()["tokens"]) == (6, 2 * 9 * 8)


def test_tokens_without_those_of_padding(syncer: Syncer, tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * 8, "attention_mask": [1] * 3 + [0] * 5, "labels": [1] * 8} for _ in range(8)]
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, callback, max_steps=2, include_num_input_tokens_seen="non_padding")
    trainer.train_dataset = Dataset.from_list(rows)
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.metrics()["tokens"] == 8 * 3


def test_a_late_learner_starts_its_schedule_at_the_runs_step(syncer: Syncer, tmp_path: Path) -> None:
    """The run is of 10 steps, and the second learner finds it at its sixth."""
    model = tiny()
    with diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=dial(syncer)) as first:
        for _ in range(6):
            first.step(1)
        first.state_dict()  # the syncer has answered what was sent after the sixth
        callback = DilocoCallback(dial(syncer, initialise=False, learner="b"))
        trainer = make(tmp_path, callback, logging_steps=1, warmup_steps=5, learning_rate=0.1)
        first.finish()
        trainer.train()
    assert callback.learner is not None
    assert callback.learner.steps == 10
    assert trainer.state.global_step == 4  # its own, which say where it is in its data
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.08, 0.06, 0.04, 0.02])


def test_a_learner_that_comes_after_the_runs_end_saves_the_global_model(syncer: Syncer, tmp_path: Path) -> None:
    model = tiny()
    with diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=dial(syncer)) as first:
        for _ in range(4):
            first.step(1)
        first.state_dict()  # the syncer has answered what was sent after the fourth
        callback = DilocoCallback(dial(syncer, initialise=False, learner="b"))
        trainer = make(
            tmp_path, callback, max_steps=3, save_strategy="steps", save_steps=1, gradient_accumulation_steps=1
        )
        first.finish()
        trainer.train()
    assert callback.learner is not None
    assert (callback.learner.steps, callback.learner.metrics()["tokens"]) == (4, 0)
    assert_same(loaded(tmp_path / "out" / "checkpoint-1"), copy(trainer.model))


class Overflows(LlamaForCausalLM):
    """Its first gradient is infinite."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **values: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **values)
        if not hasattr(self, "has_overflowed"):
            self.has_overflowed = True
            output.loss = output.loss * float("inf")
        return output


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])  # a fused one is called, and skips by itself
def test_a_step_that_the_scaler_skips_counts_without_tokens(optim: str, syncer: Syncer, tmp_path: Path) -> None:
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, callback, model=Overflows(tiny().config), max_steps=3, max_grad_norm=0.0, optim=optim)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trainer.train()
    assert callback.learner is not None
    assert (callback.learner.steps, callback.learner.metrics()["tokens"]) == (3, 2 * 4 * 8)


class Fails(LlamaForCausalLM):
    """Has no memory for batches of more than one window."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **values: Any) -> Any:
        if len(input_ids) > 1 and self.training:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(input_ids=input_ids, labels=labels, **values)


@pytest.mark.slow
def test_a_batch_size_that_is_found_keeps_the_learner(syncer: Syncer, tmp_path: Path) -> None:
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, callback, model=Fails(tiny().config), auto_find_batch_size=True)
    trainer.train()
    assert callback.learner is not None
    assert (callback.learner.steps, callback.learner.metrics()["tokens"]) == (10, 10 * 2 * 8)
    assert [event.tokens for event in read_events(tmp_path / "syncer" / "events.jsonl") if isinstance(event, Left)] == [
        10 * 2 * 8
    ]


class Asks(TrainerCallback):
    """Asks for something at the end of a step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **given: Any) -> TrainerControl:
        setattr(control, self.what, True)
        return control


def test_a_save_that_is_asked_for_later_is_refused(syncer: Syncer, tmp_path: Path) -> None:
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, [callback, Asks("should_save")])
    with pytest.raises(ConfigError, match="make DilocoCallback the last callback"):
        trainer.train()
    assert callback.learner is not None
    callback.learner.close()


def test_an_evaluation_of_the_own_model_is_said(
    syncer: Syncer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, [callback, Asks("should_evaluate")], max_steps=1)
    with caplog.at_level(logging.WARNING, "diloco"):
        trainer.train()
    assert "this evaluation used a's own weights" in caplog.text


def test_two_callbacks_are_refused(syncer: Syncer, tmp_path: Path) -> None:
    first, second = (DilocoCallback(dial(syncer, learner=name)) for name in "ab")
    trainer = make(tmp_path, [first, second])
    with pytest.raises(ConfigError, match="two DilocoCallbacks"):
        trainer.train()
    assert first.learner is not None
    first.learner.close()


def test_a_callback_serves_one_training(syncer: Syncer, tmp_path: Path) -> None:
    trainer = make(tmp_path, DilocoCallback(dial(syncer)), max_steps=1)
    trainer.train()
    with pytest.raises(ConfigError, match="has already trained"):
        trainer.train()


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, vectors: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(vectors).squeeze() - labels).square().mean()}


def test_inputs_without_tokens_are_counted_by_the_name_that_the_model_gives(syncer: Syncer, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"vectors": [1.0] * 8, "labels": 0.5} for _ in range(16)])
    callback = DilocoCallback(dial(syncer))
    trainer = make(tmp_path, callback, model=Vectors(), max_steps=2)
    trainer.train_dataset = rows
    with pytest.raises(ConfigError, match=r"set model\.main_input_name"):
        trainer.train()
    assert callback.learner is not None
    callback.learner.close()
    model = Vectors()
    model.main_input_name = "vectors"  # type: ignore[assignment]
    callback = DilocoCallback(dial(syncer, initialise=False))
    trainer = make(tmp_path, callback, model=model, max_steps=2)
    trainer.train_dataset = rows
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.metrics()["tokens"] == 2 * 4 * 8


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdp1_is_refused(syncer: Syncer, tmp_path: Path) -> None:
    """accelerate 1.15 makes it only where there are accelerators."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny()
        model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=torch.device("cpu"))
        trainer = make(tmp_path, DilocoCallback(dial(syncer)), model=model)
        with pytest.raises(ConfigError, match=r"\(FSDP1\) flattens .* fsdp_version=2 in accelerate"):
            trainer.train()
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_without_the_learners_state_is_refused(syncer: Syncer, tmp_path: Path) -> None:
    plain = make(tmp_path, [], max_steps=2, save_strategy="steps", save_steps=2)
    plain.train()
    again = make(tmp_path, DilocoCallback(dial(syncer)), save_strategy="steps", save_steps=4)
    with pytest.raises(CheckpointError, match="saved without a learner's state"):
        again.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_was_moved_is_named_in_the_arguments(syncer: Syncer, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    make(tmp_path, DilocoCallback(dial(syncer)), max_steps=2, **settings).train()
    moved = (tmp_path / "out" / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    lost = make(tmp_path, DilocoCallback(dial(syncer, initialise=False)), max_steps=4, **settings)
    with pytest.raises(CheckpointError, match=r"name it in TrainingArguments\(resume_from_checkpoint=…\)"):
        lost.train(resume_from_checkpoint=str(moved))
    callback = DilocoCallback(dial(syncer, initialise=False))
    found = make(tmp_path, callback, max_steps=4, resume_from_checkpoint=str(moved), **settings)
    found.train(resume_from_checkpoint=str(moved))
    assert callback.learner is not None
    assert (callback.learner.resumed, callback.learner.steps) == (True, 4)


@pytest.mark.parametrize(("values", "message"), [
    ({"deepspeed": "config.json"}, "DeepSpeed trains copies"),
    ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "pushes checkpoints before"),
])  # fmt: skip
def test_what_cannot_work_is_refused_when_training_begins(
    values: dict[str, Any], message: str, syncer: Syncer, tmp_path: Path
) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    for name, value in values.items():  # set here: the constructor would ask for DeepSpeed, and the Trainer for the hub
        setattr(arguments, name, value)
    callback = DilocoCallback(dial(syncer))
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=message):
        callback.on_train_begin(
            arguments, TrainerState(), TrainerControl(), model=model, optimizer=optimizer, lr_scheduler=None
        )


def test_a_hyperparameter_search_is_refused(syncer: Syncer, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    state = TrainerState(is_hyper_param_search=True)
    with pytest.raises(ConfigError, match="hyperparameter search"):
        DilocoCallback(dial(syncer)).on_train_begin(arguments, state, TrainerControl())
