"""Converts events and counters of a run to named numbers; docs/operate.md lists the names.

The same events give the same points: nothing here reads a clock or a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from diloco import events as ev


@dataclass(frozen=True)
class Point:
    """Named numbers at one time.

    Attributes:
        step: inner steps, of the run at its syncer, of the learner at a learner.
        t: Unix time in seconds.
        values: by the names of docs/operate.md.
    """

    step: int
    t: float
    values: Mapping[str, float]


STATES = ("merged", "pending", "discarded", "lost")
"""States of trained tokens."""


def learner_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """`Learner.metrics()` as numbers for a tracker; empty for a learner that exchanges nothing.

    Bytes are those of the payloads that this learner sends and receives. Shares are fractions of its trained tokens,
    over all fragments, and add up to 1.
    """
    if not metrics:
        return {}
    names, num_bytes = ("run_tokens", "updates", "merges", "step_s", "blocked_s", "resumed_bytes"), metrics["num_bytes"]
    values = {f"exchange/{name}": metrics[name] for name in names} | {
        "exchange/blocked_steps": metrics["num_blocked"],
        "exchange/sent_bytes": num_bytes.get("contributions", 0),
        "exchange/received_bytes": num_bytes.get("updates", 0) + num_bytes.get("joins", 0),
    }
    tokens: Counter[str] = Counter()
    for fragment in metrics["ledger"]:
        tokens.update({state: fragment[state] for state in ("merged", "pending", "lost")})
        tokens["discarded"] += sum(fragment["discarded"].values())
    return {name: float(value) for name, value in values.items() if value is not None} | _shares("exchange", tokens)


def trainer_point(event: ev.Event) -> Point | None:
    """An event of the reference trainer as numbers; None for an event that trackers do not log."""
    match event:
        case ev.Stepped():
            names = ("loss", "lr", "gradient_norm", "tokens", "tokens_per_s")
            values = {f"train/{name}": float(getattr(event, name)) for name in names}
        case ev.Routed():
            values = _load(event)
        case ev.Evaluated():
            values = {"part/held_out_loss": event.loss} if event.of_part else _evaluation(event.tokens, event.loss)
        case ev.Checkpointed():
            values = {"train/checkpoint_s": event.seconds, "train/checkpoint_bytes": float(event.num_bytes)}
        case _:
            return None
    return Point(event.step, event.t, values)


class SyncerValues:
    """Converts the events of a syncer, from the first of its log, to points.

    Every `progress`, `reported` and `finished` event gives a point. A point of `progress` contains totals since the run
    began, and means since the previous `progress`.

    Attributes:
        run_id: id of the run in the newest `progress`.
    """

    def __init__(self) -> None:
        self.run_id = ""
        self._step = 0
        self._live: set[str] = set()
        self._newest: dict[str, ev.LearnerProgress] = {}  # of present incarnations
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED.values(), 0))
        self._merges: list[tuple[int, float, float]] = []  # contributors, participation, seconds
        self._before: tuple[float, int] | None = None  # Unix time and tokens of the last `progress` of this process
        self._traffic = ev.TrafficTotals()

    def take(self, event: ev.Event) -> Point | None:
        """Process the next event. Returns its point, or None."""
        if (name := COUNTED.get(event.kind)) is not None:
            self._counts[name] += event.times if isinstance(event, ev.Refused) else 1
        self._traffic.take(event)
        match event:
            case ev.SyncerStarted():
                self._before = None
                self._live.clear()
            case ev.Initialised():
                self._step = event.step
            case ev.Joined():
                self._live.add(event.learner)
                self._newest.pop(event.learner, None)
            case ev.Left() | ev.Evicted():
                self._live.discard(event.learner)
            case ev.Merged():
                expected = {*event.members, *event.contributors} | self._live - self._without(event.fragment)
                share = len(event.contributors) / max(1, len(expected))
                self._merges.append((len(event.contributors), share, event.merge_s))
            case ev.Reported():
                return Point(self._step, event.t, _evaluation(event.tokens, event.loss, event.scores))
            case ev.Progress():
                return self._progress(event)
            case ev.Finished():
                return Point(event.steps, event.t, self._totals(event.tokens))
        return None

    def _progress(self, event: ev.Progress) -> Point:
        self._step, self.run_id = event.step, event.run_id
        self._live = {name for name, it in event.learners.items() if it.state != "lost"}
        self._newest = dict(event.learners)
        values = {
            "run/live_learners": float(len(self._live)),
            "run/healthy_learners": float(sum(it.state == "healthy" for it in event.learners.values())),
        } | self._totals(event.tokens)
        if self._before is not None and event.t > self._before[0]:
            values["run/tokens_per_s"] = max(0.0, (event.tokens - self._before[1]) / (event.t - self._before[0]))
        self._before = event.t, event.tokens
        if self._merges:
            for name, of_each in zip(MEANS, zip(*self._merges, strict=True), strict=True):
                values[name] = sum(of_each) / len(of_each)
            self._merges = []
        values |= _shares("run", _by_state(event.ledger))
        if event.groups is not None:
            values |= _groups(event.groups)
        for learner, it in event.learners.items():
            values |= self._learner(learner, it)
        return Point(event.step, event.t, values)

    def _without(self, fragment: int) -> set[str]:
        """Learners that do not hold a fragment."""
        return {name for name, it in self._newest.items() if not it.holds(fragment)}

    def _totals(self, tokens: int) -> dict[str, float]:
        totals, (received, sent) = {"run/tokens": tokens, **self._counts}, self._traffic.ways()
        if received or sent:
            totals |= {"run/received_bytes": received, "run/sent_bytes": sent}
        return {name: float(number) for name, number in totals.items()}

    def _learner(self, name: str, it: ev.LearnerProgress) -> dict[str, float]:
        received, sent = self._traffic.ways(name)
        known: dict[str, float | None] = {
            "step": it.step, "tokens": it.tokens, "step_s": it.step_s, "silent_s": it.silent_s,
            "training_loss": it.training_loss, "received_bytes": received or None, "sent_bytes": sent or None,
        }  # fmt: skip
        return {f"learner/{name}/{key}": float(value) for key, value in known.items() if value is not None}


COUNTED = {
    "merged": "run/merges",
    "rejected": "run/rejected_contributions",
    "joined": "run/joins",
    "left": "run/goodbyes",
    "evicted": "run/evictions",
    "refused": "run/refused_calls",
}
"""Names of the totals by kind of event."""

MEANS = ("run/contributors", "run/participation", "run/merge_s")
"""Names of the means over the merges since the previous point."""


def _evaluation(
    tokens: int, loss: float | None, scores: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    values = {} if loss is None else {"global_model/held_out_loss": loss}
    values |= {f"global_model/{name}": value for name, value in scores.items()}
    return values | {"global_model/evaluated_at_tokens": float(tokens)}


def _load(event: ev.Routed) -> dict[str, float]:
    """The load of experts as shares of their block's tokens, 1 / number of experts each if balanced."""
    values: dict[str, float] = {}
    for block, tokens, entropy in zip(event.blocks, event.tokens, event.entropy, strict=True):
        prefix, total = f"experts/{block}", max(1, sum(tokens))
        values[f"{prefix}/router_entropy"] = entropy
        values[f"{prefix}/idle"] = float(tokens.count(0) - event.not_held)
        values |= {f"{prefix}/load_{expert}": number / total for expert, number in enumerate(tokens)}
    return values


def _groups(groups: ev.GroupsProgress) -> dict[str, float]:
    """Groups of reinforcement learning by state, and rewards by task."""
    states = {"acknowledged": groups.acknowledged, "waiting": groups.waiting, "leased": groups.leased, **groups.ended}
    values = {f"rl/groups_{state.replace(' ', '_')}": float(num) for state, num in states.items()}
    return values | {f"rl/reward/{task}": reward for task, reward in groups.rewards.items()}


def _by_state(ledger: Mapping[str, int]) -> Counter[str]:
    """Tokens of a `progress` event by state, summed over the reasons of discarding."""
    tokens: Counter[str] = Counter()
    for key, number in ledger.items():
        tokens[key.partition(":")[0]] += number
    return tokens


def _shares(prefix: str, tokens: Counter[str]) -> dict[str, float]:
    whole = tokens.total()
    return {f"{prefix}/{state}_share": tokens[state] / whole for state in STATES} if whole else {}
