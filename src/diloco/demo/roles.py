"""The roles of a run of reinforcement learning as processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.config import RunConfig
from diloco.demo.processes import RESTART_AFTER_S, DemoProcesses
from diloco.errors import UnreachableError
from diloco.exchange.dialling import fetch_status
from diloco.protocol.groups import ENDS

IMPORTS = ("diloco.rl.trainer", "diloco.rl.reward")
"""What its processes import beside those of `DemoProcesses`."""


class Roles:
    """The processes of a run, and what its syncer says of it.

    Attributes:
        names: of trainers, rollout workers and reward workers.
    """

    def __init__(self, config: RunConfig, family: DemoProcesses) -> None:
        self._config, self._family = config, family
        self.names: list[str] = []

    def start(
        self, run_file: Path, overrides: Sequence[str] = (), *, serves: bool = True, rollouts: int = 1, rewards: int = 1
    ) -> None:  # fmt: skip
        """Start all planned trainers, so many rollout and reward workers, and the syncer if this `serves`."""
        options = [text for each in overrides for text in ("--set", each)]
        if serves:
            command = ("syncer", str(run_file), *options)
            self._family.start("syncer", *command, serves=True, restart_after_s=RESTART_AFTER_S)
        for role, number in (("trainer", self._config.run.learners), ("rollout", rollouts), ("reward", rewards)):
            for name in (f"{role}-{each}" for each in range(number)):
                command = ("rl", role, str(run_file), "--name", name, *options)
                self._family.start(name, *command, restart_after_s=RESTART_AFTER_S)
                self.names.append(name)

    def are_done(self) -> bool:
        """Whether all but the syncer have ended in order."""
        return self._family.are_done(*self.names)

    def status(self) -> Mapping[str, Any] | None:
        """As of `diloco status`; None: no syncer answers."""
        run, syncer = self._config.run.name, self._config.syncer
        try:
            return fetch_status(syncer.address, run=run, keys=syncer.keys, insecure=syncer.insecure)
        except UnreachableError:
            return None


def line(status: Mapping[str, Any]) -> str:
    """The state of a run for people, from its "step" and "groups", or neither: the syncer does not answer."""
    if not status:
        return "no syncer answers at the moment"
    if (groups := status["groups"]) is None:
        return "no trainer has joined yet"
    ends = "".join(f", {groups[end]:,} {end}" for end in ENDS if groups[end] or end == "merged")
    rewards = "".join(f", mean reward of {task} {mean:.3f}" for task, mean in sorted(groups["rewards"].items()))
    return f"step {status['step']:,}: {groups['acknowledged']:,} groups made{ends}{rewards}"
