"""The reference trainer: one learner's part of a run, from the first batch to the summary."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco import events as ev
from diloco.config import RunConfig, dump_config
from diloco.errors import CheckpointError, ConfigError, LayoutError, StoreError
from diloco.training.alone import AloneLearner, LearnerLike
from diloco.training.budget import Budget
from diloco.training.checkpoint import (
    from_bytes,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
    to_bytes,
)
from diloco.training.data import Stream
from diloco.training.evaluate import Judge
from diloco.training.export import global_model
from diloco.training.inner import InnerStep, StepResult, choose_device
from diloco.training.job import Job, local_rank
from diloco.training.journal import Journal
from diloco.training.models import build_model, load_state
from diloco.training.optimizers import describe_optimizer, load_optimizer, make_optimizer, untrained
from diloco.training.part import Part, Role, Summary
from diloco.training.progress import Progress, Silent, Status
from diloco.training.schedule import learning_rate, schedule_factor
from diloco.training.sources import load_corpus

__all__ = ["CHECKPOINTS", "Attach", "Part", "Role", "Summary", "Together", "Trainer"]

CHECKPOINTS = "checkpoints"

# Makes the learner that exchanges: (model, inner optimizer, steps already done, tokens that the run has trained).
Attach = Callable[[nn.Module, torch.optim.Optimizer, int, int], LearnerLike]


@dataclass(frozen=True)
class Together:
    """Learners that are the ranks of one process group, without a syncer.

    Attributes:
        everyone: all of them; they stop after the same step.
        data_parallel: makes the learner that exchanges gradients, for the warm start that they make together.
    """

    everyone: Job
    data_parallel: Attach


class Trainer:
    """Trains one part of a run.

    Arguments:
        attach: connects this part to the others; None for a part that exchanges nothing.
        job: the ranks that are this learner; every rank makes a Trainer of its own, with the same arguments.
        together: where the learners are ranks of one process group.
    """

    def __init__(
        self, config: RunConfig, part: Part, attach: Attach | None = None, progress: Progress | None = None,
        job: Job | None = None, together: Together | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.part = part
        self.directory = config.dir / part.name
        self._attach = attach
        self._together = together
        self._job = job or Job()
        self._everyone = self._job if together is None else together.everyone
        self._progress = progress or Silent()
        self._stopping = False
        self._joined = False
        self._budget = Budget(0, 0)
        self._beginning = (0, 0)  # step and tokens of the run when this part's learner took over
        self._tokens = 0
        self._inner_s = 0.0
        self._inner_steps = 0
        self._trained_here = 0
        self._num_joined_versions = 0

        corpus = load_corpus(config.data)
        device = choose_device(config.train.device, local_rank())
        length = config.data.sequence_length
        model: nn.Module = build_model(config.model, corpus.vocab_size, length, config.run.seed)
        self.model = model.to(device)
        self.model.train()
        self._trained = self._job.wrap(self.model)
        self.optimizer = make_optimizer(self.model, config)
        self._inner = InnerStep(self._trained, self.optimizer, config.train, device)
        self._check_batches()
        everything = range(config.run.learners)
        self._stream = Stream(corpus, length, config.run.learners, everything, config.share, config.run.seed)
        self._judge = Judge(self.model, corpus, config)
        self.learner: LearnerLike = AloneLearner(self.model, config.tokens_per_full_step)

    def _check_batches(self) -> None:
        """Every batch that this part will take is divided over ranks and micro-batches, equally."""
        config = self.config
        sizes = {config.train.global_batch if self.part.role == "baseline" else config.learner_batch}
        if self._begins and config.warm_start.steps:
            sizes.add(config.train.global_batch if self._together is None else config.share)
        parts = self._job.size * config.train.accumulate
        for size in sizes:
            if size % parts:
                raise ConfigError(
                    f"a batch of {size} sequences does not divide over {self._job.size} ranks x {config.train.accumulate} "
                    "micro-batches; change train.batch, train.global_batch or train.accumulate"
                )

    # --- the life of a part

    def train(self) -> Summary:
        """Train until the run's tokens are spent (or `stop` is called), evaluate, and say goodbye."""
        try:
            if self._job.first:
                self._save_config()
            path = self.directory / "events.jsonl" if self._job.first else None
            with Journal(path, self.part.name, self._progress) as self._journal:
                self._prepare()
                self._journal.begins(self._tokens)
                started = time.perf_counter()
                reason = self._loop()
                return self._finish(reason, time.perf_counter() - started)
        finally:
            self.learner.close()
            self._progress.close()

    def stop(self) -> None:
        """End after the current step, with a checkpoint; safe to call from a signal handler."""
        self._stopping = True

    def _loop(self) -> str:
        last_step = self.config.run.steps
        while self._run_tokens() < self.config.run.tokens:
            if self._joined and last_step is not None and self.learner.steps >= last_step:
                return "steps"
            if self._everyone.any(self._stopping):
                return "stopped"
            if not self._joined and not self._warming_up:
                self._join()
                continue  # the run may be over already
            self._take_step()
        return "budget"

    def _take_step(self) -> None:
        started = time.perf_counter()
        batch = self._stream.next(self._job.rows(self._stream.num_rows))
        step = self.learner.steps + 1
        result = self._inner.run(batch, schedule_factor(self.config, step))
        versions = self.learner.versions
        tokens = batch[:, 1:].numel()
        self._tokens += tokens * self._job.size
        self._trained_here += tokens * self._job.size
        self.learner.step(tokens=tokens)
        self._inner_s += time.perf_counter() - started
        self._inner_steps += 1
        self._after_step(learning_rate(self.config, step), result, versions)

    def _run_tokens(self) -> int:
        return self._budget.spent(self._tokens, self.learner.run_tokens)

    @property
    def _begins(self) -> bool:
        """Whether this part makes the run's beginning: the warm start, or what a checkpoint holds."""
        part = self.part
        return part.role != "learner" or part.initialise or self._together is not None

    @property
    def _warming_up(self) -> bool:
        """Whether the next step belongs to the warm start: one model at the full batch, before the run is initialised."""
        return (
            self._begins
            and self.part.role != "baseline"  # which trains at the full batch all along
            and self.learner.steps < self.config.warm_start.steps
        )

    def _warm_up(self) -> None:
        """Begin the warm start: over a process group every learner brings its share of the batch, else this one takes it all."""
        if self._together is not None:
            self._stream.select([self.part.shard])
            self._connect(self._together.data_parallel, self._run_tokens())

    def _join(self, *, resumed: bool = False) -> None:
        """Become what this part is: connect, and read its own shard only."""
        part, steps = self.part, self.learner.steps
        self._joined = True
        if part.role != "baseline":
            self._stream.select([part.shard])
            self._stream.batch = self.config.learner_batch
            self._inner.leave_alone(untrained(self.model, self.config.train.trains))
        if part.role == "learner":
            assert self._attach is not None
            self._journal.say("joins the run")
            self._connect(self._attach, self._tokens_at(steps))
            if self.learner.steps < steps and not resumed:
                raise ConfigError(
                    f"the warm start made {steps} steps but the run starts at {self.learner.steps}: "
                    "this exchange cannot take them over; set warm_start.steps = 0"
                )
            if self.learner.steps != steps:
                # A late joiner reads its shard from where the run is, so that no two passes differ between learners, and nothing
                # is read again that the warm start has read.
                self._stream.position = self.learner.steps * max(self.config.share, self.config.learner_batch)
        self._num_joined_versions = sum(self.learner.versions)
        self._budget = Budget(self._tokens, self.learner.run_tokens)

    def _connect(self, attach: Attach, run_tokens: int) -> None:
        """Take part by another exchange from here on."""
        steps = self.learner.steps
        self._beginning = (steps, run_tokens)
        self.learner.close()
        self.learner = attach(self._trained, self.optimizer, steps, run_tokens)

    def _tokens_at(self, step: int) -> int:
        """Tokens of the run at the end of the warm start, exactly: what is heard of the last step comes with the next."""
        steps, tokens = self._beginning
        return tokens + (step - steps) * self.config.tokens_per_full_step

    def _finish(self, reason: str, seconds: float) -> Summary:
        if self.config.checkpoint.every_steps or reason == "stopped":
            self._save()
        loss = self._evaluate()
        sample = self._judge.sample(self.learner) if self._job.first else ""
        steps = self.learner.steps
        if sample:
            self._journal.append(ev.Sampled(step=steps, prompt=self.config.evaluate.prompt, text=sample))
        self._journal.append(ev.Finished(steps=steps, tokens=self._tokens, seconds=seconds, reason=reason, loss=loss))
        return Summary(
            name=self.part.name,
            role=self.part.role,
            reason=reason,
            steps=steps,
            tokens=self._tokens,
            run_tokens=self._run_tokens(),
            held_out_loss=loss,
            seconds=seconds,
            step_s=self._inner_s / max(1, self._inner_steps),
            sample=sample,
            metrics=self.learner.metrics(),
        )

    # --- beginnings

    def _prepare(self) -> None:
        if self.config.inner_optimizer != "adamw":
            self._journal.say(describe_optimizer(self.optimizer, self.config))
        torch.manual_seed(_seed_of(self.config.run.seed, self.part.shard, self._job.rank))
        if self.part.resume_from is not None:
            self._resume(self.part.resume_from)
        else:
            if self.config.warm_start.checkpoint is not None and self._begins:
                self._begin_from(self.config.warm_start.checkpoint)
            if self._warming_up:
                self._warm_up()
            else:
                self._join()
        config = self.config
        self._journal.append(
            ev.RunStarted(
                run=config.run.name,
                learners=config.run.learners,
                num_parameters=sum(p.numel() for p in self.model.parameters()),
                step=self.learner.steps,
                tokens=self._tokens,
                role=self.part.role,
                shard=None if self.part.role == "baseline" else self.part.shard,
                method=config.method,
            )
        )

    def _begin_from(self, path: Path) -> None:
        """Start the run with what a checkpoint, of any run, came to: global model, inner optimizer, step and tokens."""
        saved = load_checkpoint(path)
        self._take_over(saved, path)
        if self.learner.run_tokens >= self.config.run.tokens:
            raise ConfigError(
                f"{path} has {self.learner.run_tokens} tokens behind it and run.tokens is {self.config.run.tokens}; raise it"
            )
        self._stream.position = self.learner.steps * self._stream.batch
        self._journal.say(f"begins at step {self.learner.steps} with the model of {path}")

    def _take_over(self, saved: dict[str, Any], path: Path) -> None:
        """A checkpoint's global model, inner optimizer, step and tokens: what an initialising learner gives the run."""
        try:
            load_state(self.model, global_model(saved))
            load_optimizer(self.optimizer, saved["optimizer"])
        except (LayoutError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not fit the model of this run ({error}); check [model] and [inner]"
            ) from error
        self.learner.load_state_dict({"type": "alone", "steps": saved["step"], "run_tokens": saved["run_tokens"]})
        self._beginning = (saved["step"], saved["run_tokens"])

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint: exactly, or with the run's newest model where the run has gone on."""
        saved = load_checkpoint(path)
        if saved["run"] != self.config.run.name:
            raise CheckpointError(
                f"{path} belongs to the run {saved['run']}, not to {self.config.run.name}; check --resume"
            )
        self._take_over(saved, path)
        if saved["joined"]:
            self._join(resumed=True)
        elif self._warming_up:
            self._warm_up()
        self.model.load_state_dict(saved["model"])
        exact = self.learner.load_state_dict(saved["learner"])
        self._stream.load_state_dict(saved["cursor"])
        if self._job.rank < len(saved["random"]):
            restore_random_state(from_bytes(saved["random"][self._job.rank]))
        self._tokens = saved["tokens"]
        self._budget = Budget(self._tokens, self.learner.run_tokens)
        if exact:
            self._budget.load_state_dict(saved["budget"])
        self._everyone.require_same(self.learner.steps, "the step to resume from")
        how = "" if exact else ", with the run's newest model"
        self._journal.say(f"resumes at step {self.learner.steps} from {path}{how}")

    def _save(self) -> None:
        started = time.perf_counter()
        step = self.learner.steps
        learner = self.learner.state_dict()  # before the model: it may wait for answers
        random = self._job.gathered(to_bytes(random_state()))
        if not self._job.first:
            return
        state = {
            "run": self.config.run.name,
            "joined": self._joined and self.part.role == "learner",
            "step": step,
            "tokens": self._tokens,
            "run_tokens": self._run_tokens() if self._joined else self._tokens_at(step),
            "budget": self._budget.state_dict(),
            "layout": None if self.learner.layout is None else self.learner.layout.to_dict(),
            "learner": learner,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.config.schedule.model_dump(),
            "cursor": self._stream.state_dict(),
            "random": random,  # of every rank
        }
        saved = save_checkpoint(self.directory / CHECKPOINTS, step, state, keep=self.config.checkpoint.keep)
        seconds = time.perf_counter() - started
        self._journal.append(
            ev.Checkpointed(step=step, path=str(saved.path), num_bytes=saved.num_bytes, seconds=seconds)
        )

    def _save_config(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "run.toml").write_text(dump_config(self.config), encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"cannot write to {self.directory} ({error}); set [run] dir to a writable directory"
            ) from error

    # --- after a step

    def _after_step(self, lr: float, result: StepResult, versions: tuple[int, ...]) -> None:
        config, step = self.config, self.learner.steps
        self._journal.adopted(step, versions, self.learner.versions)
        if step % config.train.log_every_steps == 0:
            loss, norm = self._job.mean(float(result.loss)), float(result.gradient_norm)
            self._journal.stepped(step, loss=loss, lr=lr, tokens=self._tokens, gradient_norm=norm)
            self._journal.waited(step, self.learner.metrics())
        if self._journal.wants_status():
            self._journal.show(self._status(step, lr, float(result.loss)))
        if config.evaluate.every_steps and step % config.evaluate.every_steps == 0:
            self._evaluate()
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
            self._save()

    def _status(self, step: int, lr: float, loss: float) -> Status:
        metrics = self.learner.metrics()
        num_bytes = metrics.get("num_bytes", {})
        new_versions = sum(self.learner.versions) - self._num_joined_versions
        return Status(
            name=self.part.name,
            step=step,
            loss=loss,
            lr=lr,
            tokens_per_s=self._trained_here / max(1e-9, self._inner_s),
            run_tokens=self._run_tokens(),
            budget=self.config.run.tokens,
            versions=self.learner.versions,
            sent_bytes=num_bytes.get("contributions", 0),
            received_bytes=num_bytes.get("updates", 0) + num_bytes.get("joins", 0),
            participation=metrics.get("merges", 0) / new_versions if new_versions > 0 else None,
            note="warm start" if self._warming_up else "",
        )

    def _evaluate(self) -> float:
        """The global model's loss; the first rank finds it, and all know it."""
        loss = self._judge.known(self.learner)
        if loss is not None:
            return loss
        loss = self._job.shared(self._judge.loss(self.learner) if self._job.first else 0.0)
        self._judge.remember(self.learner, loss)
        step = self.learner.steps
        self._journal.append(
            ev.Evaluated(
                step=step,
                tokens=self._run_tokens(),
                loss=loss,
                num_sequences=self._judge.num_sequences,
                versions=self.learner.versions,
            )
        )
        self._journal.say(f"step {step}: held-out loss of the global model {loss:.4f}")
        return loss


def _seed_of(*numbers: int) -> int:
    """One seed of several numbers, so that learners and ranks draw different ones (in dropout, for instance)."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1
