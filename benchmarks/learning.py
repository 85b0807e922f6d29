"""What a run of reinforcement learning learns, and the processor time of each role.

    python -m benchmarks.learning [RUN_FILE] [--faults] [--set table.key=value] [--json]

A syncer, two trainers, two rollout workers and a reward worker run as processes of this machine until the run ends.
Accuracy is the mean score of one completion of each prompt at the run's temperature, by the first published version
(the model after the supervised start) and by the last one, on prompts of training and on those that are held out. With
--faults, at fixed fractions of the steps one process of each role and the syncer are killed by SIGKILL and started
again by the same command, and one of each is frozen. At all times, the states of the groups must add up to those that
were acknowledged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import machine
from benchmarks.processes import until
from benchmarks.roles import STATES, SYNCER, Roles
from diloco.errors import ConfigError, NotInitialisedError, UnreachableError
from diloco.following.follower import FollowedModel, newest_model
from diloco.rl.evaluation import TaskEvaluation

SAY_S, LOOK_S = 10.0, 0.5

FAULTS = (
    ("kill", "rollout-0"), ("freeze", "trainer-1"), ("kill", SYNCER), ("freeze", "reward-0"), ("kill", "trainer-0"),
    ("freeze", SYNCER), ("kill", "reward-0"), ("freeze", "rollout-1"),
)  # fmt: skip
"""Evenly spaced over the steps of the run."""

FROZEN = 1.5
"""Duration of a freeze, in `syncer.lost_floor_s`: the process is given up meanwhile, or the syncer's workers wait."""


class Watched:
    """A run on its way.

    Attributes:
        faults: those that were done, each with the step.
    """

    def __init__(self, roles: Roles) -> None:
        self.roles, self.faults = roles, list[dict[str, Any]]()
        self._began_at = self._said_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began_at, 1)

    def is_over(self) -> bool:
        """Look at the run, and say how it is if it is time for that; returns whether it has ended.

        Raises:
            RuntimeError: something is wrong, with all of it.
        """
        roles = self.roles
        time.sleep(LOOK_S)
        roles.look()
        if roles.wrong:
            raise RuntimeError("\n".join(roles.wrong))
        if roles.shown and time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            rewards = "".join(f", {task} {mean:.3f}" for task, mean in sorted(roles.groups["rewards"].items()))
            self.say(f"step {roles.shown['step']:,}, {roles.groups['merged']:,} groups merged{rewards}")
        return {end.name for end in roles.ends} >= set(roles.names)

    def say(self, text: str) -> None:
        print(f"{self.seconds:7.0f} s  {text}", file=sys.stderr, flush=True)

    def strike(self, kind: str, name: str) -> None:
        """One fault, until the syncer answers and more groups are merged."""
        roles, step, merged = self.roles, self.roles.shown["step"], self.roles.groups["merged"]
        self.say(f"{kind} {name}")
        if kind == "kill":
            roles.kill_now(name)
            roles.restart(name)
        else:
            roles.freeze(name)
            time.sleep(FROZEN * roles.config.syncer.lost_floor_s)
            roles.thaw(name)
        until(lambda: self.is_over() or roles.groups["merged"] > merged, f"no group is merged after {kind} {name}")
        self.faults.append({"fault": f"{kind} {name}", "at_step": step})


def first_model(roles: Roles) -> FollowedModel:
    """The first published version of a run that begins."""
    while True:
        roles.watch()
        if roles.wrong:
            raise RuntimeError("\n".join(roles.wrong))
        with suppress(UnreachableError, NotInitialisedError):
            return newest_model(roles.config.syncer.address, run=roles.config.run.name)
        time.sleep(LOOK_S)


def accuracy(evaluation: TaskEvaluation, model: FollowedModel) -> dict[str, dict[str, float]]:
    """By task and part."""
    return {
        task: {part: score.mean for part, score in parts.items()} for task, parts in evaluation.scores(model).items()
    }


def run(roles: Roles, num_prompts: int, *, with_faults: bool) -> dict[str, Any]:
    """Run it to its end; returns what was measured."""
    config, watched, steps = roles.config, Watched(roles), roles.config.run.steps
    if steps is None:
        raise ConfigError("the run needs run.steps; set it")
    for name in (SYNCER, *roles.names):
        roles.restart(name)
    evaluation, start = TaskEvaluation(config, num_prompts), first_model(roles)
    due = [steps * at // (len(FAULTS) + 1) for at in range(1, len(FAULTS) + 1)] if with_faults else []
    while not watched.is_over():
        if len(watched.faults) < len(due) and roles.shown.get("step", 0) >= due[len(watched.faults)]:
            watched.strike(*FAULTS[len(watched.faults)])
    wall_s, end = watched.seconds, newest_model(config.syncer.address, run=config.run.name)
    roles.stop(SYNCER)
    return {
        "run": config.run.name, "steps": roles.shown["step"], "wall_s": wall_s, "processor_s": roles.processor_s(),
        "versions": [start.number, end.number], "tokens": end.tokens, "prompts": num_prompts,
        "start": accuracy(evaluation, start), "end": accuracy(evaluation, end),
        "groups": {state: roles.groups[state] for state in ("acknowledged", *STATES)},
        "staleness": roles.groups["staleness"], "faults": watched.faults, "wrong": roles.wrong,
    }  # fmt: skip


def show(found: Mapping[str, Any]) -> None:
    """For people."""
    processor_s = found["processor_s"]
    by_role = ", ".join(f"{role} {seconds:.0f}" for role, seconds in processor_s.items())
    took = f"in {found['wall_s']:.0f} s; processor time {sum(processor_s.values()):.0f} s"
    print(f"{found['steps']:,} steps {took}: {by_role}")
    first, last = found["versions"]
    for task, parts in found["start"].items():
        for part, before in parts.items():
            after = found["end"][task][part]
            print(
                f"{task}, {part}: {before:.3f} at version {first}, {after:.3f} at {last}, of {found['prompts']} prompts"
            )
    print("groups: " + ", ".join(f"{num:,} {state}" for state, num in found["groups"].items()))
    for fault in found["faults"]:
        print(f"at step {fault['at_step']:,}: {fault['fault']}")
    print("\n".join(found["wrong"]) or "the states of the groups add up at all times")


def main() -> int:
    """Run it from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", nargs="?", type=Path, default=Path("examples/rl/run.toml"), help="(%(default)s)")
    parser.add_argument("--faults", action="store_true", help="kill and freeze one of each role on the way")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run file"
    )
    parser.add_argument("--prompts", type=int, default=500, help="for each accuracy (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the run's directory, kept (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="diloco-learning-") as temporary:
        directory = (chosen.out or Path(temporary)).absolute()
        with Roles(directory, chosen.run_file, overrides=chosen.set) as roles:
            found = {"machine": before, **run(roles, chosen.prompts, with_faults=chosen.faults)}
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
