"""A rollout worker: it follows a run, leases prompts, and sends groups generated with the newest version it holds."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diloco.config import EngineTable, RunConfig
from diloco.errors import ConfigError, EngineError, NonFiniteError, ScoringError, StoreError, translated
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup
from diloco.exchange.wire.values import message_of
from diloco.following.follower import FollowedModel, follow
from diloco.protocol.groups import digest_of
from diloco.protocol.workers import Score
from diloco.rl.engines import Completion, Engine, OpenAIEngine, TransformersEngine, VLLMEngine
from diloco.rl.scoring import Scorer
from diloco.rl.settings import rules_of, table_of, tokenizer_of
from diloco.rl.tokenizer import Tokenizer
from diloco.rl.worker import Tally, WorkClient, Worked, make_scorer
from diloco.training.model import build_model
from diloco.training.spec import StopRequest

log = logging.getLogger("diloco")

FOLLOW_S = 0.5
"""Between two looks for a newer version."""

IDLE_S = 1.0
"""Between two looks whether the run has ended, while there is nothing to do."""

ENGINE_PAUSE_S = 5.0
"""After a failure of the engine, whose server may be restarting."""


def run_rollout(
    config: RunConfig, name: str, *, stop: StopRequest, say: Callable[[str], None] = lambda _: None
) -> Worked:  # fmt: skip
    """Generate groups until the run ends, or `stop`.

    A prompt that cannot be sampled, is too long or cannot be scored here is reported, and not leased again. While the
    engine fails, its prompts are given back.

    Raises:
        ConfigError: the run file cannot be used, a task cannot be loaded, or the run has other settings.
        LayoutError: the run has another model. StaleIncarnationError: another process works under this name. AuthError:
        the keys do not permit it.
    """
    tokenizer, syncer = tokenizer_of(config), config.syncer
    rules, table = rules_of(config, tokenizer), config.engine or EngineTable()
    if table.threads is not None:
        torch.set_num_threads(table.threads)
    newest = _Newest()
    with ExitStack() as opened:
        engine = opened.enter_context(closing(open_engine(config, tokenizer)))
        scorer = opened.enter_context(make_scorer(config, scores=table_of(config).reward == "inline"))
        client = opened.enter_context(WorkClient(config, "rollout", name, rules.digest, 0))
        stop.interrupt_with(lambda _: client.close())
        address, run = syncer.address, config.run.name
        follower = opened.enter_context(closing(follow(
            address, run=run, keys=syncer.keys, insecure=syncer.insecure, callback=newest.put, poll_s=FOLLOW_S
        )))  # fmt: skip
        rollout = Rollout(config, name, tokenizer, engine, scorer, client, say)
        while not follower.wait(0):
            if (model := newest.wait(IDLE_S)) is not None:
                client.hold(2 * table.prompts)  # not before: others may have a model
                if leases := client.take(table.prompts, IDLE_S):
                    rollout.make([lease.number for lease in leases], lambda: newest.wait(0) or model)
            if client.closing.is_set():
                client.take(0)  # raises what has ended it
                return rollout.tally.worked(is_over=False)
        return rollout.tally.worked(is_over=True)


def open_engine(config: RunConfig, tokenizer: Tokenizer) -> Engine:
    """The engine of a run file, with the run's model.

    Raises:
        ConfigError: the model cannot be built, there is no such device, or an invalid URL.
    """
    own, table = config.engine or EngineTable(), table_of(config)
    context = table.max_prompt_tokens + table.max_tokens
    model = build_model(config.model, tokenizer.vocab_size, context, config.run.seed)
    with translated((RuntimeError, AssertionError), ConfigError, f'engine.device = "{own.device}"', 'use "cpu"'):
        nn.Module.to(model, own.device)
    if own.kind == "transformers":
        return TransformersEngine(model, tokenizer.end_token)
    assert own.url is not None
    assert own.folder is not None
    if own.kind == "openai":
        return OpenAIEngine(own.url, own.folder, model, tokenizer)
    return VLLMEngine(own.url, own.folder, model, tokenizer, served=config.run.name)


class _Newest:
    """The newest version, from the thread that follows the run."""

    def __init__(self) -> None:
        self._model: FollowedModel | None = None
        self._has_model = threading.Event()

    def put(self, model: FollowedModel) -> None:
        self._model = model
        self._has_model.set()

    def wait(self, timeout_s: float) -> FollowedModel | None:
        self._has_model.wait(timeout_s)
        return self._model


@dataclass(frozen=True)
class _Prompt:
    number: int
    task: str
    values: dict[str, Any]
    tokens: list[int]


class Rollout:
    """Makes groups of prompts.

    Arguments:
        scorer: samples the prompts, and scores the groups if no reward workers do.
        say: as in `Tally`.
    """

    def __init__(
        self, config: RunConfig, name: str, tokenizer: Tokenizer, engine: Engine, scorer: Scorer,
        client: WorkClient, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._table, self._seed = table_of(config), config.run.seed
        self._tokenizer, self._engine, self._scorer, self._client = tokenizer, engine, scorer, client
        self._loaded: FollowedModel | None = None
        self.tally = Tally(name, "rollout", say)

    def make(self, numbers: Sequence[int], newest: Callable[[], FollowedModel]) -> None:
        """Send the groups of these prompts, or report what is wrong with a prompt. While the engine fails, all prompts
        are given back, and none is held for `ENGINE_PAUSE_S`."""
        going_on = (number for number in numbers if not self._client.closing.is_set())
        prompts = [prompt for number in going_on if (prompt := self._sampled(number)) is not None]
        if not prompts or self._client.closing.is_set():
            return
        try:
            model = newest()
            self._load(model)
            self._generate(prompts, model)
        except (EngineError, NonFiniteError, StoreError) as error:
            log.warning("its prompts are given back: %s", error)
            self._client.hold(0)
            self._client.closing.wait(ENGINE_PAUSE_S)

    def _sampled(self, number: int) -> _Prompt | None:
        """The prompt with this number; None: it cannot be used, which is reported."""
        try:
            task, values = self._scorer.prompt(number)
        except ScoringError as error:
            self._cannot(number, str(error))
            return None
        tokens, most = self._tokenizer.encode(values["prompt"]), self._table.max_prompt_tokens
        if not 0 < len(tokens) <= most:
            self._cannot(number, f"its prompt has {len(tokens)} tokens; rl.max_prompt_tokens = {most}")
            return None
        return _Prompt(number, task, values, tokens)

    def _cannot(self, number: int, reason: str) -> None:
        score = Score(number, reason=reason)
        self.tally.add(score)
        self._client.score(score)

    def _load(self, model: FollowedModel) -> None:
        if model is not self._loaded:
            self._loaded = None
            self._engine.load(model)
            self._loaded = model

    def _generate(self, prompts: Sequence[_Prompt], model: FollowedModel) -> None:
        """Generate all groups in one batch, with the seed of its first prompt. Prompts that the engine refuses are
        found one by one."""
        seed = seed_of(self._seed, prompts[0].number)
        try:
            found = self._engine.generate(
                [prompt.tokens for prompt in prompts], num=self._table.group_size, max_tokens=self._table.max_tokens,
                temperature=self._table.temperature, seed=seed,
            )  # fmt: skip
        except ConfigError as error:
            if len(prompts) == 1:
                self._cannot(prompts[0].number, str(error))
                return
            for prompt in prompts:
                self._generate([prompt], model)
            return
        made = (self._made(prompt, its, model, seed) for prompt, its in zip(prompts, found, strict=True))
        if self._table.reward == "workers":
            self._client.send([group for group in made if group is not None])
            return
        for group in made:  # the next one may take long to score
            self._client.send([] if group is None else [group])

    def _made(
        self, prompt: _Prompt, completions: Sequence[Completion], model: FollowedModel, seed: int
    ) -> pb.MadeGroup | None:  # fmt: skip
        """The group of a prompt; None: it cannot be scored here, which is reported."""
        rewards: list[float] = []
        if self._table.reward == "inline":
            texts = [self._tokenizer.decode(each.tokens.tolist()) for each in completions]
            try:
                rewards = self._scorer.score(prompt.task, prompt.values, texts)
            except ScoringError as error:
                self._cannot(prompt.number, str(error))
                return None
        group = CompletionGroup(
            prompt.number, prompt.task, seed, model.versions, digest_of(model.digests), self._tokenizer.digest,
            self._table.temperature, torch.tensor(prompt.tokens, dtype=torch.int32),
            torch.cat([each.tokens for each in completions]),
            torch.tensor([len(each.tokens) for each in completions], dtype=torch.int32),
            torch.tensor([each.ended for each in completions]), torch.cat([each.logprobs for each in completions]),
        )  # fmt: skip
        self.tally.add(Score(prompt.number, tuple(rewards)), f", {model}")
        return message_of(pb.MadeGroup, group, rewards=rewards, data=group.to_bytes())


def seed_of(seed: int, number: int) -> int:
    """The seed of a prompt's completions, from the run's seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:6], "big")
