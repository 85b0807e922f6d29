"""Where every token of a storm is, as it follows from what learners sent and drivers decided, and that the syncer's
accounting and the ledgers of its learners say the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tests.chaos.versions import BrokenInvariantError, require
from tests.storms.invariants import Ledger
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.method import Method
from diloco.protocol.accounting import Account, Key, key_of
from diloco.protocol.actions import MergeRound, Reject
from diloco.protocol.contribution import KEPT, MISSED, OVERLAP, UNMERGED, Contribution
from diloco.protocol.learner import LearnerCore
from diloco.protocol.syncer import SyncerCore
from diloco.run.ports import MergedRound, NullObserver

CONFIRMED_S = 12.0
"""After so long without a fault a learner has confirmed a verdict."""


@dataclass
class _Sum:
    """Tokens that verdicts account for. `accounted`: also those that adoption has overwritten."""

    merged: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    accounted: int = 0

    def add(self, c: Contribution, reason: str | None) -> None:
        """Count a verdict."""
        for overwritten, tokens in c.discarded:
            _add(self.discarded, overwritten, tokens)
            self.accounted += tokens
        if reason in KEPT:
            return
        self.accounted += c.tokens
        if reason is None:
            self.merged += c.tokens
        else:
            _add(self.discarded, reason, c.tokens)


def _add(discarded: dict[str, int], reason: str, tokens: int) -> None:
    """As `protocol.in_flight.Ledger.discard`: without reasons for no token."""
    total = discarded.pop(reason, 0) + tokens
    if total:
        discarded[reason] = total


class Accounts(NullObserver):
    """Of one driver after the other. Their events are taken in after the event of the storm in which they happened,
    since what an observer raises is caught. What learners have sent is known to all.

    Arguments:
        others: of all syncers, to which this is added.
        num_fragments: of the run.

    Attributes:
        decided: the verdicts of the driver that is there, and those that were durable when it began.
        open: contributions that it has acknowledged and given no verdict.
    """

    def __init__(self, ledger: Ledger, others: list[Self], num_fragments: int) -> None:
        self.decided: dict[Key, str | None] = {}
        self.open: dict[Key, Contribution] = {}
        self._ledger = ledger
        self._events: list[Contribution | Reject | MergedRound[GlobalFragment, Tensor]] = []
        self._others = others
        self._sent: dict[Key, tuple[Contribution, Tensor]] = others[0]._sent if others else {}
        self._overwritten: Counter[tuple[str, int, int]] = others[0]._overwritten if others else Counter()
        self._volatile: dict[Key, str | None] = {}  # verdicts that are not on the disk, as far as was looked
        self._of_learner: defaultdict[tuple[str, int], _Sum] = defaultdict(_Sum)
        self._of_incarnation: defaultdict[tuple[str, int, int], _Sum] = defaultdict(_Sum)
        self._undecided: defaultdict[tuple[str, int, int], dict[int, Contribution]] = defaultdict(dict)  # by number
        self._decided_s: dict[Key, float] = {}
        self._confirmed = Counter[tuple[str, int, int]]()
        self._admitted: list[Contribution] = []
        self._trained: defaultdict[str, tuple[int, list[int]]] = defaultdict(lambda: (0, [0] * num_fragments))
        others.append(self)

    # --- what happens -------------------------------------------------------------------------------------------------

    def sent(self, c: Contribution, payload: Tensor) -> None:
        """A learner offers a contribution."""
        require(key_of(c) not in self._sent, f"{c} has the number of one that was sent before")
        self._sent[key_of(c)] = c, payload
        for each in self._others:
            each._undecided[c.learner, c.incarnation, c.fragment][c.number] = c
        self._overwritten[c.learner, c.incarnation, c.fragment] += sum(tokens for _, tokens in c.discarded)

    def payload(self, c: Contribution) -> Tensor:
        """That its learner has encoded."""
        return self._sent[key_of(c)][1]

    def contributed(self, c: Contribution, num_bytes: int) -> None:
        self._events.append(c)

    def rejected(self, action: Reject) -> None:
        self._events.append(action)

    def published(self, merged: MergedRound[Any, Any], num_live: int, persist_s: float) -> None:
        self._events.append(merged)

    def scaled(self, method: Method, action: MergeRound, absent_tokens: Sequence[int]) -> None:
        """A round is to be closed. `absent_tokens`: pending ones of its members without a contribution."""
        num_present = len({c.learner for c in action.contributions})
        is_full = method.partial == "full" or not absent_tokens
        uniform = num_present / (num_present + len(absent_tokens))
        scale = 1.0 if is_full else uniform if method.weight == "uniform" else action.scale
        is_less = is_full or action.scale < 1 or not any(absent_tokens)
        require(
            0 < action.scale <= 1 and action.scale == scale and is_less,
            f"round {action.round} of fragment {action.fragment} has scale {action.scale}, with {num_present} "
            f"contributors, and {absent_tokens} tokens of others",
        )

    def closing(self, action: MergeRound, payloads: Sequence[Tensor]) -> None:
        """A round is closed on these payloads."""
        learners = [c.learner for c in action.contributions]
        require(learners == sorted(learners), f"{learners} are not in merge order")
        for c, payload in zip(action.contributions, payloads, strict=True):
            require(payload is self.payload(c), f"{key_of(c)} is merged with the payload of another one")

    def restarted(self, verdicts: Mapping[Key, str | None]) -> None:
        """A driver begins with what is durable, with these verdicts."""
        self._events, self.open, self._volatile, self._admitted = [], {}, {}, []
        self._of_learner.clear()
        self._of_incarnation.clear()
        for c, _ in self._sent.values():
            self._undecided[c.learner, c.incarnation, c.fragment][c.number] = c
        self.decided = dict(verdicts)
        for key, reason in self.decided.items():
            self._count(key, reason)

    def begins_with(self, core: SyncerCore) -> None:
        """A driver has begun with these accounts."""
        for learner, account in core.accounting.accounts.items():
            self._trained[learner] = account.tokens, [ledger.trained for ledger in account.ledgers]

    def take_events(self, now_s: float) -> None:
        """Take in what the driver has done."""
        events, self._events = self._events, []
        for event in events:
            match event:
                case Contribution() as c:
                    require(self._sent.get(key_of(c), (None,))[0] == c, f"{c} is not what its learner has sent")
                    require(key_of(c) not in self.decided | self.open, f"{key_of(c)} is acknowledged twice")
                    held = self._ledger.held_as[c.learner, c.incarnation]
                    require(c.fragment in held, f"{c} is acknowledged, and its learner holds {sorted(held)}")
                    self.open[key_of(c)] = c
                    self._admitted.append(c)
                case Reject(contribution=c, reason=reason):
                    self._decide(now_s, c, reason)
                case MergedRound():
                    for c in event.action.contributions:
                        if c.learner not in event.refused:
                            self._decide(now_s, c, None)

    def _decide(self, now_s: float, c: Contribution, reason: str | None) -> None:
        key = key_of(c)
        require(key not in self.decided, f"{key} has the verdict {self.decided.get(key)}, and now {reason}")
        self.open.pop(key, None)
        self.decided[key] = self._volatile[key] = reason
        self._decided_s[key] = now_s
        self._count(key, reason)

    def _count(self, key: Key, reason: str | None) -> None:
        c, _ = self._sent[key]
        self._of_learner[c.learner, c.fragment].add(c, reason)
        self._of_incarnation[c.learner, c.incarnation, c.fragment].add(c, reason)
        del self._undecided[c.learner, c.incarnation, c.fragment][c.number]

    def recorded_with(
        self, merged: Sequence[Contribution], rejected: Sequence[tuple[Contribution, str]]
    ) -> dict[Key, str | None]:
        """The verdicts that become durable with the commit that begins now; those of its versions come with it."""
        self._volatile = {key: it for key, it in self._volatile.items() if key not in self._ledger.verdicts}
        of_version = {key_of(c): None for c in merged} | {key_of(c): reason for c, reason in rejected}
        return self._volatile | of_version

    # --- what holds ---------------------------------------------------------------------------------------------------

    def check(self, core: SyncerCore) -> None:
        """No token is counted twice, made up or forgotten by the syncer."""
        accounting = core.accounting
        if accounting.open.keys() != self.open.keys():
            raise BrokenInvariantError(f"{accounting.open.keys()} are open, not {self.open}")
        newest, earlier = dict[tuple[str, int], int](), dict[tuple[str, int], int]()
        for c in self.open.values():
            is_newest = c.incarnation == accounting.accounts[c.learner].incarnation
            open_, one = newest if is_newest else earlier, (c.learner, c.fragment)
            open_[one] = open_.get(one, 0) + c.accounted
        for learner, account in accounting.accounts.items():
            is_member = learner in core.members
            held = self._check_trained(learner, account)
            for fragment, ledger in enumerate(account.ledgers):
                sums = self._of_learner[learner, fragment]
                by_verdict = {reason: tokens for reason, tokens in ledger.discarded.items() if reason != UNMERGED}
                if ledger.merged != sums.merged or by_verdict != sums.discarded:
                    raise BrokenInvariantError(
                        f"{learner}, fragment {fragment}: {ledger} is not what verdicts say: {sums}"
                    )
                its_open = pending = newest.get((learner, fragment), 0)
                if is_member:
                    accounted = self._of_incarnation[learner, account.incarnation, fragment].accounted
                    pending = (account.tokens - account.earlier_tokens) * (fragment in held) - accounted
                before = earlier.get((learner, fragment), 0)
                if ledger.pending != pending + before or pending < its_open:
                    raise BrokenInvariantError(
                        f"{learner}, fragment {fragment}: {ledger} has {ledger.pending} tokens pending; {pending} of "
                        f"its newest incarnation and {before} of earlier ones are"
                    )
        for c in self._admitted:
            calls = core.rounds.calls(c.learner) if c.learner in core.members else ()
            require((c.fragment, c.base) not in calls, f"{c.learner} is called for {c}, which it has sent")
        self._admitted = []

    def _check_trained(self, learner: str, account: Account) -> frozenset[int]:
        """New tokens count in the fragments that the learner's process holds, and in no others. Returns these."""
        held = self._ledger.held_by[account.process or 0]
        tokens, trained = self._trained[learner]
        expected = [before + (account.tokens - tokens) * (f in held) for f, before in enumerate(trained)]
        now = [ledger.trained for ledger in account.ledgers]
        if now != expected or any(each > self._ledger.trained[learner, f] for f, each in enumerate(now)):
            raise BrokenInvariantError(f"{learner}, which holds {sorted(held)}, has trained {now}, not {expected}")
        self._trained[learner] = account.tokens, now
        return held

    def check_confirmed(self, core: SyncerCore, now_s: float, quiet_s: float, running: Sequence[str]) -> None:
        """Learners confirm verdicts, and only those that they were told. `quiet_s`: when the last fault was over."""
        for learner, account in core.accounting.accounts.items():
            for fragment, confirmed in enumerate(account.confirmed):
                one = learner, account.incarnation, fragment
                for number in range(self._confirmed[one] + 1, confirmed + 1):
                    require((*one, number) in self._ledger.verdicts, f"{(*one, number)} is confirmed without a verdict")
                self._confirmed[one] = confirmed
            for fragment, number in account.verdicts if learner in running else ():
                since_s = max(quiet_s, self._decided_s.get((learner, account.incarnation, fragment, number), 0.0))
                require(
                    now_s - since_s <= CONFIRMED_S,
                    f"{learner}'s verdict {number} of fragment {fragment} is not confirmed since {since_s:.1f} s",
                )

    def check_learner(self, name: str, incarnation: int, learner: LearnerCore) -> None:
        """The learner's own ledger is that of the verdicts, once it has heard those on what it has in flight."""
        for fragment, work in enumerate(learner.fragments):
            one = name, incarnation, fragment
            sums = self._of_incarnation[one]
            merged, discarded = work.ledger.merged, dict(work.ledger.discarded)
            reported, overwritten = self._overwritten[one], discarded.pop(OVERLAP, 0)
            for flight in work.in_flight:
                key = (*one, flight.number)
                if flight.listed or flight.is_rejected or key not in self.decided:
                    continue
                if (reason := self.decided[key]) is None:
                    merged += flight.tokens
                elif reason not in KEPT:
                    _add(discarded, reason, flight.tokens)
            expected = dict(sums.discarded)
            expected.pop(OVERLAP, None)
            if undecided := self._undecided[one]:
                in_flight = {flight.number for flight in work.in_flight}
                for number, c in undecided.items():
                    if number not in in_flight:  # the version of its round is adopted
                        _add(expected, MISSED, c.tokens)
            if merged != sums.merged or discarded != expected or overwritten != reported + work.overwritten_tokens:
                raise BrokenInvariantError(
                    f"{name} ({incarnation}), fragment {fragment}: {work} is not what verdicts say: {sums}"
                )
