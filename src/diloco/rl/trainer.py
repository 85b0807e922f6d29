"""The trainer of a run of reinforcement learning: a learner that trains on groups of completions.

    first model → join the run → a batch of groups → one inner step on its loss → Learner.step → the next batch

The first model is that of `[model]`, from the run's seed or from weights, after `rl.supervised_steps` steps on the
answers of the run's tasks. A trainer writes no checkpoint: if it is started again, it joins like any learner, with the
newest global model, and the state of its inner optimizer begins anew.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import diloco
from diloco.config import RlTable, RunConfig
from diloco.errors import ConfigError, StoppedError, UnreachableError
from diloco.exchange.dialling import dialler, found
from diloco.learner.experts import mixture_blocks
from diloco.learner.learner import FINISH_TIMEOUT_S, Learner
from diloco.rl.batching import Batch, batches
from diloco.rl.loss import policy_loss, token_log_probs
from diloco.rl.settings import loss_of, table_of, tokenizer_of
from diloco.rl.tasks import Tasks
from diloco.rl.tokenizer import Tokenizer
from diloco.tracking.feed import Feed, open_feed, persistent_id
from diloco.tracking.values import Point, learner_values
from diloco.training.inner import InnerStep, StepResult
from diloco.training.mixture import buffer_roles
from diloco.training.model import build_model
from diloco.training.optimizers import lr_factor, make_optimizer, untrained_parameters
from diloco.training.progress import ProgressDisplay, status_line
from diloco.training.rank_group import choose_device
from diloco.training.spec import StopRequest, Summary

BLOCK = 1024
"""Tokens whose logits are in memory in fp32 at a time."""


def run_trainer(
    config: RunConfig, name: str, *, stop: StopRequest | None = None, progress: ProgressDisplay | None = None
) -> Summary:
    """Train as the learner `name` of a run, until its tokens or steps are spent, the learner is drained, or `stop`.

    The first trainer of a run initialises it. The reference model of `rl.kl` is the run's first model, which each
    trainer makes itself, so their run files must agree on `rl.supervised_…` too.

    Raises:
        ConfigError: a run file or keys that cannot be used. Others as `diloco.connect` and `Learner`.
    """
    _refuse_unused(config)
    stop, progress = stop or StopRequest(), progress or ProgressDisplay()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    with ExitStack() as at_the_end:
        at_the_end.callback(progress.close)
        feed = None
        if config.track.trackers:
            feed = at_the_end.enter_context(open_feed(config, name, persistent_id(config.dir / name)))
        policy = Policy(config, begins=not _has_model(config), say=lambda text: progress.say(f"{name} {text}"))
        try:
            learner = at_the_end.enter_context(_join(config, name, policy, stop))
        except StoppedError:
            if not stop.is_set:
                raise
            return Summary(name, "learner", "stopped", 0, 0, 0, None, 0.0, 0.0, "", {})
        return _train(config, learner, policy, Reports(config, learner, progress, feed), stop)


def _train(config: RunConfig, learner: Learner, policy: Policy, reports: Reports, stop: StopRequest) -> Summary:
    run, reason, began_at = config.run, "", time.perf_counter()

    def ended() -> str:
        ends = {
            "stopped": stop.is_set,
            "drained": learner.drained,
            "steps": run.steps is not None and learner.steps >= run.steps,
            "budget": learner.run_tokens >= run.tokens,
        }
        return next((reason for reason, holds in ends.items() if holds), "")

    with closing(batches(learner, config)) as iterator:
        while not (reason := ended()):
            try:
                if (batch := next(iterator, None)) is None:
                    reason = ended() or "drained"
                    break
                step = learner.steps + 1
                lr, result = learner.lr_factor * policy.lr(step), policy.step(batch, step)
                learner.step(tokens=batch.num_tokens)
            except StoppedError:
                if not stop.is_set:
                    raise
                continue
            reports.stepped(step, batch, result, lr)
    seconds = time.perf_counter() - began_at
    # By tokens it ends at an estimate of the others', so that the syncer's count may be lower yet.
    leaves_early = reason in ("stopped", "drained")
    learner.finish(0.0 if leaves_early else FINISH_TIMEOUT_S, ends_run=reason == "budget" or None)
    metrics = {**learner.metrics(), "digests": list(learner.digests), "reward": reports.reward}
    return Summary(
        learner.name, "learner", reason, learner.steps, reports.tokens, learner.run_tokens, None, seconds,
        seconds / max(1, reports.num_steps), "", metrics,
    )  # fmt: skip


def _refuse_unused(config: RunConfig) -> None:
    unused = {
        "warm_start.steps": config.warm_start.steps, "warm_start.checkpoint": config.warm_start.checkpoint,
        "evaluate.every_steps": config.evaluate.every_steps, "checkpoint.every_steps": config.checkpoint.every_steps,
        "train.expert_parallel": config.train.expert_parallel, "train.trains_experts": config.train.trains_experts,
        "train.holds_experts": config.train.holds_experts,
    }  # fmt: skip
    for key, value in unused.items():
        if value:
            raise ConfigError(f"{key} has no effect in a run with the table [rl]; drop it")


def _has_model(config: RunConfig) -> bool:
    """Whether the run has a model already; False while no syncer answers."""
    syncer = config.syncer
    with closing(dialler(syncer.address, keys=syncer.keys, insecure=syncer.insecure)) as syncers:
        with suppress(UnreachableError):
            return found(syncers, config.run.name).initialised
    return False


def _join(config: RunConfig, name: str, policy: Policy, stop: StopRequest) -> Learner:
    syncer, table = config.syncer, config.train
    exchange = diloco.connect(
        syncer.address, run=config.run.name, learner=name, keys=syncer.keys, insecure=syncer.insecure,
        initialise="if-empty" if policy.begins else False, source="seed" if config.model.weights is None else "weights",
        tokens_per_step=_most_tokens(table_of(config)),
    )  # fmt: skip
    stop.interrupt_with(exchange.interrupt)
    with ExitStack() as refused:  # closes the exchange, and so ends its threads, if the learner refuses it
        refused.callback(exchange.close)
        learner = Learner(
            policy.model, policy.optimizer, exchange=exchange, trains=table.trains or None, overlap=table.overlap,
            rewarm_steps=table.rewarm_steps, buffers=buffer_roles(policy.model),
        )  # fmt: skip
        refused.pop_all()
    stop.interrupt_with(learner.interrupt)
    return learner


def _most_tokens(table: RlTable) -> int:
    """Of a trainer in one step."""
    return table.groups_per_step * table.group_size * table.max_tokens


# --- the policy -------------------------------------------------------------------------------------------------------


class Policy:
    """The model in training, its inner optimizer, and the loss.

    The model is in eval mode: with dropout its probabilities would differ from those that rollouts record.

    Arguments:
        begins: the run has no model yet, so the model must be its first one.
        say: tells people one sentence about this trainer.

    Attributes:
        begins: as given.
        reference: the run's first model; None: the loss has no use for it.

    Raises:
        ConfigError: model, optimizer, loss or tasks cannot be made.
    """

    def __init__(self, config: RunConfig, *, begins: bool, say: Callable[[str], None] = lambda _: None) -> None:
        self.begins, self._config, self._table = begins, config, table_of(config)
        table, tokenizer = self._table, tokenizer_of(config)
        self._loss, device = loss_of(table), choose_device(config.train.device)
        context = table.max_prompt_tokens + table.max_tokens
        model: nn.Module = build_model(config.model, tokenizer.vocab_size, context, config.run.seed)
        self.model = model.to(device).eval()
        self._device = device
        if any(True for _ in mixture_blocks(model)):
            raise ConfigError("a trainer of [rl] does not train mixtures of experts; choose a dense [model]")
        if table.supervised_steps and (begins or self._loss.kl):
            loss = supervised_start(self.model, config, tokenizer, device)
            say(f"made the first model: loss {loss:.3f} on answers after {table.supervised_steps} supervised steps")
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if self._loss.kl else None
        self.optimizer = make_optimizer(self.model, config)
        self._inner = InnerStep(self.model, self.optimizer, config.train, device)
        self._inner.exclude(untrained_parameters(self.model, config.train.trains))

    def step(self, batch: Batch, step: int) -> StepResult:
        """Take an inner step on a batch, in `train.accumulate` micro-batches. `step`: of the schedule, from 1 on."""
        return self._inner.run_parts(
            list(self._parts(batch)), lambda part: self._losses(part, batch), self._factor(step)
        )

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return self._config.inner.lr * self._factor(step)

    def _factor(self, step: int) -> float:
        run, schedule = self._config.run, self._config.schedule
        steps = schedule.steps or run.steps or -(-run.tokens // (run.learners * _most_tokens(self._table)))
        return lr_factor(schedule, steps, step)

    def _parts(self, batch: Batch) -> Iterator[Part]:
        tensors = batch.tokens, batch.mask, batch.rollout_log_probs, batch.advantages
        chunks = (each.to(self._device).chunk(self._config.train.accumulate) for each in tensors)
        return (Part(*each) for each in zip(*chunks, strict=True))

    def _losses(self, part: Part, batch: Batch) -> tuple[Tensor, Tensor]:
        table, log_probs = self._table, self._log_probs(self.model, part)
        with torch.no_grad():
            reference = None if self.reference is None else self._log_probs(self.reference, part)
        loss = policy_loss(
            log_probs, log_probs, part.rollout_log_probs, reference, part.advantages, part.mask, self._loss,
            num_tokens=batch.num_tokens, num_sequences=len(batch.tokens), max_tokens=table.max_tokens,
        )  # fmt: skip
        return loss, loss

    def _log_probs(self, model: nn.Module, part: Part) -> Tensor:
        """Log-probabilities of completions' tokens, and 0 at all other positions, fp32 [n, T − 1]."""
        where = part.mask.bool()
        # The padding is on the right, so that no other position depends on it.
        logits = model(input_ids=part.tokens[:, :-1], use_cache=False).logits[where].split(BLOCK)
        blocks = zip(logits, part.tokens[:, 1:][where].split(BLOCK), strict=True)
        found = [token_log_probs(its[None], tokens[None], self._table.temperature)[0] for its, tokens in blocks]
        return torch.zeros_like(part.mask).masked_scatter(where, torch.cat(found))


