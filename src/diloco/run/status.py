"""The values of `diloco status`: the state of `SyncerCore`, and the learners' part in recent merges."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.events import RECENT_MERGES
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import NOTHING
from diloco.protocol.in_flight import total
from diloco.protocol.members import Claim
from diloco.protocol.syncer import SyncerCore
from diloco.run.experts import ExpertStatus
from diloco.run.global_model import GlobalModel
from diloco.run.run_state import RunState


@dataclass
class _Seen:
    """Facts about an incarnation besides its ledger.

    Attributes:
        versions: by fragment, the newest that it has.
        steps: inner steps that it has taken.
        staleness: how many versions old its last merged work was.
        recent: for each of the last merges while it trained, whether its work was in it.
    """

    incarnation: int
    versions: Sequence[int] = ()
    steps: int = 0
    staleness: int | None = None
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_MERGES))


def state_of(it: Mapping[str, Any]) -> str:
    """A learner's state in a word, from its status; only a healthy one is expected in a merge. A member from before the
    syncer's restart, without a message since, is "not back yet"."""
    if not it["heard"]:
        return "not back yet"
    if not it["live"]:
        return "lost"
    if it["drained"]:
        return "drained"
    if it["finished"]:
        return "finishing"
    return "waiting" if it["waiting"] else "healthy" if it["healthy"] else "starting"


class RunStatus:
    """Reports of learners besides their ledgers; empty after a restart until they report again."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def heard(self, claim: Claim, steps: int) -> None:
        """A heartbeat was accepted. `steps`: inner steps that the incarnation has taken."""
        seen = self._seen_of(claim.learner, claim.incarnation)
        seen.versions, seen.steps = claim.versions, steps

    def steps_of(self, learner: str, incarnation: int) -> int:
        """Inner steps that an incarnation has taken, by its newest heartbeat."""
        return self._seen_of(learner, incarnation).steps

    def merged(self, action: MergeRound, core: SyncerCore) -> None:
        """A round is closed."""
        for c in action.contributions:
            self._seen_of(c.learner, c.incarnation).staleness = action.round - c.base
        contributors = {c.learner for c in action.contributions}
        for learner, member in core.members.items():
            if (member.ready and member.holds(action.fragment)) or learner in contributors:
                self._seen_of(learner, member.incarnation).recent.append(learner in contributors)

    def _seen_of(self, learner: str, incarnation: int) -> _Seen:
        """Only the newest incarnation's facts are kept."""
        seen = self._seen.get(learner)
        if seen is None or seen.incarnation < incarnation:
            seen = self._seen[learner] = _Seen(incarnation)
        return seen if seen.incarnation == incarnation else _Seen(incarnation)

    def as_dict(self, state: RunState[Any, Any], now_s: float) -> dict[str, Any]:
        """Plain values.

        Of each learner: `live` (not evicted and connected), `healthy` (live and training), `heard` (a message arrived
        since this syncer started; otherwise its step and silence are unknown), `merged` (fragments whose newest version
        contains its work), `share` (of the last merges while it trained; None: there was none since this syncer
        started), `versions_behind` (of its oldest fragment; None: not reported yet), `staleness` (of its last merged
        contribution, in versions; None: none yet), `experts` (as in `ExpertStatus.of`), `holds_part` (it holds no
        others). `data`: as in `Leases.status`. `experts`: as in `ExpertStatus.as_dict`.
        """
        lineage = state.lineage(0)
        base = {
            "run": state.run, "method": state.method.to_dict(), "initialised": state.is_initialised, "cut": state.cut,
            "run_id": lineage.run_id, "epoch": lineage.epoch, "step": state.step, "tokens": state.run_tokens,
            "initial_tokens": state.initial_tokens,
        }  # fmt: skip
        if not state.is_initialised:
            nothing = dict.fromkeys(("steering", "newest_merge", "data", "groups", "experts"))
            return {**base, **nothing, "learners": {}, "fragments": []}
        return {**base, **self.of_core(state.core, state.model, state.experts, now_s)}

    def of_core(
        self, core: SyncerCore, model: GlobalModel[Any, Any], experts: ExpertStatus, now_s: float
    ) -> dict[str, Any]:  # fmt: skip
        """What `as_dict` says of a run with a model."""
        return {
            "steering": {**core.steering.saved(), "at_least": core.at_least},
            "learners": {
                learner: {**self._learner(core, model, now_s, learner), "experts": experts.of(member)}
                for learner, member in sorted(core.members.items())
            },
            "fragments": [_fragment(core, model, now_s, index) for index in range(len(core.fragments))],
            "newest_merge": _newest_merge(model),
            "data": core.leases.status(),
            "groups": core.groups.status(),
            "experts": experts.as_dict(core.members.values()),
        }

    def _learner(self, core: SyncerCore, model: GlobalModel[Any, Any], now_s: float, learner: str) -> dict[str, Any]:
        member = core.members[learner]
        seen = self._seen_of(learner, member.incarnation)
        own = zip(model.versions, seen.versions, strict=False)
        behind = [newest - version for f, (newest, version) in enumerate(own) if member.holds(f)]
        return {
            "incarnation": member.incarnation,
            "step": member.step,
            "tokens": core.accounting.accounts[learner].tokens,
            "live": member.connected,
            "healthy": member.healthy,
            "heard": member.connected or member.broken_at is not None,
            "waiting": member.waiting,
            "drained": learner in core.drained,
            "finished": member.finished,
            "step_s": member.step_s,
            "tokens_per_step": member.tokens_per_step,
            "silent_s": max(0.0, now_s - member.seen_at),
            "given_up_in_s": max(0.0, core.deadlines.ends_at(member) - now_s),
            "merged": sum(learner in contributors for contributors in model.contributors),
            "share": sum(seen.recent) / len(seen.recent) if seen.recent else None,
            "versions_behind": max(0, *behind) if behind else None,
            "staleness": seen.staleness,
            "versions": [version if member.holds(f) else NOTHING for f, version in enumerate(seen.versions)],
            "holds_part": member.held is not None,
        }


def _fragment(core: SyncerCore, model: GlobalModel[Any, Any], now_s: float, index: int) -> dict[str, Any]:
    """A fragment's round with the reason why it waits, and the summed ledger of all learners."""
    state, decision = core.fragments[index], core.decision(now_s, index)
    contributed, members = core.rounds.roster(index)
    if state.closing is not None:
        contributed = list(dict.fromkeys(c.learner for c in state.closing.contributions))
        members = sorted(state.closing.members)
    is_held = not core.members or any(it.holds(index) for it in core.members.values())
    waits = state.phase if state.phase != "open" else "no contribution yet" if is_held else "no live learner holds it"
    return {
        "fragment": index,
        "version": state.version,
        "phase": state.phase,
        "contributed": list(contributed),
        "members": list(members),
        "reason": decision.reason if decision else waits,
        "ledger": total(account.ledgers[index] for account in core.accounting.accounts.values()).as_dict(),
        "last_contributors": list(model.contributors[index]),
    }


def _newest_merge(model: GlobalModel[Any, Any]) -> dict[str, Any] | None:
    shown = "fragment", "version", "contributors", "weights", "scale"
    return None if model.newest is None else {key: getattr(model.newest, key) for key in shown}
