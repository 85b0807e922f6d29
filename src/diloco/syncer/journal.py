"""The observer of a syncer's run, which writes events, Prometheus metrics and log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco import events
from diloco.errors import NoRoomError, PayloadError, StoreError
from diloco.event_log import EventLog
from diloco.protocol.actions import Evict, MergeRound, Reject
from diloco.protocol.contribution import Contribution
from diloco.protocol.leases import Leases
from diloco.protocol.steering import Order
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.units import Ranges, count, numbers, union
from diloco.run.ports import InitialModel, MergedRound, Observer
from diloco.syncer.metrics import SyncerMetrics

log = logging.getLogger("diloco.syncer")

EVERY_S = 60.0


class MergeLines:
    """Log lines that summarise the versions published since the line before.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._due_at = clock, clock()
        self._forget()

    def _forget(self) -> None:
        self._num = self._contributors = self._live = 0
        self._tokens: dict[int, int] = {}  # by fragment
        self._newest = ""

    def merged(self, fragment: int, version: int, *, tokens: int, contributors: int, live: int) -> None:
        """Count a published version; `live`: learners that are live now, since some contributors may have left."""
        self._num, self._tokens[fragment] = self._num + 1, self._tokens.get(fragment, 0) + tokens
        self._contributors, self._live = self._contributors + contributors, self._live + max(live, contributors)
        self._newest = f"version {version} of fragment {fragment}"

    def say(self, *, is_last: bool = False) -> None:
        """Write a line, at most one a minute, if a version was published since the last one."""
        if not self._num or (self._clock() < self._due_at and not is_last):
            return
        self._due_at = self._clock() + EVERY_S
        versions = "1 version" if self._num == 1 else f"{self._num:,} versions"
        share = f"{self._contributors / max(1, self._live):.0%} of live learners took part"
        tokens = round(sum(self._tokens.values()) / len(self._tokens))
        log.info("merged %s, %s tokens a fragment, %s; newest: %s", versions, f"{tokens:,}", share, self._newest)
        self._forget()


