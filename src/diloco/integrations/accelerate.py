"""A learner in a loop that uses accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    learner = AcceleratedLearner(accelerator, model, optimizer, exchange=diloco.connect("syncer.example.org:7700", …))
    for batch in loader:
        with accelerator.accumulate(model):
            …                                                  # backward, optimizer.step, as before
            learner.step(tokens=batch["input_ids"].numel())    # after every micro-batch

`accelerator.save_state` saves the learner's state in the directory `diloco` of its checkpoint. `accelerator.load_state`
restores it; call it after the learner is constructed and before the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from diloco.errors import ConfigError, required_library
from diloco.exchange.base import Exchange
from diloco.integrations.common import LearnerOptions, forward_schedule, load_part, save_part, steps_missed
from diloco.learner import Learner

with required_library("accelerate"):
    from accelerate import Accelerator, DistributedType, ParallelismConfig
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler


class PreparedOptimizer:
    """A prepared optimizer, and whether the gradient scaler skipped its last step.

    Arguments:
        optimizer: result of `accelerator.prepare`, or a plain optimizer.

    Attributes:
        inner: the wrapped optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._outer = optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self.inner = optimizer
        self._found_inf: Tensor | None = None
        self.inner.register_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record `found_inf`: a fused optimizer skips a step itself, and accelerate counts that as a step."""
        self._found_inf = getattr(optimizer, "found_inf", None)

    @property
    def has_skipped(self) -> bool:
        """Whether the gradient scaler has skipped the last step."""
        if isinstance(self._outer, AcceleratedOptimizer) and self._outer.step_was_skipped:
            return True
        return self._found_inf is not None and bool(self._found_inf)


def num_copies(parallelism: ParallelismConfig | None) -> int:
    """Number of ranks with the same batch, as in tensor and context parallelism."""
    return 1 if parallelism is None else parallelism.tp_size * parallelism.cp_size


def is_first_copy(parallelism: ParallelismConfig | None, mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the first of the ranks with its batch.

    Arguments:
        mesh: the device mesh of the Accelerator.
    """
    if num_copies(parallelism) == 1:
        return True
    assert mesh is not None
    assert mesh.mesh_dim_names is not None
    return all(mesh.get_local_rank(name) == 0 for name in ("tp", "cp") if name in mesh.mesh_dim_names)


class AcceleratedLearner(Learner):
    """A `Learner` in a loop with an Accelerator. All ranks of the Accelerator are one learner.

    It is saved in the checkpoints of the Accelerator. `save_state` waits for answers, as `Learner.state_dict` does.

    Arguments:
        model, optimizer, scheduler: results of `accelerator.prepare`. The schedule follows the run's steps: it is
            advanced when the learner joins, or rejoins, a run that has advanced.
        exchange, options: arguments of `Learner`: method, trains, overlap, buffers, static, rewarm_steps. Loading a
            checkpoint by `load_state` ends the re-warm-up.

    Raises:
        ConfigError: an unsupported setting of the Accelerator, and as `Learner`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: object = None,
        *,
        exchange: Exchange,
        **options: Unpack[LearnerOptions],
    ) -> None:
        if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"{accelerator.distributed_type.value} trains copies of the parameters, so that adopted global values "
                "would be ignored; use DDP or FSDP2."
            )
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise ConfigError(
                "the optimizer is not prepared; pass the result of accelerator.prepare(model, optimizer)."
            )
        self._accelerator, self._prepared, self._scheduler = accelerator, PreparedOptimizer(optimizer), scheduler
        self._tokens = 0  # of the micro-batches since the last optimizer step
        self._is_first_copy = is_first_copy(accelerator.parallelism_config, accelerator.torch_device_mesh)
        super().__init__(model, self._prepared.inner, exchange=exchange, **options)
        self._forward_schedule(self.steps)
        accelerator.register_for_checkpointing(_Checkpoint(self))

    def step(self, tokens: int | None = None) -> None:
        """Call after each micro-batch. It is a step of the learner if the optimizer has stepped.

        A step that the gradient scaler skipped counts as a step with no tokens.

        Arguments:
            tokens: tokens of the micro-batch on this rank; None: 1. Ranks that share a batch (tensor and context
                parallelism) count it once.

        Raises:
            As `Learner.step`.
        """
        self._tokens += 1 if tokens is None else tokens
        if self._accelerator.sync_gradients:
            counts = self._is_first_copy and not self._prepared.has_skipped
            trained, self._tokens = self._tokens if counts else 0, 0
            before = self.steps
            super().step(trained)
            self._forward_schedule(self.steps - before - 1)  # missed before a rejoin

    def _forward_schedule(self, num_steps: int) -> None:
        scheduler, per_step = self._scheduler, 1
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler.step_with_optimizer and not scheduler.split_batches:
                per_step = self._accelerator.num_processes
            scheduler = scheduler.scheduler
        forward_schedule(scheduler, num_steps * per_step)


class _Checkpoint:
    """The learner's part of the checkpoints of its Accelerator.

    The Accelerator saves a registered object on the first rank only, and loads it last; hooks save every rank's part.
    """

    def __init__(self, learner: AcceleratedLearner) -> None:
        self._learner = learner
        self._saved: dict[str, Any] = {}
        learner._accelerator.register_save_state_pre_hook(self._save)
        learner._accelerator.register_load_state_pre_hook(self._load)

    def _save(self, models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        if self._learner._tokens:
            raise ConfigError(
                "save_state was called between two micro-batches of one optimizer step, and no checkpoint contains "
                "their gradients; call it where accelerator.sync_gradients is true."
            )
        save_part(Path(output_dir), self._learner._accelerator.process_index, self._learner)

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        accelerator = self._learner._accelerator
        self._saved = load_part(Path(input_dir), accelerator.process_index, accelerator.num_processes)

    def state_dict(self) -> dict[str, int]:
        """The steps, for people; the state itself is in safetensors beside it."""
        return {"steps": self._learner.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the learner, after the Accelerator has restored everything else."""
        saved, self._saved = self._saved, {}
        self._learner.load_state_dict(saved["learner"])
        self._learner._forward_schedule(steps_missed(self._learner, saved["steps"]))
