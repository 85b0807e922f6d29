"""The story: one learner warms up alone and initialises the run, two more join, one is killed and comes back; then the controls.

Everything is a real process: `diloco syncer` and `diloco train` on one run file, on loopback.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco import events as ev
from diloco.config import RunConfig, load_config
from diloco.demo.accounting import Timeline, read_timeline
from diloco.demo.processes import Family
from diloco.errors import ConfigError

NUM_LEARNERS = 3
VICTIM = "learner-2"
SYNC_EVERY = 30
SEQUENCES = 18  # of a full step
LENGTH = 64
POLL_S = 0.25

RUN_FILE = """\
# Written by `diloco demo`.

[run]
name = "demo"
dir = {directory}
seed = {seed}
learners = {learners}
tokens = {tokens}

[data]
kind = "stdlib"
sequence_length = {length}

[train]
global_batch = {sequences}
threads = 1
warm_start_steps = {warm_start_steps}

[schedule]
kind = "cosine"
warmup_steps = 50
steps = {steps}

[optimizer]
lr = 4e-3

[evaluate]
sequences = 512

[method]
preset = "StreamingDiLoCo"
sync_every = {sync_every}
overlap = 1
mix = 0.0
codec = "e3m0"
fragments = {{ type = "ByLayer", layers = 1, pattern = "strided" }}
outer = {{ type = "Nesterov", lr = 0.7, momentum = 0.9 }}

[syncer]
address = "127.0.0.1:{port}"
lost_floor_s = 3.0
"""


@dataclass(frozen=True)
class Plan:
    """How long the demo is. A quarter of the steps is the warm start, as the papers' runs start from a trained model."""

    steps: int
    kill_after: float  # share of the common part
    quick: bool

    @property
    def warm_start_steps(self) -> int:
        return self.steps // 4

    @property
    def kill_at_step(self) -> int:
        """Late enough to have merged, early enough to come back."""
        return self.warm_start_steps + round(self.kill_after * (self.steps - self.warm_start_steps))


FULL = Plan(steps=1500, kill_after=0.3, quick=False)
QUICK = Plan(steps=840, kill_after=0.15, quick=True)


@dataclass(frozen=True)
class Outcome:
    """What was measured, before it is summed up."""

    config: RunConfig
    timeline: Timeline
    global_loss: float
    baseline: dict[str, Any]
    isolated: dict[str, Any] | None
    learners: dict[str, dict[str, Any]]
    num_kills: int
    seconds: float


Say = Callable[[str, Timeline | None], None]


def tell(directory: Path, plan: Plan, seed: int, say: Say) -> Outcome:
    """Run everything; `say(phase, timeline)` hears about it at least every two seconds.

    Raises:
        ConfigError: `directory` holds something else. ExchangeError: a process failed.
    """
    started = time.monotonic()
    config = _prepare(directory, plan, seed)
    run_file = str(directory / "run.toml")
    with Family(directory) as family:
        family.start("syncer", ["syncer", run_file])
        for shard in range(NUM_LEARNERS):
            name = f"learner-{shard}"
            command = [
                "train",
                run_file,
                "--name",
                name,
                "--shard",
                str(shard),
                "--json",
                "--set",
                "checkpoint.every_steps=60",
            ]
            command += ["--initialise", "--set", f"evaluate.every_steps={plan.steps // 20}"] if shard == 0 else []
            family.start(name, command, [*command, "--resume"])
        killed = False
        while not all(family.children[f"learner-{shard}"].done for shard in range(NUM_LEARNERS)):
            timeline = read_timeline(directory)
            if not killed and timeline.is_merging(VICTIM) and timeline.step >= plan.kill_at_step:
                say(f"kill -9 {VICTIM}", timeline)
                family.kill(VICTIM)
                killed = True
            family.watch()
            say(_phase(timeline, plan), timeline)
            time.sleep(POLL_S)
        learners = {name: json.loads(family.output(name)) for name in family.children if name != "syncer"}
        say("evaluating the global model", None)
        global_loss = _evaluate(config)
        num_kills = family.num_kills
        family.finish("syncer")
        timeline = read_timeline(directory)
        controls = _controls(family, run_file, timeline, plan, say)
    return Outcome(
        config=config,
        timeline=timeline,
        global_loss=global_loss,
        baseline=controls["baseline"],
        isolated=controls.get("isolated"),
        learners=learners,
        num_kills=num_kills,
        seconds=time.monotonic() - started,
    )


def _prepare(directory: Path, plan: Plan, seed: int) -> RunConfig:
    if directory.exists():
        marker = directory / "run.toml"
        if any(directory.iterdir()) and not (
            marker.exists() and marker.read_text().startswith("# Written by `diloco demo`")
        ):
            raise ConfigError(f"{directory} holds something that is not a demo; choose another directory with --dir")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    text = RUN_FILE.format(
        directory=json.dumps(str(directory)), seed=seed, learners=NUM_LEARNERS, tokens=plan.steps * SEQUENCES * LENGTH, length=LENGTH,
        sequences=SEQUENCES, warm_start_steps=plan.warm_start_steps, steps=plan.steps, sync_every=SYNC_EVERY, port=_free_port(),
    )  # fmt: skip
    (directory / "run.toml").write_text(text)
    return load_config(directory / "run.toml")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _phase(timeline: Timeline, plan: Plan) -> str:
    if timeline.initialised_at is None:
        return "learner-0 warms up alone, at the full batch" if timeline.step else "starting the processes"
    live = timeline.live_learners()
    return f"{len(live)} of {NUM_LEARNERS} learners train together"


def _evaluate(config: RunConfig) -> float:
    """Held-out loss of the model that the syncer serves."""
    from diloco.exchange.remote import fetch_model
    from diloco.training.data import held_out_batches
    from diloco.training.evaluate import evaluate
    from diloco.training.models import build_model
    from diloco.training.sources import load_corpus

    corpus = load_corpus(config.data)
    model = build_model(config.model, corpus.vocab_size, LENGTH, config.run.seed)
    state = model.state_dict()
    state.update(fetch_model(config.syncer.address, run=config.run.name))
    for name, tied in tied_names(model).items():
        state[name] = state[tied]
    return evaluate(model, state, held_out_batches(corpus, LENGTH, config.evaluate.sequences, batch=32))


def tied_names(model: Any) -> dict[str, str]:
    """Names in `state_dict` that share a parameter with an earlier one."""
    first: dict[int, str] = {}
    tied = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
    return tied


def _controls(family: Family, run_file: str, timeline: Timeline, plan: Plan, say: Say) -> dict[str, dict[str, Any]]:
    """The baseline on exactly the run's tokens, and the learner that never communicates; on a core each."""
    common = ["--json", "--set", f"evaluate.every_steps={plan.steps // 20}"]
    names = ["baseline"] if plan.quick else ["baseline", "isolated"]
    family.start("baseline", ["train", run_file, "--alone", "--set", f"run.tokens={timeline.tokens}", *common])
    if not plan.quick:
        family.start("isolated", ["train", run_file, "--isolated", "--shard", "1", *common])
    while not all(family.children[name].done for name in names):
        family.watch()
        steps = {name: _newest_step(family.directory / name / "events.jsonl") for name in names}
        say("controls: " + ", ".join(f"{name} at step {step} of {plan.steps}" for name, step in steps.items()), None)
        time.sleep(POLL_S)
    return {name: json.loads(family.output(name)) for name in names}


def _newest_step(path: Path) -> int:
    steps = [event.step for event in ev.read_events(path) if isinstance(event, ev.Stepped)] if path.exists() else []
    return steps[-1] if steps else 0
