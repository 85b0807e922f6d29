"""Rollout and reward workers against a real syncer: groups are made, scored and merged, whatever is killed or refused."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.processes import start_module
from tests.rl.worker_run import SHORT, ServedRun, Trainer, served

from diloco.config import RunConfig
from diloco.rl.reward import run_reward
from diloco.rl.rollout import run_rollout
from diloco.rl.worker import Worked
from diloco.training.spec import StopRequest

Run = Callable[..., Worked]


class Workers(ThreadPoolExecutor):
    """Threads of workers, which are stopped at the end."""

    def __init__(self) -> None:
        super().__init__(8)
        self._stops: list[StopRequest] = []

    def start(self, run: Run, config: RunConfig, name: str) -> Future[Worked]:
        self._stops.append(StopRequest())
        return self.submit(run, config, name, stop=self._stops[-1])

    def stop(self) -> None:
        for each in self._stops:
            each.set()

    def __exit__(self, *error: Any) -> bool | None:
        self.stop()
        return super().__exit__(*error)


def test_groups_flow_from_prompts_to_merged_versions(tmp_path: Path) -> None:
    with served(tmp_path) as run, Workers() as workers:
        config = run.config()
        with Trainer(run) as trainer:
            made = workers.start(run_rollout, config, "paris")
            scored = workers.start(run_reward, config, "rome")
            until(lambda: run.groups()["merged"] >= 24 or made.done() or scored.done(), "no groups are merged")
        assert trainer.steps >= 6
        assert made.result(60).reason == scored.result(60).reason == "over"
        groups = run.groups()
        run.require_account()
        assert groups["merged"] == 4 * trainer.steps
        assert groups["refused"] == 0
        rollout, reward = run.worker("rollout", "paris"), run.worker("reward", "rome")
        assert rollout["generated"] == groups["acknowledged"] <= made.result().groups
        assert sum(rollout["versions"]) > 0
        assert reward["scored"] <= scored.result().groups
        assert groups["tasks"]["letters"][0] == reward["scored"]
