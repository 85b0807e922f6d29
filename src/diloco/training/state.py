"""The training state of a learner: model, inner optimizer, data and exchange; its inner steps and checkpoints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from diloco.config import AUTO, RunConfig
from diloco.errors import CheckpointError, ConfigError, LayoutError, translated
from diloco.learner import Learner
from diloco.learner.held import HeldExperts
from diloco.protocol.units import numbers, units_of
from diloco.training.checkpoint import from_bytes, random_state, restore_random_state, to_bytes
from diloco.training.data.corpus import Corpus
from diloco.training.data.streams import BatchStream, LeasedStream, Stream, TextStream
from diloco.training.expert_part import held_rows, moved_rows, part_of, part_state
from diloco.training.inner import InnerStep, StepResult
from diloco.training.learners import AnyLearner, Attach, Holding, StandaloneLearner
from diloco.training.mixture import Mixture
from diloco.training.model import build_model, load_state
from diloco.training.optimizers import converted, load_optimizer, make_optimizer, schedule_factor, untrained_parameters
from diloco.training.pretrained import global_model
from diloco.training.rank_group import RankGroup, choose_device
from diloco.training.spec import Clock

COUNTED = ("updates", "merges", "blocked_s", "num_blocked", "blocked_histogram", "num_bytes", "resumed_bytes")
"""Of a learner's metrics, those that are sums over its life."""

LEASE_STEPS = 16
"""Inner steps that a lease of data covers by default."""


