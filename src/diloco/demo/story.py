"""The story: one learner warms up alone and initialises the run, two more join, one is killed and comes back.

Then the controls. Everything is a real process: `diloco syncer` and `diloco train` on one run file, on loopback.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from diloco.config import RunConfig
from diloco.demo.plan import NUM_LEARNERS, VICTIM, Plan, alone_in, prepare
from diloco.demo.processes import Family
from diloco.demo.served import Served, fetch_served, judge, resolved_method
from diloco.report.timeline import Follower, Timeline, is_learner

T = TypeVar("T")
POLL_S = 0.25
STARTING = "starting the processes"

Say = Callable[["DemoState"], None]


@dataclass(frozen=True)
class DemoState:
    """The demo at one moment, for display.

    Attributes:
        phase: a few words.
        states: by process, what it is doing.
        plan: the planned length.
        page_url: of the run's live page.
    """

    phase: str
    states: dict[str, str]
    timeline: Timeline
    plan: Plan
    page_url: str


@dataclass(frozen=True)
class DemoResult:
    """The measurements of a demo. Losses are in nats per byte, on the same held-out sequences."""

    config: RunConfig
    plan: Plan
    method: dict[str, Any]
    timeline: Timeline
    served: Served
    global_loss: float
    sample: str
    learners: dict[str, dict[str, Any]]  # what each learner printed in the end
    controls: dict[str, dict[str, Any]]  # and each control
    seconds: float


def tell(directory: Path, plan: Plan, seed: int, say: Say) -> DemoResult:
    """Run everything; `say(state)` hears about it several times a second.

    Raises:
        ConfigError: `directory` holds something else, or a demo that is under way.
        RunError: a process failed by itself.
    """
    started = time.monotonic()
    with alone_in(directory):
        config = prepare(directory, plan, seed)
        with Family(directory) as family:
            stage = _Stage(config, plan, family, Follower(directory), say)
            stage.start_run()
            stage.train()
            learners = {name: json.loads(family.output(name)) for name in stage.learners}
            served = stage.meanwhile("the run is over: fetching the global model", lambda: fetch_served(config))
            family.finish("syncer")
            judged = _in_background(lambda: judge(config, served.state, plan.sample_bytes))
            controls = stage.train_controls(served.tokens, max(learner["steps"] for learner in learners.values()))
            global_loss, sample = stage.meanwhile("evaluating the global model", judged.result)
            timeline = stage.look()
    return DemoResult(
        config=config,
        plan=plan,
        method=resolved_method(config),
        timeline=timeline,
        served=served,
        global_loss=global_loss,
        sample=sample,
        learners=learners,
        controls=controls,
        seconds=time.monotonic() - started,
    )


class _Stage:
    """Starts the processes and watches them."""

    def __init__(self, config: RunConfig, plan: Plan, family: Family, follower: Follower, say: Say) -> None:
        self.learners = [f"learner-{shard}" for shard in range(NUM_LEARNERS)]
        self._config = config
        self._plan = plan
        self._family = family
        self._follower = follower
        self._say = say
        self._run_file = str(config.dir / "run.toml")

    # --- scenes

    def start_run(self) -> None:
        """Start all processes: the joiners wait until the first learner has warmed up."""
        self._family.start("syncer", ["syncer", self._run_file], serves=True)
        self._show(STARTING)
        for shard, name in enumerate(self.learners):
            command = self._learner_command(shard, name)
            self._family.start(name, command, forks=True)

    def train(self) -> None:
        """Watch until every learner has left, and kill one on the way."""
        killed = False

        def phase() -> str:
            nonlocal killed
            timeline = self._follower.timeline
            if killed or not timeline.is_merging(VICTIM) or timeline.step < self._plan.kill_at_step:
                return self._phase(timeline)
            killed = True
            self._family.kill(VICTIM)
            return self._phase(timeline)

        self._until(lambda: self._all_done(self.learners), phase)

    def train_controls(self, tokens: int, steps: int) -> dict[str, dict[str, Any]]:
        """Data parallel on exactly as many tokens, and a lone learner that makes as many steps as the longest one.

        Both go on from the end of the run's warm start, which trained as they would have: alone, at the full batch.
        """
        warm = self._config.dir / self.learners[0] / "checkpoints" / f"step-{self._plan.warm_start_steps:010d}"
        common = ["--json", "--resume-from", str(warm), *self._set("evaluate.every_steps", self._plan.every)]
        common += self._set("checkpoint.every_steps", 0)
        names = ["baseline"]
        self._start_control("baseline", ["--alone", *self._set("run.tokens", tokens), *common])
        if self._plan.isolated:
            names.append("isolated")
            full = steps * self._config.tokens_per_full_step
            self._start_control("isolated", ["--isolated", "--shard", "1", *self._set("run.tokens", full), *common])
        phase = "the controls: " + " and ".join({"baseline": "data parallel"}.get(name, name) for name in names)
        self._until(lambda: self._all_done(names), lambda: phase)
        return {name: json.loads(self._family.output(name)) for name in names}

    def meanwhile(self, phase: str, work: Callable[[], T]) -> T:
        """Work in the background while the processes are watched."""
        future = _in_background(work)
        self._until(future.done, lambda: phase)
        return future.result()

    def _until(self, is_over: Callable[[], bool], phase: Callable[[], str]) -> None:
        """Watch and show the processes until something is over."""
        while not is_over():
            self.look()
            self._show(phase())
            time.sleep(POLL_S)

    def look(self) -> Timeline:
        """Restart killed processes, and read new events."""
        self._family.watch()
        timeline = self._follower.read()
        timeline.kills = self._family.kills
        return timeline

    # --- commands

    def _learner_command(self, shard: int, name: str) -> list[str]:
        command = ["train", self._run_file, "--name", name, "--shard", str(shard), "--supervised", "--json"]
        if shard:
            return command
        # One of them is enough to draw the global model's curve; its warm start is kept, for the controls.
        evaluates = self._set("evaluate.every_steps", self._plan.every)
        return [*command, "--initialise", *evaluates, *self._set("checkpoint.keep", self._plan.points)]

    @staticmethod
    def _set(key: str, value: int) -> list[str]:
        return ["--set", f"{key}={value}"]

    def _start_control(self, name: str, arguments: Sequence[str]) -> None:
        """A control that is killed begins again: it has no run to come back to."""
        command = ["train", self._run_file, *arguments]

        def restart() -> list[str]:
            (self._config.dir / name / "events.jsonl").unlink(missing_ok=True)
            self._follower.forget(name)
            return command

        self._family.start(name, command, restart=restart, forks=True)

    # --- what to show

    def _all_done(self, names: Sequence[str]) -> bool:
        return all(self._family.children[name].done for name in names)

    def _show(self, phase: str) -> None:
        timeline = self._follower.timeline
        states = {name: self._state(name, timeline) for name in self._family.children}
        url = f"http://127.0.0.1:{self._config.syncer.page_port}/"
        self._say(DemoState(phase, states, timeline, self._plan, url))

    def _state(self, name: str, timeline: Timeline) -> str:
        if self._family.is_dead(name):
            return "killed"
        if self._family.children[name].done:
            return "done"
        if name == "syncer":
            if not timeline.syncer_starts:
                return "starting"
            return "serving" if timeline.initialised_at is not None else "waiting for a model"
        if not is_learner(name):
            return "training alone" if timeline.newest_step(name) else "starting"
        if timeline.is_away(name):
            return "coming back"
        if name in timeline.live_learners():
            return "in the run"
        if name in timeline.left:
            return "finishing"
        if timeline.initialised_at is None:
            return "warming up" if timeline.newest_step(name) else "starting"
        return "joining"

    def _phase(self, timeline: Timeline) -> str:
        if timeline.initialised_at is None:
            return "learner-0 warms up alone, at the full batch" if timeline.step else STARTING
        if self._family.is_dead("syncer"):
            return "the syncer is gone, the learners go on"
        if timeline.left:
            return "the tokens are spent, the learners say goodbye"
        num_live = sum(not timeline.is_away(name) for name in timeline.live_learners())
        return f"{num_live} of {NUM_LEARNERS} learners train together"


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Work on a thread that does not keep the demo from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="demo-background", daemon=True).start()
    return future
