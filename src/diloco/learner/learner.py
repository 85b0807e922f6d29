"""`Learner`, the object that users hold: it connects a model and its optimizer to a method and an exchange.

`step()` is one boundary: send the fragments that are due, receive updates, adopt the versions that are due. The
training thread only copies the tensors to send and to adopt. Encoding, sending, receiving and decoding run on threads
of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diloco.closing import Closing
from diloco.core.choices import positive
from diloco.core.method import Method
from diloco.errors import ConfigError, translated
from diloco.exchange.base import Call, Exchange, StartingState
from diloco.exchange.island import Ranks
from diloco.learner.attaching import attach
from diloco.learner.island import RanksOfLearner
from diloco.learner.leased_units import LeasedUnits
from diloco.learner.models import fsdp_modules, joined, reshard
from diloco.learner.optimizers import in_eval_mode, listed, require_hooks, required_modes
from diloco.learner.pieces import Gather
from diloco.learner.roles import Buffers, Static
from diloco.learner.state_dict import learner_state, resume
from diloco.protocol.contribution import Budget
from diloco.protocol.leases import DataSet
from diloco.protocol.members import Evaluation

FINISH_TIMEOUT_S = 300.0
"""How long `Learner.finish` waits, unless told otherwise."""

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader


class Learner(Closing):
    """One learner of a run: trains models in this process and exchanges outer gradients with the other learners.

    Call `step` after every step of the optimizer. With a method that exchanges gradients (`DataParallel`) the exchange
    happens inside `optimizer.step()`, through a hook.

    Arguments:
        model: a module, or several by name: `{"generator": g, "discriminator": d}` puts "generator." before the names
            of g's tensors. Or a list of the parts of one model that this rank holds, such as pipeline stages, whose
            tensors have the names of the whole model. Parameters on CPU or CUDA in fp32, bf16 or fp16. Joining
            overwrites them with the run's. Names are canonical: those of the model without `torch.compile`,
            DistributedDataParallel and checkpoint wrappers, so wrapped and plain learners can meet.
        optimizer: the inner optimizer, or several (Muon and AdamW). Its state is local and never reset. With a
            schedule-free optimizer, the global model is the one that the parameters hold when the learner steps
            (docs/learner.md).
        method: the run's method; another one is refused. None: the method of the syncer.
        exchange: from `diloco.connect(…)`, `diloco.Collective(…)` or `diloco.run_local(…)`; a new one for each learner.
        ranks: the process group or device mesh whose ranks are this learner, each with a Learner of its own; rank 0
            communicates with the other learners. None: read from the model (`DistributedDataParallel`, `replicate()`;
            DTensors, as in FSDP2 and tensor parallel: all ranks), else this process alone. "self": this process alone,
            where torch.distributed has several ranks that train separately.
        trains: names of the parameters that this learner trains, as shell patterns; None: all. The others are adopted
            and never sent. A merge of a tensor is over the learners that train it. The caller must ensure that training
            changes only these parameters.
        trains_experts: the experts of a mixture that this learner trains, such as "0-15" or "0,3,8-11", with a method
            that cuts the model into experts (`fragments=Experts(…)`); None: all. The learner holds and adopts all of
            them. The others get no gradients, and keep their values at each step of the optimizer, which must call
            hooks, as those of torch do.
        holds_experts: the experts of a mixture that the model has, and how many the run's has, such as "4-7 of 16":
            whole groups of `fragments=Experts(…)`. The learner stores, receives and sends no others; `layout`,
            `global_state_dict` and checkpoints are those of its part. Over a syncer, which holds all. None: the model
            is whole.
        whole: the whole model, from which a learner that holds a part may initialise the run; it is read while the
            learner attaches. None: the learner waits until the run has a model.
        overlap: τ of this learner; None: the method's. Learners of different speed may overlap different numbers of
            inner steps, in scheduled rounds with the outer step on the syncer (Streaming DiLoCo, arXiv 2501.18512).
        buffers: the role of floating-point buffers that training changes, such as BatchNorm's running statistics.
            "refuse": such a buffer is an error, when the learner attaches or at its first boundary. "average": all
            persistent ones are part of the fragments, and become the mean of the learners' values. "local": each
            learner keeps its own. Or answers by name, as {shell pattern: answer}: the first match counts, also for
            frozen parameters (a router's bias); "refuse" without a match. Integer counters are each learner's own.
        static: "exchange": frozen parameters and buffers are part of the run's model, and a learner that joins loads
            the run's. "digest": every learner loads the same ones itself (LoRA on a pretrained base); they are
            compared by digest when it joins, and are neither sent nor exported. All learners must give the same
            `buffers` and `static`.
        gather: describes the piece of each parameter in this rank, where it is neither whole nor a DTensor (`Gather`),
            as in FSDP1.
        resume: the value of `state_dict` in an earlier process; as `load_state_dict`. The optimizer's state may be
            loaded before or after.
        rewarm_steps: inner steps over which the learning rate grows to the schedule's, in a learner that joins a run
            under way without a checkpoint; 0: no re-warm-up. None: 5, or a warning where the optimizer cannot be
            re-warmed. A learner that resumes, or joins before the first version, does not re-warm.

    Attributes:
        model, optimizer, exchange: as given.
        resumed: whether the learner continues exactly from the state to resume; None: without such a state.

    Raises:
        ConfigError: a combination that cannot work: FSDP parameters, private master weights, averaging parameters under
            a stateful optimizer, a method that differs from the run's or cannot cut the model, an exchange that belongs
            to another learner, several ranks of which it is unknown whether they are one learner; an optimizer that
            cannot be re-warmed, or `rewarm_steps` over an exchange that no learner joins late; experts that the model
            does not have, or that no learner of a group of fixed membership trains.
        LayoutError: the run holds another model, or training changes a buffer that is not exchanged.
        CheckpointError: `resume` belongs to another model or method.

    Example:
        >>> method = diloco.DiLoCo(sync_every=100)
        >>> with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
        ...     for batch in loader:
        ...         model(**batch).loss.backward(); optimizer.step(); optimizer.zero_grad()
        ...         learner.step(tokens=batch["input_ids"].numel())
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        method: Method | None = None,
        exchange: Exchange,
        ranks: RanksOfLearner | None = None,
        trains: Sequence[str] | None = None,
        trains_experts: str | None = None,
        holds_experts: str | None = None,
        whole: nn.Module | None = None,
        overlap: int | None = None,
        buffers: Buffers | Mapping[str, Buffers] = "refuse",
        static: Static = "exchange",
        gather: Gather | None = None,
        resume: Mapping[str, Any] | None = None,
        rewarm_steps: int | None = None,
    ) -> None:
        self.model, self.optimizer, self.exchange = model, optimizer, exchange
        self._root, self._optimizers = joined(model), listed(optimizer)
        self._sharded = fsdp_modules(self._root)
        reshard(self._sharded)
        driver, opened = attach(
            self._root, self._optimizers, method=method, exchange=exchange, ranks=ranks, trains=trains,
            trains_experts=trains_experts, holds_experts=holds_experts, whole=whole, overlap=overlap, buffers=buffers,
            static=static, gather=gather, resume=resume, rewarm_steps=rewarm_steps,
        )  # fmt: skip
        self._driver, self.method, self.layout = driver, driver.method, driver.layout
        self._exchange, self._tensors, self._core = driver.exchange, driver.tensors, driver.core
        self._start_model: StartingState | None = opened
        self._closed = False
        self._hooks = driver.untrained.hooks()
        self._steps_by_itself = self._holds_global_model = False
        self._modes: list[bool | None] = []  # of the optimizers at earlier steps
        if self._exchanges_gradients:
            self._hooks.append(self._optimizers[-1].register_step_pre_hook(self._before_step))
        self.resumed: bool | None = None
        if resume is not None:
            with ExitStack() as undo:
                undo.callback(self.close)
                self.load_state_dict(resume)
                undo.pop_all()

    @property
    def _exchanges_gradients(self) -> bool:
        return self.method.exchanged == "gradients"

    def step(self, tokens: int | None = None) -> None:
        """Call after each step of the optimizer: send, receive and adopt what is due.

        Blocks only while the method waits for an update. With gradient accumulation an inner step is a step of the
        optimizer, for any number of micro-batches; a step that a gradient scaler skips does not count.

        Arguments:
            tokens: number of tokens of that inner step on this rank: an int, or a tensor of one integer (on a GPU, this
                waits for its value). None: 1, if tokens are not counted; weights by tokens are then by steps of ranks,
                and `run_tokens` counts these steps. All learners of a run must count the same unit.

        Raises:
            ConfigError: the learner is closed or has finished, or steps by itself (`step_after_optimizer`); `tokens` is
                no number of tokens; a schedule-free optimizer is in another mode than at earlier steps, or an optimizer
                was given tensors that are not the model's. With gradients exchanged, `optimizer.step(closure)` raises
                it too.
            LayoutError: training changed a frozen tensor; a parameter or buffer was added, replaced or removed; a
                parameter was frozen or unfrozen.
        """
        if self._steps_by_itself:
            raise ConfigError("this learner steps after its optimizer by itself; leave learner.step(…) out.")
        self._step(1 if tokens is None else tokens)

    def log(self, *, training_loss: float | None = None, held_out_loss: float | None = None) -> None:
        """Report the progress of training to the syncer's page, metrics and events.

        The values do not influence the run. They are sent with the next heartbeat, and have no effect without a syncer.
        Call this every few steps. In a learner of several ranks, the values of rank 0 count.

        Arguments:
            training_loss: of the newest inner step, nats per token.
            held_out_loss: of the global model at this learner's versions (`global_state_dict`), nats per token, on data
                outside the training data.

        Raises:
            ConfigError: the learner is closed, or a loss is no number.
        """
        self._require_open()
        driver = self._driver
        with translated((TypeError, ValueError), ConfigError, "learner.log(…) needs numbers", "pass losses as floats"):
            training, held_out = (None if loss is None else float(loss) for loss in (training_loss, held_out_loss))
        if training is not None:
            driver.training_loss = training
        if held_out is not None:
            driver.evaluation = Evaluation(held_out, self.run_tokens)
        driver.report()

    def step_after_optimizer(self, tokens: Callable[[], int] | None = None) -> None:
        """From now on, call `step` in a hook after every step of the optimizer: for loops that cannot be edited.

        Of several optimizers, the hook is on the last of the list, which must be the last to step in each iteration. A
        step that a gradient scaler skips does not count.

        Arguments:
            tokens: returns the number of tokens of the last inner step on this rank; None: 1, as for `step`.

        Raises:
            ConfigError: the learner is closed, or has such a hook already; the optimizer is a wrapper without hooks.
        """
        self._require_open()
        if self._steps_by_itself:
            raise ConfigError("step_after_optimizer was called before; call it once.")
        if tokens is not None and not callable(tokens):
            raise ConfigError(
                f"step_after_optimizer(tokens={tokens!r}) is not a function; pass one that returns the tokens."
            )
        require_hooks(self._optimizers[-1])
        self._steps_by_itself = True

        def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            # Set on optimizers that skip steps themselves, where a gradient scaler has found an overflow.
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is None or not bool(found_inf):
                self._step(1 if tokens is None else tokens())

        self._hooks.append(self._optimizers[-1].register_step_post_hook(stepped))

    def _step(self, tokens: int) -> None:
        self._require_training()
        tokens = _number_of(tokens)
        self._modes = required_modes(self._optimizers, self._modes)
        reshard(self._sharded)
        timing = self._driver.timing
        if not self._exchanges_gradients:
            self._exchange.stepped()
        timing.step_begins()
        if self._start_model is not None:
            self._start_model = None  # a copy of the model that the anchors replace; no checkpoint can be loaded now
            if notice := self._driver.rewarm.notice(self._core.step + 1):
                self._driver.say(notice)
        self._driver.rewarm.stepped()
        tokens = self._exchange.sum_over_ranks(tokens)
        if self._exchanges_gradients:
            self._core.credit(tokens)
            self._driver.report()
            while self._exchange.boundary():
                self._driver.receive()
        else:
            self._driver.after_step(tokens)
        timing.step_ends()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._require_training()
        if any(map(callable, (*args[1:], kwargs.get("closure")))):  # args[0] is the optimizer
            raise ConfigError(
                f"{self.method.name} exchanges gradients before the optimizer's step, and {type(optimizer).__name__}"
                ".step(closure) computes others inside it; call the closure first and step() without it, or use a "
                "method that exchanges outer gradients."
            )
        self._driver.before_step()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This learner's name in the run."""
        return self._driver.name

    @property
    def steps(self) -> int:
        """Inner steps on the run's schedule; a late joiner starts at the run's step."""
        return self._core.step

    @property
    def lr_factor(self) -> float:
        """The factor of the learning rate in the next step, below 1 during a re-warm-up (`rewarm_steps`). The learner
        applies it inside `optimizer.step()`."""
        return self._driver.rewarm.factor

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner holds: adopted, or, once it has finished, received."""
        return self._driver.newest_versions if self._driver.has_finished else self._core.versions

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each fragment at that version; in a learner of several ranks, of the part that this rank
        exchanges."""
        held = map(self._driver.received.get, enumerate(self.versions))
        return tuple(own if it is None else it.held.digest for own, it in zip(self._driver.digests, held, strict=True))

    @property
    def run_tokens(self) -> int:
        """Tokens trained by the whole run, as last reported; this learner's own if the exchange does not count them."""
        known = self._exchange.overview.run_tokens
        return self._core.tokens if known is None else known

    @property
    def done(self) -> bool:
        """Whether this learner should take no more steps: the run's budget is spent (`[run] tokens` and `steps` of the
        run file; `tokens=` of `run_local` and `Collective`), or it is `drained`.

        Raises:
            ConfigError: the run has no budget; the loop itself must know its end.
        """
        if self.drained:
            return True
        if self._exchange.overview.budget == Budget():
            raise ConfigError(
                "learner.done needs a run with a budget: [run] tokens of its run file, or run_local(…, tokens=…) and "
                "Collective(tokens=…); without one, end the loop by learner.steps."
            )
        return self._driver.is_done

    @property
    def drained(self) -> bool:
        """Whether this learner should finish now: the run no longer needs it (`protocol.steering`), or an admin has
        drained it or ended the run; and all work on some fragment has been sent.

        A training loop must end when this is true. Fragments that are sent at other steps lose the work since their
        last send. A learner that was evicted, and cannot join again, loses all work that is not merged, and takes no
        more steps.
        """
        return self._driver.is_drained or (self._exchange.overview.drained and self._is_sent(any))

    @property
    def dealt(self) -> tuple[int, ...]:
        """The groups of experts that the syncer has dealt to this learner, once all work on some fragment has been
        sent, or on all that it holds where these are sent together; otherwise none. A learner that holds others closes,
        and another one with these joins; the reference trainer does so (`train.holds_experts = "auto"`)."""
        return self._exchange.overview.dealt if self._is_sent(all if self._core.sends_together else any) else ()

    def _is_sent(self, of: Callable[[Iterable[bool]], bool]) -> bool:
        """Whether all work on `any` or `all` of the fragments has been sent."""
        return of(work.pending_steps == 0 for work in self._core.fragments if work.is_held)

    @property
    def rank(self) -> tuple[int, int]:
        """(This process's rank in this learner, the number of its ranks)."""
        return self._exchange.rank

    def lease(self, data: DataSet, *, num_ahead: int) -> LeasedUnits:
        """Train on units of data that the run's syncer leases (docs/data.md); `LeasedSampler` uses it.

        From now on, each `step` accounts for the units taken since the step before. Call it before the first step, and
        before or after loading a checkpoint.

        Arguments:
            num_ahead: units to request at a time.

        Raises:
            ConfigError: the exchange has no syncer that leases, or the method exchanges gradients; the learner has
                taken a step, or leased data already.
        """
        self._require_open()
        if self._exchanges_gradients or not self._exchange.has_syncer:
            raise ConfigError(
                "leases of data need a syncer (diloco.connect, run_local), and a method that exchanges outer "
                "gradients; deal fixed shards of the data to the learners instead."
            )
        if self._driver.units is not None or self._core.steps:
            raise ConfigError(
                "this learner has taken a step, or leases data already; lease once, before the first step."
            )
        return LeasedUnits(self._driver, data, num_ahead)

    def global_state_dict(self) -> dict[str, Tensor]:
        """The global model at the versions that this learner holds: the model to evaluate and export.

        Returns:
            Host tensors with the canonical keys, the shapes and the dtypes of `model.state_dict()`, so that they load
            into the model without wrappers; where gradients are exchanged, the values of the model itself. Local
            buffers have this learner's own values. With `static="digest"`, only the tensors that the run holds: for
            LoRA, the adapters.

        All ranks of a learner call it together; with DTensors each gets its shards.

        Raises:
            ConfigError: a learner of several ranks is closed, or its other ranks call `step` meanwhile.
        """
        self._require_ranks()
        if self._exchanges_gradients or self._holds_global_model:
            return self._tensors.model_state_dict(None)
        self._exchange.meet("global_state_dict")
        if self._tensors.has_made_keys:
            with self.global_model():
                return self._tensors.model_state_dict(None)
        return self._tensors.model_state_dict(self._driver.newest())

    @contextmanager
    def global_model(self) -> Iterator[None]:
        """A context in which the model has the global weights, to evaluate it. Afterwards it has its own, to the bit.

        The weights are those of `global_state_dict`. Meanwhile the host holds a copy of the learner's own parameters in
        their own dtypes, and of its local buffers and counters, which an evaluation may change (`update_bn`). The
        device needs memory for one fragment in fp32, as at an adoption. Where gradients are exchanged, the model is the
        global one, and nothing is copied. Inside, the learner can neither step nor save its state, and a schedule-free
        optimizer is in eval mode. All ranks of a learner enter and leave the context together.

        Raises:
            ConfigError: the context is entered inside itself; a learner of several ranks is closed.

        Example:
            >>> with learner.global_model():
            ...     loss = evaluate(model)
        """
        self._require_own_parameters()
        self._require_ranks()
        if self._exchanges_gradients:
            yield
            return
        self._exchange.meet("global_model")
        reshard(self._sharded)
        own, counters = self._tensors.own_parameters(), self._tensors.frozen.counters()
        self._holds_global_model = True
        try:
            with in_eval_mode(self._optimizers):
                for fragment, theta in enumerate(self._driver.newest()):
                    self._tensors.write(fragment, theta)
                yield
        finally:
            reshard(self._sharded)
            self._tensors.restore_parameters(own)
            self._tensors.frozen.load_counters(counters)
            self._holds_global_model = False

    def metrics(self) -> dict[str, Any]:
        """Counters as plain JSON values.

        `updates` counts versions received, and `merges` those that contain this learner's work. `blocked_s` is the time
        in which `step` waited for updates, and `blocked_histogram` counts calls of `step` by it. `num_bytes` is by kind
        (`Exchange.num_bytes`); `resumed_bytes` were not sent again after a cut. `ledger` accounts, for each fragment,
        for the tokens trained.
        """
        driver, timing = self._driver, self._driver.timing
        return {
            "learner": driver.name,
            "incarnation": driver.incarnation,
            "steps": self._core.step,
            "tokens": self._core.tokens,
            "run_tokens": self.run_tokens,
            "versions": list(self.versions),
            "updates": driver.updates,
            "merges": driver.merges,
            "step_s": timing.step_s,
            "blocked_s": timing.blocked_s,
            "num_blocked": timing.num_blocked,
            "blocked_histogram": dict(timing.histogram),
            "num_bytes": dict(self._exchange.num_bytes),
            "resumed_bytes": self._exchange.resumed_bytes,
            "ledger": [work.ledger.as_dict() for work in self._core.fragments],
        }

    def state_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """This learner's part of a checkpoint: parameters, anchors, versions, counters, updates, error feedback.

        Blocks until the updates of scheduled rounds in flight have arrived, so that a resumed run continues with the
        same bits. In asynchronous rounds, work in flight becomes pending again, or belongs to the syncer, if there is
        one. Save the optimizer's state at the same boundary. The model's own `state_dict` is not needed.

        Arguments:
            whole: of a learner of several ranks over a syncer, return the state of one process on rank 0, and {} on the
                others. Any number of ranks can load it, each with all of it.

        Returns:
            Nested dicts of host tensors and plain values.

        Raises:
            ConfigError: the learner is closed, or the global weights are in its model (`global_model`).
        """
        self._begin_together("state_dict")
        if not (whole and isinstance(self._exchange, Ranks)):
            return learner_state(self._driver)
        from diloco.learner.distributed_state import whole_state

        return whole_state(self._driver, self._exchange.group)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`: the model's parameters become those of the checkpoint.

        Call it before the first step. The caller loads the optimizer's state, before or after.

        Returns:
            True: the learner continues exactly from the state. False: the run has continued without this learner, which
            keeps its step count and adopts the run's newest model, like any learner that rejoins. A run in one process
            returns to a checkpoint only before a learner has trained in it.

        Raises:
            CheckpointError: the state belongs to another model or method.
            ConfigError: this learner has already taken a step, or is closed.
        """
        self._begin_together("load_state_dict")
        opened = self._start_model
        if opened is None:
            raise ConfigError("load_state_dict was called after a step; load the state before the first one.")
        if isinstance(self._exchange, Ranks) and state.get("rank") == [0, 1]:
            from diloco.learner.distributed_state import own_part

            state = own_part(self._driver, state)
        self.resumed = resume(self._driver, opened, state)
        return self.resumed

    def distributed_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, for `torch.distributed.checkpoint.save`: it can be loaded with any number of ranks.

        Over a syncer. Every rank calls it. The optimizer's state is the caller's (`get_optimizer_state_dict`).

        Raises:
            ConfigError: the learner is closed, or the global weights are in its model; the exchange has state of its
                own, as a process group has.

        Example:
            >>> dcp.save({"learner": learner.distributed_state_dict(), "optimizer": …}, checkpoint_id=directory)
        """
        self._begin_together("distributed_state_dict")
        from diloco.learner.distributed_state import distributed_state

        return distributed_state(self._driver)

    def load_distributed_state_dict(
        self, storage: str | Path | StorageReader, prefix: str = "learner", *, process_group: ProcessGroup | None = None
    ) -> bool:
        """As `load_state_dict`, from a checkpoint of `torch.distributed.checkpoint.save`. Every rank calls it.

        Arguments:
            storage: the directory, or a reader of it.
            prefix: the key under which `distributed_state_dict` was saved.
            process_group: of the ranks of this learner; None: all.

        Raises:
            CheckpointError: the checkpoint has no learner's state, or that of another model or method.
            ConfigError: this learner has already taken a step, or is closed.
        """
        self._require_open()
        from diloco.learner.distributed_state import load_distributed_state

        return self.load_state_dict(load_distributed_state(self._driver, storage, prefix, process_group))

    # --- leaving ------------------------------------------------------------------------------------------------------

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S, *, ends_run: bool | None = None) -> bool:
        """Take no more steps, so that no round waits for this learner, and wait for the run's last merges.

        Where the run ends with this learner, this blocks until the other learners have finished too, all is merged, and
        the last versions have arrived: `global_state_dict` then has the same bits at every learner. A learner that
        stops earlier waits for the merges of its own contributions only. Over a process group all learners are in every
        round, and end together. All ranks of a learner call it together.

        The learner remains a member of the run until `close`, and can evaluate, export or save. A second call waits
        again.

        Arguments:
            timeout_s: the longest wait, in seconds; 0: only declare the end.
            ends_run: whether the other learners end now too; None: if the run's budget is spent, or it has none.

        Returns:
            Whether this learner has the run's final model. If not, a warning says why.

        Raises:
            ConfigError: the learner is closed, or the global weights are in its model; `timeout_s` is no number of
                seconds.
        """
        self._require_open()
        self._require_own_parameters()
        if timeout_s != 0:
            positive("timeout_s of learner.finish, unless it is 0,", timeout_s)
        driver = self._driver
        obstacle = driver.finish(timeout_s, ends_run)
        if obstacle is not None and timeout_s > 0:
            driver.say(
                f"ends at step {self.steps} with versions {list(self.versions)} of the global model, which may not "
                f"be the run's last, since {obstacle}; `diloco export` gets the last ones."
            )
        return obstacle is None

    def interrupt(self, after_s: float = 0.5) -> None:
        """End all waits after this time: for SIGTERM. May be called from a signal handler or any thread.

        A blocked call of `step` then raises StoppedError; `state_dict` does not wait for updates in flight, whose work
        becomes pending again; `close` says goodbye in a moment. Training may continue until it would block. Only over a
        syncer: other exchanges wait in torch, which cannot be interrupted.
        """
        self._exchange.interrupt(after_s)

    def close(self) -> None:
        """Leave the run and close the exchange. Idempotent."""
        if not self._closed:
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            self._driver.close()

    def _begin_together(self, call: Call) -> None:
        """Begin a call that all ranks of this learner make, with the learner's own parameters, sharded."""
        self._require_open()
        self._require_own_parameters()
        self._exchange.meet(call)
        reshard(self._sharded)

    def _require_training(self) -> None:
        self._require_open()
        self._require_own_parameters()
        if self._driver.has_finished:
            raise ConfigError("this learner has finished; make a new one to train on.")

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this learner is closed; save its state before close(), and make a new one to train on.")

    def _require_ranks(self) -> None:
        if self._closed and self._exchange.rank[1] > 1:
            raise ConfigError(
                "this learner is closed, and its ranks, each with a part of the global model, are not connected any "
                "more; use the global model before close()."
            )

    def _require_own_parameters(self) -> None:
        if self._holds_global_model:
            raise ConfigError(
                "the model holds the global weights inside learner.global_model(); leave that block to train, save or "
                "load."
            )


def _number_of(tokens: int | Tensor) -> int:
    """The number of tokens of a step, from an int or an object that converts to one, such as a tensor of one value."""
    try:
        number = index(tokens)
    except TypeError as error:
        raise ConfigError(f"learner.step(tokens={tokens!r}) is not a whole number; pass tokens as an int.") from error
    if number < 0:
        raise ConfigError(f"learner.step(tokens={number}) is below 0; pass the tokens of the step.")
    return number
