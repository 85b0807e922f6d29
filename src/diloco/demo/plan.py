"""Sizes of the demo, its directory and its run file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.config import RunConfig, load_config
from diloco.errors import ConfigError, RunError, translated
from diloco.tables import write_toml

LEARNERS = ("learner-0", "learner-1", "learner-2")
SYNCERS = ("syncer", "standby")
MARK = "# Written by `diloco demo`"
PORTS = range(20_000, 30_000)

LEASE_S = 5.0
"""Of the syncers over a bucket."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a demo. A quarter of the steps is the warm start: the papers' runs also start from a trained model.

    Attributes:
        steps: steps of the run, each over `sequences` sequences of `sequence_length` tokens in total.
        points: evaluations of the held-out loss, each with a checkpoint; one of them is at the end of the warm start.
        kill_after: the victim is killed after this share of the steps that follow the warm start: late enough to have
            merged, early enough to rejoin.
        isolated: also train a learner that never communicates.
        bucket: URL of a store that two syncers share, of which the first is killed; None: one syncer with a directory,
            and a learner is killed.
    """

    steps: int
    kill_after: float
    isolated: bool
    points: int = 20
    sync_every: int = 30
    sequences: int = 18
    sequence_length: int = 64
    held_out: int = 512
    bucket: str | None = None

    @property
    def syncers(self) -> tuple[str, ...]:
        """Names of the syncers."""
        return SYNCERS[: 1 if self.bucket is None else 2]

    @property
    def victim(self) -> str:
        """The process that is killed."""
        return LEARNERS[2] if self.bucket is None else SYNCERS[0]

    @property
    def every(self) -> int:
        """Steps from one point to the next."""
        return max(1, self.steps // self.points)

    @property
    def warm_start_steps(self) -> int:
        return self.points // 4 * self.every

    @property
    def kill_at_step(self) -> int:
        return self.warm_start_steps + round(self.kill_after * (self.steps - self.warm_start_steps))


@dataclass(frozen=True)
class RlPlan:
    """Sizes of a demo of reinforcement learning: two trainers, so many rollout workers, and a reward worker.

    Attributes:
        steps: of each trainer.
        kill_at_step: the victim is killed then.
    """

    steps: int = 500
    kill_at_step: int = 150
    supervised_steps: int = 190
    rollouts: int = 2
    syncers: tuple[str, ...] = SYNCERS[:1]

    @property
    def victim(self) -> str:
        """The process that is killed."""
        return f"rollout-{self.rollouts - 1}"


FULL = Plan(steps=1500, kill_after=0.3, isolated=True)
QUICK = Plan(steps=840, kill_after=0.15, isolated=False, points=12)


@contextlib.contextmanager
def prepared(directory: Path, plan: Plan | RlPlan, seed: int) -> Iterator[RunConfig]:
    """Prepare and lock a directory that holds the run file only; an earlier demo in it is removed.

    Raises:
        ConfigError: `directory` has other content or a running demo, or cannot be written.
    """
    run_file, choice = directory / "run.toml", "choose another directory with --dir"
    with locked(directory, f"a demo is running in {directory}; wait until it ends, or {choice}", choice):
        with translated(OSError, ConfigError, f"cannot write to {directory}", choice):
            found = sorted(directory.iterdir(), key=lambda each: each == run_file)  # the run file is removed last
            if found and not (run_file.is_file() and run_file.read_text(errors="replace").startswith(MARK)):
                raise ConfigError(f"{directory} contains files that no earlier demo wrote; {choice}")
            for each in found:
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            made = _tables(directory, plan, seed) if isinstance(plan, Plan) else _rl_tables(directory, plan, seed)
            run_file.write_text(f"{MARK}.\n\n{write_toml(made)}", encoding="utf-8")
        yield load_config(run_file)


@contextlib.contextmanager
def locked(directory: Path, refusal: str, choice: str) -> Iterator[None]:
    """Make a directory, and hold its lock, which ends with this process.

    Raises:
        ConfigError: `refusal`, if another process holds it; or it cannot be made, with `choice` as the advice.
    """
    with translated(OSError, ConfigError, f"cannot write to {directory}", choice):
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
    try:
        with translated(OSError, ConfigError, f"cannot lock {directory}", choice):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(refusal) from None
        yield
    finally:
        os.close(lock)


def _tables(directory: Path, plan: Plan, seed: int) -> dict[str, dict[str, Any]]:
    """The run file of a demo."""
    tokens = plan.steps * plan.sequences * plan.sequence_length
    shared = {} if plan.bucket is None else {"store": plan.bucket, "lease_s": LEASE_S}
    return {
        "run": {"name": "demo", "dir": str(directory), "seed": seed, "learners": len(LEARNERS), "tokens": tokens},
        "data": {"kind": "stdlib", "sequence_length": plan.sequence_length},
        "train": {"global_batch": plan.sequences, "threads": 1},
        "warm_start": {"steps": plan.warm_start_steps},
        "schedule": {"kind": "cosine", "warmup_steps": min(50, plan.steps // 12), "steps": plan.steps},
        "inner": {"lr": 4e-3},
        "evaluate": {"sequences": plan.held_out, "sample_bytes": 0},
        "checkpoint": {"every_steps": plan.every},
        "method": {
            "preset": "StreamingDiLoCo",
            "sync_every": plan.sync_every,
            "overlap": 1,
            "mix": 0.0,
            "codec": "e3m0",
            "fragments": {"type": "ByLayer", "layers": 1, "pattern": "strided"},
            "outer": {"type": "Nesterov", "lr": 0.9, "momentum": 0.8},
        },
        "syncer": {**_served(len(plan.syncers)), **shared},
    }


def _rl_tables(directory: Path, plan: RlPlan, seed: int) -> dict[str, dict[str, Any]]:
    """The run file of a demo of reinforcement learning: `examples/rl/run.toml` with one task and nothing held out."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    tokens = plan.steps * 2 * 16 * 8 * 4  # an answer has 2 or 3, so that the steps end the run
    return {
        "run": {
            "name": "sums", "dir": str(directory), "seed": seed, "learners": 2, "tokens": tokens, "steps": plan.steps
        },
        "model": {**sizes, "num_attention_heads": 4, "num_key_value_heads": 4},
        "inner": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0},
        "schedule": {"kind": "wsd", "decay_fraction": 0.5, "warmup_steps": 20, "steps": plan.steps},
        "method": {"preset": "DiLoCo", "sync_every": 5, "outer": {"type": "SGD", "lr": 1.0}},
        "train": {"threads": 1},
        "engine": {"threads": 1, "prompts": 16},
        "rl": {
            "group_size": 8, "groups_per_step": 16, "max_prompt_tokens": 24, "max_tokens": 8,
            "supervised_steps": plan.supervised_steps, "supervised_lr": 4e-3,
        },
        "task": {
            "sums": {
                "source": "reasoning-gym:chain_sum", "template": "{expression} =",
                "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            }
        },
        "syncer": _served(1),
    }  # fmt: skip


def _served(num: int) -> dict[str, Any]:
    """The table of so many syncers."""
    port = free_port(2 * num)
    return {
        "address": ",".join(f"127.0.0.1:{each}" for each in range(port, port + num)),
        "insecure": True,  # ignore DILOCO_KEYS, which is for another run
        "page": True,
        "page_port": port + num,  # keeps the page's address over a restart
        "lost_floor_s": 3.0,
    }


def free_port(number: int = 1) -> int:
    """The first of so many free ports in a row, below the ephemeral ports, which outgoing connections could take during
    a restart.

    Drawn from the system's random numbers, so that processes with the same seed draw different ports.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for each in range(port, port + number):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port
    raise RunError(f"no {number} ports between {PORTS[0]} and {PORTS[-1]} are free; stop a process that listens there.")
