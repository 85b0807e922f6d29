"""The story: one learner warms up alone and initialises the run, two more join, one is killed and comes back.

Then the controls. Everything is a real process: `diloco syncer` and `diloco train` on one run file, on loopback.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.config import RunConfig
from diloco.demo.plan import LEARNERS, VICTIM, Plan
from diloco.demo.processes import Family, Kill
from diloco.report.timeline import Timeline, TimelineFollower

POLL_S = 0.25

Show = Callable[[str, Timeline, Family], None]
"""Hears about the phase of the demo in a few words, the run and the processes, several times a second."""


@dataclass(frozen=True)
class DemoOutcome:
    """A demo that is over.

    Attributes:
        global_loss: held-out loss of the model that the syncer has saved, in nats per byte; those of the controls, on
            the same sequences, are in their events.
    """

    config: RunConfig
    timeline: Timeline
    kills: list[Kill]
    global_loss: float
    seconds: float


def tell(config: RunConfig, plan: Plan, show: Show) -> DemoOutcome:
    """Run everything.

    Raises:
        RunError: a process failed by itself.
    """
    started = time.monotonic()
    with Family(config.dir) as family:
        stage = _Stage(config, plan, family, show)
        stage.train()
        stage.train_controls()
        (export,) = json.loads(family.output("evaluation"))["exports"]
        global_loss = export["results"][0]["value"]
        return DemoOutcome(config, stage.timeline, family.kills, global_loss, time.monotonic() - started)


class _Stage:
    """Starts the processes and watches them."""

    def __init__(self, config: RunConfig, plan: Plan, family: Family, show: Show) -> None:
        self._config = config
        self._plan = plan
        self._family = family
        self._show = show
        self._follower = TimelineFollower(config.dir)
        self.timeline = self._follower.timeline
        self._run_file = str(config.dir / "run.toml")

    def train(self) -> None:
        """Run the syncer and the learners to their end, and kill one learner on the way; joiners wait for a model."""
        family, timeline = self._family, self.timeline
        self._show("starting a syncer and three learners", timeline, family)
        family.start("syncer", "syncer", self._run_file, serves=True, restarts=True)
        for shard, name in enumerate(LEARNERS):
            command = ["train", self._run_file, "--name", name, "--shard", str(shard), "--supervised"]
            if shard == 0:
                # One of them is enough to draw the global model's curve; its warm start is kept, for the controls.
                command += ["--initialise", *_set("evaluate.every_steps", self._plan.every)]
                command += _set("checkpoint.keep", self._plan.points)
            family.start(name, *command, restarts=True)

        def is_over() -> bool:
            return family.are_done(*LEARNERS)

        def may_kill() -> bool:
            return is_over() or (timeline.step >= self._plan.kill_at_step and timeline.is_merging(VICTIM))

        together = "the learners train together"
        self._until(lambda: timeline.initialised_at is not None, f"{LEARNERS[0]} warms up alone, at the full batch")
        self._until(may_kill, together)
        family.children[VICTIM].process.kill()
        self._until(is_over, together)
        family.stop("syncer")
        self._follower.read()

    def train_controls(self) -> None:
        """Data parallel on exactly as many tokens, and a lone learner that makes as many steps as the longest one.

        Both go on from the end of the run's warm start, which trained as they would have: alone, at the full batch.
        Beside them the model that the syncer has saved is exported and evaluated.
        """
        family, run = self._family, self.timeline.finished["syncer"]
        self._control("baseline", run.tokens, "--alone")
        controls = ["baseline"]
        if self._plan.isolated:
            self._control("isolated", run.steps * self._config.tokens_per_full_step, "--isolated", "--shard", "1")
            controls.append("isolated")
        model, phase = str(self._config.dir / "model"), "the run is over, the controls train"
        family.start("export", "export", self._run_file, model, "--state-dir", str(self._config.state_dir))
        self._until(lambda: family.are_done("export"), phase)
        family.start("evaluation", "evaluate", model, "--run", self._run_file, "--json")
        self._until(lambda: family.are_done("evaluation", *controls), phase)

    def _control(self, name: str, tokens: int, *role: str) -> None:
        warm = self._config.dir / LEARNERS[0] / "checkpoints" / f"step-{self._plan.warm_start_steps:010d}"
        command = ["train", self._run_file, *role, "--resume-from", str(warm), *_set("run.tokens", tokens)]
        command += [*_set("evaluate.every_steps", self._plan.every), *_set("checkpoint.every_steps", 0)]
        self._family.start(name, *command)

    def _until(self, is_over: Callable[[], bool], phase: str) -> None:
        """Watch and show the processes until something is over, the last time after that."""
        is_last = False
        while not is_last:
            is_last = is_over()
            self._family.watch()
            self._follower.read()
            self._show(phase, self.timeline, self._family)
            time.sleep(0.0 if is_last else POLL_S)


def _set(key: str, value: int) -> list[str]:
    return ["--set", f"{key}={value}"]
