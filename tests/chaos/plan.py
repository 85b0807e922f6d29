"""The plan of a chaos run: its length, its learners, its faults as a pure function of a seed, and its run file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import diloco
from diloco.config import RunConfig, dump_config, load_config, parse_config
from diloco.demo.plan import free_port
from diloco.errors import ConfigError, StoreError, translated
from diloco.whole_files import write_whole

SYNCER = "syncer"
"""A target of faults, beside the learners."""

TWIN = "-twin"
"""Suffix of the name of a second process of a learner."""

ENDS_LEARNER, ENDS_SYNCER = ("kill learner", "stop learner"), ("kill syncer", "stop syncer")
GOES_BACK = ("restore", "damage state")
"""Faults after which the run may go on from earlier versions."""

SOAK_FAULTS = ("kill learner", "stop learner", "pause learner", "cut", "half open", "slow link")
"""Faults of a soak. None ends the syncer: a process that ends has no leak."""

VIEWER_EVERY_S = {
    "long-lived": 0.25, "short-lived": 0.5, "model": 5.0, "broken off": 1.0, "metrics": 0.5, "silent": 0.5,
}  # fmt: skip
"""Viewers of a soak, and the seconds between two of their requests (`tests.chaos.viewers`)."""

ANSWERS = "viewers.json"
"""File of a run's directory in which viewers count their answers."""

RUN, WATCHER = "chaos", "watcher"
ENDLESS_TOKENS = 10**12
"""The run ends when the chaos does."""

LOST_S = 2.0
"""Lost deadline of the run that chaos makes itself."""

WIDTH = 32
"""A hidden size of 32 gives 29 thousand parameters, of which no transfer is long enough to be resumed."""

CUT_BYTES = 40_000
"""Of such a model, a transfer that is to be cut breaks within so many bytes."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: of it.
        target: "learner": a learner's process; "way": a learner's way to the syncer; "syncer": the syncer's process.
        weight: how often it is drawn, against the others.
        seconds: the shortest and the longest time that it lasts.
        settles_s: afterwards its target is left alone for so long.
        what: what it does, for people.
    """

    name: str
    target: str
    weight: float
    seconds: tuple[float, float]
    settles_s: float
    what: str