@dataclass(frozen=True, eq=False)
class Part:
    """Sequences of a batch; as the attributes of `Batch`."""

    tokens: Tensor
    mask: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor


def supervised_start(model: nn.Module, config: RunConfig, tokenizer: Tokenizer, device: torch.device) -> float:
    """Train a model on answers to the first prompts of the run: `supervised_steps` steps of `supervised_batch` prompts,
    at a constant rate, on the tokens of the answer and its end. Returns the last loss, nats per token.

    Raises:
        ConfigError: a task has no answers, or none of a batch fits into `max_prompt_tokens` and `max_tokens`.
    """
    table, tasks = table_of(config), Tasks(config.task)
    inner = config.inner.model_copy(update={"lr": table.supervised_lr, "muon_lr": None})
    optimizer = make_optimizer(model, config.model_copy(update={"inner": inner}))
    step, result = InnerStep(model, optimizer, config.train, device), None
    for number in range(table.supervised_steps):
        first = number * table.supervised_batch
        pairs = [_answered(tasks, tokenizer, each) for each in range(first, first + table.supervised_batch)]
        pairs = [
            (prompt, answer) for prompt, answer in pairs
            if len(prompt) <= table.max_prompt_tokens and len(answer) <= table.max_tokens
        ]  # fmt: skip
        if not pairs:
            raise ConfigError("no answer fits into rl.max_prompt_tokens and rl.max_tokens; raise them")
        tokens = pad_sequence([torch.tensor([*prompt, *answer]) for prompt, answer in pairs], batch_first=True)
        targets = pad_sequence(
            [torch.tensor([-100] * (len(prompt) - 1) + answer) for prompt, answer in pairs],
            batch_first=True, padding_value=-100,
        ).to(device)  # fmt: skip
        num_targets = int((targets >= 0).sum())

        def losses(part: tuple[Tensor, Tensor], num_targets: int = num_targets) -> tuple[Tensor, Tensor]:
            logits = model(input_ids=part[0][:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), part[1].flatten(), reduction="sum") / num_targets
            return loss, loss

        chunks = (each.chunk(config.train.accumulate) for each in (tokens.to(device), targets))
        result = step.run_parts(list(zip(*chunks, strict=True)), losses, 1.0)
    return 0.0 if result is None else float(result.loss)


