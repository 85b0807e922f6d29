"""The learners of a run, for its page."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.events import RECENT_MERGES, Joined, LearnerProgress, Merged, Traffic

MAX_RETURNS = 100


@dataclass
class LearnerSummary:
    """The state and the totals of one learner.

    Attributes:
        number: from 0, in the order in which events name learners; it selects the colour on the page.
        state: "gone" after it left or was evicted; otherwise as `LearnerProgress.state`.
        since: Unix time at which it left or was evicted; otherwise when it joined.
        joined, evicted: number of times.
        incarnation: the last one that joined; `held`: its experts, as (first, stop) of each range; None: all.
        returns: for each of the newest joins, its time and that of the first merge since, None: none yet.
        recent: for each of the newest merges since it first joined, whether it contributed.
        num_bytes: sent and received on its connections; `rates`: per second, since the previous counts.
    """

    name: str
    number: int
    state: str = "starting"
    since: float = 0.0
    joined: int = 0
    evicted: int = 0
    incarnation: int = 0
    held: tuple[tuple[int, int], ...] | None = None
    merges: int = 0
    reason: str = ""
    progress: LearnerProgress | None = None
    returns: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=MAX_RETURNS))
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_MERGES))
    num_bytes: tuple[int, int] = (0, 0)
    rates: tuple[float, float] = (0.0, 0.0)

    def join(self, event: Joined) -> None:
        """The learner joined, or rejoined."""
        t, self.incarnation, self.held = event.t, event.incarnation, event.holds
        self.returns.append((t, None))
        self.state, self.since, self.joined, self.reason = "starting", t, self.joined + 1, ""

    def go(self, t: float, reason: str) -> None:
        """The learner left, or was evicted."""
        self.state, self.since, self.reason = "gone", t, reason

    def holds(self, merged: Merged) -> bool:
        """Whether its newest incarnation holds the fragment that was merged, as far as is known."""
        if (it := self.progress) is not None and it.incarnation == self.incarnation and it.versions:
            return it.holds(merged.fragment)
        pairs = [pair for own in merged.experts for pair in own]
        held = pairs if self.held is None else self.held
        return not pairs or any(first < end and begin < stop for begin, end in pairs for first, stop in held)

    @property
    def is_live(self) -> bool:
        """Whether it is a member that is not lost."""
        return self.state not in ("gone", "lost")

    def count(self, before: Traffic | None, now: Traffic, num_bytes: tuple[int, int]) -> None:
        """Set the byte counts; `before` and `now` are those of the current syncer process."""
        self.rates, self.num_bytes = (0.0, 0.0), num_bytes
        if before is not None and now.t > before.t:
            passed_s, earlier, later = now.t - before.t, before.ways, now.ways
            self.rates = max(0.0, (later[0] - earlier[0]) / passed_s), max(0.0, (later[1] - earlier[1]) / passed_s)

    def to_dict(self, versions: Mapping[int, int], now: float, seen_at: float) -> dict[str, Any]:
        """Plain values for the page; `versions`: the newest of each fragment; `seen_at`: Unix time of `progress`."""
        it = self.progress
        own = it.versions if it is not None and self.is_live else ()
        behind = [
            max(0, newest - own[index]) if own[index] >= 0 else None  # −1: it does not hold the fragment
            for index, newest in sorted(versions.items())
            if index < len(own)
        ]
        silent_s = None if it is None or not self.is_live else it.silent_s + max(0.0, now - seen_at)
        return {
            "name": self.name, "number": self.number, "state": self.state, "since": self.since, "reason": self.reason,
            "joined": self.joined, "evicted": self.evicted, "merges": self.merges,
            "share": sum(self.recent) / len(self.recent) if self.recent else None,
            "step": None if it is None else it.step, "tokens": None if it is None else it.tokens,
            "step_s": None if it is None else it.step_s, "silent_s": silent_s,
            "loss": None if it is None else it.training_loss, "behind": behind,
            "experts": it.experts if it is not None and self.is_live else (),
            "holds_part": it is not None and it.holds_part,
            "sent_bytes": self.num_bytes[0], "received_bytes": self.num_bytes[1],
            "sent_bytes_per_s": self.rates[0], "received_bytes_per_s": self.rates[1],
        }  # fmt: skip
