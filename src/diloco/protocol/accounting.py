"""The syncer's accounting: the tokens of each learner, and the verdict on each contribution.

Per learner and fragment, trained = pending + merged + discarded + lost (`protocol.in_flight`); trained are the tokens
of the incarnations that held the fragment. All hold the trunk of a mixture, so the largest of these sums has all tokens
of the learner. The syncer is responsible for an acknowledged contribution until it is merged or rejected, even if the
learner has left. All other pending tokens are given up when their learner ends: lost if it was evicted, discarded as
"not merged at the end" if it finished or left. Tokens that an evicted incarnation trained before it was notified, which
its process reports later, are lost. If the syncer restarts, open contributions of absent learners are given up too,
since they are not sent again.

A contribution is identified by its number, so a retransmission is recognised. It is open from its acknowledgement to
its verdict. The verdict is counted once, sent once it is durable, and kept until the learner has confirmed it. Open
contributions are not saved: their learners send them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.errors import PayloadError
from diloco.protocol.contribution import KEPT, UNMERGED, Contribution, Decided, Verdict
from diloco.protocol.in_flight import Ledger

MAX_COUNTED_TOKENS = 2**53
"""Most tokens of one learner: JSON and a weight represent the number exactly, and its sum over learners too."""

Key = tuple[str, int, int, int]
"""Learner, incarnation, fragment and number of a contribution."""


def key_of(c: Contribution) -> Key:
    """Return the identity of a contribution."""
    return c.learner, c.incarnation, c.fragment, c.number


@dataclass
class Account:
    """One learner's account, over all its incarnations.

    Attributes:
        incarnation: the newest.
        process: of the newest incarnation.
        ledgers: one per fragment.
        ended_at: the inner step at which the newest incarnation finished or left; None: it did neither.
        is_gone: whether the newest incarnation is no longer a member.
        earlier_tokens: tokens trained by earlier incarnations.
        others_tokens: the part of `earlier_tokens` trained before the process first joined.
        confirmed: per fragment, the number up to which the newest incarnation has confirmed verdicts.
        verdicts: unconfirmed verdicts of the newest incarnation, by fragment and number.
        held: the fragments that the newest incarnation holds; None: all of them.
        held_before: likewise, of the incarnation before of its process; of a first one, its own.
        tokens: trained by all incarnations.
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
    held: frozenset[int] | None = None
    held_before: frozenset[int] | None = None
    tokens: int = 0

    def holds(self, fragment: int) -> bool:
        """Whether the newest incarnation holds a fragment."""
        return self.held is None or fragment in self.held

    def train(self, tokens: int) -> None:
        """Count tokens of the newest incarnation."""
        self.tokens += tokens
        for fragment, ledger in enumerate(self.ledgers):
            if self.holds(fragment):
                ledger.trained += tokens

    def lose_late(self, tokens: int, held: frozenset[int] | None) -> None:
        """Count tokens of a past incarnation, which held these fragments, as lost."""
        self.earlier_tokens += tokens
        self.tokens += tokens
        for fragment, ledger in enumerate(self.ledgers):
            if held is None or fragment in held:
                ledger.trained += tokens
                ledger.lost += tokens

    def count(self, c: Contribution, reason: str | None, version: int) -> None:
        """Count a contribution's tokens and keep the verdict for its learner; call once."""
        ledger = self.ledgers[c.fragment]
        for given_up, tokens in c.discarded:
            ledger.discard(tokens, given_up)
        if reason is None:
            ledger.merged += c.tokens
        elif reason not in KEPT:
            ledger.discard(c.tokens, reason)
        elif self.is_gone or c.incarnation != self.incarnation:  # the learner cannot take the work back
            self.give_up(c.fragment, c.tokens)
        if c.incarnation == self.incarnation:
            self.verdicts[c.fragment, c.number] = Verdict(c.fragment, c.number, reason, version)

    def give_up(self, fragment: int, tokens: int) -> None:
        """Count tokens whose work no merge will have: as lost, unless the learner has finished or left."""
        if self.ended_at is None:
            self.ledgers[fragment].lost += tokens
        else:
            self.ledgers[fragment].discard(tokens, UNMERGED)

    def copied(self) -> Account:
        """Return an independent copy."""
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
            **{
                key: sorted(held)
                for key, held in (("held", self.held), ("held_before", self.held_before))
                if held is not None
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Account:
        """Read the values of `as_dict`."""
        ledgers = [
            Ledger(trained, merged, lost, dict(by_reason)) for trained, merged, lost, by_reason in values["ledgers"]
        ]
        verdicts = [Verdict(*each) for each in values["verdicts"]]
        by_number = {(each.fragment, each.number): each for each in verdicts}
        return cls(
            ledgers, values["incarnation"], values["process"], values["ended_at"],
            earlier_tokens=values["earlier_tokens"], others_tokens=values["others_tokens"],
            confirmed=list(values["confirmed"]), verdicts=by_number,
            held=held_of(values, "held"), held_before=held_of(values, "held_before"),
            tokens=max(ledger.trained for ledger in ledgers),
        )  # fmt: skip


def held_of(values: Mapping[str, Any], key: str) -> frozenset[int] | None:
    """A set of held fragments in the values of `Account.as_dict`; None: all of them."""
    return frozenset(values[key]) if key in values else None


class Accounting:
    """The accounts of all learners, present and past.

    Attributes:
        accounts: by learner id.
        open: acknowledged contributions without a verdict.
    """

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.accounts: dict[str, Account] = {}
        self.open: dict[Key, Contribution] = {}
        self._unsent: dict[Key, int | None] = {}
        """Rejections that are not durable yet, with the serial number of the record that contains them; None: none
        yet."""

    # --- learners -----------------------------------------------------------------------------------------------------

    @property
    def run_tokens(self) -> int:
        """Tokens trained by all learners, present and past."""
        return sum(account.tokens for account in self.accounts.values())

    def begin(self, learner: str, process: int, after: int = 0, held: frozenset[int] | None = None) -> int:
        """Begin a new incarnation of a process, which has trained nothing; return its number.

        Arguments:
            after: the process's previous incarnation.
            held: as in `Account`.
        """
        account = self.accounts.setdefault(learner, Account([Ledger() for _ in range(self._num_fragments)]))
        account.earlier_tokens = account.tokens
        if process != account.process:
            account.others_tokens = account.earlier_tokens
        account.held, account.held_before = held, account.held if process == account.process else held
        account.incarnation, account.process = max(account.incarnation, after) + 1, process
        account.ended_at, account.is_gone = None, False
        account.confirmed, account.verdicts = [0] * self._num_fragments, {}
        return account.incarnation

    def trained(self, learner: str, tokens: int, earlier_tokens: int = 0) -> None:
        """Set the tokens that the newest incarnation (`tokens`) and earlier ones of its process (`earlier_tokens`) have
        trained; both are monotonic.

        Earlier tokens that were unknown when it joined are lost, in the fragments that the incarnation before held:
        contributed tokens were reported with their contribution.

        Raises:
            PayloadError: the learner's incarnations would have trained more tokens than can be counted.
        """
        account = self.accounts[learner]
        earlier = max(account.earlier_tokens, account.others_tokens + earlier_tokens)
        _require_countable(learner, earlier + tokens)
        account.lose_late(earlier - account.earlier_tokens, account.held_before)
        account.train(max(0, earlier + tokens - account.tokens))

    def trained_late(self, learner: str, tokens: int) -> bool:
        """Set the final tokens of the newest incarnation's process. Return whether any were unknown: those are lost.

        Raises:
            PayloadError: as `trained`.
        """
        account = self.accounts[learner]
        _require_countable(learner, account.others_tokens + tokens)
        late = max(0, account.others_tokens + tokens - account.tokens)
        has_trained = account.tokens > account.earlier_tokens  # otherwise the process may not know of it
        account.lose_late(late, account.held if has_trained else account.held_before)
        return late > 0

    def end(self, learner: str) -> None:
        """End a learner: its acknowledged contributions remain, its other pending tokens are given up."""
        account = self.accounts[learner]
        account.is_gone = True
        acknowledged = [0] * self._num_fragments
        for c in self.open.values():
            if c.learner == learner:
                acknowledged[c.fragment] += c.accounted
        for fragment, tokens in enumerate(acknowledged):
            account.give_up(fragment, account.ledgers[fragment].pending - tokens)

    def incarnation_of(self, learner: str) -> int:
        """Return the newest incarnation; 0: there was none."""
        account = self.accounts.get(learner)
        return 0 if account is None else account.incarnation

    def ended(self, step: int) -> set[str]:
        """Learners that finished or left at this inner step or later, whatever they held."""
        accounts = self.accounts.items()
        return {learner for learner, account in accounts if account.ended_at is not None and account.ended_at >= step}

    def is_newest(self, learner: str, process: int, incarnation: int) -> bool:
        """Whether no other process is known to have joined under this learner's name since this incarnation of
        `process`.

        A repaired run, or one that goes on from a copy, may know only earlier incarnations.
        """
        account = self.accounts.get(learner)
        return account is None or account.process == process or account.incarnation < incarnation

    # --- contributions ------------------------------------------------------------------------------------------------

    def is_known(self, c: Contribution) -> bool:
        """Whether a contribution of the newest incarnation is open or has a verdict."""
        account = self.accounts[c.learner]
        has_verdict = c.number <= account.confirmed[c.fragment] or (c.fragment, c.number) in account.verdicts
        return has_verdict or key_of(c) in self.open

    def check(self, c: Contribution) -> None:
        """Check that a new contribution accounts only for trained tokens that no other one accounts for.

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
                f"{c.learner!r} contributes {c.accounted} tokens of fragment {c.fragment}, but only {left} of its "
                "trained tokens are not accounted for; nothing of it was counted."
            )

    def acknowledge(self, c: Contribution) -> None:
        """Make the syncer responsible for a contribution."""
        self.open[key_of(c)] = c

    def count_merged(self, c: Contribution, version: int) -> None:
        """Count a contribution as merged into a durable version."""
        del self.open[key_of(c)]
        self.accounts[c.learner].count(c, None, version)

    def count_rejected(self, c: Contribution, reason: str, version: int) -> None:
        """Count a contribution as rejected; the fragment is at `version`."""
        self.open.pop(key_of(c), None)
        account = self.accounts[c.learner]
        account.count(c, reason, version)
        if c.incarnation == account.incarnation:
            self._unsent.setdefault(key_of(c), None)

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def confirm(self, learner: str, confirmed: Sequence[int]) -> None:
        """Record that the newest incarnation has the verdicts up to these numbers, one per fragment."""
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
        """Return durable, unconfirmed verdicts of the newest incarnation, by fragment and number."""
        account = self.accounts[learner]
        return tuple(
            verdict
            for (fragment, number), verdict in sorted(account.verdicts.items())
            if (learner, account.incarnation, fragment, number) not in self._unsent
        )

    @property
    def needs_record(self) -> bool:
        """Whether a verdict is not in any record yet."""
        return any(serial is None for serial in self._unsent.values())

    def recorded(self, serial: int) -> set[str]:
        """Mark the record with this serial number as durable. Return the learners with verdicts to send."""
        durable = {key for key, since in self._unsent.items() if since is not None and since <= serial}
        for key in durable:
            del self._unsent[key]
        return {learner for learner, *_ in durable}

    # --- saving -------------------------------------------------------------------------------------------------------

    def saved(self, serial: int, decided: Sequence[Decided] = ()) -> dict[str, Any]:
        """Plain values (JSON) of the record with this serial number, after these verdicts."""
        self._unsent = {key: serial if since is None else since for key, since in self._unsent.items()}
        decided_of = {c.learner for c, _, _ in decided}
        accounts = {
            learner: account.copied() if learner in decided_of else account
            for learner, account in self.accounts.items()
        }
        for c, reason, version in decided:
            accounts[c.learner].count(c, reason, version)
            if reason is not None and c.incarnation == accounts[c.learner].incarnation:
                self._unsent[key_of(c)] = serial
        keys = {key_of(c) for c, _, _ in decided}
        void = {learner: [0] * self._num_fragments for learner in accounts}
        for key, c in self.open.items():
            if c.incarnation < accounts[c.learner].incarnation and key not in keys:
                void[c.learner][c.fragment] += c.accounted
        return {
            learner: {**account.as_dict(), "void_on_restart": void[learner]} for learner, account in accounts.items()
        }

    def restore(self, values: Mapping[str, Any], alive: Iterable[str]) -> None:
        """Continue from `saved`. Open contributions of absent incarnations are given up."""
        self.accounts = {learner: Account.from_dict(each) for learner, each in values.items()}
        living = set(alive)
        for learner, account in self.accounts.items():
            account.is_gone = learner not in living
            for fragment, (ledger, void) in enumerate(
                zip(account.ledgers, values[learner]["void_on_restart"], strict=True)
            ):
                if account.is_gone:
                    account.give_up(fragment, ledger.pending)
                else:
                    ledger.lost += void


def _require_countable(learner: str, tokens: int) -> None:
    """Raise PayloadError if a learner's tokens exceed the largest countable number."""
    if tokens > MAX_COUNTED_TOKENS:
        raise PayloadError(
            f"{learner!r} would have trained {tokens} tokens; at most {MAX_COUNTED_TOKENS} can be counted."
        )