def kinds(lost_s: float) -> tuple[Kind, ...]:
    """All kinds. `lost_s`: the deadline after which a silent learner is given up."""
    short, long = (0.1, 0.5 * lost_s), (1.5 * lost_s, 2.5 * lost_s)
    return (
        Kind("kill learner", "learner", 4, (0.5, 2.0), 6.0, "SIGKILL; started again after a while"),
        Kind("stop learner", "learner", 2, (0.5, 2.0), 6.0, "SIGTERM: it checkpoints and leaves; started again"),
        Kind("pause learner", "learner", 3, short, 2.0, "SIGSTOP, SIGCONT before its deadline"),
        Kind("freeze learner", "learner", 2, long, 4.0, "SIGSTOP, SIGCONT after its deadline: it was evicted"),
        Kind("same name", "learner", 2, (10.0, 16.0), 8.0, "a second process with the learner's keys and name"),
        Kind("fill learner's disk", "learner", 2, (1.0, 3.0), 2.0, "RLIMIT_FSIZE 0: no file can grow"),
        Kind("partition", "way", 3, short, 2.0, "nothing arrives either way, and no end is told; then all of it"),
        Kind("long partition", "way", 2, long, 4.0, "the same beyond the deadline"),
        Kind("one-way up", "way", 2, (0.1, 2 * lost_s), 3.0, "nothing of the learner's arrives at the syncer"),
        Kind("one-way down", "way", 2, (0.1, 2 * lost_s), 3.0, "nothing of the syncer's arrives at the learner"),
        Kind("half open", "way", 3, long, 4.0, "bytes on open connections are acknowledged and swallowed"),
        Kind("slow link", "way", 2, (1.0, 3.0), 2.0, "30 to 300 kB/s each way"),
        Kind("delay", "way", 2, (1.0, 3.0), 2.0, "50 to 500 ms for every piece"),
        Kind("corruption", "way", 3, (0.0, 0.5), 2.0, "a bit of one to three pieces is changed"),
        Kind("cut", "way", 4, (0.0, 0.0), 2.0, "all connections break"),
        Kind("cut transfer", "way", 4, (0.5, 1.5), 2.0, "a connection breaks after so many more bytes, up or down"),
        Kind("kill syncer", "syncer", 4, (0.2, 1.5), 4.0, "SIGKILL; started again after a while"),
        Kind("stop syncer", "syncer", 2, (0.2, 1.5), 4.0, "SIGTERM; started again"),
        Kind("pause syncer", "syncer", 2, (0.1, 2 * lost_s), 3.0, "SIGSTOP, SIGCONT"),
        Kind("fill syncer's disk", "syncer", 2, (1.0, 4.0), 4.0, "RLIMIT_FSIZE 0: no file can grow"),
        Kind("damage state", "syncer", 1, (0.2, 0.5), 6.0, "SIGKILL; a file of the state is damaged; repair"),
        Kind("restore", "syncer", 1, (0.2, 0.5), 6.0, "SIGKILL, a copy of its state in its place"),
        Kind("stale copy", "syncer", 1, (10.0, 14.0), 6.0, "SIGKILL, an older copy serves for a while"),
    )


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when, from the first moment of trouble on.
        kind: `Kind.name`.
        target: a learner's name, or "syncer".
        seconds: how long.
        choice: from 0 to 1, what is left open: which file, how many bytes, how slow.
    """

    at_s: float
    kind: str
    target: str
    seconds: float
    choice: float

    @property
    def ends_s(self) -> float:
        """When it is over."""
        return self.at_s + self.seconds


def schedule(
    seed: int, seconds: float, learners: Sequence[str], among: Sequence[Kind], every_s: float
) -> tuple[Fault, ...]:
    """The faults of a seed, by time: one every `every_s` on average, and none that begins after `seconds`.

    A process or way that a fault has hit is left alone until that is over and the process has had the time to come
    back; several others are hit at a time.
    """
    draws = random.Random(seed)
    faults: list[Fault] = []
    free_s: dict[str, float] = {}
    at_s = 0.0
    while (at_s := at_s + draws.expovariate(1 / every_s)) < seconds:
        kind = draws.choices(among, [each.weight for each in among])[0]
        target = draws.choice(learners) if kind.target in ("learner", "way") else kind.target
        lasts_s, choice = draws.uniform(*kind.seconds), draws.random()
        if free_s.get(target, 0.0) <= at_s:
            faults.append(Fault(round(at_s, 3), kind.name, target, round(lasts_s, 3), round(choice, 6)))
            free_s[target] = at_s + lasts_s + kind.settles_s
    return tuple(faults)


@dataclass(frozen=True)
class ChaosPlan:
    """One chaos run.

    Attributes:
        directory: of all that it writes.
        seconds: how long faults happen.
        calm_s: how long the run is measured before them.
        every_s: mean time from one fault to the next.
        only: the names of the kinds of faults that happen; empty: all.
        width: of the model that chaos makes itself.
        soak: viewers poll the syncer, and what its processes hold is sampled.
        slowness: factor on the time limits of all waits, for a busy machine.
    """

    directory: Path
    seed: int
    seconds: float
    learners: int
    calm_s: float
    every_s: float
    only: tuple[str, ...] = ()
    width: int = WIDTH
    soak: bool = False
    slowness: float = 1.0

    @property
    def names(self) -> list[str]:
        """Names of the learners."""
        return [f"learner-{index}" for index in range(self.learners)]

    @property
    def cut_bytes(self) -> int:
        """A transfer that is to be cut breaks within so many bytes: they grow as the model does."""
        return int(CUT_BYTES * max(1.0, (self.width / WIDTH) ** 2))

    def kinds(self, lost_s: float) -> tuple[Kind, ...]:
        """The kinds of faults that can happen. Raises ConfigError: `only` names another."""
        every = kinds(lost_s)
        if unknown := sorted(set(self.only) - {each.name for each in every}):
            names = ", ".join(each.name for each in every)
            raise ConfigError(f"there is no fault {unknown[0]!r}; choose among {names}")
        return tuple(each for each in every if not self.only or each.name in self.only)

    def faults(self, lost_s: float) -> tuple[Fault, ...]:
        """The faults of the seed."""
        return schedule(self.seed, self.seconds, self.names, self.kinds(lost_s), self.every_s)


def prepare(plan: ChaosPlan, run_file: Path | None) -> RunConfig:
    """Make the directory, with `run.toml` in it: that of `run_file`, or a small model's.

    Raises:
        ConfigError: there is something in the directory, or the run file cannot be used.
    """
    directory = plan.directory.absolute()
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{plan.directory} is not empty; choose another directory with --out")
    own: dict[str, str | int | float] = {
        "run.dir": str(directory), "run.tokens": ENDLESS_TOKENS, "run.learners": plan.learners,
        "train.threads": 1, "syncer.address": f"127.0.0.1:{free_port()}",
        "syncer.copy_to": str(directory / "copies"), "syncer.copy_every_s": 5.0,
    }  # fmt: skip
    if plan.soak:
        own["syncer.metrics_port"] = free_port()
    overrides = [f"{key}={json.dumps(value)}" for key, value in own.items()] + ["syncer.record_contributions=true"]
    if run_file is None:
        config = parse_config(_run_file(plan), source="the run file of chaos", overrides=overrides)
    else:
        config = load_config(run_file, overrides)
        if config.syncer.keys:
            raise ConfigError(f"{run_file} names keys; chaos makes keys of its own, so leave them out")
    with translated(OSError, StoreError, f"cannot write to {directory}", "choose another directory with --out"):
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "run.toml", dump_config(config))
    return config


def _run_file(plan: ChaosPlan) -> str:
    """A small model that learns the source of this package, in leased ranges."""
    texts = sorted(str(each) for each in (Path(diloco.__file__).parent / "core").glob("*.py"))
    return f"""
run = {{name = "{RUN}", tokens = {ENDLESS_TOKENS}, seed = {plan.seed}, learners = {plan.learners}}}
data = {{kind = "text", paths = {json.dumps(texts)}, sequence_length = 32, deal = "leases"}}
train = {{global_batch = {4 * plan.learners}}}
schedule = {{kind = "constant", warmup_steps = 0, steps = 1000}}
evaluate = {{sequences = 4, sample_bytes = 0}}
checkpoint = {{every_steps = 100}}
syncer = {{lost_floor_s = {LOST_S}, reconnect_floor_s = 1.0}}

[model]
type = "llama"
hidden_size = {plan.width}
intermediate_size = {2 * plan.width}
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2

[method]
preset = "StreamingDiLoCo"
sync_every = 20
overlap = 1
mix = 0.0
codec = "e3m0"
fragments = {{type = "ByLayer", layers = 1, pattern = "strided"}}
"""
