"""What a syncer says of what it does: an event, a number for Prometheus, a line in the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from diloco import events
from diloco.core.contribution import Contribution
from diloco.core.layout import Layout
from diloco.core.rounds import Evict, Merge, Reject
from diloco.core.syncer import SyncerCore
from diloco.core.update import Update
from diloco.errors import NoRoomError, StoreError
from diloco.syncer.metrics import LearnerSample, SyncerMetrics

log = logging.getLogger("diloco.syncer")

COMES_AGAIN_S = 5.0
"""A contribution that was sent back comes again at least once a second; one that has not for this long waits no more."""


class Journal:
    """Arguments:
    events_log: the syncer's events.
    metrics: what Prometheus reads.
    """

    def __init__(self, events_log: events.EventLog, metrics: SyncerMetrics) -> None:
        self._events = events_log
        self._metrics = metrics
        self._no_room = ""
        self._no_room_at = -math.inf
        self._lacking: dict[int, int] = {}  # by fragment, the newest round that was said to lack learners

    def set_aside(self, files: Sequence[Path]) -> None:
        """They were in the state directory, and no version names them."""
        if files:
            names = ", ".join(file.name for file in files)
            log.warning(
                "no version names %s: set aside in %s; look at them, and remove them yourself", names, files[0].parent
            )

    def initialised(
        self, learner: str, source: str, layout: Layout, step: int, tokens: int, num_static_bytes: int
    ) -> None:
        self._events.append(
            events.Initialised(
                learner=learner, source=source, layout_digest=layout.digest(), num_parameters=layout.num_parameters, step=step,
                tokens=tokens, num_bytes=4 * sum(fragment.numel for fragment in layout.fragments) + num_static_bytes,
            )
        )  # fmt: skip

    def joined(self, learner: str, incarnation: int, step: int) -> None:
        self._events.append(events.Joined(learner=learner, incarnation=incarnation, step=step))
        self._metrics.joined(learner)

    def left(self, learner: str, incarnation: int, tokens: int) -> None:
        self._events.append(events.Left(learner=learner, incarnation=incarnation, tokens=tokens))

    def evicted(self, action: Evict) -> None:
        log.warning("evicted %s (incarnation %d): %s", action.learner, action.incarnation, action.reason)
        self._events.append(
            events.Evicted(learner=action.learner, incarnation=action.incarnation, reason=action.reason)
        )
        self._metrics.evicted(action.learner)

    def contributed(self, c: Contribution, num_bytes: int, staleness: int) -> None:
        self._events.append(
            events.Contributed(
                learner=c.learner, fragment=c.fragment, round=c.round, base=c.base, tokens=c.tokens, steps=c.steps,
                num_bytes=num_bytes,
            )
        )  # fmt: skip
        self._metrics.contributed(c.learner, staleness=staleness)

    def rejected(self, action: Reject) -> None:
        c = action.contribution
        log.warning(
            "rejected %s's contribution to round %d of fragment %d: %s", c.learner, c.round, c.fragment, action.reason
        )
        self._events.append(
            events.Rejected(
                learner=c.learner, fragment=c.fragment, reason=action.reason, round=c.round, base=c.base, tokens=c.tokens
            )
        )  # fmt: skip
        self._metrics.rejected(c.learner, action.reason)

    @property
    def waits_for(self) -> str | None:
        """Why contributions are sent back and wait with their learners, in a sentence; None: none was of late."""
        return self._no_room if time.monotonic() - self._no_room_at < COMES_AGAIN_S else None

    def has_no_room(self, error: NoRoomError) -> None:
        """A contribution cannot be taken now."""
        if self.waits_for is None:
            log.error("contributions wait with their learners: %s", error)
        self._no_room, self._no_room_at = str(error), time.monotonic()
        self._metrics.sent_back()

    def abandoned(self, action: Merge, error: Exception) -> None:
        log.error("round %d of fragment %d was abandoned: %s", action.round, action.fragment, error)

    def merged(self, action: Merge, update: Update, members: Collection[str], merge_s: float) -> None:
        each = [[c for c in action.contributions if c.learner == learner] for learner in update.contributors]
        self._events.append(
            events.Merged(
                fragment=action.fragment, round=action.round, version=update.version, contributors=update.contributors,
                weights=update.weights, tokens=tuple(sum(c.tokens for c in own) for own in each),
                steps=tuple(sum(c.steps for c in own) for own in each), members=tuple(sorted(members)), scale=action.scale,
                merge_s=merge_s,
            )
        )  # fmt: skip

    def waits_for_disk(self, update: Update, error: StoreError) -> None:
        log.error("version %d of fragment %d waits for the disk: %s", update.version, update.fragment, error)

    def published(self, update: Update, num_live: int, num_bytes: int, *, merge_s: float, persist_s: float) -> None:
        f = update.fragment
        self._events.append(
            events.Published(
                fragment=f, version=update.version, digest=update.digest, num_bytes=num_bytes, persist_s=persist_s
            )
        )
        self._metrics.merged(f, contributors=len(update.contributors), live=num_live, seconds=merge_s)
        self._metrics.persisted(persist_s)

    def roster_not_stored(self, error: StoreError) -> None:
        log.error("the roster could not be stored: %s", error)

    def stood_still(self, seconds: float) -> None:
        log.warning("this process stood still for %.1f s; nobody's deadline counts them", seconds)

    def stands(self, core: SyncerCore) -> None:
        """How things are, for whoever scrapes."""
        self._metrics.set_missing_events(self._events.num_missing)
        self._metrics.set_ledgers(core.books.ledgers)
        for index, fragment in enumerate(core.fragments):
            self._metrics.published(index, fragment.version)
            if (present := core.lacks_learners(index)) is not None and self._lacking.get(index) != fragment.version:
                self._lacking[index] = fragment.version
                log.warning(
                    "round %d of fragment %d has the contributions of %d of at least %d learners and no other learner to wait for; "
                    "it waits for another learner to join", fragment.version, index, present, core.method.quorum.at_least,
                )  # fmt: skip
        self._metrics.set_learners(
            [LearnerSample(m.learner, m.step, m.step_s, m.healthy) for m in core.members.values()]
        )
