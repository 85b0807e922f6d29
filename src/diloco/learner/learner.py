"""`Learner`: the object that users hold. It ties a model and an inner optimizer to a method and an exchange.

`step()` is one boundary: send the fragments that are due, receive updates, adopt the versions that are due. The
training thread copies what is sent and what is adopted. Encoding, sending, receiving and decoding run on threads of the
exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.core.fragments import Layout, make_layout
from diloco.core.learner import LearnerCore
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange, Opened
from diloco.learner.boundary import Boundary
from diloco.learner.compatibility import check_compatible
from diloco.learner.partition import Partition, Undivided, divided
from diloco.learner.pieces import read_dtensor
from diloco.learner.state_dict import learner_state, resume
from diloco.learner.tensors import LearnerTensors, trained_tensors


class Learner:
    """One learner of a run: a model that trains here and exchanges outer gradients with the other learners.

    Call `step` after every inner optimizer step. With a method that exchanges gradients (`DataParallel`) the exchange
    happens inside `inner_optimizer.step()`, through a hook.

    Arguments:
        model: an `nn.Module`, or one wrapped in `DistributedDataParallel` (its ranks form one learner, and rank 0 talks
            to the others). Parameters on CPU or CUDA in fp32, bf16 or fp16. Joining overwrites them with the run's.
        inner_optimizer: the optimizer that trains `model`. Its state is local and never reset.
        method: the run's method. None: the method that the exchange brings (from a syncer). A different one is refused.
        exchange: from `diloco.connect(…)`, `diloco.Collective(…)` or `diloco.run_local(…)`.
        trains: names of the parameters that this learner trains, as shell patterns; None: all. The others are adopted
            and never sent. A merge of a tensor is over the learners that train it. The caller must ensure that training
            changes only these parameters.
        overlap: τ of this learner; None: the method's. Learners of different speed may overlap different numbers of
            inner steps, in scheduled rounds with the outer step on the syncer (Streaming DiLoCo, arXiv 2501.18512).

    Raises:
        ConfigError: a combination that cannot work: FSDP parameters, private master weights, averaging parameters under
            a stateful inner optimizer, a method that differs from the run's.
        LayoutError: the run holds another model.

    Example:
        >>> method = diloco.DiLoCo(sync_every=100)
        >>> with diloco.Learner(model, inner_optimizer, method=method, exchange=exchange) as learner:
        ...     for batch in loader:
        ...         model(**batch).loss.backward(); inner_optimizer.step(); inner_optimizer.zero_grad()
        ...         learner.step(tokens=batch["input_ids"].numel())
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        method: Method | None = None,
        exchange: Exchange,
        trains: Sequence[str] | None = None,
        overlap: int | None = None,
    ) -> None:
        group = None
        if isinstance(model, nn.parallel.DistributedDataParallel):
            from diloco.exchange.island import Ranks

            exchange = island = Ranks(exchange, model.process_group)
            model, group = model.module, island.group
        elif any(isinstance(p, DTensor) for p in model.parameters()):
            from diloco.exchange.island import Ranks

            exchange = island = Ranks(exchange, None)
            group = island.group
        self.model = model
        self.inner_optimizer = inner_optimizer
        self.method = exchange.method(method)
        self._exchange = exchange
        check_compatible(model, inner_optimizer, self.method, exchange)
        self.layout: Layout = make_layout(model, self.method.fragments)
        partition: Partition = Undivided(self.layout)
        if group is not None:
            trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
            partition = divided(self.layout, trainable, read_dtensor, group)
        self._tensors = LearnerTensors(model, self.layout, self.method, partition)
        trained = trained_tensors(self.layout, trains, self.method)
        own = self.method if overlap is None else self.method.with_own_overlap(overlap)
        opened = exchange.open(self.layout, self.method, self._tensors.own_model, overlap=overlap)
        self._core = LearnerCore(own.rules(len(self.layout.fragments)), opened.versions, step=opened.step)
        self._boundary = Boundary(self.method, self.layout, exchange, self._core, self._tensors, trained, opened)
        self._start_model: Opened | None = opened
        self._closed = False
        self._hook = None
        if self._exchanges_gradients:
            self._hook = inner_optimizer.register_step_pre_hook(lambda *_: self._before_step())

    @property
    def _exchanges_gradients(self) -> bool:
        return self.method.exchanged == "gradients"

    def step(self, *, tokens: int) -> None:
        """Call after each inner step: send, receive and adopt what is due.

        Blocks only while the method waits for an update.

        Arguments:
            tokens: tokens of that inner step on this rank.

        Raises:
            ConfigError: the learner is closed or has finished.
            LayoutError: training changed a frozen tensor.
        """
        self._require_training()
        timing = self._boundary.timing
        if not self._exchanges_gradients:
            self._exchange.stepped()
        timing.step_begins()
        self._start_model = None  # a copy of the model that the anchors replace
        tokens = self._exchange.sum_tokens(tokens)
        if self._exchanges_gradients:
            self._core.credit(tokens)
            self._boundary.report()
            while self._exchange.boundary():
                self._boundary.receive()
        else:
            self._boundary.after_step(tokens)
        timing.step_ends()

    def _before_step(self) -> None:
        self._require_training()
        self._boundary.before_step()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This learner's name in the run."""
        return self._boundary.name

    @property
    def steps(self) -> int:
        """Inner steps on the run's schedule; a late joiner starts at the run's step."""
        return self._core.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner holds."""
        return self._core.versions

    @property
    def run_tokens(self) -> int:
        """Tokens trained by the whole run as last reported; this learner's own if the exchange counts none."""
        known = self._exchange.overview.run_tokens
        return self._core.tokens if known is None else known

    @property
    def drained(self) -> bool:
        """Whether this learner should finish now: the run's pool (`core.pool`) has no place for it any more, and a
        fragment has no work that was not sent.

        The training loop ends on it. A fragment that is sent at other steps loses what was trained since its last send.
        A learner that was evicted, and cannot join again, loses what is not merged, and takes no more steps.
        """
        has_sent = any(work.pending_steps == 0 for work in self._core.fragments)
        return self._boundary.is_drained or (self._exchange.overview.drained and has_sent)

    def global_state_dict(self) -> dict[str, Tensor]:
        """The global model at the versions that this learner holds: the model to evaluate and export.

        Returns:
            Host tensors with the keys, shapes and dtypes of `model.state_dict()`; where gradients are exchanged, the
            values of `model` itself.
        """
        return self._tensors.model_state_dict(None if self._exchanges_gradients else self._boundary.newest())

    def metrics(self) -> dict[str, Any]:
        """Counters as plain JSON values.

        `updates` counts versions received, and `merges` those that contain this learner's work. `blocked_s` is the time
        in which `step` waited for updates, and `blocked_histogram` counts calls of `step` by it. `num_bytes` is by kind
        (`Exchange.num_bytes`). `ledger` says for each fragment what became of the tokens trained.
        """
        boundary, timing = self._boundary, self._boundary.timing
        return {
            "learner": boundary.name,
            "incarnation": boundary.incarnation,
            "steps": self._core.step,
            "tokens": self._core.tokens,
            "run_tokens": self.run_tokens,
            "versions": list(self._core.versions),
            "updates": boundary.updates,
            "merges": boundary.merges,
            "step_s": timing.step_s,
            "blocked_s": timing.blocked_s,
            "num_blocked": timing.num_blocked,
            "blocked_histogram": timing.histogram.as_dict(),
            "num_bytes": dict(self._exchange.num_bytes),
            "ledger": [work.ledger.as_dict() for work in self._core.fragments],
        }

    def state_dict(self) -> dict[str, Any]:
        """This learner's part of a checkpoint: parameters, anchors, versions, counters, updates, error feedback.

        Blocks until the updates of scheduled rounds in flight have arrived, so that a resumed run continues with the
        same bits. In asynchronous rounds, work in flight becomes pending again, or stays with the syncer over one.
        Save the inner optimizer's state at the same boundary. The model's own `state_dict` is not needed.

        Returns:
            Nested dicts of host tensors and plain values.
        """
        return learner_state(self._boundary)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`: the model's parameters become those of the checkpoint.

        Call it before the first step. The caller loads the inner optimizer's state, before or after.

        Returns:
            True where the learner continues exactly as it was. False where the run has gone on without it: the learner
            keeps its step count and adopts the run's newest model, like any learner that rejoins. A run in one process
            returns to a checkpoint only until a learner has trained in it.

        Raises:
            CheckpointError: the state belongs to another model or method.
            ConfigError: this learner has already taken a step.
        """
        opened = self._start_model
        if opened is None:
            raise ConfigError("load_state_dict was called after a step; load the state before the first one.")
        return resume(self._boundary, opened, state)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Declare that this learner takes no more steps, so that no round waits for it. Idempotent.

        It stays a member of the run until `close`, with time to evaluate, export or save. Contributions in flight are
        still merged. A process group has fixed members: there the others wait for it all the same.
        """
        self._require_open()
        self._boundary.has_finished = True
        self._boundary.report()

    def close(self) -> None:
        """Leave the run and close the exchange. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._hook is not None:
                self._hook.remove()
            self._exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_training(self) -> None:
        self._require_open()
        if self._boundary.has_finished:
            raise ConfigError("this learner has finished; make a new one to train on.")

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this learner is closed; make a new one to train on.")
