"""The scenario of `diloco demo --rl` and its result: trainers, rollout workers, of which one is killed, and a reward
worker learn sums."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config import RunConfig
from diloco.demo.display import Display
from diloco.demo.plan import RlPlan
from diloco.demo.processes import DemoProcesses, Kill
from diloco.demo.roles import IMPORTS, Roles, line
from diloco.demo.summary import kills_in_words, write_story
from diloco.errors import NotInitialisedError, UnreachableError
from diloco.report.page import read_run

if TYPE_CHECKING:
    from diloco.following.follower import FollowedModel

POLL_S = 0.5

NUM_PROMPTS = 1600
"""Of an accuracy, so that each of the 200 questions is asked about eight times."""

STATES = ("waiting", "leased", "merged", "stale", "without signal", "refused")


@dataclass(frozen=True)
class RlOutcome:
    """The result of a demo of reinforcement learning.

    Attributes:
        first, last: the run's first model, after the supervised start, and its newest one in the end.
        status: the syncer's, in the end.
        back_s: of kills, seconds until the work of the process went on.
    """

    config: RunConfig
    first: FollowedModel
    last: FollowedModel
    status: Mapping[str, Any]
    kills: Sequence[Kill]
    back_s: Mapping[Kill, float]
    seconds: float


def tell(config: RunConfig, plan: RlPlan, display: Display) -> RlOutcome:
    """Run the whole demo.

    Raises:
        RunError: a process failed.
    """
    began_at, run, address = time.monotonic(), config.run.name, config.syncer.address
    first, is_killed, before, back_s = None, False, dict[Kill, int | None](), dict[Kill, float]()
    phase = f"starting a syncer, two trainers, {plan.rollouts} rollout workers and a reward worker"
    display.advance(phase, (), {})
    with DemoProcesses(config.dir, IMPORTS) as family:
        roles = Roles(config, family)
        roles.start(config.dir / "run.toml", rollouts=plan.rollouts)
        from diloco.following.follower import newest_model  # imports torch, while the others do their first work

        while not roles.are_done():
            family.watch()
            if (status := roles.status()) is not None:
                display.page_of("syncer")
                if first is None and status["initialised"]:
                    with suppress(NotInitialisedError, UnreachableError):
                        first = newest_model(address, run=run, insecure=True)
                        phase = "all generate, score and train"
                if status["step"] >= plan.kill_at_step and not is_killed:
                    family.children[plan.victim].process.kill()
                    is_killed = True
                for kill in family.kills:
                    if kill not in back_s and family.children[kill.name].restart_at is None:
                        done = work_of(kill.name, status)
                        then = before.setdefault(kill, None if kill.name == "syncer" else done or 0)
                        if done is not None and done != then:
                            back_s[kill] = time.time() - kill.t
                display.advance(phase, [line(status)], {"trainers": (status["step"], line(status))})
            display.report_kills(family.kills, lambda kill: (back_s.get(kill), kill.name))
            time.sleep(POLL_S)
        while (status := roles.status()) is None:  # the syncer was killed, and is being restarted
            family.watch()
            time.sleep(POLL_S)
        last = newest_model(address, run=run, insecure=True)
        family.stop("syncer")
        assert first is not None
        return RlOutcome(config, first, last, status, family.kills, back_s, time.monotonic() - began_at)


def work_of(name: str, status: Mapping[str, Any]) -> int | None:
    """What a process has done: the groups of a worker, the tokens of a trainer, nothing by a syncer; None: the status
    does not name it."""
    done = {"syncer": 0}
    if status["groups"] is not None:
        done |= {each["name"]: each["generated"] + each["scored"] for each in status["groups"]["workers"]}
    return {**done, **{name: each["tokens"] for name, each in status["learners"].items()}}.get(name)


# --- the result -------------------------------------------------------------------------------------------------------


def summarise(outcome: RlOutcome) -> dict[str, Any]:
    """Plain values. Accuracies are of `NUM_PROMPTS` prompts of the run, at its temperature."""
    from diloco.rl.evaluation import TaskEvaluation

    evaluation = TaskEvaluation(outcome.config, NUM_PROMPTS)
    models = {"untrained": None, "supervised": outcome.first, "end": outcome.last}
    groups = outcome.status["groups"]
    found = {
        "accuracy": {name: evaluation.scores(model)["sums"]["training"].mean for name, model in models.items()},
        "prompts": NUM_PROMPTS,
        "groups": {state: groups[state] for state in ("acknowledged", *STATES)},
        "kills": [{"name": kill.name, "back_s": outcome.back_s.get(kill), "by": kill.name} for kill in outcome.kills],
        "kills_survived": len(outcome.back_s),
        "steps": outcome.last.step,
        "versions": outcome.last.number,
        "tokens": outcome.last.tokens,
        "seed": outcome.config.run.seed,
        "seconds": outcome.seconds,
    }
    return {"headline": headline(found), **found}


def headline(summary: Mapping[str, Any]) -> str:
    """For instance "sums from 31 % to 93 % right, one rollout worker killed and back in 3.1 s"."""
    start, end = (100 * summary["accuracy"][each] for each in ("supervised", "end"))
    return f"sums from {start:.0f} % to {end:.0f} % right, {kills_in_words(summary['kills'])}"


def describe(summary: Mapping[str, Any]) -> str:
    """The numbers behind the headline, one line each."""
    it, groups = summary, summary["groups"]
    untrained, supervised, end = (f"{100 * each:.1f} %" for each in it["accuracy"].values())
    states = " + ".join(f"{groups[state]:,} {state}" for state in STATES)
    is_equal = "=" if groups["acknowledged"] == sum(groups[state] for state in STATES) else "≠"
    return (
        f"right answers: {untrained} untrained, {supervised} after the supervised start, {end} in the end; of "
        f"{it['prompts']:,} samples of 200 questions, each of them trained, so they are memorised\n"
        f"groups: {groups['acknowledged']:,} acknowledged {is_equal} {states}\n"
        f"{it['steps']:,} steps, {it['versions']:,} versions, {it['tokens']:,} tokens, {it['seconds']:.0f} s"
    )


def write_report(path: Path, outcome: RlOutcome, summary: dict[str, Any]) -> None:
    """Write the page of the run with the headline and the kills."""
    numbers = describe(summary).replace("\n", "; ")
    text = f"A small model learns sums and differences of two digits. In numbers: {numbers}."
    write_story(path, read_run([outcome.config.dir])[1], outcome.kills, summary, text)
