"""The demo's scenario: one learner makes the warm start and initialises the run, two join, one is killed and rejoins;
or of two syncers over a bucket the first is killed, and the other one takes over.

The controls train afterwards. All are real processes: `diloco syncer` and `diloco train` on one run file, on loopback.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.config import RunConfig
from diloco.demo.plan import LEARNERS, LEASE_S, Plan
from diloco.demo.processes import RESTART_AFTER_S, DemoProcesses, Kill
from diloco.report.timeline import Timeline, TimelineFollower
from diloco.store.objects import open_store, read_manifest

POLL_S = 0.25

Show = Callable[[str, Timeline, DemoProcesses], None]
"""Called several times a second with the phase in a few words, the run and the processes."""


@dataclass(frozen=True)
class DemoOutcome:
    """The result of a demo.

    Attributes:
        global_loss: held-out loss of the saved global model, in nats per byte; the controls' losses on the same
            sequences are in their events.
        versions: the newest of each fragment in the store.
    """

    config: RunConfig
    timeline: Timeline
    kills: list[Kill]
    global_loss: float
    versions: tuple[int, ...]
    seconds: float


def tell(config: RunConfig, plan: Plan, show: Show) -> DemoOutcome:
    """Run the whole demo.

    Raises:
        RunError: a process failed.
    """
    started = time.monotonic()
    with DemoProcesses(config.dir) as family:
        stage = _Stage(config, plan, family, show)
        stage.train()
        stage.train_controls()
        (export,) = json.loads(family.output("evaluation"))["exports"]
        global_loss = export["results"][0]["value"]
        versions, seconds = read_manifest(open_store(config.store)).versions, time.monotonic() - started
        return DemoOutcome(config, stage.timeline, family.kills, global_loss, versions, seconds)


class _Stage:
    """Starts the processes and watches them."""

    def __init__(self, config: RunConfig, plan: Plan, family: DemoProcesses, show: Show) -> None:
        self._config = config
        self._plan = plan
        self._family = family
        self._show = show
        self._follower = TimelineFollower(config.dir)
        self.timeline = self._follower.timeline
        self._run_file = str(config.dir / "run.toml")

    def train(self) -> None:
        """Run the syncer and the learners to their end, and kill one learner meanwhile; joiners wait for a model."""
        family, timeline = self._family, self.timeline
        self._start_syncers()
        for shard, name in enumerate(LEARNERS):
            command = ["train", self._run_file, "--name", name, "--shard", str(shard), "--supervised"]
            if shard == 0:
                # One learner evaluates the global model; the controls start from its warm-start checkpoint.
                command += ["--initialise", "if-empty", *_set("evaluate.every_steps", self._plan.every)]
                command += _set("checkpoint.keep", self._plan.points)
            family.start(name, *command, restart_after_s=RESTART_AFTER_S)

        def is_over() -> bool:
            return family.are_done(*LEARNERS)

        def may_kill() -> bool:
            return is_over() or (timeline.step >= self._plan.kill_at_step and timeline.is_merging(LEARNERS[2]))

        together = "the learners train together"
        self._until(lambda: timeline.initialised_at is not None, f"{LEARNERS[0]} warms up alone, at the full batch")
        self._until(may_kill, together)
        family.children[self._plan.victim].process.kill()
        self._until(is_over, together)
        for name in sorted(self._plan.syncers, key=lambda name: name == timeline.serving):  # so that none takes over
            family.stop(name)
        self._follower.read()

    def _start_syncers(self) -> None:
        """One; or two over a bucket, as on two machines, the second once the first one serves."""
        timeline, syncer, is_alone = self.timeline, self._config.syncer, self._plan.bucket is None
        phase = f"starting {'a syncer' if is_alone else 'a syncer, its standby'} and three learners"
        self._show(phase, timeline, self._family)
        for index, name in enumerate(self._plan.syncers):
            address, page_port = syncer.address.split(",")[index], syncer.page_port + index
            own = ["--address", address, "--page-port", str(page_port), "--state-dir", str(self._config.dir / name)]
            own += [] if is_alone else ["--standby"]
            # A syncer that came back within the lease would go on itself.
            restart_after_s = RESTART_AFTER_S if is_alone else 3 * LEASE_S
            self._family.start(name, "syncer", self._run_file, *own, serves=True, restart_after_s=restart_after_s)
            self._until(lambda: is_alone or bool(timeline.takeovers), phase)

    def train_controls(self) -> None:
        """Train data parallel on equally many tokens, and a lone learner for as many steps as the longest learner's.

        Both continue from the end of the run's warm start, which was also trained alone at the full batch. Meanwhile
        the saved global model is exported and evaluated.
        """
        family, run = self._family, self.timeline.finished["syncer"]
        self._control("baseline", run.tokens, "--alone")
        controls = ["baseline"]
        if self._plan.isolated:
            self._control("isolated", run.steps * self._config.tokens_per_full_step, "--isolated", "--shard", "1")
            controls.append("isolated")
        model, phase = str(self._config.dir / "model"), "the run is over, the controls train"
        family.start("export", "export", self._run_file, model, "--store", self._config.store)
        self._until(lambda: family.are_done("export"), phase)
        family.start("evaluation", "evaluate", model, "--run", self._run_file, "--json")
        self._until(lambda: family.are_done("evaluation", *controls), phase)

    def _control(self, name: str, tokens: int, *role: str) -> None:
        warm = self._config.dir / LEARNERS[0] / "checkpoints" / f"step-{self._plan.warm_start_steps:010d}"
        command = ["train", self._run_file, *role, "--resume-from", str(warm), *_set("run.tokens", tokens)]
        command += [*_set("evaluate.every_steps", self._plan.every), *_set("checkpoint.every_steps", 0)]
        self._family.start(name, *command)

    def _until(self, is_over: Callable[[], bool], phase: str) -> None:
        """Watch and show the processes until `is_over`, and once more afterwards."""
        is_last = False
        while not is_last:
            is_last = is_over()
            self._family.watch()
            self._follower.read()
            self._show(phase, self.timeline, self._family)
            time.sleep(0.0 if is_last else POLL_S)


def _set(key: str, value: int) -> list[str]:
    return ["--set", f"{key}={value}"]
