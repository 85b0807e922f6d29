"""The syncer's accounting: where each learner's tokens are, and the verdict on each contribution.

Per learner and fragment, trained = pending + merged + discarded + lost (`protocol.in_flight`). The syncer is
responsible for an acknowledged contribution until it is merged or rejected, even if the learner is gone. All other
pending tokens are lost with their learner; so are those that an evicted incarnation has trained before it heard of
that, of which its process tells later. If the syncer restarts, open contributions of learners that are gone are lost
too: they are not sent again.

A contribution is known by its number, so a retransmission is recognised. It is open from its acknowledgement to its
verdict. The verdict is counted once, sent once it is durable, and kept until the learner has confirmed it. Open
contributions are not saved: their learners send them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.errors import PayloadError
from diloco.protocol.contribution import KEPT, Contribution, Verdict
from diloco.protocol.in_flight import Ledger

MAX_COUNTED_TOKENS = 2**53
"""Of one learner: JSON and a weight hold the number exactly, and the sum over learners too."""

Key = tuple[str, int, int, int]
"""Learner, incarnation, fragment and number of a contribution."""


def key_of(c: Contribution) -> Key:
    """The identity of a contribution."""
    return c.learner, c.incarnation, c.fragment, c.number


@dataclass
class Account:
    """One learner's account, over all its incarnations.

    Attributes:
        incarnation: the newest.
        process: whose it is.
        ledgers: one per fragment.
        ended_at: the inner step at which the newest incarnation finished or left; None: it did neither.
        is_gone: the newest incarnation is no member any more.
        earlier_tokens: trained by earlier incarnations.
        others_tokens: of those, trained before the process joined first.
        confirmed: per fragment, the newest incarnation knows the verdicts of all its contributions up to this number.
        verdicts: of the newest incarnation, those not confirmed, by fragment and number.
    """

    ledgers: list[Ledger]
    incarnation: int = 0
    process: int | None = None
    ended_at: int | None = None
    is_gone: bool = False
    earlier_tokens: int = 0
    others_tokens: int = 0
    confirmed: list[int] = field(default_factory=list)
    verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)

    def count(self, c: Contribution, reason: str | None, version: int) -> None:
        """Count a contribution's tokens, once, and keep the verdict for its learner."""
        ledger = self.ledgers[c.fragment]
        for given_up, tokens in c.discarded:
            ledger.discard(tokens, given_up)
        if reason is None:
            ledger.merged += c.tokens
        elif reason not in KEPT:
            ledger.discard(c.tokens, reason)
        elif self.is_gone or c.incarnation != self.incarnation:  # the work cannot be given back
            ledger.lost += c.tokens
        if c.incarnation == self.incarnation:
            self.verdicts[c.fragment, c.number] = Verdict(c.fragment, c.number, reason, version)

    def copied(self) -> Account:
        """One that can be counted on while this one stays as it is."""
        ledgers = [replace(ledger, discarded=dict(ledger.discarded)) for ledger in self.ledgers]
        return replace(self, ledgers=ledgers, confirmed=list(self.confirmed), verdicts=dict(self.verdicts))

    def as_dict(self) -> dict[str, Any]:
        """Plain values (JSON)."""
        return {
            "incarnation": self.incarnation,
            "process": self.process,
            "ended_at": self.ended_at,
            "earlier_tokens": self.earlier_tokens,
            "others_tokens": self.others_tokens,
            "confirmed": list(self.confirmed),
            "verdicts": [[it.fragment, it.number, it.reason, it.version] for it in self.verdicts.values()],
            "ledgers": [[it.trained, it.merged, it.lost, dict(it.discarded)] for it in self.ledgers],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Account:
        """What `as_dict` gave."""
        ledgers = [
            Ledger(trained, merged, lost, dict(by_reason)) for trained, merged, lost, by_reason in values["ledgers"]
        ]
        verdicts = [Verdict(*each) for each in values["verdicts"]]
        by_number = {(each.fragment, each.number): each for each in verdicts}
        return cls(
            ledgers, values["incarnation"], values["process"], values["ended_at"],
            earlier_tokens=values["earlier_tokens"], others_tokens=values["others_tokens"],
            confirmed=list(values["confirmed"]), verdicts=by_number,
        )  # fmt: skip


class Accounting:
    """The accounts of all learners that the run has ever seen.

    Attributes:
        accounts: by learner id.
        open: contributions that are acknowledged and have no verdict.
    """

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.accounts: dict[str, Account] = {}
        self.open: dict[Key, Contribution] = {}
        self._untold: dict[Key, int | None] = {}
        """Rejections that are not durable, with the serial number of the record that contains them; None: no record
        yet."""

    # --- learners -----------------------------------------------------------------------------------------------------

    @property
    def run_tokens(self) -> int:
        """Tokens trained by all learners, present and past."""
        return sum(account.ledgers[0].trained for account in self.accounts.values())

    def begin(self, learner: str, process: int, after: int = 0) -> int:
        """A new incarnation, which has trained nothing, of this process, whose last one was `after`; returns its
        number."""
        account = self.accounts.setdefault(learner, Account([Ledger() for _ in range(self._num_fragments)]))
        account.earlier_tokens = account.ledgers[0].trained
        if process != account.process:
            account.others_tokens = account.earlier_tokens
        account.incarnation, account.process = max(account.incarnation, after) + 1, process
        account.ended_at, account.is_gone = None, False
        account.confirmed, account.verdicts = [0] * self._num_fragments, {}
        return account.incarnation

    def trained(self, learner: str, tokens: int, earlier_tokens: int = 0) -> None:
        """The newest incarnation has trained `tokens` in all, and earlier ones of its process `earlier_tokens`; both
        only ever grow.

        Of the earlier ones, those that were not known when it joined are lost: what was sent was known with it.

        Raises:
            PayloadError: all its learner's incarnations together would have trained more than can be counted.
        """
        account = self.accounts[learner]
        earlier = max(account.earlier_tokens, account.others_tokens + earlier_tokens)
        _require_countable(learner, earlier + tokens)
        self._lose_late(account, earlier - account.earlier_tokens)
        for ledger in account.ledgers:
            ledger.trained = max(ledger.trained, earlier + tokens)

    def trained_late(self, learner: str, tokens: int) -> bool:
        """The process of the newest incarnation has trained `tokens` in all, and trains no more. Returns whether any of
        them were not known: those are lost.

        Raises:
            PayloadError: as `trained`.
        """
        account = self.accounts[learner]
        _require_countable(learner, account.others_tokens + tokens)
        late = max(0, account.others_tokens + tokens - account.ledgers[0].trained)
        self._lose_late(account, late)
        return late > 0

    def _lose_late(self, account: Account, tokens: int) -> None:
        """Count tokens of incarnations that are gone."""
        account.earlier_tokens += tokens
        for ledger in account.ledgers:
            ledger.trained += tokens
            ledger.lost += tokens

    def end(self, learner: str) -> None:
        """The learner is gone: its acknowledged contributions stay, and its other pending tokens are lost."""
        account = self.accounts[learner]
        account.is_gone = True
        acknowledged = [0] * self._num_fragments
        for c in self.open.values():
            if c.learner == learner:
                acknowledged[c.fragment] += c.accounted
        for ledger, tokens in zip(account.ledgers, acknowledged, strict=True):
            ledger.lost += ledger.pending - tokens

    def incarnation_of(self, learner: str) -> int:
        """The newest; 0: there was none."""
        account = self.accounts.get(learner)
        return 0 if account is None else account.incarnation

    def is_newest(self, learner: str, process: int, incarnation: int) -> bool:
        """Whether no other process is known to have joined by this learner's name since this incarnation of `process`.

        A run that was repaired, or goes on from a backup, may know none but earlier ones.
        """
        account = self.accounts.get(learner)
        return account is None or account.process == process or account.incarnation < incarnation

    # --- contributions ------------------------------------------------------------------------------------------------

    def is_known(self, c: Contribution) -> bool:
        """Whether a contribution of the newest incarnation is open, or has a verdict."""
        account = self.accounts[c.learner]
        has_verdict = c.number <= account.confirmed[c.fragment] or (c.fragment, c.number) in account.verdicts
        return has_verdict or key_of(c) in self.open

    def check(self, c: Contribution) -> None:
        """Check that a new contribution accounts only for trained tokens that are not accounted for yet.

        Raises:
            PayloadError: it accounts for more.
        """
        ledger = self.accounts[c.learner].ledgers[c.fragment]
        acknowledged = sum(
            it.accounted for it in self.open.values() if (it.learner, it.fragment) == (c.learner, c.fragment)
        )
        left = ledger.pending - acknowledged
        if c.accounted > left:
            raise PayloadError(
                f"{c.learner!r} says {c.accounted} tokens of fragment {c.fragment}, and {left} of those that it has "
                "trained are not accounted for; nothing of it was counted."
            )

    def acknowledge(self, c: Contribution) -> None:
        """The syncer is responsible for the contribution from now on."""
        self.open[key_of(c)] = c

    def count_merged(self, c: Contribution, version: int) -> None:
        """The version that it is merged in is durable."""
        del self.open[key_of(c)]
        self.accounts[c.learner].count(c, None, version)

    def count_rejected(self, c: Contribution, reason: str, version: int) -> None:
        """It will not be merged; the fragment is at `version`."""
        self.open.pop(key_of(c), None)
        account = self.accounts[c.learner]
        account.count(c, reason, version)
        if c.incarnation == account.incarnation:
            self._untold.setdefault(key_of(c), None)

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def confirm(self, learner: str, confirmed: Sequence[int]) -> None:
        """The newest incarnation knows the verdicts of its contributions up to these numbers, one per fragment."""
        account = self.accounts[learner]
        if list(confirmed) == account.confirmed:
            return
        account.confirmed = [max(each) for each in zip(account.confirmed, confirmed, strict=True)]
        account.verdicts = {
            (fragment, number): verdict
            for (fragment, number), verdict in account.verdicts.items()
            if number > account.confirmed[fragment]
        }

    def verdicts(self, learner: str) -> tuple[Verdict, ...]:
        """Of the newest incarnation, durable and not confirmed, by fragment and number."""
        account = self.accounts[learner]
        return tuple(
            verdict
            for (fragment, number), verdict in sorted(account.verdicts.items())
            if (learner, account.incarnation, fragment, number) not in self._untold
        )

    @property
    def needs_record(self) -> bool:
        """Whether there are verdicts that no record has."""
        return any(serial is None for serial in self._untold.values())

    def recorded(self, serial: int) -> set[str]:
        """The record with this serial number is durable. Returns the learners that have verdicts to be told of."""
        told = {key for key, since in self._untold.items() if since is not None and since <= serial}
        for key in told:
            del self._untold[key]
        return {learner for learner, *_ in told}

    # --- saving -------------------------------------------------------------------------------------------------------

    def saved(
        self, serial: int, merged: Sequence[Contribution] = (), rejected: Sequence[tuple[Contribution, str]] = (),
        version: int = 0
    ) -> dict[str, Any]:  # fmt: skip
        """Plain values (JSON) of the record with this serial number, as they are once these contributions have their
        verdicts."""
        self._untold = {key: serial if since is None else since for key, since in self._untold.items()}
        decided_of = {c.learner for c in merged} | {c.learner for c, _ in rejected}
        accounts = {
            learner: account.copied() if learner in decided_of else account
            for learner, account in self.accounts.items()
        }
        for c in merged:
            accounts[c.learner].count(c, None, version)
        for c, reason in rejected:
            accounts[c.learner].count(c, reason, version)
            if c.incarnation == accounts[c.learner].incarnation:
                self._untold[key_of(c)] = serial
        decided = {key_of(c) for c in merged} | {key_of(c) for c, _ in rejected}
        void = {learner: [0] * self._num_fragments for learner in accounts}
        for key, c in self.open.items():
            if c.incarnation < accounts[c.learner].incarnation and key not in decided:
                void[c.learner][c.fragment] += c.accounted
        return {
            learner: {**account.as_dict(), "void_on_restart": void[learner]} for learner, account in accounts.items()
        }

    def restore(self, values: Mapping[str, Any], alive: Iterable[str]) -> None:
        """Continue from `saved`. Open contributions of incarnations that are gone are lost."""
        self.accounts = {learner: Account.from_dict(each) for learner, each in values.items()}
        living = set(alive)
        for learner, account in self.accounts.items():
            account.is_gone = learner not in living
            for ledger, void in zip(account.ledgers, values[learner]["void_on_restart"], strict=True):
                ledger.lost += ledger.pending if account.is_gone else void


def _require_countable(learner: str, tokens: int) -> None:
    """Check that a learner's tokens can be counted. Raises PayloadError."""
    if tokens > MAX_COUNTED_TOKENS:
        raise PayloadError(f"{learner!r} would have trained {tokens} tokens, and {MAX_COUNTED_TOKENS} can be counted.")
