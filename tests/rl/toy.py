"""A task and a run file for the tests of trainers, and a rollout worker made of bare calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from benchmarks.processes import until
from tests.syncer.runs import PATIENT

import diloco
from diloco.config import RunConfig, parse_config
from diloco.core.quorum import AllLive
from diloco.errors import NotInitialisedError
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup
from diloco.exchange.wire.values import message_of
from diloco.protocol.contribution import Budget
from diloco.rl.settings import rules_of
from diloco.rl.tokenizer import open_tokenizer
from diloco.syncer.server import Options, Syncer

RUN = "toy"
RUN_FILE = """
run = {name = "toy", tokens = 1000000, steps = 6}
inner = {lr = 1e-2, weight_decay = 0.0}
schedule = {kind = "constant", warmup_steps = 0}
train = {rewarm_steps = 0, log_every_steps = 1}
rl = {group_size = 4, groups_per_step = 1, reward = "inline", max_prompt_tokens = 8, max_tokens = 4}
task.letters = {source = "tests.rl.toy"}
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
"""


def sample(seed: int) -> dict[str, Any]:
    letter = chr(ord("a") + seed % 8)
    return {"prompt": f"{letter}?", "answer": letter.upper()}


def score(prompt: dict[str, Any], completion: str) -> float:
    return float(completion == prompt["answer"])


class NoAnswers:
    def sample(self, seed: int) -> str:
        return f"{seed % 8}?"

    def score(self, prompt: dict[str, Any], completion: str) -> float:
        return 0.0


def config_of(*overrides: str) -> RunConfig:
    return parse_config(RUN_FILE, overrides=overrides)


@contextmanager
def served(tmp_path: Path, sync_every: int, *overrides: str) -> Iterator[tuple[Syncer, RunConfig]]:
    """A syncer of the toy run, whose learners begin together, and its run file."""
    run = config_of(*overrides).run
    method = diloco.DiLoCo(sync_every=sync_every, quorum=AllLive(at_least=run.learners))
    options = Options("127.0.0.1:0", tmp_path / "state", deadlines=PATIENT, budget=Budget(run.tokens, run.steps))
    with Syncer(RUN, method, options) as syncer:
        yield syncer, config_of(f'syncer.address="{syncer.address}"', *overrides)


def group_of(number: int, versions: Sequence[int], weights: str, config: RunConfig) -> CompletionGroup:
    """Four completions, of which the first is the only right one."""
    tokenizer = open_tokenizer(config.data.tokenizer)
    answers = [[65 + number % 8, 0], [66 + number % 8, 0], [67], [68, 69, 70]]
    tokens = torch.tensor([*chain(*answers)], dtype=torch.int32)
    return CompletionGroup(
        number, "letters", number, tuple(versions), weights, tokenizer.digest, 1.0,
        torch.tensor(tokenizer.encode(f"{chr(97 + number % 8)}?"), dtype=torch.int32), tokens,
        torch.tensor([len(each) for each in answers], dtype=torch.int32), torch.ones(4, dtype=torch.bool),
        torch.full((tokens.numel(),), -5.0),
    )  # fmt: skip


class Rollout:
    """A rollout worker that scores its own groups."""

    def __init__(self, syncer: Syncer, config: RunConfig) -> None:
        self._syncer, self._config, self._order = syncer, config, 0
        self._digest = rules_of(config, open_tokenizer(config.data.tokenizer)).digest
        self._connection = Connection(syncer.address)

    def work(self, wants: int) -> pb.WorkReply:
        self._order += 1
        request = pb.WorkRequest(
            run=RUN, learner="hands", role="rollout", process=1, order=self._order, digest=self._digest, wants=wants
        )
        try:
            return self._connection.call("work", "Work", request, pb.WorkReply)
        except NotInitialisedError:
            return pb.WorkReply()

    def make(self, num: int, rewards: Sequence[float] = (1, 0, 0, 0)) -> list[int]:
        """Send so many groups, made with the newest versions, once a trainer has joined and the queue has room."""
        replies = list[pb.WorkReply]()

        def has_leases() -> bool:
            replies.append(self.work(num))
            return len(replies[-1].numbers) == num

        until(has_leases, "no prompts are leased")
        numbers, versions = list(replies[-1].numbers), list(replies[-1].versions)
        weights = self._syncer.driver.ask(lambda driver: driver.core.groups.weights_of(versions)) or "unknown"
        made = [group_of(number, versions, weights, self._config) for number in numbers]
        groups = [message_of(pb.MadeGroup, group, rewards=rewards, data=group.to_bytes()) for group in made]
        request = pb.GroupsRequest(run=RUN, learner="hands", process=1, groups=groups)
        assert not self._connection.call("groups", "Groups", request, pb.GroupsReply).refused
        return numbers

    @contextmanager
    def working(self) -> Iterator[None]:
        """Meanwhile, fill the queue."""
        stop = threading.Event()

        def fill() -> None:
            while not stop.wait(0.02):
                if self.work(1).numbers:
                    self.make(1)

        with ThreadPoolExecutor(1) as pool:
            filling = pool.submit(fill)
            try:
                yield
            finally:
                stop.set()
                filling.result()


def groups_of(syncer: Syncer) -> dict[str, Any]:
    """The groups in the status; each acknowledged one is in one state."""
    found: dict[str, Any] = syncer.driver.ask(lambda driver: driver.status())["groups"]
    states = ("waiting", "leased", "merged", "stale", "without signal", "refused")
    assert found["acknowledged"] == sum(found[state] for state in states)
    return found