def _answered(tasks: Tasks, tokenizer: Tokenizer, number: int) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, and of its answer with an end."""
    name, prompt = tasks.prompt(number)
    if not isinstance(answer := prompt.get("answer"), str):
        raise ConfigError(f"task.{name} has no answers to start from; set rl.supervised_steps = 0")
    return tokenizer.encode(prompt["prompt"]), [*tokenizer.encode(answer), tokenizer.end_token]


# --- reports ----------------------------------------------------------------------------------------------------------


class Reports:
    """Reports of a trainer: to the syncer, to trackers, and to people.

    Attributes:
        num_steps, tokens: steps of this process, and the tokens of completions that it has trained.
        reward: mean over the groups of the last steps (weight of the newest: 1/10). Groups of equal rewards are not
            among them.
    """

    def __init__(self, config: RunConfig, learner: Learner, progress: ProgressDisplay, feed: Feed | None) -> None:
        self._config, self._learner, self._progress, self._feed = config, learner, progress, feed
        self.num_steps, self.tokens, self.reward, self._began_at = 0, 0, 0.0, time.perf_counter()

    def stepped(self, step: int, batch: Batch, result: StepResult, lr: float) -> None:
        """Report an inner step."""
        self.num_steps += 1
        self.tokens += batch.num_tokens
        self.reward += (float(batch.rewards.mean()) - self.reward) / min(self.num_steps, 10)
        if step % self._config.train.log_every_steps == 0:
            self._log(step, batch, result, lr)
        if self._progress.is_due():
            rate, metrics = self.tokens / (time.perf_counter() - self._began_at), self._learner.metrics()
            self._progress.show(status_line(
                self._learner.name, step, float(result.loss), lr, rate, self._learner.run_tokens,
                self._config.run.tokens, metrics, f"reward {self.reward:.3f}",
            ))  # fmt: skip

    def _log(self, step: int, batch: Batch, result: StepResult, lr: float) -> None:
        loss = float(result.loss)
        self._learner.log(training_loss=loss)
        if self._feed is not None:
            values = {
                "train/loss": loss, "train/lr": lr, "train/gradient_norm": float(result.gradient_norm),
                "train/tokens": float(self.tokens), "train/reward": float(batch.rewards.mean()),
                "train/staleness": float(batch.staleness.float().mean()),
            }  # fmt: skip
            self._feed.put(Point(step, time.time(), {**values, **learner_values(self._learner.metrics())}))
