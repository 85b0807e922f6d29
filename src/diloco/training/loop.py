"""The reference trainer: one learner's part of a run, from the first batch to the summary."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from diloco import events as ev
from diloco.config import RunConfig, dump_config
from diloco.errors import CheckpointError, ConfigError, StoreError
from diloco.training.alone import AloneLearner, LearnerLike
from diloco.training.budget import Budget
from diloco.training.checkpoint import load_checkpoint, random_state, restore_random_state, save_checkpoint
from diloco.training.data import Stream, held_out_batches
from diloco.training.evaluate import evaluate, sample_bytes
from diloco.training.inner import InnerStep, StepResult, choose_device
from diloco.training.models import build_model
from diloco.training.optimizers import describe_optimizer, load_optimizer, make_optimizer
from diloco.training.progress import Progress, Silent, Status
from diloco.training.schedule import learning_rate, schedule_factor
from diloco.training.sources import load_corpus

CHECKPOINTS = "checkpoints"

Role = Literal["learner", "baseline", "isolated"]
# Makes the learner that exchanges: (model, inner optimizer, steps already done, tokens already trained).
Attach = Callable[[nn.Module, torch.optim.Optimizer, int, int], LearnerLike]


@dataclass(frozen=True)
class Part:
    """Which part of the run this process plays.

    learner: trains its shard and exchanges; the one that initialises the run first makes the warm start.
    baseline: every shard in one process, the full batch at every step. isolated: as a learner, exchanging nothing.
    """

    name: str
    role: Role = "learner"
    shard: int = 0
    initialise: bool = False
    resume_from: Path | None = None  # a checkpoint directory


@dataclass(frozen=True)
class Summary:
    """What a finished part comes to."""

    name: str
    role: Role
    reason: str  # "budget" or "stopped"
    steps: int
    tokens: int  # trained by this process
    run_tokens: int
    held_out_loss: float  # of the global model, nats per token
    seconds: float  # spent in the loop
    step_s: float  # mean time of an inner step, without evaluation and checkpoints
    sample: str
    metrics: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Trainer:
    """Trains one part of a run; `attach` connects it to the others, and is None for a part that exchanges nothing."""

    def __init__(
        self, config: RunConfig, part: Part, attach: Attach | None = None, progress: Progress | None = None
    ) -> None:
        self.config = config
        self.part = part
        self.directory = config.dir / part.name
        self._attach = attach
        self._progress = progress or Silent()
        self._stopping = False
        self._joined = False
        self._budget = Budget(0, 0)
        self._tokens = 0
        self._inner_s = 0.0
        self._inner_steps = 0
        self._trained_here = 0
        self._last_logged = (time.perf_counter(), 0)
        self._waits = (0.0, 0)
        self._last_evaluated: tuple[tuple[int, tuple[int, ...]], float] | None = None
        self._num_joined_versions = 0

        self._corpus = load_corpus(config.data)
        self._device = choose_device(config.train.device)
        length = config.data.sequence_length
        model: nn.Module = build_model(config.model, self._corpus.vocab_size, length, config.run.seed)
        self.model = model.to(self._device)
        self.model.train()
        self.optimizer = make_optimizer(self.model, config)
        self._inner = InnerStep(self.model, self.optimizer, config.train, self._device)
        self._stream = Stream(
            self._corpus, length, config.run.learners, range(config.run.learners), config.learner_batch, config.run.seed
        )
        self._held_out = held_out_batches(self._corpus, length, config.evaluate.sequences, batch=32)
        self.learner: LearnerLike = AloneLearner(self.model, config.tokens_per_full_step)

    # --- the life of a part

    def train(self) -> Summary:
        """Train until the run's tokens are spent (or `stop` is called), evaluate, and say goodbye."""
        self._save_config()
        with ev.EventLog(self.directory / "events.jsonl", who=self.part.name) as self._log:
            try:
                self._prepare()
                started = time.perf_counter()
                self._last_logged = (started, self._tokens)
                reason = self._loop()
                return self._finish(reason, time.perf_counter() - started)
            finally:
                self.learner.close()
                self._progress.close()

    def stop(self) -> None:
        """End after the current step, with a checkpoint; safe to call from a signal handler."""
        self._stopping = True

    def _loop(self) -> str:
        while self._run_tokens() < self.config.run.tokens:
            if self._stopping:
                return "stopped"
            if not self._joined and not self._warming_up:
                self._join()
                continue  # the run may be over already
            started = time.perf_counter()
            batch = self._stream.next()
            step = self.learner.steps + 1
            result = self._inner.run(batch, schedule_factor(self.config, step))
            versions = self.learner.versions
            tokens = batch[:, 1:].numel()
            self._tokens += tokens
            self._trained_here += tokens
            self.learner.step(tokens=tokens)
            self._inner_s += time.perf_counter() - started
            self._inner_steps += 1
            self._after_step(learning_rate(self.config, step), result, versions)
        return "budget"

    def _run_tokens(self) -> int:
        return self._budget.spent(self._tokens, self.learner.run_tokens)

    @property
    def _warming_up(self) -> bool:
        """Whether the next step belongs to the warm start: one model at the full batch, before the run is initialised."""
        part = self.part
        warms = part.role == "isolated" or (part.role == "learner" and part.initialise)
        return warms and self.learner.steps < self.config.train.warm_start_steps

    def _join(self) -> None:
        """Become what this part is: connect, and read its own shard only."""
        part, steps = self.part, self.learner.steps
        self._joined = True
        if part.role != "baseline":
            self._stream.select([part.shard])
        if part.role == "learner":
            assert self._attach is not None
            self._progress.say(f"{part.name} joins the run")
            self.learner = self._attach(self.model, self.optimizer, steps, self._tokens)
            if self.learner.steps < steps:
                raise ConfigError(
                    f"the warm start made {steps} steps but the run starts at {self.learner.steps}: "
                    "this exchange cannot take them over; set train.warm_start_steps = 0"
                )
            # A late joiner reads its shard from where the run is, so that no two passes differ between learners.
            self._stream.position = self.learner.steps * self._stream.batch
        self._num_joined_versions = sum(self.learner.versions)
        self._budget = Budget(self._tokens, self.learner.run_tokens)

    def _finish(self, reason: str, seconds: float) -> Summary:
        if self.config.checkpoint.every_steps or reason == "stopped":
            self._save()
        loss = self._evaluate()
        sample = self._sample()
        metrics = self.learner.metrics()
        self._log.append(
            ev.Finished(steps=self.learner.steps, tokens=self._tokens, seconds=seconds, reason=reason, loss=loss)
        )
        return Summary(
            name=self.part.name,
            role=self.part.role,
            reason=reason,
            steps=self.learner.steps,
            tokens=self._tokens,
            run_tokens=self._run_tokens(),
            held_out_loss=loss,
            seconds=seconds,
            step_s=self._inner_s / max(1, self._inner_steps),
            sample=sample,
            metrics=metrics,
        )

    # --- beginnings

    def _prepare(self) -> None:
        if self.config.inner_optimizer != "adamw":
            self._progress.say(f"{self.part.name}: {describe_optimizer(self.optimizer, self.config)}")
        if self.part.resume_from is not None:
            self._resume(self.part.resume_from)
        elif not self._warming_up:
            self._join()
        config = self.config
        self._log.append(
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

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint: exactly, or with the run's newest model where the run has gone on."""
        saved = load_checkpoint(path)
        if saved["run"] != self.config.run.name:
            raise CheckpointError(
                f"{path} belongs to the run {saved['run']}, not to {self.config.run.name}; check --resume"
            )
        if saved["joined"]:
            self._join()
        try:
            self.model.load_state_dict(saved["model"])
            load_optimizer(self.optimizer, saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not fit the model of this run ({error}); check [model] and [inner]"
            ) from error
        exact = self.learner.load_state_dict(saved["learner"])
        self._stream.load_state_dict(saved["cursor"])
        restore_random_state(saved["random"])
        self._tokens = saved["tokens"]
        self._budget = Budget(self._tokens, self.learner.run_tokens)
        how = "" if exact else ", with the run's newest model"
        self._progress.say(f"{self.part.name} resumes at step {self.learner.steps} from {path}{how}")

    def _save(self) -> None:
        started = time.perf_counter()
        state = {
            "run": self.config.run.name,
            "joined": self._joined and self.part.role == "learner",
            "tokens": self._tokens,
            "layout": None if self.learner.layout is None else self.learner.layout.to_dict(),
            "learner": self.learner.state_dict(),  # before the model: it may wait for answers
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.config.schedule.model_dump(),
            "cursor": self._stream.state_dict(),
            "random": random_state(),
        }
        saved = save_checkpoint(
            self.directory / CHECKPOINTS, self.learner.steps, state, keep=self.config.checkpoint.keep
        )
        self._log.append(
            ev.Checkpointed(
                step=self.learner.steps,
                path=str(saved.path),
                num_bytes=saved.num_bytes,
                seconds=time.perf_counter() - started,
            )
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
        for fragment, (before, after) in enumerate(zip(versions, self.learner.versions, strict=True)):
            if after != before:
                self._log.append(ev.Adopted(step=step, fragment=fragment, version=after))
        if step % config.train.log_every_steps == 0:
            self._log_step(step, lr, result)
        if self._progress.wants():
            self._progress.show(self._status(step, lr, float(result.loss)))
        if config.evaluate.every_steps and step % config.evaluate.every_steps == 0:
            self._evaluate()
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
            self._save()

    def _log_step(self, step: int, lr: float, result: StepResult) -> None:
        now, tokens = time.perf_counter(), self._tokens
        since, before = self._last_logged
        self._last_logged = (now, tokens)
        self._log.append(
            ev.Stepped(
                step=step,
                loss=float(result.loss),
                lr=lr,
                tokens=tokens,
                tokens_per_s=(tokens - before) / (now - since),
                gradient_norm=float(result.gradient_norm),
            )
        )
        metrics = self.learner.metrics()
        seconds, times = float(metrics.get("blocked_s", 0.0)), int(metrics.get("num_blocked", 0))
        if times > self._waits[1]:
            self._log.append(ev.Waited(step=step, seconds=seconds - self._waits[0], times=times - self._waits[1]))
        self._waits = (seconds, times)

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
        """The global model's loss; whatever training state there is stays as it is."""
        now = (self.learner.steps, self.learner.versions)
        if self._last_evaluated is not None and self._last_evaluated[0] == now:
            return self._last_evaluated[1]
        loss = evaluate(self.model, self.learner.global_state_dict(), self._held_out)
        self._log.append(
            ev.Evaluated(
                step=self.learner.steps,
                tokens=self._run_tokens(),
                loss=loss,
                num_sequences=sum(len(batch) for batch in self._held_out),
                versions=self.learner.versions,
            )
        )
        self._last_evaluated = (now, loss)
        self._progress.say(f"{self.part.name} step {self.learner.steps}: held-out loss of the global model {loss:.4f}")
        return loss

    def _sample(self) -> str:
        table = self.config.evaluate
        if not (self._corpus.is_bytes and table.sample_bytes):
            return ""
        text = sample_bytes(
            self.model,
            self.learner.global_state_dict(),
            prompt=table.prompt,
            num_bytes=table.sample_bytes,
            context=self.config.data.sequence_length,
        )
        self._log.append(ev.Sampled(step=self.learner.steps, prompt=table.prompt, text=text))
        return text
