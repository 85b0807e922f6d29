"""That the syncer counts what each process of a learner trains: never more, and all of it once there was no fault for a
while.

It is looked at once a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.versions import require
from tests.storms.accounts import CONFIRMED_S
from tests.storms.progress import LOOK_S

if TYPE_CHECKING:
    from tests.storms.learners import Process
    from tests.storms.world import Storm


@dataclass
class _Seen:
    """What was seen of a process.

    Attributes:
        speaks_since_s: when it began to train as an incarnation that the syncer knows, or to leave; infinite: it does
            neither.
        trained: when it was seen to have trained how many tokens in all, ascending; the oldest are checked first.
    """

    process: Process
    speaks_since_s: float = math.inf
    trained: list[tuple[float, int]] = field(default_factory=list)


class Counts:
    """Of one storm."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._seen: dict[int, _Seen] = {}

    def look(self) -> None:
        """Raises BrokenInvariantError."""
        for learner in self._storm.learners:
            for process in learner.processes:
                self._note(self._seen.setdefault(process.number, _Seen(process)))
        if self._storm.driver is None or not self._storm.driver.state.is_initialised:
            return
        for name, account in self._storm.driver.core.accounting.accounts.items():
            if account.process in self._seen:
                counted = account.ledgers[-1].trained - account.others_tokens  # of the trunk, which all hold
                self._check(name, self._seen[account.process], counted)

    def _note(self, seen: _Seen) -> None:
        now_s, tokens = self._storm.now_s, seen.process.tokens
        if not seen.trained or seen.trained[-1][1] != tokens:
            seen.trained.append((now_s, tokens))
        seen.speaks_since_s = min(seen.speaks_since_s, now_s) if seen.process.speaks else math.inf

    def _check(self, name: str, seen: _Seen, counted: int) -> None:
        tokens, storm = seen.process.tokens, self._storm
        require(counted <= tokens, f"{name} has trained {tokens} tokens, and {counted} are counted")
        if not seen.process.speaks or (seen.process.is_leaving and storm.quiet_s > seen.speaks_since_s - LOOK_S):
            return  # where there is a fault while it leaves, its goodbye may be lost
        quiet_s = max(storm.quiet_s, seen.speaks_since_s) + CONFIRMED_S
        due = [tokens for since_s, tokens in seen.trained if max(since_s + CONFIRMED_S, quiet_s) <= storm.now_s]
        if due:
            require(counted >= due[-1], f"{name} had trained {due[-1]} tokens long ago, and only {counted} are counted")
            del seen.trained[: len(due) - 1]
