"""A learner in the `Trainer` of transformers, and in every trainer that is built on it, such as TRL's.

    trainer = Trainer(…, callbacks=[DilocoCallback(diloco.connect("syncer.example.org:7700", run="demo", …))])
    trainer.train(resume_from_checkpoint=…)      # as before

The Trainer evaluates and saves the global model: the model has the global weights after a step in which the Trainer
evaluates or saves, until the next step starts, and after training. The learner's state, including its own parameters,
is in `checkpoint-N/diloco`.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.errors import CheckpointError, ConfigError, required_library
from diloco.exchange.base import Exchange
from diloco.integrations.accelerate import PreparedOptimizer, num_copies
from diloco.integrations.common import (
    DIRECTORY,
    LearnerOptions,
    forward_schedule,
    learner_with,
    load_part,
    save_part,
    steps_missed,
)
from diloco.learner import Learner

with required_library("accelerate"), required_library("transformers"):
    from accelerate.state import AcceleratorState
    from accelerate.utils import broadcast
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy

log = logging.getLogger("diloco")

_attached: weakref.WeakKeyDictionary[nn.Module, DilocoCallback] = weakref.WeakKeyDictionary()


class DilocoCallback(TrainerCallback):
    """Makes the training of a Trainer one learner of a run.

    A step of the learner is a step of the optimizer (`TrainerState.global_step` counts the same). Its tokens are those
    that the Trainer counts in the inputs of all micro-batches and ranks (`TrainerState.num_input_tokens_seen`);
    `TrainingArguments(include_num_input_tokens_seen="non_padding")` excludes padding. A step that the gradient scaler
    skips counts as a step with no tokens.

    `max_steps` and `num_train_epochs` are the length of the run: a learner that joins or rejoins later starts
    its learning rate schedule at the run's step and trains to the end of the run. All ranks of a Trainer are one
    learner.

    Callbacks that request an evaluation or a save must come before this one.

    Arguments:
        exchange: from `diloco.connect(…)`; a callback and its exchange serve one `Trainer.train`.
        options: arguments of `Learner`: method, trains, overlap, buffers, static, rewarm_steps.

    Attributes:
        learner: the learner, from the start of training; closed when training ends.

    Raises:
        ConfigError: when training starts: an unsupported setting of the Trainer, and as `Learner`.
        CheckpointError: the Trainer resumes from a checkpoint without this callback's state, or with another number of
            ranks.
    """

    def __init__(self, exchange: Exchange, **options: Unpack[LearnerOptions]) -> None:
        self.learner: Learner | None = None
        self._make = learner_with(exchange, **options)
        self._optimizer: PreparedOptimizer
        self._training_id = secrets.randbits(62)  # id of this training in its checkpoints; all ranks use rank 0's
        self._tokens = 0  # count of the Trainer before this step
        self._global_model = ExitStack()
        self._shows_global_model = False  # the model has the global weights
        self._is_over = self._has_left = False

    # --- beginning ----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Join the run, and restore the learner if the Trainer resumes."""
        _refuse(args, state)
        model, optimizer = given["model"], given["optimizer"]
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        self._tokens = state.num_input_tokens_seen
        if self.learner is None:
            saved = _saved_state(args, state) if state.global_step else None
            self._training_id = int(broadcast(torch.tensor(self._training_id, device=args.device)))
            self.learner = self._attach(args, model, optimizer, saved)
            behind = steps_missed(self.learner, 0 if saved is None else int(saved["steps"]))
        else:
            self._check_again(state, model, optimizer)
            behind = self.learner.steps
        forward_schedule(given["lr_scheduler"], behind)
        cast("dict[str, Any]", state.stateful_callbacks)[DIRECTORY] = {"attributes": {"life": self._training_id}}
        self._is_over = self.learner.steps >= state.max_steps or self.learner.drained
        control.should_training_stop |= self._is_over
        if args.eval_on_start:
            self._show_global_model()

    def _attach(
        self, args: TrainingArguments, model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any] | None
    ) -> Learner:
        """Join the run, and restore the saved state."""
        if (other := _attached.get(model)) is not None and other is not self:
            raise ConfigError("the Trainer has two DilocoCallbacks for one model; give it one.")
        _attached[model] = self
        self._optimizer = PreparedOptimizer(optimizer)
        return self._make(
            model, self._optimizer.inner, ranks=dist.group.WORLD if args.world_size > 1 else None,
            resume=None if saved is None else saved["learner"],
        )  # fmt: skip

    def _check_again(self, state: TrainerState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Continue with the same learner when `auto_find_batch_size` restarts training, which is out of memory."""
        if self._has_left or state.global_step or _attached.get(model) is not self:
            raise ConfigError(
                "this DilocoCallback has already trained; make a new Trainer, callback and exchange to train again."
            )

    # --- steps --------------------------------------------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Restore the learner's own weights."""
        self._show_own_model()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        """Make a step of the learner; load the global weights if the Trainer evaluates or saves next."""
        assert self.learner is not None
        if self._is_over:
            control.should_training_stop = True
            self._show_if_needed(control)
            return control
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        if not self._tokens:
            raise ConfigError(
                "the Trainer has counted no tokens in its inputs; set model.main_input_name to the name of the input "
                "to count."
            )
        tokens //= num_copies(AcceleratorState().parallelism_config)  # the Trainer counts all ranks
        before = self.learner.steps
        self.learner.step(tokens=tokens if args.process_index == 0 and not self._optimizer.has_skipped else 0)
        forward_schedule(given["lr_scheduler"], self.learner.steps - before - 1)  # missed before a rejoin
        if self.learner.steps >= state.max_steps or self.learner.drained:
            self._is_over = control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
        self._show_if_needed(control)
        return control

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Load the global weights if the Trainer evaluates or saves next."""
        self._show_own_model()
        self._show_if_needed(control)

    # --- evaluation, checkpoints, the end -----------------------------------------------------------------------------

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Save the learner's state beside the global model, which the Trainer has saved."""
        assert self.learner is not None
        if not self._shows_global_model:
            raise ConfigError(
                "a callback after DilocoCallback has requested a save, so the learner's own model was saved; make "
                "DilocoCallback the last callback."
            )
        self._show_own_model()
        if args.save_only_model:
            return
        checkpoint, step = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}", state.global_step
        save_part(checkpoint, args.process_index, self.learner, life=self._training_id, global_step=step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Warn if the evaluated model was not the global one."""
        if self.learner is not None and not self._has_left and not self._shows_global_model:
            log.warning("this evaluation used %s's own weights, not the global model", self.learner.name)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Leave the run. The model becomes the global one, or stays the best one, which the Trainer has loaded."""
        assert self.learner is not None
        model = given["model"]
        self._has_left = True
        has_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        final = _copy(model) if has_best else None
        self._show_own_model()
        self.learner.finish()
        if final is None:
            with self.learner.global_model():
                final = _copy(model)
        for name, value in model.state_dict().items():
            value.copy_(final[name])
        self.learner.close()

    def _show_if_needed(self, control: TrainerControl) -> None:
        if control.should_evaluate or control.should_save:
            self._show_global_model()

    def _show_global_model(self) -> None:
        assert self.learner is not None
        if not self._shows_global_model:
            self._global_model.enter_context(self.learner.global_model())
            self._shows_global_model = True

    def _show_own_model(self) -> None:
        self._global_model.close()
        self._shows_global_model = False


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _refuse(args: TrainingArguments, state: TrainerState) -> None:
    """Refuse unsupported settings of a Trainer."""
    if state.is_hyper_param_search:
        raise ConfigError(
            "a hyperparameter search trains many models, and a run has one model; search without DilocoCallback."
        )
    if args.deepspeed is not None:
        raise ConfigError(
            "DeepSpeed trains copies of the parameters, so that adopted global values would be ignored; use DDP or "
            "FSDP2."
        )
    if args.push_to_hub and args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        raise ConfigError(
            f"hub_strategy={HubStrategy(args.hub_strategy).value!r} pushes checkpoints before they contain the "
            "learner's state; use hub_strategy='every_save', which pushes the global model."
        )


def _saved_state(args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """The state that this callback saved in the checkpoint that the Trainer resumes from.

    The Trainer does not pass the path of that checkpoint to callbacks. So the state is searched where the Trainer saves
    and where its arguments point; the ids of the training in both files must match.
    """
    place = f"checkpoint-{state.global_step}"
    if (known := cast("dict[str, Any]", state.stateful_callbacks).get(DIRECTORY)) is None:
        raise CheckpointError(
            f"the Trainer resumes from {place}, which was saved without a learner's state; begin from its model with "
            "from_pretrained, or resume from a checkpoint that was saved with DilocoCallback."
        )
    candidates = [Path(str(args.output_dir)) / place]
    if args.resume_from_checkpoint is not None:
        candidates.insert(0, Path(args.resume_from_checkpoint))
    for candidate in candidates:
        if (candidate / DIRECTORY).is_dir():
            saved = load_part(candidate, args.process_index, args.world_size)
            if (saved["life"], saved["global_step"]) == (known["attributes"]["life"], state.global_step):
                return saved
    raise CheckpointError(
        f"the learner's state of the {place} that the Trainer resumes from is not in {candidates[-1]}; resume from an "
        "earlier checkpoint if this one was cut off, or name it in TrainingArguments(resume_from_checkpoint=…)."
    )
