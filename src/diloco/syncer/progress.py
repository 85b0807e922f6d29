"""The progress of a run: an event and new metrics every ten seconds, and the losses that learners report."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from diloco import events
from diloco.event_log import EventLog
from diloco.protocol.groups import ENDS
from diloco.protocol.members import Claim, Report
from diloco.protocol.units import Ranges, numbers
from diloco.run.status import state_of
from diloco.syncer.metrics import SyncerMetrics

log = logging.getLogger("diloco.syncer")

EVERY_S = 10.0


class ProgressLog:
    """Writes `Progress` and `Reported` events, and the metrics of the run. Any thread may call any method.

    Arguments:
        log: the syncer's event log.
        metrics: the syncer's.
        status: gives `Driver.status`; None while this syncer does not serve the run.
        budget_tokens: planned for the run; None: not known.
        clock: monotonic seconds.
    """

    def __init__(
        self, log: EventLog, metrics: SyncerMetrics, status: Callable[[], Mapping[str, Any] | None],
        budget_tokens: int | None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log, self._metrics, self._status, self._clock = log, metrics, status, clock
        self._budget_tokens = budget_tokens
        self._lately: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._losses: dict[str, float] = {}
        self._evaluated: dict[str, tuple[int, float]] = {}
        self._blocked: dict[str, tuple[int, float]] = {}  # by learner, its process and the last value from it
        self._blocked_s: dict[str, float] = {}
        self._newest: events.Progress | None = None
        self._untrained: Ranges = ()

    def record(self, claim: Claim, report: Report) -> None:
        """Keep the losses and the blocked time of an accepted heartbeat or Leave."""
        learner = claim.learner
        with self._lock:
            self._count_blocked(learner, claim.process, report.blocked_s)
            if report.training_loss is not None:
                self._losses[learner] = report.training_loss
            if report.evaluation is None:
                return
            found = (report.evaluation.run_tokens, report.evaluation.loss)
            if self._evaluated.get(learner) == found:
                return
            self._evaluated[learner] = found
        self._log.append(events.Reported(by=learner, tokens=found[0], loss=found[1]))

    def evaluated(self, report: events.Reported) -> None:
        """Keep and write the report of an evaluator."""
        if report.loss is not None:
            with self._lock:
                self._evaluated[report.by] = report.tokens, report.loss
        self._log.append(report)

    def _count_blocked(self, learner: str, process: int, blocked_s: float) -> None:
        """Count the increase. A process's first value may date from before this syncer's start, and was counted
        then."""
        before, told_s = self._blocked.get(learner, (process, blocked_s))
        new_s = max(0.0, blocked_s - told_s) if before == process else 0.0
        self._blocked[learner] = (process, blocked_s)
        self._blocked_s[learner] = self._blocked_s.get(learner, 0.0) + new_s

    def newest(self) -> events.Progress | None:
        """The run's progress now; None: the run has no model, or this syncer does not serve it."""
        status = self._status()
        if status is None or not status["initialised"]:
            return None
        with self._lock:
            losses = dict(self._losses)
        learners = {name: _learner(it, losses.get(name)) for name, it in status["learners"].items()}
        experts = status["experts"] or {"number": 0, "untrained": ()}
        return events.Progress(
            step=status["step"], tokens=status["tokens"], learners=learners, ledger=_ledger(status["fragments"]),
            run_id=status["run_id"], num_experts=experts["number"], untrained=experts["untrained"],
            groups=None if status["groups"] is None else _groups(status["groups"]),
        )  # fmt: skip

    def write(self) -> None:
        """Write the run's progress, if there is any since the last event."""
        progress, before = self.newest(), self._newest
        if progress is not None:
            self._measure(progress)
            if progress.untrained and progress.untrained != self._untrained:
                log.warning(
                    "no live learner trains experts %s: nothing is merged into them", numbers(progress.untrained)
                )
            self._untrained = progress.untrained
        if progress is None or (before is not None and _marks(progress) == _marks(before)):
            return
        self._newest = progress
        self._log.append(progress)

    def _measure(self, progress: events.Progress) -> None:
        tokens, budget = progress.tokens, self._budget_tokens
        speed = events.speed(self._lately, self._clock(), tokens)
        eta_s = max(0, budget - tokens) / speed if budget is not None and speed else None
        with self._lock:
            loss = max(self._evaluated.values())[1] if self._evaluated else None
            blocked_s = dict(self._blocked_s)
        losses = {name: it.training_loss for name, it in progress.learners.items() if it.training_loss is not None}
        if progress.groups is not None:
            self._metrics.set_groups(progress.groups)
        self._metrics.set_run(
            tokens=tokens, budget_tokens=budget, held_out_loss=loss, training_losses=losses, tokens_per_s=speed,
            eta_s=eta_s, blocked_s=blocked_s,
        )  # fmt: skip


def _learner(it: Mapping[str, Any], loss: float | None) -> events.LearnerProgress:
    return events.LearnerProgress(
        incarnation=it["incarnation"], state=state_of(it), step=it["step"], tokens=it["tokens"], step_s=it["step_s"],
        silent_s=round(it["silent_s"], 3), training_loss=loss, versions=tuple(it["versions"]),
        experts=it["experts"] or (), holds_part=it["holds_part"],
    )  # fmt: skip


def _groups(status: Mapping[str, Any]) -> events.GroupsProgress:
    others = {key: value for key, value in status.items() if key not in ENDS}
    return events.GroupsProgress(ended={end: status[end] for end in ENDS}, **others)


def _ledger(fragments: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens by state, summed over fragments."""
    totals: dict[str, int] = {}
    for fragment in fragments:
        ledger = fragment["ledger"]
        found = {key: ledger[key] for key in ("merged", "pending", "lost")}
        found |= {f"discarded: {reason}": tokens for reason, tokens in ledger["discarded"].items()}
        for key, tokens in found.items():
            totals[key] = totals.get(key, 0) + tokens
    return totals


def _marks(progress: events.Progress) -> tuple[Any, ...]:
    """The values by which two moments differ if the run has progressed."""
    learners = [(name, it.incarnation, it.state, it.step) for name, it in progress.learners.items()]
    groups = None if progress.groups is None else (progress.groups.acknowledged, progress.groups.ended)
    return progress.tokens, progress.ledger, progress.untrained, learners, groups
