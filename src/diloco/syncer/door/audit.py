"""The audit of a syncer's callers: admissions to calls that change the run, and refusals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco import events
from diloco.errors import (
    AlreadyInitialisedError,
    AuthError,
    ConfigError,
    DilocoError,
    LayoutError,
    PayloadError,
    UnknownRunError,
)
from diloco.event_log import EventLog
from diloco.syncer.keys.certificates import UNKNOWN, Caller
from diloco.syncer.metrics import SyncerMetrics

log = logging.getLogger("diloco.syncer")

REFUSALS = (AuthError, ConfigError, LayoutError, PayloadError, UnknownRunError, AlreadyInitialisedError)
"""Errors for which the sender is responsible. Others, such as a lack of room, are the syncer's or the run's."""

AGAIN_S = 60.0
"""A sender's first refusal gives an event; later ones give at most one event in this time, with their number, so that a
flood of bad calls does not fill the disk."""

MAX_SENDERS = 64
"""Senders that are counted separately; any others are counted together."""

MAX_TEXT = 500


@dataclass
class _Sender:
    """One sender's refusals that are not written yet."""

    written_at: float
    times: int = 0
    newest: events.Refused | None = field(default=None)


class Audit:
    """Writes admissions and refusals to the event log, the log and the metrics. Any thread may call any method.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, log: EventLog, metrics: SyncerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._metrics, self._clock = log, metrics, clock
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}

    def admitted(self, call: str, caller: Caller, learner: str, peer: str) -> None:
        """Record that a caller was admitted to a call that changes the run."""
        self._log.append(
            events.Admitted(
                call=call, learner=learner, name=caller.name, role=caller.role, key=caller.key[:16], peer=peer
            )
        )

    def refused(self, call: str, caller: Caller | None, peer: str, error: DilocoError) -> None:
        """Record a refused call, if its sender is responsible. `caller`: None: it is not authenticated."""
        if not isinstance(error, REFUSALS):
            return
        reason, name = type(error).__name__, "" if caller is None else caller.name
        self._metrics.refused.labels(call, reason).inc()
        event = events.Refused(call=call, name=name, peer=peer, reason=reason, text=str(error)[:MAX_TEXT])
        key = name if caller not in (None, UNKNOWN) else peer.rpartition(":")[0]
        with self._lock:
            if key not in self._senders and len(self._senders) >= MAX_SENDERS:
                key = ""
            sender = self._senders.get(key)
            if sender is None:
                self._senders[key] = _Sender(self._clock())
                self._append(event)
            else:
                sender.times, sender.newest = sender.times + 1, event

    def flush(self, after_s: float = AGAIN_S) -> None:
        """Write counts that are this old; call it regularly."""
        now = self._clock()
        with self._lock:
            for key, sender in list(self._senders.items()):
                if now - sender.written_at >= after_s:
                    if sender.newest is not None:
                        self._append(sender.newest.model_copy(update={"times": sender.times}))
                    del self._senders[key]

    def _append(self, event: events.Refused) -> None:
        self._log.append(event)
        who = f"{event.name} at {event.peer}" if event.name else event.peer
        times = "" if event.times == 1 else f" {event.times:,} times since the last such line"
        log.warning("refused %s of %s%s: %s", event.call, who, times, event.text)