class TokenEstimate:
    """Estimates the current tokens of the whole run from its last report and from this learner's tokens since.

    A learner receives a report of the run's tokens about once a second. Between reports the other learners are assumed
    to keep the pace of the last report: run(now) ≈ run(reported) + own(since) · Δrun / Δown, of which the others add at
    most Δrun: after a wait for the others, Δown is small. The estimate is exact where every step brings a report.

    Arguments:
        own: tokens of this learner at the report.
        reported: tokens of the run in the report.
    """

    def __init__(self, own: int, reported: int) -> None:
        self._own = own
        self._reported = reported
        self._pace, self._most = 1.0, 0

    def now(self, own: int, reported: int) -> int:
        """Tokens of the run now; `own` is this learner's count now, `reported` the run's in the newest report."""
        if reported != self._reported:
            if own > self._own:
                # At least this learner's own pace: the tokens of a learner that leaves go with it, which would look
                # like a negative pace.
                self._pace = max(1.0, (reported - self._reported) / (own - self._own))
            self._most = reported - self._reported
            self._own, self._reported = own, reported
        since = own - self._own
        return reported + max(since, min(int(since * self._pace), self._most))

    def state_dict(self) -> dict[str, float]:
        """The last report, this learner's tokens at it, the pace, and the most that the others add."""
        return {"own": self._own, "heard": self._reported, "pace": self._pace, "most": self._most}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`, where the run has not advanced since."""
        self._own, self._reported, self._most = (int(state[name]) for name in ("own", "heard", "most"))
        self._pace = state["pace"]


class TrainingState:
    """Model, inner optimizer, data and learner of one trainer.

    At first the learner is standalone and reads every shard at the full batch of the run; `select_shard` and `attach`
    make it a learner of the run. Every rank has a training state of its own, and calls the same methods.

    Arguments:
        begins_whole: build the whole model also where the learner is to hold a part of it (`take_part`).

    Attributes:
        config, ranks, clock: as given.
        held: the experts that this learner is to hold; None: all.
        is_dealt: the syncer deals it these experts.
        part: those that its model has now; None: all.
        mixture: the experts of the model; a dense model has none.
        tokens: trained by this learner.
        num_steps, inner_s: steps of this process, and the time they took.
    """

    def __init__(
        self, config: RunConfig, corpus: Corpus, ranks: RankGroup, clock: Clock | None = None,
        peers: RankGroup | None = None, *, held: HeldExperts | None = None, begins_whole: bool = True,
    ) -> None:  # fmt: skip
        self.config = config
        self.clock = clock or Clock()
        self.ranks, self._peers = ranks, peers or ranks
        self.held = held
        self._vocab_size = corpus.vocab_size
        self._earlier: dict[str, Any] = {}
        self._whole: tuple[nn.Module, dict[str, Any]] | None = None  # and its inner optimizer, until this learner joins
        self.is_dealt = config.train.holds_experts == AUTO
        self.part = None if begins_whole else held
        self._train(self._build())
        self.stream = _stream(config, corpus)
        self.learner: AnyLearner = StandaloneLearner(self.model, config.tokens_per_full_step)
        self.tokens = 0
        self.num_steps = 0
        self.inner_s = 0.0
        self._trained_here = 0
        self._run_tokens = TokenEstimate(0, 0)
        self._beginning = (0, 0)  # step and tokens of the run when the current learner started

    def _build(self) -> PreTrainedModel:
        """A new model with the experts of `part`."""
        config, experts = self.config, None if self.part is None else self.part.experts
        return build_model(config.model, self._vocab_size, config.data.sequence_length, config.run.seed, experts)

    def _train(self, model: nn.Module) -> None:
        """Train this model from here on, by a new inner optimizer."""
        config, device = self.config, choose_device(self.config.train.device)
        self.model: nn.Module = model.to(device)
        self.model.train()
        self._trained = self.ranks.wrap(self.model, config.train.expert_parallel)
        self.optimizer = make_optimizer(self.model, config)
        self.mixture = Mixture(self.model, self.ranks, config.train.bias_speed, self.part)
        self._inner = InnerStep(self._trained, self.optimizer, config.train, device)

    # --- steps

    @property
    def step(self) -> int:
        """The inner step of the run that this learner has reached."""
        return self.learner.steps

    @property
    def run_tokens(self) -> int:
        """Estimate of the tokens that the whole run has trained."""
        return self._run_tokens.now(self.tokens, self.learner.run_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of this learner since its process started."""
        return self._trained_here / max(1e-9, self.inner_s)

    def metrics(self) -> dict[str, Any]:
        """As `Learner.metrics`; its bytes, versions, merges and waits with those of earlier learners (`leave_for`)."""
        now = self.learner.metrics()
        for key, earlier in self._earlier.items():
            if isinstance(earlier, Mapping):
                (total := Counter(earlier)).update(now.get(key))
                now[key] = dict(total)
            else:
                now[key] = earlier + now.get(key, 0)
        return now

    def take_step(self) -> StepResult:
        """Take one inner step and the learner's part of it."""
        started = self.clock.seconds()
        batch = self.stream.next(self.ranks.rows(self.stream.num_rows))
        result = self._inner.run(batch, schedule_factor(self.config, self.step + 1))
        self.mixture.balance()
        tokens = batch[:, 1:].numel()
        self.tokens += tokens * self.ranks.size
        self._trained_here += tokens * self.ranks.size
        self.learner.step(tokens=tokens)
        if isinstance(self.learner, StandaloneLearner):
            self.clock.stepped_alone()
        self.inner_s += self.clock.seconds() - started
        self.num_steps += 1
        return result

    # --- from standalone to a learner of the run

    def select_shard(self, shard: int, batch: int) -> None:
        """Read this shard only, `batch` sequences a step."""
        self.stream.select([shard])
        self.stream.batch = batch

    def take_part(self) -> None:
        """Replace the whole model by the part that this learner is to hold, with the inner optimizer's state of it."""
        if self.held is None or self.part is not None:
            return
        assert isinstance(self.model, PreTrainedModel)
        self._whole, self.part = (self.model, self.optimizer.state_dict()), self.held
        self.mixture.close()
        self._train(part_of(self.model, self.held.experts))
        load_optimizer(self.optimizer, self._own(self._whole[1]))

    def return_part(self) -> None:
        """After this learner could not join, go back to the whole model, with which it may begin the run later."""
        if self._whole is not None:
            (whole, optimizer), self._whole, self.part = self._whole, None, None
            self.mixture.close()
            self._train(whole)
            load_optimizer(self.optimizer, optimizer)

    def leave_for(self, held: HeldExperts) -> None:
        """Leave the run, and replace the model by the part with these experts: with the values and the inner
        optimizer's state of the experts that both have, and without state of the others, whose values come from the
        run."""
        self.learner.close()
        self._earlier = {key: value for key, value in self.metrics().items() if key in COUNTED}
        layout, before, model, state = self.learner.layout, self.part, self.model, self.optimizer.state_dict()
        assert layout is not None
        assert before is not None
        cut = layout.units().keys()  # the tensors with a row for each expert
        rows = [before.experts.index(it) if it in before.experts else None for it in held.experts]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        trained = [names[id(each)] for group in self.optimizer.param_groups for each in group["params"]]

        def moved(name: str, value: Any) -> Any:
            is_cut = name in cut and isinstance(value, Tensor) and value.shape[:1] == (len(before.experts),)
            return moved_rows(value, rows) if is_cut else value

        self.mixture.close()
        self.held = self.part = held
        self._train(self._build())
        self.model.load_state_dict({name: moved(name, value) for name, value in model.state_dict().items()})
        load_optimizer(self.optimizer, converted(state, lambda index, value: moved(trained[index], value)))

    def stand_alone(self) -> None:
        """After this learner could not join again, keep its step and tokens for a checkpoint."""
        steps, run_tokens = self.learner.steps, self.learner.run_tokens
        self.learner = StandaloneLearner(self.model, self.config.tokens_per_full_step)
        self.learner.load_state_dict({"type": "alone", "steps": steps, "run_tokens": run_tokens})

    def _own(self, optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
        """An optimizer's saved state, of the experts that the model has."""
        return optimizer if self.part is None else part_state(optimizer, self.optimizer, self.part.experts)

    def exclude_untrained(self) -> None:
        """Train only the parameters that the run file selects for this learner (`train.trains`)."""
        self._inner.exclude(untrained_parameters(self.model, self.config.train.trains))

    def attach(self, attach: Attach, *, again: bool = False) -> None:
        """Replace the learner by one that `attach` makes, at the current step. `again`: after `leave_for`."""
        step, tokens = self.step, self.warm_start_tokens(self.step)
        self._beginning = (step, tokens)
        self.learner.close()
        holding = Holding()
        if self.part is not None:
            whole = None if self._whole is None else self._whole[0]
            holding = Holding(self.part.text, whole, self.is_dealt, again)
        self.learner = attach(self._trained, self.optimizer, step, tokens, holding)
        self._whole = None
        exchanges_gradients = isinstance(self.learner, Learner) and self.learner.method.exchanged == "gradients"
        self.mixture.ranks = self._peers if exchanges_gradients else self.ranks
        if isinstance(self.stream, LeasedStream) and isinstance(self.learner, Learner):
            self.stream.lease(self.learner)
        if self.step > step and not again:
            # A late joiner starts its shard at the run's step: all learners are in the same pass, and no learner reads
            # the sequences of a warm start again.
            self.stream.position = self.step * max(self.config.share, self.stream.batch)
        self.reset_token_estimate()

    def reset_token_estimate(self) -> None:
        """Restart the estimate of the run's tokens at the learner's current report, which is exact."""
        self._run_tokens = TokenEstimate(self.tokens, self.learner.run_tokens)

    def warm_start_tokens(self, step: int) -> int:
        """Exact tokens of the run at a step of the warm start. A report of its last step would arrive a step later."""
        first, tokens = self._beginning
        return tokens + (step - first) * self.config.tokens_per_full_step

    # --- checkpoints

    def state(self, *, warming_up: bool) -> dict[str, Any]:
        """The state that `load` and `start_from` restore, complete on the first rank. Every rank must call it."""
        # Before the model: it may wait for answers. Several ranks have a syncer, and the state of one process.
        learner = self.learner.state_dict(whole=self.ranks.size > 1)
        layout, model = self.learner.layout, self.model.state_dict()
        if layout is not None:  # the learner's state has the trained tensors
            model = {spec.name: model[spec.name] for spec in layout.static}
        return {
            "step": self.step,
            "tokens": self.tokens,
            "run_tokens": self.warm_start_tokens(self.step) if warming_up else self.run_tokens,
            "budget": self._run_tokens.state_dict(),
            "layout": None if layout is None else layout.to_dict(),
            "held": None if self.part is None else list(self.part.experts),
            "learner": learner,
            "model": self.ranks.whole(model),
            "optimizer": self.ranks.whole(self.optimizer.state_dict()),
            "schedule": self.config.schedule.model_dump(),
            "cursor": self.stream.state_dict(),
            "random": self.ranks.gather(to_bytes(random_state())),  # of every rank
        }

    def restore_global(self, saved: dict[str, Any], path: Path) -> None:
        """Restore the state of a checkpoint that initialises a run: global model, inner optimizer, step and tokens.

        A learner that holds a part of a mixture takes its part of a whole model.

        Raises CheckpointError when the checkpoint is of another model or optimizer, or of another part.
        """
        own = None if self.part is None else list(self.part.experts)
        if saved.get("held") != own and (saved.get("held") is not None or saved["joined"]):
            raise CheckpointError(
                f"{path} is of a learner that holds {_experts(saved.get('held'))}, and this one holds {_experts(own)} "
                "(train.holds_experts); resume with those, or start without this checkpoint"
            )
        failed, advice = f"{path} does not fit the model of this run", "check [model] and [inner]"
        with translated((LayoutError, ValueError), CheckpointError, failed, advice):
            model: Mapping[str, Tensor] = global_model(saved)
            if self.part is not None:
                shapes = {name: each.shape for name, each in self.model.state_dict().items()}
                experts = self.part.experts
                model = {name: held_rows(it, shapes.get(name, it.shape), experts) for name, it in model.items()}
            load_state(self.model, model)
            load_optimizer(self.optimizer, self._own(saved["optimizer"]))
        self.learner.load_state_dict({"type": "alone", "steps": saved["step"], "run_tokens": saved["run_tokens"]})
        self._beginning = (saved["step"], saved["run_tokens"])

    def start_from(self, saved: dict[str, Any], path: Path) -> None:
        """Start a run from a checkpoint of any run. Raises CheckpointError or ConfigError."""
        self.restore_global(saved, path)
        budget = self.config.run.tokens
        if saved["run_tokens"] >= budget:
            raise ConfigError(
                f"the checkpoint {path} has trained {saved['run_tokens']} tokens and run.tokens is {budget}; raise it"
            )
        self.stream.position = self.step * self.stream.batch

    def load(self, saved: dict[str, Any]) -> bool:
        """After `restore_global`, restore the rest. Returns False where the run has advanced without this learner.

        The learner then continues with the run's newest model, otherwise exactly.
        """
        rank = self.ranks.rank
        exact = self.learner.load_state_dict(saved["learner"])
        self.stream.load_state_dict(saved["cursor"])
        if rank < len(saved["random"]):
            restore_random_state(from_bytes(saved["random"][rank]))
        self.tokens = saved["tokens"]
        self.reset_token_estimate()
        if exact:
            self._run_tokens.load_state_dict(saved["budget"])
        return exact


def _experts(held: Sequence[int] | None) -> str:
    return "the whole model" if held is None else f"experts {numbers(units_of(held))}"


def _stream(config: RunConfig, corpus: Corpus) -> BatchStream:
    """The data of the whole run, at its full batch."""
    length, learners, seed = config.data.sequence_length, config.run.learners, config.run.seed
    shards, shared_fraction = range(learners), config.data.shared_fraction
    if corpus.texts is not None:
        return TextStream(corpus.texts, length, learners, shards, config.share, seed, shared_fraction)
    if config.data.deal == "leases":
        return LeasedStream(corpus, length, shards, config.share, seed, config.data.lease_steps or LEASE_STEPS)
    return Stream(corpus, length, learners, shards, config.share, seed, shared_fraction)
