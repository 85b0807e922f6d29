"""A reward worker: it leases groups, reads them from the run's store, and scores their completions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import torch

from diloco.config import RunConfig
from diloco.errors import ConfigError, DilocoError, PayloadError, StoppedError
from diloco.following.sources import LANES
from diloco.protocol.manifest import Manifest
from diloco.protocol.workers import Score
from diloco.rl.reading import Groups, read_span, spans
from diloco.rl.rollout import IDLE_S
from diloco.rl.scoring import Scorer
from diloco.rl.settings import rules_of, table_of, tokenizer_of
from diloco.rl.tokenizer import Tokenizer
from diloco.rl.worker import Tally, WorkClient, Worked, make_scorer
from diloco.store.reading import NOT_WHOLE
from diloco.training.spec import StopRequest

AHEAD_S, FEWEST, MOST = 2.0, 2, 64
"""Groups are leased and read ahead for so many seconds of scoring, within these limits: others may be faster."""


def run_reward(
    config: RunConfig, name: str, *, stop: StopRequest, say: Callable[[str], None] = lambda _: None
) -> Worked:  # fmt: skip
    """Score groups until the run ends, or `stop`. A group that cannot be scored is refused, with the reason.

    Raises:
        ConfigError: the run file cannot be used, a task cannot be loaded, or the run has other settings.
        StaleIncarnationError: another process works under this name. AuthError: the keys do not permit it.
    """
    if table_of(config).reward == "inline":
        raise ConfigError('rl.reward = "inline": rollout workers score their groups; start no reward worker')
    torch.set_num_threads(1)
    tokenizer = tokenizer_of(config)
    rules, tally = rules_of(config, tokenizer), Tally(name, "reward", say)
    with ExitStack() as opened:
        scorer = opened.enter_context(make_scorer(config))
        readers = opened.enter_context(ThreadPoolExecutor(LANES, thread_name_prefix="diloco-reads"))
        client = opened.enter_context(WorkClient(config, "reward", name, rules.digest, FEWEST))
        stop.interrupt_with(lambda _: client.close())
        rewarder = Rewarder(tokenizer, scorer)
        pending, mean_s = deque[tuple[int, Future[Groups]]](), AHEAD_S / FEWEST
        with suppress(StoppedError):
            while not client.closing.is_set():
                for span in spans(client.take(MOST, 0.0 if pending else IDLE_S)):
                    groups = readers.submit(read_span, span, client.get, rules)
                    pending += [(place.number, groups) for place in span]
                if pending:
                    began_at = time.monotonic()
                    score = rewarder.score(*pending.popleft())
                    client.score(score)
                    mean_s += (time.monotonic() - began_at - mean_s) / 10  # over the last ones
                    client.num_ahead = max(FEWEST, min(MOST, int(AHEAD_S / mean_s)))
                    tally.add(score)
                elif Manifest.from_bytes(client.manifest(), config.run.name).is_over:
                    return tally.worked(is_over=True)
        client.take(0)  # raises what has ended it
    return tally.worked(is_over=False)


class Rewarder:
    """Scores groups, each as completions of the prompt that its number has in the tasks of the run."""

    def __init__(self, tokenizer: Tokenizer, scorer: Scorer) -> None:
        self._tokenizer, self._scorer = tokenizer, scorer

    def score(self, number: int, groups: Future[Groups]) -> Score:
        """The score of a group, one of those that were read, or why it has none.

        Raises:
            ConfigError: the tasks cannot be loaded. StoppedError: as `WorkClient.get`.
        """
        try:
            made = groups.result()[number]
            if isinstance(made, DilocoError):
                raise made
            task, prompt = self._scorer.prompt(number)
            if (made.number, made.task, made.tokenizer) != (number, task, self._tokenizer.digest):
                raise PayloadError(f"it is group {made.number} of task {made.task}, or of another tokenizer.")
            if made.prompt.tolist() != self._tokenizer.encode(prompt["prompt"]):
                raise PayloadError("its prompt is not the task's.")
            texts = [self._tokenizer.decode(tokens.tolist()) for tokens in made.split(made.tokens)]
            return Score(number, tuple(self._scorer.score(task, prompt, texts)))
        except (PayloadError, *NOT_WHOLE) as error:  # of an object, the score counts only if it is not settled
            return Score(number, reason=str(error))
