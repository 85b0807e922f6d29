"""`Learner`: the object users hold. It ties a model and an inner optimizer to a method and an exchange.

`step()` is one boundary: report, send what is due, take in what has arrived, adopt what is due. The training thread pays for a
snapshot of what is sent and a copy of what is adopted; encoding, sending, receiving and decoding happen on the exchange's threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco.core.fragments import Layout, make_layout
from diloco.core.learner import LearnerCore, mode_of
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange, Opened
from diloco.learner.boundary import Boundary
from diloco.learner.compatibility import check_compatible
from diloco.learner.state_dict import learner_state, resume
from diloco.learner.tensors import LearnerTensors, trained_tensors


class Learner:
    """One island's part in a run.

    Call `step` after every inner optimizer step. With a method that exchanges gradients (`DataParallel`) the exchange happens
    inside `inner_optimizer.step()`, through a hook.

    Arguments:
        model: an `nn.Module`, or one wrapped in `DistributedDataParallel` (its ranks form one learner; rank 0 speaks for them).
            Parameters on CPU or CUDA in fp32, bf16 or fp16. Its parameters are overwritten with the run's when the learner joins.
        inner_optimizer: the optimizer that trains `model` here. Its state stays here and is never reset.
        method: what to run. None: the exchange's own (a syncer brings one); a different one is refused.
        exchange: from `diloco.connect(…)`, `diloco.Collective(…)` or `diloco.run_local(…)`.
        trains: names of the parameters that this learner trains, as shell patterns; None: all. Others are adopted and never sent,
            and a merge divides by those who train a tensor. It is for the caller to see that only these change.

    Raises:
        ConfigError: a combination that cannot work: FSDP parameters, private master weights, averaging parameters under a
            stateful inner optimizer, a method that differs from the run's.
        LayoutError: the run holds another model.

    Example:
        >>> with diloco.Learner(model, inner_optimizer, method=diloco.DiLoCo(sync_every=100), exchange=exchange) as learner:
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
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            from diloco.exchange.ranks import Ranks

            exchange, model = Ranks(exchange, model.process_group), model.module
        self.model = model
        self.inner_optimizer = inner_optimizer
        self.method = exchange.method(method)
        self._exchange = exchange
        check_compatible(model, inner_optimizer, self.method, exchange)
        self.layout: Layout = make_layout(model, self.method.fragments)
        self._values = LearnerTensors(model, self.layout, self.method)
        trained = trained_tensors(self.layout, trains, self.method)
        opened = exchange.open(self.layout, self.method, self._values.own_model)
        self._core = LearnerCore(
            self.method.schedule(len(self.layout.fragments)),
            opened.versions,
            wait=self.method.wait,
            keeps_pending=self.method.adopt.keeps_pending,
            step=opened.step,
            mode=mode_of(self.method),
        )
        self._boundary = Boundary(self.method, self.layout, exchange, self._core, self._values, trained, opened)
        self._start_model: Opened | None = opened
        self._closed = False
        self._hook = None
        if self._exchanges_gradients:
            self._hook = inner_optimizer.register_step_pre_hook(lambda *_: self._before_step())

    @property
    def _exchanges_gradients(self) -> bool:
        return self.method.exchanged == "gradients"

    def step(self, *, tokens: int) -> None:
        """After an inner step on `tokens` tokens (of this rank): send, take in, adopt.

        Blocks only where the method waits for an answer that is due.
        """
        self._require_training()
        timing = self._boundary.timing
        if not self._exchanges_gradients:
            self._exchange.stepped()
        timing.step_begins()
        self._start_model = None  # from here on the anchors are all that is needed of it
        tokens = self._exchange.sum_tokens(tokens)
        if self._exchanges_gradients:
            self._core.credit(tokens)
            self._boundary.report()
            self._exchange.boundary()
        else:
            self._boundary.after_step(tokens)
        timing.step_ends()

    def _before_step(self) -> None:
        self._require_training()
        self._boundary.before_step()

    # --- state ------------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This learner's id in the run."""
        return self._boundary.name

    @property
    def steps(self) -> int:
        """Inner steps on the run's schedule; a late joiner starts at the run's."""
        return self._core.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner holds."""
        return self._core.versions

    @property
    def run_tokens(self) -> int:
        """Tokens trained by the whole run as last heard; this learner's own where nobody counts them."""
        known = self._exchange.run_tokens
        return self._core.tokens if known is None else known

    def global_state_dict(self) -> dict[str, Tensor]:
        """The global model as this learner last adopted it, in the shape of `model.state_dict()`: what to evaluate and export.

        Host tensors, in the parameters' dtypes. With gradients exchanged it is the model itself.
        """
        return self._values.state_dict(None if self._exchanges_gradients else self._boundary.newest())

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: steps, tokens, versions, updates received and merges among them this learner was in, seconds blocked in `step`
        (in all, and how many calls were blocked for how long), bytes, ledger."""
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
            "ledger": [book.ledger.as_dict() for book in self._core.books],
        }

    def state_dict(self) -> dict[str, Any]:
        """The trained parameters, anchors, versions, counters, answers on their way and error feedback; tensors on the host and plain
        values in nested dicts.

        Waits for the answers that a schedule has on their way, so that a resumed run continues with the same bits. Where nobody
        waits for a round, work on its way becomes pending again or, over a syncer, stays with it. Take the inner optimizer's state
        at the same boundary; the model's own is not needed.
        """
        return learner_state(self._boundary)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`: the model's parameters become those of the checkpoint, whatever they are now. The inner
        optimizer's state is the caller's to load, before or after.

        Returns:
            True where the learner continues exactly as it was. False where the run has gone on without it: it keeps its step
            count and adopts the run's newest model, like any learner that rejoins. A run in one process goes back to a checkpoint
            only before a learner has trained in it.

        Raises:
            CheckpointError: the state belongs to another model or method.
            ConfigError: this learner has taken a step already.
        """
        opened = self._start_model
        if opened is None:
            raise ConfigError("load_state_dict was called after a step; load the state before the first one.")
        return resume(self._boundary, opened, state)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Say that this learner takes no more steps: from here on no round waits for it. Idempotent.

        It stays part of the run until `close`, to evaluate, export or save for as long as that takes. What it has sent is still merged.
        Over a process group, whose members are fixed, the others wait all the same.
        """
        self._require_open()
        self._boundary.has_finished = True
        self._boundary.report()

    def close(self) -> None:
        """Leave the run. Idempotent."""
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
