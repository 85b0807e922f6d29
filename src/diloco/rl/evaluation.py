"""The accuracy of a run's model on the run's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from diloco.config import RunConfig
from diloco.errors import ConfigError
from diloco.following.follower import FollowedModel
from diloco.rl.rollout import open_engine
from diloco.rl.scoring import Scorer
from diloco.rl.settings import table_of, tokenizer_of
from diloco.rl.tasks import Tasks
from diloco.rl.worker import make_scorer

AT_ONCE = 100
"""Prompts that are evaluated at a time."""


class Evaluation:
    """The mean score of one completion of each of so many prompts, at the run's temperature.

    Arguments:
        num: prompts of each task and part; those that are too long for the run are left out.

    Raises:
        ConfigError: the run file has no table [rl], or its tokenizer, engine or model cannot be loaded.
    """

    def __init__(self, config: RunConfig, num: int) -> None:
        self._config, self._table, self._num = config, table_of(config), num
        self._tokenizer, self._tasks = tokenizer_of(config), Tasks(config.task).tasks
        self._engine = open_engine(config, self._tokenizer)

    def accuracy(self, model: FollowedModel | None) -> dict[str, dict[str, float]]:
        """By task, of the parts "training" and "held out", if it has that. None: the model of the seed, untrained.

        Raises:
            ConfigError: no prompt fits into `max_prompt_tokens`. ScoringError: a completion cannot be scored.
            LayoutError: `model` is not one of the run file.
        """
        if model is not None:
            self._engine.load(model)
        parts = {"training": False, "held out": True}
        with make_scorer(self._config) as scorer:
            return {
                name: {
                    part: fmean(self._scores(name, scorer, held_out=held_out)) for part, held_out in parts.items()
                    if self._config.task[name].held_out or not held_out
                }
                for name in self._tasks
            }  # fmt: skip

    def _scores(self, name: str, scorer: Scorer, *, held_out: bool) -> Iterator[float]:
        table, prompts = self._table, [self._tasks[name].prompt(it, held_out=held_out) for it in range(self._num)]
        pairs = [(prompt, self._tokenizer.encode(prompt["prompt"])) for prompt in prompts]
        pairs = [(prompt, tokens) for prompt, tokens in pairs if len(tokens) <= table.max_prompt_tokens]
        if not pairs:
            raise ConfigError(f"no prompt of task.{name} fits into rl.max_prompt_tokens = {table.max_prompt_tokens}")
        for first in range(0, len(pairs), AT_ONCE):
            now = pairs[first : first + AT_ONCE]
            found = self._engine.generate(
                [tokens for _, tokens in now], num=1, max_tokens=table.max_tokens, temperature=table.temperature,
                seed=first,
            )  # fmt: skip
            for (prompt, _), (completion,) in zip(now, found, strict=True):
                yield from scorer.score(name, prompt, [self._tokenizer.decode(completion.tokens.tolist())])
