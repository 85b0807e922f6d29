"""A torchtitan job as a learner.

    def my_job() -> Trainer.Config:                                         # in a config registry of torchtitan
        return attach(llama3_8b(), Attachment(syncer="syncer.example.org:7700", run="demo", learner="paris"))

torchtitan validates the global model, and its last checkpoint holds it. What the learner needs to continue, its own
parameters included, is in the trainer's state of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diloco.core.names import tensor_names
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.exchange.remote import connect
from diloco.integrations.common import forward_schedule, required_library
from diloco.learner import Learner
from diloco.learner.roles import Buffers, Static
from diloco.training.checkpoint import from_bytes, to_bytes

with required_library("torchtitan"):
    from torchtitan.config import Configurable
    from torchtitan.trainer import Trainer


@dataclass(kw_only=True, slots=True)
class Attachment(Configurable.Config):  # type: ignore[misc]
    """How a job takes part in a run: the arguments of `diloco.connect` and `Learner`, as fields of a config."""

    syncer: str
    """Address of the syncer, HOST:PORT."""
    run: str
    """Name of the run."""
    learner: str | None = None
    """Name of this learner, unique in the run and the same after a restart. None: the one that `keys` are for, or else
    the host's name."""
    keys: str | None = None
    """Directory of this learner's keys, as `diloco keys` makes it. None: what the environment variable DILOCO_KEYS
    holds, a directory or a line of keys; a line here would be in every record of the configuration."""
    insecure: bool = False
    """Plain text to another machine, on purpose."""
    initialise: bool = False
    """Give the run this job's model. Exactly one learner does so, once: a job that finds its checkpoint does not, so
    that its command can stay the same."""
    join_timeout_s: float | None = None
    """Seconds to wait for the syncer, and for the run to have a model. None: as long as it takes."""
    trains: list[str] | None = None
    """Shell patterns of the names of the parameters that this learner trains. None: all."""
    overlap: int | None = None
    """Inner steps that an exchange overlaps. None: the method's."""
    buffers: Buffers | dict[str, Buffers] = "refuse"
    """What becomes of buffers that training changes, as for `Learner`: one answer, or pairs of a shell pattern and an
    answer. The biases of a mixture's router need one."""
    static: Static = "exchange"
    """Whether frozen tensors come from the run, or are compared by digest, as for `Learner`."""
    rewarm_steps: int | None = None
    """Steps in which the learning rate grows to the schedule's where a job joins a run under way without a checkpoint,
    as for `Learner`."""
    validate: Literal["global", "local"] = "global"
    """The model that is validated: the global one, or this learner's own."""


