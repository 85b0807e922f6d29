"""The reference trainer: trains one learner of a run from its first batch to its summary."""

import hashlib
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from diloco import events as ev
from diloco.config import AUTO, RunConfig, TrainTable, dump_config
from diloco.core.presets import DataParallel, method_from_table
from diloco.errors import (
    AuthError,
    CheckpointError,
    ConfigError,
    DrainedError,
    StoppedError,
    StoreError,
    translated,
)
from diloco.learner.held import HeldExperts
from diloco.learner.learner import FINISH_TIMEOUT_S
from diloco.tracking.feed import Feed
from diloco.training.checkpoint import has_joined, held_by, load_checkpoint, save_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.dealt import DealtExperts
from diloco.training.expert_part import experts_to_hold
from diloco.training.held_out import HeldOutEvaluator
from diloco.training.learners import AnyLearner, Attach, Deal, attach_to_group
from diloco.training.model import model_config
from diloco.training.monitor import Monitor, fragment_versions
from diloco.training.optimizers import describe_optimizer, learning_rate
from diloco.training.progress import ProgressDisplay
from diloco.training.rank_group import RankGroup
from diloco.training.spec import Clock, LearnerSpec, SharedInputs, StopRequest, Summary
from diloco.training.state import TrainingState
from diloco.whole_files import write_whole

CHECKPOINTS = "checkpoints"
CONFIG = "run.toml"

RETRIES_PER_INTERVAL = 10
"""After a failed write the next checkpoint is due after this fraction of the checkpoint interval."""


