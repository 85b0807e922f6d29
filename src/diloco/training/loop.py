"""The reference trainer: one learner's part of a run, from the first batch to the summary."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from diloco import events as ev
from diloco.config import RunConfig, dump_config
from diloco.errors import AuthError, CheckpointError, ConfigError, StoppedError, StoreError, translated
from diloco.tracking.feed import Feed
from diloco.training.checkpoint import load_checkpoint, save_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.held_out import HeldOutEvaluator
from diloco.training.learners import AnyLearner
from diloco.training.monitor import Monitor, holdings
from diloco.training.optimizers import describe_optimizer
from diloco.training.progress import ProgressDisplay
from diloco.training.rank_group import RankGroup
from diloco.training.reporter import Reporter
from diloco.training.schedule import learning_rate
from diloco.training.spec import Clock, LearnerSpec, Role, SharedInputs, StopRequest, Summary
from diloco.training.state import Attach, TrainingState
from diloco.whole_files import write_whole

__all__ = ["CHECKPOINTS", "Attach", "LearnerSpec", "Role", "Summary", "Together", "Trainer"]

CHECKPOINTS = "checkpoints"
CONFIG = "run.toml"

TRIED_AGAIN = 10
"""A checkpoint that could not be written is tried again after this part of the steps between two checkpoints."""


@dataclass(frozen=True)
class Together:
    """Learners that are the ranks of one process group, without a syncer.

    Attributes:
        everyone: all of them; they stop after the same step.
        data_parallel: makes the learner that exchanges gradients, for the warm start that they make together.
    """

    everyone: RankGroup
    data_parallel: Attach


class Trainer:
    """Trains one part of a run.

    Arguments:
        attach: connects this part to the others; None for a part that exchanges nothing.
        job: the ranks that are this learner; every rank makes a Trainer of its own, with the same arguments.
        together: where the learners are ranks of one process group.
        clock: where time is not real.
        shared: where several trainers are in this process.
        stopping: asks this part to stop; `attach` tells it what ends waiting.
        feed: of trackers, closed by its owner; of the first rank.
    """

    def __init__(
        self,
        config: RunConfig,
        part: LearnerSpec,
        attach: Attach | None = None,
        progress: ProgressDisplay | None = None,
        job: RankGroup | None = None,
        together: Together | None = None,
        clock: Clock | None = None,
        shared: SharedInputs | None = None,
        stopping: StopRequest | None = None,
        feed: Feed | None = None,
    ) -> None:
        self.config = config
        self.part = part
        self.directory = config.dir / part.name
        self._attach = attach
        self._together = together
        self._job = job or RankGroup()
        self._everyone = self._job if together is None else together.everyone
        self._progress, self._feed = progress or ProgressDisplay(), feed
        self._stopping = stopping or StopRequest()
        self._joined = self._has_begun = False
        self._save_again_at: int | None = None  # the step; on every rank the same
        self._check_batches()
        if config.data.deal == "leases" and (together is not None or part.role != "learner"):
            raise ConfigError(
                'data.deal = "leases" needs a syncer, which leases the data to learners; set deal = "shards" for a '
                "process group, the baseline and isolated learners"
            )
        self._clock = clock or Clock()
        corpus = load_corpus(config.data) if shared is None else shared.corpus
        self._island = TrainingState(config, corpus, self._job, self._clock)
        self._judge = HeldOutEvaluator(self.model, corpus, config, None if shared is None else shared.losses)

    def _check_batches(self) -> None:
        """Check that every batch of this part divides equally over ranks and micro-batches."""
        config = self.config
        sizes = {config.train.global_batch if self.part.role == "baseline" else config.learner_batch}
        if self._begins and config.warm_start.steps:
            sizes.add(config.train.global_batch if self._together is None else config.share)
        for size in sizes:
            self._job.check_batch(size, config.train.accumulate)

    @property
    def model(self) -> nn.Module:
        """The model being trained: this learner's own, not the global one."""
        return self._island.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._island.optimizer

    @property
    def learner(self) -> AnyLearner:
        """The learner of this process in the present phase."""
        return self._island.learner

    # --- the life of a part

    def train(self) -> Summary:
        """Train until tokens or steps are spent, the syncer drains this part, or `stop` is called; evaluate and leave.

        A disk that refuses a checkpoint is said, and the checkpoint is tried again soon; training goes on.

        Raises:
            StoreError: the last checkpoint could not be written; all else is done.
        """
        try:
            if self._job.first:
                self._save_config()
            path = self.directory / "events.jsonl" if self._job.first else None
            with Reporter(path, self.part.name, self._progress, self._clock, self._feed) as self._reporter:
                self._monitor = Monitor(self.config, self.part, self._island, self._judge, self._job, self._reporter)
                started, waited = self._clock.seconds(), False
                try:
                    self._prepare()
                    self._reporter.begins(self._island.tokens)
                    self._has_begun = True
                    started = self._clock.seconds()
                    reason = self._loop()
                except AuthError:  # the syncer lets this part in no more; what it has trained is kept
                    if self._has_news:
                        self._save()
                    raise
                except StoppedError:
                    if not self._job.any(self._stopping.is_asked):
                        raise
                    self._reporter.say(self._stopped_where)
                    reason, waited = "stopped", True
                return self._finish(reason, self._clock.seconds() - started, is_blocked=waited)
        finally:
            self.learner.close()
            self._progress.close()

    def stop(self) -> None:
        """End after the current step, or where this part waits for others, with a checkpoint. A signal handler may
        call it."""
        self._stopping.ask()

    @property
    def _stopped_where(self) -> str:
        if not self._joined:
            return "stops before it has joined the run"
        return f"stops after step {self._island.step}, where it waited for others"

    def _loop(self) -> str:
        run = self.config.run
        while self._island.run_tokens < run.tokens:
            if self._joined and run.steps is not None and self._island.step >= run.steps:
                return "steps"
            if self._everyone.any(self._stopping.is_asked):
                return "stopped"
            if self.learner.drained:
                return "drained"
            if not self._joined and not self._warming_up:
                self._join()
                continue  # the run may be over already
            if not self._island.has_data():
                continue  # drained meanwhile
            lr = self.learner.lr_factor * learning_rate(self.config, self._island.step + 1)
            held = holdings(self.learner)
            result = self._island.take_step()
            self._monitor.stepped(lr, result, held, warming_up=self._warming_up)
            every = self.config.checkpoint.every_steps
            if every and (self._island.step % every == 0 or self._island.step == self._save_again_at):
                refusal = self._save()
                is_refused = self._job.any(refusal is not None)
                self._save_again_at = self._island.step + max(1, every // TRIED_AGAIN) if is_refused else None
        return "budget"

    @property
    def _begins(self) -> bool:
        """Whether this part makes the run's beginning: the warm start, or what a checkpoint holds."""
        return self.part.role != "learner" or self.part.initialise or self._together is not None

    @property
    def _warming_up(self) -> bool:
        """Whether the next step belongs to the warm start: one model at the full batch, before initialisation."""
        return (
            self._begins
            and self.part.role != "baseline"  # which trains at the full batch all along
            and self._island.step < self.config.warm_start.steps
        )

    def _warm_up(self) -> None:
        """Begin the warm start; over a process group every learner has a share of the batch, otherwise one has all."""
        if self._together is not None:
            self._island.narrow(self.part.shard, self.config.share)
            self._island.connect(self._together.data_parallel)

    def _join(self, *, resumed: bool = False) -> None:
        """Become what this part is: connect, and read its own shard only."""
        part, island = self.part, self._island
        self._joined = True
        if part.role != "baseline":
            island.narrow(part.shard, self.config.learner_batch)
            island.specialise()
        if part.role == "learner":
            assert self._attach is not None
            self._reporter.say("joins the run")
            steps = island.step
            try:
                island.connect(self._attach)
            except (AuthError, StoppedError):
                self._joined = False
                raise
            if island.step < steps and not resumed:
                raise ConfigError(
                    f"the warm start made {steps} steps but the run starts at {island.step}: "
                    "this exchange cannot take them over; set warm_start.steps = 0"
                )
        island.count_anew()

    def _finish(self, reason: str, seconds: float, *, is_blocked: bool) -> Summary:
        """`is_blocked`: it was told to stop while it waited, and evaluates nothing."""
        self.learner.finish()  # the others go on while this one saves and evaluates
        saves = self._has_news if reason in ("stopped", "drained") else bool(self.config.checkpoint.every_steps)
        refusal = self._save() if saves else None
        summary = self._monitor.finished(reason, seconds, evaluates=not is_blocked)
        if refusal is not None:
            raise refusal
        return summary

    @property
    def _has_news(self) -> bool:
        """Whether a checkpoint would say more than the one that this part came from, if any."""
        return (self._joined and self._has_begun) or (self.part.resume_from is None and self._island.step > 0)

    # --- beginnings

    def _prepare(self) -> None:
        config, part = self.config, self.part
        if config.inner_optimizer != "adamw":
            self._reporter.say(describe_optimizer(self.optimizer, config))
        torch.manual_seed(_seed_of(config.run.seed, part.shard, self._job.rank))
        if part.resume_from is not None:
            self._resume(part.resume_from)
        else:
            if config.warm_start.checkpoint is not None and self._begins:
                path = config.warm_start.checkpoint
                self._island.begin_from(load_checkpoint(path), path)
                self._reporter.say(f"begins at step {self._island.step} with the model of {path}")
            if self._warming_up:
                self._warm_up()
            else:
                self._join()
        self._monitor.begins()
        for checkpoint in part.unusable:
            self._reporter.set_aside(checkpoint)

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint: exactly, or with the run's newest model where the run has gone on."""
        saved = load_checkpoint(path)
        if saved["run"] != self.config.run.name:
            raise CheckpointError(
                f"{path} belongs to the run {saved['run']}, not to {self.config.run.name}; check --resume"
            )
        self._island.take_over(saved, path)
        if saved["joined"]:
            self._join(resumed=True)
        elif self._warming_up:
            self._warm_up()
        exact = self._island.load(saved)
        self._everyone.require_same(self._island.step, "the step to resume from")
        how = "" if exact else ", with the run's newest model"
        self._reporter.say(f"resumes at step {self._island.step} from {path}{how}")

    def _save(self) -> StoreError | None:
        """Write a checkpoint. Returns the error where the disk has refused it, on the rank that writes."""
        started = self._clock.seconds()
        state = self._island.state(warming_up=not self._joined)
        if not self._job.first:
            return None
        state |= {"run": self.config.run.name, "joined": self._joined and self.part.role == "learner"}
        step = self._island.step
        try:
            saved = save_checkpoint(self.directory / CHECKPOINTS, step, state, keep=self.config.checkpoint.keep)
        except StoreError as error:
            self._reporter.say(f"has no checkpoint of step {step}: {error}")
            self._reporter.append(ev.CheckpointRefused(step=step, error=str(error)))
            return error
        seconds = self._clock.seconds() - started
        self._reporter.append(
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
