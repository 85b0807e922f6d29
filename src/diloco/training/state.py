"""One part of a run: what it trains with, its progress, and both in a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco.config import RunConfig
from diloco.errors import CheckpointError, ConfigError, LayoutError, translated
from diloco.learner import Learner
from diloco.training.checkpoint import from_bytes, random_state, restore_random_state, to_bytes
from diloco.training.data.corpus import Corpus
from diloco.training.data.streams import BatchStream, LeasedStream, Stream, TextStream
from diloco.training.inner import InnerStep, StepResult
from diloco.training.learners import AnyLearner, StandaloneLearner
from diloco.training.model import build_model, load_state
from diloco.training.optimizers import load_optimizer, make_optimizer, untrained_parameters
from diloco.training.pretrained import global_model
from diloco.training.rank_group import RankGroup, choose_device
from diloco.training.schedule import TokenEstimate, schedule_factor
from diloco.training.spec import Clock

# Makes the learner that exchanges: (model, inner optimizer, steps already done, tokens that the run has trained).
Attach = Callable[[nn.Module, torch.optim.Optimizer, int, int], AnyLearner]

LEASE_STEPS = 16
"""Inner steps that a lease of data lasts, where the run file says nothing."""


class TrainingState:
    """Model, inner optimizer, data and learner of one part of a run.

    It begins as a model of its own, reading every shard at the full batch of the run; `narrow` and
    `connect` make it a learner. Every rank of a `job` has an island of its own, and all do the same.

    Attributes:
        tokens: trained by this part.
        num_steps, inner_s: steps taken by this process, and the time they took.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, job: RankGroup, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or Clock()
        self._job = job
        device = choose_device(config.train.device)
        length = config.data.sequence_length
        model: nn.Module = build_model(config.model, corpus.vocab_size, length, config.run.seed)
        self.model = model.to(device)
        self.model.train()
        self._trained = job.wrap(self.model)
        self.optimizer = make_optimizer(self.model, config)
        self._inner = InnerStep(self._trained, self.optimizer, config.train, device)
        self.stream = _stream(config, corpus)
        self.learner: AnyLearner = StandaloneLearner(self.model, config.tokens_per_full_step)
        self.tokens = 0
        self.num_steps = 0
        self.inner_s = 0.0
        self._trained_here = 0
        self._budget = TokenEstimate(0, 0)
        self._beginning = (0, 0)  # step and tokens of the run when the learner took over

    # --- steps

    @property
    def step(self) -> int:
        """The run's step that this part is at."""
        return self.learner.steps

    @property
    def run_tokens(self) -> int:
        """Tokens trained by the whole run, as far as they can be known now."""
        return self._budget.spent(self.tokens, self.learner.run_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of this part since its process began."""
        return self._trained_here / max(1e-9, self.inner_s)

    def take_step(self) -> StepResult:
        """Take one inner step, and do what the learner does after it."""
        started = self._clock.seconds()
        batch = self.stream.next(self._job.rows(self.stream.num_rows))
        result = self._inner.run(batch, schedule_factor(self._config, self.step + 1))
        tokens = batch[:, 1:].numel()
        self.tokens += tokens * self._job.size
        self._trained_here += tokens * self._job.size
        self.learner.step(tokens=tokens)
        if isinstance(self.learner, StandaloneLearner):
            self._clock.stepped_alone()
        self.inner_s += self._clock.seconds() - started
        self.num_steps += 1
        return result

    def has_data(self) -> bool:
        """Whether there is a next batch; False where the learner was drained while it waited for one."""
        return self.stream.has_next()

    # --- becoming a learner

    def narrow(self, shard: int, batch: int) -> None:
        """Read this shard only, `batch` sequences a step."""
        self.stream.select([shard])
        self.stream.batch = batch

    def specialise(self) -> None:
        """Train only what the run file has this learner train."""
        self._inner.leave_alone(untrained_parameters(self.model, self._config.train.trains))

    def connect(self, attach: Attach) -> None:
        """Take part by another exchange from here on."""
        step, tokens = self.step, self.tokens_at(self.step)
        self._beginning = (step, tokens)
        self.learner.close()
        self.learner = attach(self._trained, self.optimizer, step, tokens)
        if isinstance(self.stream, LeasedStream) and isinstance(self.learner, Learner):
            self.stream.lease(self.learner)
        if self.step > step:
            # A late joiner reads its shard from where the run is, so that no two passes differ between learners, and
            # nothing is read again that a warm start has read.
            self.stream.position = self.step * max(self._config.share, self.stream.batch)
        self.count_anew()

    def count_anew(self) -> None:
        """Restart the count of the run's tokens at what the learner hears now, which is exact."""
        self._budget = TokenEstimate(self.tokens, self.learner.run_tokens)

    def tokens_at(self, step: int) -> int:
        """Tokens of the run at the end of a warm start, exactly: what is heard of its last step comes with the next."""
        first, tokens = self._beginning
        return tokens + (step - first) * self._config.tokens_per_full_step

    # --- checkpoints

    def state(self, *, warming_up: bool) -> dict[str, Any]:
        """Everything that `load` and `take_over` need. Every rank calls it; the first one saves for all."""
        learner = self.learner.state_dict()  # before the model: it may wait for answers
        layout, model = self.learner.layout, self.model.state_dict()
        if layout is not None:  # what is trained is in the learner's state
            model = {spec.name: model[spec.name] for spec in layout.static}
        return {
            "step": self.step,
            "tokens": self.tokens,
            "run_tokens": self.tokens_at(self.step) if warming_up else self.run_tokens,
            "budget": self._budget.state_dict(),
            "layout": None if layout is None else layout.to_dict(),
            "learners": self._of_all_ranks(learner),
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._config.schedule.model_dump(),
            "cursor": self.stream.state_dict(),
            "random": self._job.gathered(to_bytes(random_state())),  # of every rank
        }

    def _of_all_ranks(self, learner: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's state of the learner, on the first rank."""
        if self._job.size == 1:
            return [learner]
        gathered = self._job.gathered(to_bytes(learner))
        return [from_bytes(raw) for raw in gathered] if self._job.first else []

    def take_over(self, saved: dict[str, Any], path: Path) -> None:
        """A checkpoint's global model, inner optimizer, step and tokens: what an initialising learner gives the run.

        Raises CheckpointError when it does not fit.
        """
        failed, advice = f"{path} does not fit the model of this run", "check [model] and [inner]"
        with translated((LayoutError, ValueError), CheckpointError, failed, advice):
            load_state(self.model, global_model(saved))
            load_optimizer(self.optimizer, saved["optimizer"])
        self.learner.load_state_dict({"type": "alone", "steps": saved["step"], "run_tokens": saved["run_tokens"]})
        self._beginning = (saved["step"], saved["run_tokens"])

    def begin_from(self, saved: dict[str, Any], path: Path) -> None:
        """Begin a run with the state of a checkpoint of any run. Raises CheckpointError or ConfigError."""
        self.take_over(saved, path)
        budget = self._config.run.tokens
        if saved["run_tokens"] >= budget:
            raise ConfigError(f"{path} has {saved['run_tokens']} tokens behind it and run.tokens is {budget}; raise it")
        self.stream.position = self.step * self.stream.batch

    def load(self, saved: dict[str, Any]) -> bool:
        """After `take_over`: continue exactly (True), or with the newest model of a run that went on (False)."""
        states, rank = saved["learners"], self._job.rank
        exact = self.learner.load_state_dict(states[rank] if rank < len(states) else states[0])
        if self.learner.layout is None:  # else the learner has restored what it trains, and the rest is the run's
            self.model.load_state_dict(saved["model"])
        self.stream.load_state_dict(saved["cursor"])
        if self._job.rank < len(saved["random"]):
            restore_random_state(from_bytes(saved["random"][self._job.rank]))
        self.tokens = saved["tokens"]
        self.count_anew()
        if exact:
            self._budget.load_state_dict(saved["budget"])
        return exact


def _stream(config: RunConfig, corpus: Corpus) -> BatchStream:
    """The data of the whole run, at its full batch."""
    length, learners, seed = config.data.sequence_length, config.run.learners, config.run.seed
    shards = range(learners)
    if corpus.texts is not None:
        return TextStream(corpus.texts, length, learners, shards, config.share, seed)
    if config.data.deal == "leases":
        return LeasedStream(corpus, length, shards, config.share, seed, config.data.lease_steps or LEASE_STEPS)
    return Stream(corpus, length, learners, shards, config.share, seed)
