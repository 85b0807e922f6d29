"""What `diloco status` shows: the state machine's own account, and who takes part in what."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from diloco.core.status import status_of
from diloco.core.update import Contribution
from diloco.syncer.state import RunState


@dataclass
class Seen:
    """What was heard of a learner besides the books: the versions it has, and how many versions old its last contribution was."""

    versions: tuple[int, ...] = ()
    staleness: int | None = None


class Status:
    """Guarded by the run's lock. After a restart it knows again what learners say."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._seen: dict[tuple[str, int], Seen] = {}

    def heard(self, learner: str, incarnation: int, versions: tuple[int, ...]) -> None:
        """A sign of life: the newest versions that it has."""
        self._of(learner, incarnation).versions = versions

    def contributed(self, c: Contribution) -> int:
        """An accepted contribution; returns how many versions it is behind the round that it is in."""
        rounds = self._state.core.fragments[c.fragment].rounds
        number = next((number for number, round_ in rounds.items() if c in round_.everything), c.round)
        self._of(c.learner, c.incarnation).staleness = number - c.base
        return number - c.base

    def _of(self, learner: str, incarnation: int) -> Seen:
        return self._seen.setdefault((learner, incarnation), Seen())

    def as_dict(self, *, num_spooled_bytes: int, waits_for: str | None) -> dict[str, Any]:
        """Plain values. `waits_for`: why contributions cannot be taken now, if they cannot.

        Of each learner: `live` (not given up and connected), `healthy` (live and training), `merged` (fragments whose newest merge
        has it), `versions_behind` (the newest versions, of the fragment where that is most; None: not heard yet), `staleness`
        (of its last contribution, in versions; None: none yet).
        """
        state = self._state
        base: dict[str, Any] = {
            "run": state.run,
            "method": state.method.to_dict(),
            "initialised": state.is_initialised,
            "step": 0,
            "tokens": 0,
            "initial_tokens": state.initial_tokens,
            "spooled_bytes": num_spooled_bytes,
            "waits_for": waits_for,
        }
        if not state.is_initialised:
            return {**base, "learners": {}, "fragments": [], "newest_merge": None}
        status = status_of(state.core, time.monotonic())
        fragments, contributors = state.model.fragments, state.model.contributors
        for fragment, names in zip(status["fragments"], contributors, strict=True):
            fragment["last_contributors"] = list(names)
        for learner, it in status["learners"].items():
            member = state.core.members[learner]
            seen = self._seen.get((learner, member.incarnation), Seen())
            behind = [held.version - version for held, version in zip(fragments, seen.versions, strict=False)]
            it["live"] = member.connected
            it["merged"] = sum(learner in names for names in contributors)
            it["versions_behind"] = max(0, *behind) if behind else None
            it["staleness"] = seen.staleness
        tokens = status["tokens"] + state.initial_tokens
        return {**base, **status, "tokens": tokens, "newest_merge": self._newest_merge()}

    def _newest_merge(self) -> dict[str, Any] | None:
        update = self._state.model.newest
        if update is None:
            return None
        return {
            "fragment": update.fragment,
            "version": update.version,
            "contributors": list(update.contributors),
            "weights": list(update.weights),
            "scale": update.scale,
        }
