"""The content of a run's page, from its events, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from diloco import events as ev
from diloco.escaping import printable
from diloco.report.members import LearnerSummary
from diloco.report.sentences import Tone, sentence
from diloco.report.series import Newest, Numbers, Series, ring_all_reduce_bytes

MAX_MERGES = 400
MAX_EVENTS = 300
GLOBAL = "global model"
REPLACED_S = 0.5
"""A learner that rejoins replaces its former incarnation, which is evicted within this time."""
ORDERED = {"pause": "paused", "end": "ended by an operator", "resume": None}
"""The state of a run after an order (`Steered`); None: as without orders."""


class Story:
    """The events of one run. `take` the events of each file in order; the files themselves may follow in any order.

    `since(number)` gives the page's content: small parts completely, curves and lists from `number` on.
    """

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._head: dict[str, Any] = {"run": "", "method": {}, "num_parameters": None, "state": "waiting for a model"}
        self._ordered: str | None = None  # of `ORDERED`
        self._started_at: float | None = None
        self._newest_t = 0.0
        self._traffic = ev.TrafficTotals()
        self._members: dict[str, LearnerSummary] = {}
        self._versions: dict[int, int] = {}
        self._fragments: dict[int, dict[str, Any]] = {}
        self._merges = Newest(self._numbers, MAX_MERGES)
        self._events = Newest(self._numbers, MAX_EVENTS)
        self._losses: dict[str, Series] = defaultdict(partial(Series, self._numbers))
        self._lost: deque[tuple[float, str, str]] = deque(maxlen=MAX_EVENTS)  # time, learner, kind of event
        self._evaluated: dict[str, dict[int, float]] = {}  # loss by the run's tokens
        self._training: dict[str, Series] = defaultdict(
            partial(Series, self._numbers)
        )  # reported by learners to the syncer
        self._own_training: dict[str, Series] = defaultdict(
            partial(Series, self._numbers)
        )  # from the processes' own event logs
        self._stepped: dict[str, ev.Stepped] = {}
        self._routed: dict[str, ev.Routed] = {}  # the newest of each trainer
        self._speed = Series(self._numbers)
        self._lately: deque[tuple[float, int]] = deque()
        self._tokens_per_s: float | None = None
        self._tokens = 0
        self._ledger: dict[str, int] = {}
        self._progress_at = 0.0
        self._parallel_bytes = 0.0
        self._groups: dict[str, Any] | None = None
        self._rewards: dict[str, Series] = defaultdict(partial(Series, self._numbers))  # by task
        self._num_experts, self._untrained = 0, tuple[tuple[int, int], ...]()
        self._experts: dict[int, tuple[int, int, int]] = {}  # merges, learners in them, version of the last

    # --- events -------------------------------------------------------------------------------------------------------

    def take(self, event: ev.Event, log: str = "") -> None:
        """Add an event of an event log."""
        if event.who == "syncer":
            if not isinstance(event, ev.Steered):  # as in `Timeline`
                self._newest_t = max(self._newest_t, event.t)
            self._take_syncers(event, log)
        else:
            self._take_trainers(event)
        if (description := sentence(event)) is not None:
            self.tell(event.t, *description, event.kind, getattr(event, "learner", None))

    def tell(self, t: float, tone: Tone, text: str, kind: str, learner: str | None) -> None:
        """Add a sentence at Unix time `t`; `kind` and `learner` select its mark in the picture of merges."""
        self._events.add({"t": t, "tone": tone, "text": text, "kind": kind, "learner": learner})
        if kind in ("killed", "evicted") and learner in self._members:
            self._lost.append((t, learner, kind))

    def _take_trainers(self, event: ev.Event) -> None:
        match event:
            case ev.Evaluated():
                whose = f"{event.who}'s part" if event.of_part else event.who
                self._evaluate(whose, event.tokens, event.loss)
            case ev.Stepped():
                self._own_training[event.who].add(event.step, event.loss)
                self._stepped[event.who] = event
            case ev.Routed():
                self._routed[event.who] = event

    def _take_syncers(self, event: ev.Event, log: str) -> None:
        counted = self._traffic.take(event, log)
        match event:
            case ev.SyncerStarted():
                self._start(event)
            case ev.Initialised():
                self._head |= {"num_parameters": event.num_parameters, "state": "training", "began_at": event.tokens}
                self._tokens = max(self._tokens, event.tokens)
            case ev.Steered() if event.order in ORDERED:
                self._ordered = ORDERED[event.order]
            case ev.Joined():
                self._member(event.learner).join(event)
            case ev.Left():
                self._member(event.learner).go(event.t, "left")
            case ev.Evicted():
                member = self._member(event.learner)
                member.evicted += 1
                if event.incarnation >= member.incarnation:  # not replaced by a newer one
                    member.go(event.t, event.reason)
            case ev.Merged():
                self._merge(event)
            case ev.Reported(loss=float(loss)):
                self._evaluate(event.by, event.tokens, loss)
            case ev.Traffic(learner=str(learner)) if learner in self._members:
                self._members[learner].count(counted, event, self._traffic.ways(learner))
            case ev.Progress():
                self._progress(event)
            case ev.Finished():
                self._tokens = max(self._tokens, event.tokens)
                self._head["state"] = "ended"

    def _start(self, event: ev.SyncerStarted) -> None:
        self._started_at = event.t if self._started_at is None else self._started_at
        self._head |= {
            "run": event.run, "method": event.method, "planned": event.learners, "budget": event.budget_tokens,
        }  # fmt: skip
        if event.t == self._newest_t:  # not that of a standby beside a run that goes on
            self._head["state"] = "training" if event.versions else "waiting for a model"
        self._versions |= dict(enumerate(event.versions))
        for member in self._members.values():
            member.rates = (0.0, 0.0)

    def _merge(self, event: ev.Merged) -> None:
        self._head["state"] = "training"  # also where a standby's log begins without a model
        self._versions[event.fragment] = event.version
        self._fragments[event.fragment] = {"t": event.t, "contributors": len(event.contributors), "scale": event.scale}
        for name in event.contributors:
            member = self._member(name)
            member.merges += 1
            if member.returns and member.returns[-1][1] is None:
                member.returns[-1] = member.returns[-1][0], event.t
        for member in self._members.values():
            if (member.is_live and member.holds(event)) or member.name in event.contributors:
                member.recent.append(member.name in event.contributors)
        trained = Counter(expert for own in event.experts for pair in own for expert in range(*pair))
        for expert, num_learners in trained.items():
            merges, learners, _ = self._experts.get(expert, (0, 0, 0))
            self._experts[expert] = merges + 1, learners + num_learners, event.version
        holders = {name for name in self._live_names() if self._members[name].holds(event)}
        absent = sorted(({*event.members} | holders) - {*event.contributors})
        self._merges.add(
            {
                "t": event.t, "fragment": event.fragment, "version": event.version,
                "who": self._numbers_of(event.contributors), "absent": self._numbers_of(absent),
                "scale": event.scale, "tokens": sum(event.tokens), "reason": event.reason,
            }
        )  # fmt: skip

    def _progress(self, event: ev.Progress) -> None:
        """Take a progress report, from the event log or directly from the syncer."""
        if event.t <= self._progress_at:
            return  # already taken directly
        self._newest_t, self._progress_at = max(self._newest_t, event.t), event.t
        self._count_parallel(event)
        for name, it in event.learners.items():
            member = self._member(name)
            if it.training_loss is not None and (member.progress is None or member.progress.step < it.step):
                self._training[name].add(it.step, it.training_loss)
            member.progress, member.state = it, it.state
        for name, member in self._members.items():
            if name not in event.learners and member.is_live:
                member.go(event.t, member.reason or "no longer a member")
        self._ledger, self._num_experts, self._untrained = dict(event.ledger), event.num_experts, event.untrained
        if event.groups is not None:
            self._groups = event.groups.model_dump()
            for task, reward in event.groups.rewards.items():
                self._rewards[task].add(event.groups.scored[task], reward)
        self._tokens = max(self._tokens, event.tokens)
        self._tokens_per_s = ev.speed(self._lately, event.t, event.tokens)
        if self._tokens_per_s is not None:
            self._speed.add(event.t, self._tokens_per_s)

    def _count_parallel(self, event: ev.Progress) -> None:
        """Count the bytes that data parallel would have sent: a ring all-reduce in bf16 at every step with m ≥ 2 live
        learners, 2·(m − 1)/m · 2·N bytes for each learner."""
        num_live, numel = sum(it.state != "lost" for it in event.learners.values()), self._head["num_parameters"]
        if num_live < 2 or numel is None:
            return
        step_bytes = ring_all_reduce_bytes(num_live, numel) / num_live
        for name, it in event.learners.items():
            before = self._member(name).progress
            if before is not None and before.incarnation == it.incarnation:
                self._parallel_bytes += max(0, it.step - before.step) * step_bytes

    def at_this_moment(self, progress: ev.Progress) -> None:
        """Take a progress report that is not in the event log. Learners that no event has named yet are left out:
        learners are numbered in the order of events, which is the same for every reader."""
        known = {name: it for name, it in progress.learners.items() if name in self._members}
        self._progress(progress.model_copy(update={"learners": known}))

    def _evaluate(self, who: str, tokens: int, loss: float) -> None:
        """Add a held-out loss, unless it was already added from another log."""
        seen = self._evaluated.setdefault(who, {})
        if tokens not in seen and math.isfinite(loss):
            seen[tokens] = loss
            self._losses[who].add(tokens, loss)

    def _member(self, name: str) -> LearnerSummary:
        return self._members.setdefault(name, LearnerSummary(name, len(self._members)))

    # --- what is shown ------------------------------------------------------------------------------------------------

    def _numbers_of(self, names: Iterable[str]) -> list[int]:
        return [self._member(name).number for name in names]

    def _recovery(self) -> dict[str, Any] | None:
        """The learner that was lost last, by which event, and the seconds until its first merge after it rejoined."""
        if not self._lost:
            return None
        lost = sorted(self._lost)
        last_t, learner, _ = lost[-1]

        def back(t: float) -> tuple[float, float | None] | None:
            return next((it for it in self._members[learner].returns if it[0] > t - REPLACED_S), None)

        t, kind = next((t, kind) for t, name, kind in lost if name == learner and back(t) is back(last_t))
        _, merged_at = back(t) or (None, None)
        return {"learner": learner, "kind": kind, "seconds": None if merged_at is None else merged_at - t}

    def _live_names(self) -> set[str]:
        return {name for name, member in self._members.items() if member.is_live}

    @property
    def _num_bytes(self) -> int:
        return sum(sum(member.num_bytes) for member in self._members.values())

    def since(self, number: int, now: float | None = None) -> dict[str, Any]:
        """The page's content as plain values; `now`: Unix time, for a live run."""
        now = self._newest_t if now is None else now
        members = [self._member_now(name, now) for name in sorted(self._members)]
        training = self._training | self._own_training
        shown: dict[str, Any] = _plain(
            {
                "number": self._numbers.newest,
                "now": now,
                "head": self._summary(),
                "learners": members,
                "fragments": [{"version": version, **self._fragments.get(index, {})}
                              for index, version in sorted(self._versions.items())],
                "experts": [self._experts.get(expert, (0, 0, 0)) for expert in range(self._num_experts)],
                "untrained": self._untrained,
                "ledger": self._ledger,
                "merges": self._merges.since(number),
                "num_merges": self._merges.total,
                "events": self._events.since(number),
                "loss": self._loss_curves(number),
                "training": {name: curve.since(number) for name, curve in training.items()},
                "load": self._load(),
                "groups": self._groups,
                "rewards": {task: curve.since(number) for task, curve in self._rewards.items()},
                "speed": self._speed.since(number),
            }
        )  # fmt: skip
        return shown

    def _load(self) -> list[dict[str, Any]]:
        """The load of the experts by block, over the newest reports of the trainers' own event logs."""
        found: dict[str, dict[str, Any]] = {}
        for event in self._routed.values():
            for block, tokens, entropy in zip(event.blocks, event.tokens, event.entropy, strict=True):
                row = found.setdefault(block, {"block": block, "tokens": [0] * len(tokens), "entropy": []})
                row["tokens"] = [a + b for a, b in zip(row["tokens"], tokens, strict=False)]
                row["entropy"].append(entropy)
        return [row | {"entropy": sum(row["entropy"]) / len(row["entropy"])} for row in found.values()]

    def _loss_curves(self, number: int) -> dict[str, list[tuple[float, float]]]:
        """Curves of the global model, merged over the members that evaluated it, of members' parts, and of controls."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for who, curve in self._losses.items():
            name = GLOBAL if who in self._members else who
            curves[name] = curves.get(name, []) + curve.since(number)
        return curves

    def _member_now(self, name: str, now: float) -> dict[str, Any]:
        shown = self._members[name].to_dict(self._versions, now, self._progress_at)
        stepped = self._stepped.get(name)
        if stepped is not None and stepped.step > (shown["step"] or 0):  # its own log is newer than its reports
            shown |= {"step": stepped.step, "tokens": max(stepped.tokens, shown["tokens"] or 0), "loss": stepped.loss}
        return shown

    def _summary(self) -> dict[str, Any]:
        num_live, speed, budget = len(self._live_names()), self._tokens_per_s, self._head.get("budget")
        left = None if budget is None else max(0, budget - self._tokens)
        runs, state = self._head["state"] == "training" and self._ordered is None, self._head["state"]
        if state == "training":
            state = self._ordered or ("training" if num_live else "no learner is live")
        losses = [max(seen.items()) for who in self._members if (seen := self._evaluated.get(who))]
        tokens, loss = max(losses, default=(None, None))
        ratio = self._parallel_bytes / self._num_bytes if self._num_bytes and self._parallel_bytes else None
        return {
            **self._head, "state": state, "live": num_live, "started_at": self._started_at,
            "ended_at": self._newest_t, "restarts": self._traffic.starts.total() - len(self._traffic.starts),
            "tokens": max(self._tokens, tokens or 0),
            "tokens_per_s": speed if runs else None, "loss": loss, "loss_at": tokens,
            "eta_s": left / speed if runs and left is not None and speed else None,
            "recovery": self._recovery(),
            "num_bytes": self._num_bytes, "parallel_bytes": self._parallel_bytes, "ratio": ratio,
        }  # fmt: skip


def _plain(value: Any) -> Any:
    """The value for JSON: printable text; non-finite numbers become null."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {printable(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
