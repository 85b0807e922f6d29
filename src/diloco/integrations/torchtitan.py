"""A torchtitan job as a learner.

    def my_job() -> Trainer.Config:                                         # in a config registry of torchtitan
        return attach(llama3_8b(), Attachment(syncer="syncer.example.org:7700", run="demo", learner="paris"))

torchtitan validates the global model, and its last checkpoint contains it. The learner's state, including its own
parameters, is in the trainer's state of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diloco.core.names import tensor_names
from diloco.errors import ConfigError, required_library
from diloco.exchange.base import Exchange
from diloco.exchange.remote import connect
from diloco.integrations.common import forward_schedule
from diloco.learner import Learner
from diloco.learner.roles import Buffers, Static
from diloco.protocol.session.joining import Initialises
from diloco.training.checkpoint import from_bytes, to_bytes

with required_library("torchtitan"):
    from torchtitan.config import Configurable
    from torchtitan.trainer import Trainer


@dataclass(kw_only=True, slots=True)
class Attachment(Configurable.Config):  # type: ignore[misc]
    """A job's part in a run: the arguments of `diloco.connect` and `Learner` as fields of a config."""

    syncer: str
    """Address of the syncer, HOST:PORT."""
    run: str
    """Name of the run."""
    learner: str | None = None
    """Name of this learner, unique in the run and the same after a restart. None: the name in `keys`, or else the
    host's name."""
    keys: str | None = None
    """Directory of this learner's keys, made by `diloco keys`. None: the value of the environment variable DILOCO_KEYS,
    a directory or a line of keys. A line given here would appear in every record of the configuration."""
    insecure: bool = False
    """Allow plain text connections to another machine."""
    initialise: Initialises = False
    """Whether this job gives the run its model, as for `connect`. "if-empty": if the run has none, at every start of
    every learner. True: one learner, once; a job that finds its checkpoint does not."""
    join_timeout_s: float | None = None
    """Timeout in seconds for the syncer, and for the run to have a model. None: no timeout."""
    trains: list[str] | None = None
    """Shell patterns of the names of the parameters that this learner trains. None: all."""
    overlap: int | None = None
    """Inner steps that an exchange overlaps. None: the default of the method."""
    buffers: Buffers | dict[str, Buffers] = "refuse"
    """Treatment of buffers that training changes, as for `Learner`: one choice, or choices by shell pattern. The biases
    of the router of a mixture of experts need a choice."""
    static: Static = "exchange"
    """Whether frozen tensors are received from the run or compared by digest, as for `Learner`."""
    rewarm_steps: int | None = None
    """Steps of learning rate re-warm-up for a job that joins a running run without a checkpoint, as for `Learner`."""
    validate: Literal["global", "local"] = "global"
    """The model that is validated: the global one, or this learner's own."""


class DilocoTrainer(Trainer):  # type: ignore[misc] # torchtitan has no types
    """torchtitan's `Trainer`, as one learner of a run. All ranks of a job are one learner, whatever the parallelism.

    A step of the learner is a `train_step`: one optimizer step over all micro-batches. `training.steps` is the length
    of the run: a job that joins later, or rejoins without a checkpoint, starts at the run's step, with `step` and its
    learning rate schedule, and trains to the end of the run.

    A job that finds a checkpoint continues with the same bits if the run has not advanced without this learner, and
    otherwise from the run's newest model. A checkpoint contains the learner's own model, and the last one of the job
    the global model.

    Attributes:
        learner: the learner, from the first step.

    Raises:
        ConfigError: when training starts: a mixture of experts without a choice for the biases of its router, and as
            `Learner`.
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
    _saved: bytes | None = None  # before training the loaded state of the learner, after it the final one

    def exchange(self) -> Exchange:
        """Make the configured exchange. Override it for an exchange without a syncer."""
        its = self.config.diloco
        return connect(
            its.syncer, run=its.run, learner=its.learner, keys=its.keys, insecure=its.insecure,
            initialise=its.initialise if self._saved is None else False, join_timeout_s=its.join_timeout_s,
        )  # fmt: skip

    # --- steps --------------------------------------------------------------------------------------------------------

    def should_continue_training(self) -> bool:
        """Whether the run has another step for this learner. The first call joins, after the checkpoint is loaded."""
        if self.learner is None:
            self.learner = self._attach()
            self._follow()
        return bool(super().should_continue_training()) and not self.learner.drained

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Make one step of the optimizer and of the learner."""
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
            self.validator = _GlobalModelValidator(self.validator, learner)
        return learner

    def _refuse_router_biases(self) -> None:
        for name in chain.from_iterable(tensor_names(part) for part in self.model_parts):
            if name.endswith(".expert_bias_E"):
                raise ConfigError(
                    f"torchtitan updates {name!r}, the biases of a router, by a rule of its own at every step, so the "
                    "biases of learners would diverge; set --diloco.buffers (Attachment(buffers=…)) to average, with "
                    "the parameters, or to local, for separate biases in each learner."
                )

    def _follow(self) -> None:
        """Set the step and the schedules to the run's step, if the run has advanced without this learner."""
        assert self.learner is not None
        missed, self.step = self.learner.steps - self.step, self.learner.steps
        for scheduler in self.lr_schedulers:
            forward_schedule(scheduler, missed)

    @property
    def _counts_tokens(self) -> bool:
        """Whether this rank counts its tokens, which other ranks may share."""
        meshes = map(self.parallel_dims.get_optional_mesh, ("pp", "tp"))
        return all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)

    def _end(self) -> None:
        """Load the global model, so that the last checkpoint contains it."""
        assert self.learner is not None
        self.learner.finish()
        self._saved = _bytes_of(self.learner.state_dict())  # waits for the answers that are in flight
        tensors = [each for part in self.model_parts for each in (*part.parameters(), *part.buffers())]
        with self.learner.global_model():
            final = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor, value in zip(tensors, final, strict=True):
                tensor.copy_(value)

    # --- checkpoints and the end --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state, with this rank's part of the learner's as bytes: torch.distributed.checkpoint loads only
        tensors of known shapes."""
        saved = self._saved
        if saved is None and self.learner is not None:
            saved = _bytes_of(self.learner.state_dict())
        return {**super().state_dict(), "diloco": {self._rank: saved or b""}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the trainer's state, and keep the learner's until training starts."""
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


class _GlobalModelValidator:
    """A validator of torchtitan that validates the global model."""

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
    """The configuration of a job as a learner of a run.

    Raises:
        ConfigError: the job has a custom trainer, which `DilocoTrainer` would replace.
    """
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"the job has a custom trainer ({type(config).__qualname__}); derive it from DilocoTrainer instead of "
            "torchtitan's Trainer, and its Config from DilocoTrainer.Config."
        )
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return DilocoTrainer.Config(**given, diloco=attachment)