class DilocoTrainer(Trainer):  # type: ignore[misc] # of a library without types
    """torchtitan's `Trainer`, as one learner of a run. All ranks of a job are one learner, whatever the parallelism.

    A step of the learner is a `train_step`: one optimizer step over all micro-batches. `training.steps` is the length
    of the run: a job that joins it later, or returns without a checkpoint, has the run's step in `step` and in its
    learning rate schedule, and trains up to the run's end.

    A job that finds a checkpoint continues with the same bits where the run has not gone on without this learner, and
    from the run's newest model where it has. The model in a checkpoint is the learner's own, and in the last one of the
    job the global one.

    Attributes:
        learner: the learner, from the first step on.

    Raises:
        ConfigError: when training begins, a mixture without an answer for its router's biases, and what `Learner`
            refuses.
        CheckpointError: the checkpoint is of a job with another number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's configuration of a job, and its part in a run."""

        diloco: Attachment

    config: Config
    validator: Any
    step: int
    ntokens_seen: int
    learner: Learner | None = None
    _saved: bytes | None = None  # before training the learner's state that was loaded, after it the last

    def exchange(self) -> Exchange:
        """The exchange, as configured. Override it for another kind than one with a syncer."""
        its = self.config.diloco
        return connect(
            its.syncer, run=its.run, learner=its.learner, keys=its.keys, insecure=its.insecure,
            initialise=its.initialise and self._saved is None, join_timeout_s=its.join_timeout_s,
        )  # fmt: skip

    # --- steps --------------------------------------------------------------------------------------------------------

    def should_continue_training(self) -> bool:
        """Whether the run has another step for this learner, which joins here: torchtitan has loaded its checkpoint."""
        if self.learner is None:
            self.learner = self._attach()
            self._follow()
        return bool(super().should_continue_training()) and not self.learner.drained

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """One step of the optimizer, and of the learner."""
        assert self.learner is not None
        before = self.ntokens_seen
        super().train_step(data_iterator)
        self.learner.step(self.ntokens_seen - before if self._counts_tokens else 0)
        self._follow()
        if not self.should_continue_training():
            self._end()

    def _attach(self) -> Learner:
        its = self.config.diloco
        if its.buffers == "refuse":
            self._refuse_router_biases()
        resume = (
            None if self._saved is None else from_bytes(torch.frombuffer(bytearray(self._saved), dtype=torch.uint8))
        )
        learner = Learner(
            self.model_parts, list(self.optimizers), exchange=self.exchange(), ranks=torch.distributed.group.WORLD,
            trains=its.trains, overlap=its.overlap, buffers=its.buffers, static=its.static, resume=resume,
            rewarm_steps=its.rewarm_steps,
        )  # fmt: skip
        self._saved = None
        if its.validate == "global" and self.config.validator.enable:
            self.validator = _OnGlobalModel(self.validator, learner)
        return learner

    def _refuse_router_biases(self) -> None:
        for name in chain.from_iterable(tensor_names(part) for part in self.model_parts):
            if name.endswith(".expert_bias_E"):
                raise ConfigError(
                    f"torchtitan moves {name!r}, the biases of a router, by a rule of its own at every step, so "
                    "learners would drift apart; set --diloco.buffers (Attachment(buffers=…)) to average, with the "
                    "parameters, or to local, for each learner to keep its own."
                )

    def _follow(self) -> None:
        """Take the run's step, where it has gone on without this learner, or before it came."""
        assert self.learner is not None
        missed, self.step = self.learner.steps - self.step, self.learner.steps
        for scheduler in self.lr_schedulers:
            forward_schedule(scheduler, missed)

    @property
    def _counts_tokens(self) -> bool:
        """Whether no other rank counts the same tokens."""
        meshes = map(self.parallel_dims.get_optional_mesh, ("pp", "tp"))
        return all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)

    def _end(self) -> None:
        """Put the global model in, which the last checkpoint then holds."""
        assert self.learner is not None
        self.learner.finish()
        self._saved = _bytes_of(self.learner.state_dict())  # waits for the answers that are on their way
        tensors = [each for part in self.model_parts for each in (*part.parameters(), *part.buffers())]
        with self.learner.global_model():
            final = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor, value in zip(tensors, final, strict=True):
                tensor.copy_(value)

    # --- checkpoints and the end --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state, with this rank's of the learner as bytes: torch.distributed.checkpoint loads tensors
        only where it knows their shapes before."""
        saved = self._saved
        if saved is None and self.learner is not None:
            saved = _bytes_of(self.learner.state_dict())
        return {**super().state_dict(), "diloco": {self._rank: saved or b""}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the trainer's state, and keep the learner's until training begins."""
        super().load_state_dict(state_dict)
        self._saved = state_dict["diloco"][self._rank] or None

    @property
    def _rank(self) -> str:
        return f"rank-{torch.distributed.get_rank()}-of-{torch.distributed.get_world_size()}"

    def close(self) -> None:
        """Leave the run, and close the trainer."""
        try:
            if self.learner is not None:
                self.learner.close()
        finally:
            super().close()


class _OnGlobalModel:
    """A validator of torchtitan, on the global model."""

    def __init__(self, validator: Any, learner: Learner) -> None:
        self._validator, self._learner = validator, learner

    def should_validate(self, step: int) -> bool:
        return bool(self._validator.should_validate(step))

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        with self._learner.global_model():
            self._validator.validate(model_parts, step)


def _bytes_of(state: dict[str, Any]) -> bytes:
    return to_bytes(state).numpy().tobytes()


def attach(config: Trainer.Config, attachment: Attachment) -> DilocoTrainer.Config:
    """The configuration of the same job as a learner of a run.

    Raises:
        ConfigError: the job has a trainer of its own, which `DilocoTrainer` would replace.
    """
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"the job has a trainer of its own ({type(config).__qualname__}); derive it from DilocoTrainer instead of "
            "torchtitan's Trainer, and its Config from DilocoTrainer.Config."
        )
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return DilocoTrainer.Config(**given, diloco=attachment)
