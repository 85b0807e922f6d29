"""A learner in the `Trainer` of Lightning.

    trainer = Trainer(…, callbacks=[DilocoCallback(diloco.connect("syncer.example.org:7700", run="demo", …))])
    trainer.fit(module, loader, ckpt_path=…)     # as before

Lightning validates and saves the global model, and the module contains it after training. The learner's state,
including its own parameters, is saved in the checkpoint under this callback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, Literal, Unpack

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from diloco.errors import CheckpointError, ConfigError, DilocoError, required_library
from diloco.exchange.base import Exchange
from diloco.exchange.group import Group
from diloco.integrations.common import LearnerOptions, forward_schedule, learner_with, steps_missed
from diloco.learner import Learner
from diloco.training.checkpoint import from_bytes, to_bytes

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    with required_library("pytorch_lightning", extra="lightning"):
        from pytorch_lightning import LightningModule, Trainer  # type: ignore[assignment]
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Class names of the supported strategies: their optimizers train the module's own parameters, whole or as DTensors."""


class DilocoCallback(Callback):
    """Makes a `fit` of a Lightning Trainer one learner of a run. All ranks of a Trainer are one learner.

    A step of the learner is a training batch in which an optimizer has stepped. With automatic optimization that is a
    step of the optimizer, over all accumulated batches; with manual optimization it is a batch, for any number of
    optimizers. A step that a gradient scaler skips does not count. The tokens of a step are those of all batches since
    the previous step.

    `max_steps` is the length of the run: a learner that joins or rejoins later starts its learning rate schedule at the
    run's step and trains to the end of the run.

    `fit(ckpt_path=…)` continues with the same bits if the run has not advanced without this learner, and otherwise from
    the run's newest model. A distributed checkpoint of `ModelParallelStrategy` can be resumed with any number of ranks,
    other checkpoints with the same number.

    Arguments:
        exchange: from `diloco.connect(…)`; a callback and its exchange serve one `fit`.
        tokens: counts the tokens of a batch on this rank. None: every batch counts as one token. Ranks that share a
            batch (`tensor_parallel_size`) count it once.
        validate: the model that `fit` validates: the "global" model, or this learner's own ("local"). The sanity check
            before training validates the module as given.
        options: arguments of `Learner`: method, trains, overlap, buffers, static, rewarm_steps.

    Attributes:
        learner: the learner, from the start of training; closed when training ends.

    Raises:
        ConfigError: when `fit` starts: an unsupported setting of Lightning, and as `Learner`.
        CheckpointError: the checkpoint is of a job with another number of ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        tokens: Callable[[Any], int] | None = None,
        validate: Literal["global", "local"] = "global",
        **options: Unpack[LearnerOptions],
    ) -> None:
        self.learner: Learner | None = None
        self._exchange, self._make = exchange, learner_with(exchange, **options)
        self._count_tokens, self._validates_global = tokens, validate == "global"
        self._state: Mapping[str, Any] = {}  # before training the loaded state, after it the final one
        self._entry: str | None = None  # entry of a distributed checkpoint that contains the learner's state
        self._parts: dict[str, Any] = {}  # after training the final state for that entry
        self._tokens = 0  # since the last step
        self._has_stepped = self._is_over = self._is_closed = False
        self._hooks, self._global_model = ExitStack(), ExitStack()

    # --- beginning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported settings before anything is loaded or built."""
        if stage == "fit":
            _refuse(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, and restore the learner if `fit` resumes. Lightning has restored the optimizers."""
        if self.learner is not None:
            raise ConfigError("this DilocoCallback has already trained; make a new one with a new exchange.")
        model = trainer.strategy.model
        assert model is not None
        if self._exchange.dials_out and getattr(trainer.strategy, "_save_distributed_checkpoint", False):
            self._entry = f"optimizer_{len(trainer.optimizers)}"
        self.learner = learner = self._make(model, trainer.optimizers, resume=self._state_of_rank(trainer))
        if (entry := self._state.get("entry")) is not None:
            path = trainer.strategy.broadcast(trainer.ckpt_path)
            assert path is not None
            learner.load_distributed_state_dict(path, entry)
        if learner.method.exchanged == "gradients":
            raise ConfigError(
                "Lightning computes gradients inside optimizer.step(), which is too late to exchange them; use "
                f"strategy='ddp' instead of {learner.method.name}, or a method that exchanges outer gradients."
            )
        saved_steps = int(self._state.get("steps", 0))
        self._state = {}
        self._follow(trainer, steps_missed(learner, saved_steps))
        for each in trainer.optimizers:
            self._hooks.callback(each.register_step_post_hook(self._stepped).remove)

    def _state_of_rank(self, trainer: Trainer) -> dict[str, Any] | None:
        """This rank's state, of a checkpoint with one state per rank."""
        ranks: Sequence[dict[str, Any]] | None = self._state.get("ranks")
        if ranks is None:
            return None
        if len(ranks) != trainer.world_size:
            raise CheckpointError(
                f"the checkpoint is of a job of {len(ranks)} ranks, and this one has {trainer.world_size}; "
                "use the same number."
            )
        return deepcopy(ranks[trainer.global_rank])  # Lightning may have mapped the file into memory

    def _follow(self, trainer: Trainer, num_missed: int) -> None:
        """Advance the schedules by steps that the Trainer has missed, and stop the Trainer at the end of the run."""
        assert self.learner is not None
        if trainer.lightning_module.automatic_optimization:
            for each in trainer.lr_scheduler_configs:
                if each.interval == "step":
                    forward_schedule(each.scheduler, num_missed // each.frequency)
        if self.learner.drained or 0 <= trainer.max_steps <= self.learner.steps:
            trainer.should_stop = self._is_over = True

    # --- steps --------------------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._has_stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Make a step of the learner if an optimizer has stepped."""
        if _counts(trainer):
            self._tokens += 1 if self._count_tokens is None else self._count_tokens(batch)
        if not self._has_stepped or self._is_over:
            return
        assert self.learner is not None
        before = self.learner.steps
        self.learner.step(tokens=self._tokens)
        self._tokens, self._has_stepped = 0, False
        self._follow(trainer, self.learner.steps - before - 1)  # missed before a rejoin

    # --- validation and checkpoints -----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the global weights into the module."""
        if self._validates_global and self.learner is not None and self._is_training:
            self._global_model.enter_context(self.learner.global_model())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the learner's own weights."""
        self._global_model.close()

    def state_dict(self) -> dict[str, Any]:
        """The learner's state of all ranks; before training the loaded state, after it the final one.

        A distributed checkpoint has the state in a separate entry (`on_save_checkpoint`), which is named here.
        """
        if not self._is_training:
            return dict(self._state)
        assert self.learner is not None
        saved = {"ranks": _gathered(self.learner.state_dict())} if self._entry is None else {"entry": self._entry}
        return {"steps": self.learner.steps, **saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._state = state_dict

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the global model, and in a distributed checkpoint the learner's state beside the optimizers'."""
        parts = self._parts
        if self.learner is not None and self._is_training:
            with self.learner.global_model():
                checkpoint["state_dict"] = _copied(trainer.strategy.lightning_module_state_dict())
            parts = self._own_parts()
        if self._entry is not None:
            checkpoint["optimizer_states"].append(parts)

    def _own_parts(self) -> dict[str, Any]:
        assert self.learner is not None
        return {} if self._entry is None else self.learner.distributed_state_dict()

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run, and load its newest model into the module."""
        assert self.learner is not None
        with self._hooks:
            self.learner.finish()
            self._state, self._parts = self.state_dict(), self._own_parts()  # with the answers that are in flight
            with self.learner.global_model():
                final = _copied(pl_module.state_dict())
            pl_module.load_state_dict(final)
            self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run, so that no round waits for this learner."""
        if not self._is_training:
            return
        with self._hooks, self._global_model:
            if any(map(_saves_on_exception, trainer.checkpoint_callbacks)) and not isinstance(exception, DilocoError):
                self._state, self._parts = self.state_dict(), self._own_parts()
            self._close()

    @property
    def _is_training(self) -> bool:
        return self.learner is not None and not self._is_closed

    def _close(self) -> None:
        assert self.learner is not None
        self._is_closed = True
        self.learner.close()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _counts(trainer: Trainer) -> bool:
    """Whether this rank counts a batch that several ranks share, as in tensor parallelism."""
    if "ModelParallelStrategy" not in _names(trainer.strategy):
        return True
    mesh: DeviceMesh = trainer.strategy.device_mesh  # type: ignore[attr-defined]
    return mesh.get_local_rank("tensor_parallel") == 0


_GATHER_TIMEOUT_S = 1800.0


def _gathered(state: dict[str, Any]) -> list[Any]:
    """The states of all ranks on rank 0, which saves them; empty on the others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [state]
    group, mine = Group(None, timeout_s=_GATHER_TIMEOUT_S), to_bytes(state)
    try:
        sizes = group.gather_values(mine.numel(), "the sizes of checkpoint parts")
        joined = group.collect(mine, sizes, "checkpoint parts")
    finally:
        group.disconnect()
    return [from_bytes(raw) for raw in joined.split(sizes)] if group.rank == 0 else []


def _refuse(trainer: Trainer) -> None:
    """Refuse unsupported settings of Lightning."""
    strategy = trainer.strategy
    if _names(strategy).isdisjoint(STRATEGIES):
        raise ConfigError(
            f"the Trainer's strategy is {type(strategy).__name__}, which shards or copies parameters in a way that "
            "checkpoints and adoption do not support; use strategy='auto' on one device, 'ddp', or "
            "ModelParallelStrategy with fully_shard in configure_model."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set by a connector of Lightning
        if not _names(callback).isdisjoint({"StochasticWeightAveraging", "WeightAveraging"}):
            raise ConfigError(
                f"{type(callback).__name__} puts an average of this learner's own weights in the place of the global "
                "model, which is an average already; remove it."
            )
        if getattr(callback, "save_weights_only", False):
            raise ConfigError(
                "ModelCheckpoint(save_weights_only=True) omits callbacks and would save this learner's own weights; "
                "remove save_weights_only to save the global model."
            )


def _names(thing: object) -> set[str]:
    return {base.__name__ for base in type(thing).__mro__}


def _saves_on_exception(callback: object) -> bool:
    return "OnExceptionCheckpoint" in _names(callback) or bool(getattr(callback, "save_on_exception", False))
