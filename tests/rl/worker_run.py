"""A run of reinforcement learning for tests of its workers: how it is served, and a learner as its trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from benchmarks.processes import until
from tests.syncer.runs import PATIENT, status_of

import diloco
from diloco.config import RunConfig, load_config
from diloco.errors import StoppedError
from diloco.protocol.contribution import Budget
from diloco.protocol.groups import Group
from diloco.protocol.leases import GroupRules
from diloco.protocol.members import Deadlines
from diloco.protocol.units import numbers_of
from diloco.rl.settings import data_of, rules_of, tokenizer_of
from diloco.syncer.server import Options, Syncer
from diloco.training.model import build_model

RUN, GROUPS_PER_STEP = "letters", 4

RUN_FILE = """
[run]
name = "letters"
tokens = 1_000_000
dir = "{folder}/run"
[model]
type = "llama"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[method]
preset = "DiLoCo"
sync_every = 2
[train]
threads = 1
[syncer]
address = "{address}"
lost_floor_s = 6.0
[rl]
group_size = 4
groups_per_step = 4
max_prompt_tokens = 12
max_tokens = 6
max_staleness = 4
queue = 16
[task.letters]
source = "tests.rl.letters:Letters"
[engine]
prompts = 4
"""

METHOD = diloco.DiLoCo(sync_every=2)

SHORT = Deadlines(
    lost_floor_s=2.0, lost_cap_s=600.0, reconnect_floor_s=600.0, stalled_floor_s=600.0, lost_steps=1e6
)  # fmt: skip
"""Workers are forgotten after two seconds."""


class ServedRun:
    """A run that is served, and what its syncer knows of its groups.

    Attributes:
        path: its run file.
    """

    def __init__(self, path: Path, status: Callable[[], dict[str, Any]]) -> None:
        self.path, self.status = path, status

    def config(self, *overrides: str) -> RunConfig:
        return load_config(self.path, overrides)

    def rules(self, *overrides: str) -> GroupRules:
        config = self.config(*overrides)
        return rules_of(config, tokenizer_of(config))

    def groups(self) -> dict[str, Any]:
        until(lambda: self.status()["groups"] is not None, "no trainer has asked for groups")
        found: dict[str, Any] = self.status()["groups"]
        return found

    def worker(self, role: str, name: str) -> dict[str, Any]:
        """Its line of the status; empty: it is not known."""
        return next((it for it in self.groups()["workers"] if (it["role"], it["name"]) == (role, name)), {})

    def require_account(self) -> None:
        """Every acknowledged group is in exactly one state."""
        groups = self.groups()
        states = ("waiting", "leased", "merged", "stale", "without signal", "refused")
        assert groups["acknowledged"] == sum(groups[each] for each in states), groups

    def until_made(self, num: int) -> None:
        until(lambda: self.groups()["acknowledged"] >= num, f"{num} groups are not made")


class ServedHere(ServedRun):
    """By a syncer in this process."""

    def __init__(self, path: Path, syncer: Syncer) -> None:
        super().__init__(path, lambda: status_of(syncer))
        self.syncer = syncer

    def unsettled(self) -> dict[int, Group]:
        return self.syncer.driver.ask(lambda driver: dict(driver.core.groups.groups))

    def free_prompts(self) -> tuple[int, set[int]]:
        """The first prompt that was never leased, and those before it that are free."""
        return self.syncer.driver.ask(
            lambda driver: (driver.core.groups.frontier, set(numbers_of(driver.core.groups.workers.free["rollout"])))
        )


def write_run_file(folder: Path, address: str, change: Mapping[str, str]) -> Path:
    """The run file with these changes of its text."""
    text, path = RUN_FILE.format(folder=folder, address=address), folder / "run.toml"
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@contextmanager
def served(
    tmp_path: Path, change: Mapping[str, str] = MappingProxyType({}), *, steps: int = 12,
    deadlines: Deadlines = PATIENT, keys: Path | None = None,
) -> Iterator[ServedHere]:  # fmt: skip
    options = Options("127.0.0.1:0", tmp_path / "state", deadlines=deadlines, keys=keys, budget=Budget(steps=steps))
    with Syncer(RUN, METHOD, options) as syncer:
        yield ServedHere(write_run_file(tmp_path, syncer.address, change), syncer)


class Trainer:
    """A learner that leases groups, and steps without looking at them; a context manager, whose thread trains while it
    is open; until the run's budget of steps is spent, unless the test fails.

    Arguments:
        trains: False: it asks for as many groups as the queue holds, and so gets none unless all have rewards.
    """

    def __init__(
        self, run: ServedRun, *overrides: str, keys: Path | None = None, trains: bool = True, name: str = "trainer"
    ) -> None:  # fmt: skip
        config, rules = run.config(*overrides), run.rules(*overrides)
        exchange = diloco.connect(
            config.syncer.address, run=RUN, learner=name, keys=None if keys is None else str(keys),
            initialise="if-empty", join_timeout_s=300,
        )  # fmt: skip
        self._model = build_model(config.model, rules.vocab_size, rules.max_prompt_tokens + rules.max_tokens, 0)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._learner = diloco.Learner(self._model, self._optimizer, exchange=exchange)
        self._trains, self._num = trains, GROUPS_PER_STEP if trains else rules.queue
        self._units = self._learner.lease(data_of(rules), num_ahead=self._num)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self.steps = 0

    def _train(self) -> None:
        with suppress(StoppedError):  # it waits for groups
            while not self._learner.done and self._units.draw(self._num):
                self._units.take()
                self._step()

    def _step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        for parameter in self._model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self._optimizer.step()
        self._learner.step(tokens=10)
        self.steps += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None or not self._trains:
            self._learner.interrupt(0.0)
        self._thread.join()
        if self._learner.done:
            self._learner.finish()
        self._learner.close()
