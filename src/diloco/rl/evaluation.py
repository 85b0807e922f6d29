"""The accuracy of a run's model on the run's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diloco.config import EngineTable, RunConfig
from diloco.errors import ConfigError, ScoringError
from diloco.following.follower import FollowedModel
from diloco.rl.rollout import open_engine
from diloco.rl.scoring import Scorer
from diloco.rl.settings import table_of, tokenizer_of
from diloco.rl.tasks import Tasks
from diloco.rl.worker import make_scorer


@dataclass(frozen=True)
class MeanScore:
    """The mean score of completions. prompts: that were scored. unscored: for which `score` failed."""

    mean: float
    prompts: int
    unscored: int

    def __str__(self) -> str:
        failed = f", {self.unscored:,} could not be scored" if self.unscored else ""
        return f"{self.mean:.3f} of {self.prompts:,} prompts{failed}"


class TaskEvaluation:
    """Scores of one completion of each of so many prompts, at the run's temperature, generated in this process.

    Arguments:
        num: prompts of each task and part; those that are too long for the run are left out.

    Raises:
        ConfigError: the run file has no table [rl], or its tokenizer or model cannot be loaded.
    """

    def __init__(self, config: RunConfig, num: int) -> None:
        self._config, self._table, self._num = config, table_of(config), num
        self._tokenizer, self._tasks = tokenizer_of(config), Tasks(config.task).tasks
        table = config.engine or EngineTable()
        engine = EngineTable(prompts=table.prompts, device=table.device)  # a server is its worker's own
        self._engine = open_engine(config.model_copy(update={"engine": engine}), self._tokenizer)

    def scores(self, model: FollowedModel | None) -> dict[str, dict[str, MeanScore]]:
        """By task, of the parts "training" and "held out", if it has that. None: of the model that was loaded before,
        at first that of the seed.

        Raises:
            ConfigError: a prompt cannot be sampled, or none fits into `max_prompt_tokens`. ScoringError: no completion
            of a part can be scored. LayoutError: `model` is not one of the run file.
        """
        if model is not None:
            self._engine.load(model)
        parts = {"training": False, "held out": True}
        with make_scorer(self._config) as scorer:
            return {
                name: {
                    part: self._score(name, scorer, held_out=held_out) for part, held_out in parts.items()
                    if self._config.task[name].held_out or not held_out
                }
                for name in self._tasks
            }  # fmt: skip

    def _score(self, name: str, scorer: Scorer, *, held_out: bool) -> MeanScore:
        scores, failures = list[float](), list[ScoringError]()
        for prompt, text in self._completed(name, held_out=held_out):
            try:
                scores += scorer.score(name, prompt, [text])
            except ScoringError as error:
                failures.append(error)
        if not scores:
            raise failures[0]
        return MeanScore(fmean(scores), len(scores), len(failures))

    def _completed(self, name: str, *, held_out: bool) -> Iterator[tuple[dict[str, Any], str]]:
        """Prompts that fit, each with a completion."""
        table, prompts = self._table, [self._tasks[name].prompt(it, held_out=held_out) for it in range(self._num)]
        pairs = [(prompt, self._tokenizer.encode(prompt["prompt"])) for prompt in prompts]
        pairs = [(prompt, tokens) for prompt, tokens in pairs if len(tokens) <= table.max_prompt_tokens]
        if not pairs:
            raise ConfigError(f"no prompt of task.{name} fits into rl.max_prompt_tokens = {table.max_prompt_tokens}")
        at_once = (self._config.engine or EngineTable()).prompts * table.group_size  # sequences that a worker has
        for first in range(0, len(pairs), at_once):
            now = pairs[first : first + at_once]
            found = self._engine.generate(
                [tokens for _, tokens in now], num=1, max_tokens=table.max_tokens, temperature=table.temperature,
                seed=first,
            )  # fmt: skip
            for (prompt, _), (completion,) in zip(now, found, strict=True):
                yield prompt, self._tokenizer.decode(completion.tokens.tolist())
