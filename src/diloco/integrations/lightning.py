"""A learner in the `Trainer` of Lightning.

    trainer = Trainer(…, callbacks=[DilocoCallback(diloco.connect("syncer.example.org:7700", run="demo", …))])
    trainer.fit(module, loader, ckpt_path=…)     # as before

Lightning validates and saves the global model, and the module holds it after training. What the learner needs to
continue, its own parameters included, is in the checkpoint under this callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from diloco.core.method import Method
from diloco.errors import CheckpointError, ConfigError, DilocoError
from diloco.exchange.base import Exchange
from diloco.exchange.group import Group
from diloco.integrations.common import forward_schedule, required_library
from diloco.learner import Learner
from diloco.learner.roles import Buffers, Static
from diloco.training.checkpoint import from_bytes, to_bytes

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    with required_library("pytorch_lightning", extra="lightning"):
        from pytorch_lightning import LightningModule, Trainer  # type: ignore[assignment]
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]

log = logging.getLogger("diloco")

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Those whose optimizers train the module's own parameters, whole or as DTensors, by the names of their classes."""


class DilocoCallback(Callback):
    """Makes a `fit` of a Lightning Trainer one learner of a run. All ranks of a Trainer are one learner.

    A step of the learner is a training batch in which an optimizer has stepped: with automatic optimization a step of
    the optimizer, however many batches accumulate in it; with manual optimization a batch, however many optimizers step
    in it. A step that a gradient scaler skips is none. The tokens of a step are those of all batches since the last.

    `max_steps` is the length of the run: a learner that joins it later, or returns, starts its learning rate schedule
    at the run's step and trains up to the run's end.

    `fit(ckpt_path=…)` continues with the same bits where the run has not gone on without this learner, and from the
    run's newest model where it has. Distributed checkpoints of `ModelParallelStrategy` continue with any number of
    ranks, others with as many as before.

    Arguments:
        exchange: from `diloco.connect(…)`; a callback and its exchange serve one `fit`.
        method, trains, overlap, buffers, static, rewarm_steps: as `Learner` takes them.
        tokens: counts the tokens of a batch, on this rank. None: a batch is one, so that all steps weigh the same.
            Ranks that share a batch (`tensor_parallel_size`) count it once.
        validate: what `fit` validates: the "global" model, or this learner's own ("local"). The sanity check before
            training validates the module as given.

    Attributes:
        learner: the learner, from the beginning of training on; closed when training ends.

    Raises:
        ConfigError: when `fit` begins, what cannot work with Lightning, and what `Learner` refuses.
        CheckpointError: the checkpoint is of a job with another number of ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        method: Method | None = None,
        trains: Sequence[str] | None = None,
        overlap: int | None = None,
        buffers: Buffers | Mapping[str, Buffers] = "refuse",
        static: Static = "exchange",
        rewarm_steps: int | None = None,
        tokens: Callable[[Any], int] | None = None,
        validate: Literal["global", "local"] = "global",
    ) -> None:
        self.learner: Learner | None = None
        self._exchange, self._method, self._trains, self._overlap = exchange, method, trains, overlap
        self._buffers, self._static, self._rewarm_steps = buffers, static, rewarm_steps
        self._count_tokens, self._validates_global = tokens, validate == "global"
        self._state: Mapping[str, Any] = {}  # before training what was loaded, after it the last
        self._entry: str | None = None  # of a distributed checkpoint, where the learner's state is
        self._parts: dict[str, Any] = {}  # after training the last, as it is saved there
        self._tokens = 0  # since the last step
        self._has_stepped = self._is_over = self._is_closed = False
        self._hooks, self._global_model = ExitStack(), ExitStack()

    # --- beginning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is loaded or built."""
        if stage == "fit":
            _refuse(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run; where `fit` resumes, continue from the checkpoint. Lightning has restored the optimizers."""
        if self.learner is not None:
            raise ConfigError("this DilocoCallback has trained before; make a new one, with an exchange of its own.")
        model = trainer.strategy.model
        assert model is not None
        if self._exchange.dials_out and getattr(trainer.strategy, "_save_distributed_checkpoint", False):
            self._entry = f"optimizer_{len(trainer.optimizers)}"
        self.learner = learner = Learner(
            model, trainer.optimizers, method=self._method, exchange=self._exchange, trains=self._trains,
            overlap=self._overlap, buffers=self._buffers, static=self._static, resume=self._state_of_rank(trainer),
            rewarm_steps=self._rewarm_steps,
        )  # fmt: skip
        if (entry := self._state.get("entry")) is not None:
            path = trainer.strategy.broadcast(trainer.ckpt_path)
            assert path is not None
            learner.load_distributed_state_dict(path, entry)
        if learner.method.exchanged == "gradients":
            raise ConfigError(
                "Lightning computes gradients inside optimizer.step(), after they would have been exchanged; use "
                f"strategy='ddp' instead of {learner.method.name}, or a method that exchanges outer gradients."
            )
        saved_steps = int(self._state.get("steps", 0))
        self._state = {}
        if learner.resumed is False:
            log.warning(
                "the run has gone on since step %d, where this checkpoint was saved; %s continues at step %d with the "
                "run's newest model", saved_steps, learner.name, learner.steps
            )  # fmt: skip
        self._follow(trainer, learner.steps - saved_steps)
        for each in trainer.optimizers:
            self._hooks.callback(each.register_step_post_hook(self._stepped).remove)

    def _state_of_rank(self, trainer: Trainer) -> dict[str, Any] | None:
        """From a checkpoint with one state for each rank."""
        ranks: Sequence[dict[str, Any]] | None = self._state.get("ranks")
        if ranks is None:
            return None
        if len(ranks) != trainer.world_size:
            raise CheckpointError(
                f"the checkpoint is of a job of {len(ranks)} ranks, and this one has {trainer.world_size}; use as many."
            )
        return deepcopy(ranks[trainer.global_rank])  # Lightning may have mapped the file into memory

    def _follow(self, trainer: Trainer, num_missed: int) -> None:
        """The run has taken steps that this Trainer has not."""
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
        """One step of the learner, where an optimizer has stepped."""
        if _counts(trainer):
            self._tokens += 1 if self._count_tokens is None else self._count_tokens(batch)
        if not self._has_stepped or self._is_over:
            return
        assert self.learner is not None
        before = self.learner.steps
        self.learner.step(tokens=self._tokens)
        self._tokens, self._has_stepped = 0, False
        self._follow(trainer, self.learner.steps - before - 1)  # it was evicted and has rejoined

    # --- validation and checkpoints -----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the global weights in."""
        if self._validates_global and self.learner is not None and self._is_training:
            self._global_model.enter_context(self.learner.global_model())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the learner's own weights back."""
        self._global_model.close()

    def state_dict(self) -> dict[str, Any]:
        """What the learner needs to continue, of all ranks; before training what was loaded, after it the last.

        A distributed checkpoint has it in an entry of its own (`on_save_checkpoint`), which is named here.
        """
        if not self._is_training:
            return dict(self._state)
        assert self.learner is not None
        saved = {"ranks": _gathered(self.learner.state_dict())} if self._entry is None else {"entry": self._entry}
        return {"steps": self.learner.steps, **saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training begins."""
        self._state = state_dict

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The model of a checkpoint is the global one. A distributed one has the learner's state beside those of the
        optimizers."""
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
        """Leave the run, with its newest model in the module."""
        assert self.learner is not None
        with self._hooks:
            self.learner.finish()
            self._state, self._parts = self.state_dict(), self._own_parts()  # with the answers that are on their way
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
    """Whether this rank is the one to count a batch that several ranks have, as tensor parallel ones do."""
    if "ModelParallelStrategy" not in _names(trainer.strategy):
        return True
    mesh: DeviceMesh = trainer.strategy.device_mesh  # type: ignore[attr-defined]
    return mesh.get_local_rank("tensor_parallel") == 0


_GATHER_TIMEOUT_S = 1800.0


def _gathered(state: dict[str, Any]) -> list[Any]:
    """The states of all ranks, on rank 0, which saves them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [state]
    group, mine = Group(None, timeout_s=_GATHER_TIMEOUT_S), to_bytes(state)
    try:
        sizes = group.gather_values(mine.numel(), "the sizes of what ranks save")
        joined = group.collect(mine, sizes, "what ranks save")
    finally:
        group.disconnect()
    return [from_bytes(raw) for raw in joined.split(sizes)] if group.rank == 0 else []


def _refuse(trainer: Trainer) -> None:
    """Refuse what cannot work with Lightning."""
    strategy = trainer.strategy
    if _names(strategy).isdisjoint(STRATEGIES):
        raise ConfigError(
            f"the Trainer's strategy is {type(strategy).__name__}, which shards or copies parameters in a way that "
            "checkpoints and adoption do not follow; use strategy='auto' on one device, 'ddp', or "
            "ModelParallelStrategy with fully_shard in configure_model."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set by a connector of Lightning's
        if "StochasticWeightAveraging" in _names(callback):
            raise ConfigError(
                "StochasticWeightAveraging replaces the weights behind the learner; leave it out, since the global "
                "model is an average already."
            )
        if "WeightAveraging" in _names(callback):
            raise ConfigError(
                f"{type(callback).__name__} validates and saves its own average of this learner's weights in place of "
                "the global model; leave it out."
            )
        if getattr(callback, "save_weights_only", False):
            raise ConfigError(
                "ModelCheckpoint(save_weights_only=True) leaves callbacks out and would save this learner's own "
                "weights; leave save_weights_only out, which saves the global model."
            )


def _names(thing: object) -> set[str]:
    return {base.__name__ for base in type(thing).__mro__}


def _saves_on_exception(callback: object) -> bool:
    return "OnExceptionCheckpoint" in _names(callback) or bool(getattr(callback, "save_on_exception", False))