class Trainer:
    """Trains one learner of a run.

    Arguments:
        attach: connects this learner to the others; None: it exchanges nothing.
        ranks: the ranks that train this learner; every rank makes a Trainer with the same arguments.
        peers: for learners that are the ranks of one process group, without a syncer: all of these ranks. They stop
            after the same step, and the warm start is data parallel over them.
        clock: another clock than real time.
        shared: inputs that several trainers of this process share.
        stop_request: makes the trainer stop; `attach` registers how to interrupt a waiting learner.
        feed: the trackers of the first rank, which the caller closes.
        deal: asks the syncer for experts, where it deals them to this learner.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: LearnerSpec,
        attach: Attach | None = None,
        progress: ProgressDisplay | None = None,
        ranks: RankGroup | None = None,
        peers: RankGroup | None = None,
        clock: Clock | None = None,
        shared: SharedInputs | None = None,
        stop_request: StopRequest | None = None,
        feed: Feed | None = None,
        deal: Deal | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.directory = config.dir / spec.name
        self._attach, self._deal = attach, deal
        self._dealt: DealtExperts | None = None
        self._peers = peers
        self._ranks = ranks or RankGroup()
        self._all_ranks = peers or self._ranks
        self._progress, self._feed = progress or ProgressDisplay(), feed
        self._stop_request = stop_request or StopRequest()
        self._has_joined = self._has_started = False
        self._is_between = False  # has left the run, to join it again with other experts
        self._retry_at: int | None = None  # step of the next checkpoint after a failed one; the same on every rank
        self._check_batches()
        if config.data.deal == "leases" and (peers is not None or spec.role != "learner"):
            raise ConfigError(
                'data.deal = "leases" needs a syncer, which leases the data to learners; set deal = "shards" for a '
                "process group, the baseline and isolated learners"
            )
        self._clock = clock or Clock()
        corpus = load_corpus(config.data) if shared is None else shared.corpus
        path = spec.resume_from
        # Whether it has a whole model at first, from which it may initialise the run, also where it is to hold a part.
        self._begins_whole = config.train.holds_experts is None or (
            self._initialises and (path is None or not (has_joined(path) or held_by(path)))
        )
        self._training = TrainingState(
            config, corpus, self._ranks, self._clock, peers, held=self._held_experts(corpus.vocab_size),
            begins_whole=self._begins_whole,
        )  # fmt: skip
        self._evaluator = HeldOutEvaluator(self.model, corpus, config, None if shared is None else shared.losses)

    def _check_batches(self) -> None:
        """Check that every batch of this learner divides equally over ranks and micro-batches."""
        config = self.config
        sizes = {config.train.global_batch if self.spec.role == "baseline" else config.learner_batch}
        if self._initialises and config.warm_start.steps:
            sizes.add(config.train.global_batch if self._peers is None else config.share)
        for size in sizes:
            self._ranks.check_batch(size, config.train.accumulate)

    def _held_experts(self, vocab_size: int) -> HeldExperts | None:
        """The experts that this learner is to hold; None: all. Raises ConfigError for a set that cannot work."""
        config, text = self.config, self.config.train.holds_experts
        if text is None or self.spec.role == "baseline":
            return None
        if self.spec.role == "isolated" or self._peers is not None:
            raise ConfigError(
                "train.holds_experts needs a syncer, which holds the experts that this learner does not; drop it"
            )
        if text == AUTO and self._ranks.size > 1:
            raise ConfigError(
                'train.holds_experts = "auto" deals experts to learners of one process; name those of a learner of '
                "several ranks"
            )
        if self._ranks.size > 1 and self._begins_whole:
            raise ConfigError(
                "a learner of several ranks that holds a part of the experts (train.holds_experts) cannot initialise "
                "the run; let a learner of one process do it"
            )
        table = model_config(config.model, vocab_size, config.data.sequence_length)
        method, path = method_from_table(config.method), self.spec.resume_from
        if text != AUTO:
            return experts_to_hold(text, table, method)
        assert self._deal is not None
        self._dealt = DealtExperts(table, method, config.num_dealt, self._deal)
        if path is not None and (saved := held_by(path)) is not None:
            return self._dealt.saved(saved)
        return None if self._begins_whole else self._dealt.ask()

    @property
    def model(self) -> nn.Module:
        """The model being trained: this learner's own, not the global one."""
        return self._training.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._training.optimizer

    @property
    def learner(self) -> AnyLearner:
        """The current learner: a standalone one, or one of the run after it has joined."""
        return self._training.learner

    # --- from start to end

    def train(self) -> Summary:
        """Train until tokens or steps are spent, the syncer drains this learner, or `stop` is called; evaluate, leave.

        A checkpoint that cannot be written is reported and retried soon; training continues.

        Raises:
            StoreError: the last checkpoint could not be written; everything else is done.
        """
        try:
            if self._ranks.is_first:
                self._save_config()
            event_log = self.directory / "events.jsonl" if self._ranks.is_first else None
            self._monitor = Monitor(self.spec, self._training, self._evaluator, event_log, self._progress, self._feed)
            with closing(self._monitor):
                started, interrupted = self._clock.seconds(), False
                try:
                    self._prepare()
                    self._has_started = True
                    started = self._clock.seconds()
                    reason = self._loop()
                except AuthError:  # the syncer has revoked this learner's access; its work is saved
                    if self._has_progress:
                        self._save()
                    raise
                except StoppedError:
                    if not self._ranks.any(self._stop_request.is_set):
                        raise
                    self._monitor.say(self._where_interrupted)
                    reason, interrupted = "stopped", True
                return self._finish(reason, self._clock.seconds() - started, interrupted=interrupted)
        finally:
            self.learner.close()
            self._progress.close()

    def stop(self) -> None:
        """Stop with a checkpoint, after the current step or while this learner waits for others.

        A signal handler may call it.
        """
        self._stop_request.set()

    @property
    def _where_interrupted(self) -> str:
        if not self._has_joined:
            return "stops before it has joined the run"
        return f"stops after step {self._training.step}, while it waited for others"

    def _loop(self) -> str:
        run = self.config.run
        while self._training.run_tokens < run.tokens:
            if self._has_joined and run.steps is not None and self._training.step >= run.steps:
                return "steps"
            if self._all_ranks.any(self._stop_request.is_set):
                return "stopped"
            if self.learner.drained:
                return "drained"
            if not self._has_joined and not self._is_warming_up:
                self._join(resumed=self._is_between)
                continue  # the run may have ended
            if self._dealt is not None and self._training.part is not None:
                if (other := self._dealt.other_than(self._training.part, self.learner.dealt)) is not None:
                    if not self._join_with(other):
                        return "drained"
                    continue  # the run may have ended
            if not self._training.stream.has_next():
                continue  # the learner was drained while it waited
            lr = self.learner.lr_factor * learning_rate(self.config, self._training.step + 1)
            before = fragment_versions(self.learner)
            result = self._training.take_step()
            self._monitor.stepped(lr, result, before, warming_up=self._is_warming_up)
            every = self.config.checkpoint.every_steps
            if every and (self._training.step % every == 0 or self._training.step == self._retry_at):
                has_failed = self._ranks.any(self._save() is not None)
                self._retry_at = self._training.step + max(1, every // RETRIES_PER_INTERVAL) if has_failed else None
        return "budget"

    @property
    def _initialises(self) -> bool:
        """Whether this learner makes the run's first model: by the warm start, or from a checkpoint."""
        return self.spec.role != "learner" or bool(self.spec.initialise) or self._peers is not None

    @property
    def _is_warming_up(self) -> bool:
        """Whether the next step belongs to the warm start: one model at the full batch, before the run has a model."""
        return (
            self._initialises
            and self.spec.role != "baseline"  # which trains at the full batch throughout
            and self._training.step < self.config.warm_start.steps
        )

    def _warm_up(self) -> None:
        """Start the warm start: one learner has the full batch, or the ranks of a process group share it."""
        if self._peers is not None:
            assert self._peers.process_group is not None  # peers without a group have nothing to share
            self._training.select_shard(self.spec.shard, self.config.share)
            self._training.attach(attach_to_group(self._peers.process_group, DataParallel(), TrainTable()))

    def _join(self, *, resumed: bool = False) -> None:
        """Take this learner's role: connect, and read its own shard only."""
        spec, training = self.spec, self._training
        if self._dealt is not None and training.held is None:
            training.held = self._dealt.ask()
        self._has_joined, self._is_between = True, False
        if spec.role == "isolated" and self.config.train.trains_experts is not None:
            raise ConfigError(
                "train.trains_experts needs other learners, and an isolated one exchanges nothing; drop it"
            )
        training.take_part()
        if spec.role != "baseline":
            training.select_shard(spec.shard, self.config.learner_batch)
            training.exclude_untrained()
        if spec.role == "learner":
            assert self._attach is not None
            self._monitor.say("joins the run")
            if self._initialises and not self._begins_whole:
                self._monitor.say("cannot begin the run from its part of the model, and waits until the run has one")
            steps = training.step
            try:
                training.attach(self._attach)
            except (AuthError, StoppedError):
                self._has_joined = False
                training.return_part()
                raise
            if training.step < steps and not resumed:
                raise ConfigError(
                    f"the warm start made {steps} steps but the run starts at {training.step}: "
                    "this exchange cannot take them over; set warm_start.steps = 0"
                )
        self._evaluator.model = self.model
        training.reset_token_estimate()

    def _join_with(self, held: HeldExperts) -> bool:
        """Leave the run, and join it again with other experts, which the syncer has dealt. Returns False where the run
        has no place for this learner any more."""
        training, experts = self._training, held.text.partition(" of ")[0]
        self._monitor.say(f"is dealt experts {experts} after step {training.step}, and joins again with these")
        assert self._attach is not None
        self._is_between = True
        training.leave_for(held)
        training.exclude_untrained()
        try:
            training.attach(self._attach, again=True)
        except (AuthError, StoppedError, DrainedError) as error:
            training.stand_alone()
            if not isinstance(error, DrainedError):
                raise
            self._monitor.say(f"does not join again: {error}")
            return False
        self._is_between = False
        self._evaluator.model = self.model
        return True

    def _finish(self, reason: str, seconds: float, *, interrupted: bool) -> Summary:
        """Leave the run, save and evaluate. A learner that was interrupted while it waited evaluates nothing."""
        leaves_early = reason in ("stopped", "drained")
        # By tokens it ends at an estimate of the others', so that the syncer's count may be lower yet.
        self.learner.finish(0.0 if leaves_early else FINISH_TIMEOUT_S, ends_run=reason == "budget" or None)
        saves = self._has_progress if leaves_early else bool(self.config.checkpoint.every_steps)
        error = self._save() if saves else None
        summary = self._monitor.finished(reason, seconds, evaluates=not interrupted)
        if error is not None:
            raise error
        return summary

    @property
    def _has_progress(self) -> bool:
        """Whether there is progress since the checkpoint that this learner resumed from, if any."""
        return (self._has_joined and self._has_started) or (self.spec.resume_from is None and self._training.step > 0)

    # --- start and checkpoints

    def _prepare(self) -> None:
        config, spec = self.config, self.spec
        if config.inner_optimizer != "adamw":
            self._monitor.say(describe_optimizer(self.optimizer, config))
        if self._training.stream.sharing:
            self._monitor.say(self._training.stream.sharing)
        torch.manual_seed(_seed_of(config.run.seed, spec.shard, self._ranks.rank))
        if spec.resume_from is not None:
            self._resume(spec.resume_from)
        else:
            if config.warm_start.checkpoint is not None and self._initialises:
                path = config.warm_start.checkpoint
                self._training.start_from(load_checkpoint(path), path)
                self._monitor.say(f"starts at step {self._training.step} with the model of {path}")
            if self._is_warming_up:
                self._warm_up()
            else:
                self._join()
        self._monitor.prepared()

    def _resume(self, path: Path) -> None:
        """Resume from a checkpoint: exactly, or with the run's newest model where the run has advanced since."""
        saved = load_checkpoint(path)
        if saved["run"] != self.config.run.name:
            raise CheckpointError(
                f"{path} belongs to the run {saved['run']}, not to {self.config.run.name}; check --resume"
            )
        self._training.restore_global(saved, path)
        self._is_between = not saved["joined"] and saved["held"] is not None
        if saved["joined"]:
            self._join(resumed=True)
        elif self._is_warming_up:
            self._warm_up()
        exact = self._training.load(saved)
        self._all_ranks.require_same(self._training.step, "the step to resume from")
        how = "" if exact else ", with the run's newest model"
        self._monitor.say(f"resumes at step {self._training.step} from {path}{how}")

    def _save(self) -> StoreError | None:
        """Write a checkpoint. Returns the error of a failed write, on the rank that writes."""
        started = self._clock.seconds()
        state = self._training.state(warming_up=not self._has_joined)
        if not self._ranks.is_first:
            return None
        is_learner = self._has_joined and not self._is_between and self.spec.role == "learner"
        state |= {"run": self.config.run.name, "joined": is_learner}
        step = self._training.step
        try:
            saved = save_checkpoint(self.directory / CHECKPOINTS, step, state, keep=self.config.checkpoint.keep)
        except StoreError as error:
            self._monitor.say(f"has no checkpoint of step {step}: {error}")
            self._monitor.append(ev.CheckpointRefused(step=step, error=str(error)))
            return error
        seconds = self._clock.seconds() - started
        self._monitor.append(
            ev.Checkpointed(step=step, path=str(saved.path), num_bytes=saved.num_bytes, seconds=seconds)
        )
        return None

    def _save_config(self) -> None:
        with translated(
            OSError, StoreError, f"cannot write to {self.directory}", "set [run] dir to a writable directory"
        ):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / CONFIG, dump_config(self.config))


def _seed_of(*numbers: int) -> int:
    """One seed from several numbers, so that learners and ranks draw different ones (in dropout, for instance)."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1