class Journal(Observer):
    """Writes a run's events to the event log, the metrics and the log.

    Arguments:
        events_log: the syncer's.
        metrics: the syncer's.

    Attributes:
        merges: the log lines about merges.
    """

    def __init__(self, events_log: EventLog, metrics: SyncerMetrics) -> None:
        self._events = events_log
        self._metrics = metrics
        self.merges = MergeLines()
        self._lacking: dict[int, int] = {}  # by fragment, the newest round that was logged as lacking learners

    def initialised(self, model: InitialModel[Any], cut: str) -> None:
        layout = model.layout
        num_parameters = sum(fragment.numel for fragment in layout.fragments)
        log.info("initialised by %s (%s): %s parameters in %s", model.learner, model.source, f"{num_parameters:,}", cut)
        self._events.append(
            events.Initialised(
                learner=model.learner, source=model.source, layout_digest=layout.digest(),
                num_parameters=num_parameters, step=model.step, tokens=model.tokens,
                num_bytes=4 * num_parameters + len(model.static), cut=cut,
            )
        )  # fmt: skip

    def joined(self, learner: str, incarnation: int, step: int, experts: Ranges | None) -> None:
        part = "" if experts is None else f", with experts {numbers(experts)}"
        log.info("joined: %s (incarnation %d) at step %d%s", learner, incarnation, step, part)
        self._events.append(events.Joined(learner=learner, incarnation=incarnation, step=step, holds=experts))
        self._metrics.joins.labels(learner).inc()

    def left(self, learner: str, incarnation: int, tokens: int) -> None:
        log.info("left: %s (incarnation %d) after %s tokens", learner, incarnation, f"{tokens:,}")
        self._events.append(events.Left(learner=learner, incarnation=incarnation, tokens=tokens))

    def evicted(self, action: Evict) -> None:
        log.warning("evicted %s (incarnation %d): %s", action.learner, action.incarnation, action.reason)
        self._events.append(
            events.Evicted(learner=action.learner, incarnation=action.incarnation, reason=action.reason)
        )
        self._metrics.evictions.labels(action.learner).inc()

    def steered(self, order: Order, by: str, said: str) -> None:
        log.warning("%s", said)
        self._events.append(events.Steered(order=order.what, by=by, learner=order.learner, text=said))

    def contributed(self, c: Contribution, num_bytes: int) -> None:
        self._events.append(
            events.Contributed(
                learner=c.learner, fragment=c.fragment, round=c.round, base=c.base, tokens=c.tokens, steps=c.steps,
                num_bytes=num_bytes,
            )
        )  # fmt: skip

    def resumed(self, learner: str, what: str, num_bytes: int) -> None:
        """Record a transfer that was resumed. `what`: the kind of its connection."""
        self._events.append(events.Resumed(learner=learner, what=what, num_bytes=num_bytes))
        self._metrics.resumed.labels(learner, what).inc(num_bytes)

    def rejected(self, action: Reject) -> None:
        c = action.contribution
        log.warning(
            "rejected %s's contribution to round %d of fragment %d: %s", c.learner, c.round, c.fragment, action.reason
        )
        self._events.append(
            events.Rejected(
                learner=c.learner, fragment=c.fragment, reason=action.reason, round=c.round, base=c.base,
                tokens=c.tokens,
            )
        )  # fmt: skip
        self._metrics.rejected.labels(c.learner, action.reason).inc()

    def waits_for_room(self, error: NoRoomError) -> None:
        log.error("learners must keep their contributions for now: %s", error)

    def sent_back(self, c: Contribution) -> None:
        self._metrics.sent_back.inc()

    def abandoned(self, action: MergeRound, error: PayloadError) -> None:
        log.error("round %d of fragment %d was abandoned: %s", action.round, action.fragment, error)

    def merged(self, merged: MergedRound[Any, Any], experts: Sequence[Ranges]) -> None:
        action, update = merged.action, merged.update
        each = [[c for c in action.contributions if c.learner == learner] for learner in update.contributors]
        units = tuple(union(*(c.units for c in own)) for own in each)
        self._events.append(
            events.Merged(
                fragment=action.fragment, round=action.round, version=update.version, contributors=update.contributors,
                weights=update.weights, tokens=tuple(sum(c.tokens for c in own) for own in each),
                steps=tuple(sum(c.steps for c in own) for own in each), members=tuple(sorted(action.members)),
                scale=action.scale, merge_s=merged.merge_s, reason=action.reason,
                units=units if any(units) else (), experts=tuple(experts),
            )
        )  # fmt: skip
        for c in action.contributions:
            self._metrics.staleness.labels(c.learner).observe(action.round - c.base)

    def waits_for_store(self, what: str, error: StoreError) -> None:
        log.error("%s waits for the store: %s", what, error)

    def published(self, merged: MergedRound[Any, Any], num_live: int, persist_s: float) -> None:
        update = merged.update
        self._events.append(
            events.Published(
                fragment=update.fragment, version=update.version, digest=update.digest,
                num_bytes=merged.num_bytes, persist_s=persist_s,
            )
        )  # fmt: skip
        self._metrics.merged(
            update.fragment, contributors=len(update.contributors), live=num_live, seconds=merged.merge_s
        )
        self._metrics.persist_seconds.observe(persist_s)
        num = len(update.contributors)
        self.merges.merged(update.fragment, update.version, tokens=merged.tokens, contributors=num, live=num_live)

    def was_suspended(self, late_s: float) -> None:
        log.warning("this process was suspended for %.1f s; no learner's deadline counts them", late_s)

    def state_changed(self, core: SyncerCore) -> None:
        """Write the state of the run to the metrics and the log."""
        self.merges.say()
        self._metrics.missing_events.set(self._events.num_missing)
        self._metrics.set_ledgers({learner: account.ledgers for learner, account in core.accounting.accounts.items()})
        if (leases := core.leases).data is not None and leases.data.groups is None:
            for state, units in (("done", leases.done), ("leased", leases.leased), ("returned", leases.returned)):
                self._metrics.data_units.labels(state).set(count(units))
        for index, fragment in enumerate(core.fragments):
            self._metrics.version.labels(index).set(fragment.version)
            present = core.rounds.lacks_learners(index)
            if present is not None and self._lacking.get(index) != fragment.version:
                self._lacking[index] = fragment.version
                log.warning(
                    "round %d of fragment %d has the contributions of %d of at least %d learners and no other "
                    "learner to wait for; it waits for another learner to join",
                    fragment.version, index, present, core.at_least,
                )  # fmt: skip
        self._metrics.set_learners(core.members.values())

    def data_moved(self, leases: Leases) -> None:
        if leases.data is None or leases.data.groups is not None:  # which `Progress` counts
            return
        self._events.append(
            events.Data(
                passes_done=leases.passes_done, done=count(leases.done), leased=count(leases.leased),
                returned=leases.num_returned, unclaimed=leases.num_unclaimed,
                repeated=tuple(totals.repeated for totals in leases.totals),
            )
        )  # fmt: skip
