"""`LearnerCore`: sans-I/O bookkeeping of one learner's fragments, versions and tokens.

    events:   stepped · called · received · rejected · adopted · rejoined
    answers:  which fragments to send · which answers to wait for · which versions to adopt

One boundary after every inner step:

    sends = core.stepped(tokens)          measure and offer these displacements; sends come before applications
    send = core.called(f, v)              the same for a fragment that the syncer calls
    while core.waiting(): …               enter `received` and `rejected` until no due answer is missing
    for f, v in core.adoptions(): …       load version v of fragment f, then core.adopted(f, v)

The method determines how rounds are called: the learner's half in `protocol.rounds` decides when a fragment is sent,
and which version is adopted when.

This module uses no tensor, clock, socket or thread; `diloco.Learner` drives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.errors import CheckpointError, VersionError
from diloco.protocol.contribution import KEPT, MISSED
from diloco.protocol.in_flight import FragmentWork, InFlight, Send, require_whole_numbers
from diloco.protocol.rounds import HALVES
from diloco.protocol.rounds.base import Rules
from diloco.protocol.units import Ranges, union


class LearnerCore:
    """The bookkeeping of one learner.

    Arguments:
        rules: the run's method, as the state machines know it.
        versions: of each fragment, the version that the learner holds; `NOTHING`: it does not hold the fragment, which
            is never due, called, received or adopted, and has no tokens.
        step: the inner step to start from; a late joiner starts at the run's.

    Attributes:
        tokens: trained by this incarnation.
        earlier_tokens: trained by earlier incarnations of this process.
        fragments: per fragment, pending work, contributions in flight and the ledger of tokens.
    """

    def __init__(self, rules: Rules, versions: Sequence[int], *, step: int = 0) -> None:
        self.rules = rules
        self.earlier_tokens = 0
        self._begin(versions, step)

    def _begin(self, versions: Sequence[int], step: int) -> None:
        self.step = self._start_step = step
        self.tokens = 0
        self._is_unsure = False  # whether the units of a checkpoint are leased to this incarnation
        self._calls = dict[int, int]()  # by fragment, the calls that wait for that
        self.fragments, rules = [FragmentWork(version) for version in versions], self.rules
        self._rounds = HALVES[type(rules.quorum)].learner(rules.quorum, rules, self.fragments, step)

    @property
    def steps(self) -> int:
        """Inner steps taken since the start, or since `load_state_dict`."""
        return self.step - self._start_step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner holds."""
        return tuple(work.version for work in self.fragments)

    @property
    def received_versions(self) -> tuple[int, ...]:
        """The newest version of each fragment that this learner holds or has received."""
        return tuple(max((work.version, *work.received)) for work in self.fragments)

    @property
    def newest(self) -> tuple[int, ...]:
        """By fragment, the version that counts as the global model: the adopted one, or a newer received one."""
        return tuple(self._rounds.newest(fragment) for fragment in range(len(self.fragments)))

    # --- out ----------------------------------------------------------------------------------------------------------

    def stepped(self, tokens: int, *, units: Ranges = (), sync_every: int | None = None) -> tuple[Send, ...]:
        """An inner step on `tokens` tokens; returns the fragments to send after it.

        `units`: the leased units of data of these tokens (`protocol.leases`).
        `sync_every`: inner steps from this learner's push to its next, if it has a pace of its own; None: the
            schedule's H.
        """
        self.step += 1
        self.tokens += tokens
        for work in self.fragments:
            if work.is_held:
                work.stepped(tokens, units)
        due = (fragment for fragment in self._rounds.due(self.step) if self.fragments[fragment].is_held)
        sends = [self._send(fragment, sync_every) for fragment in due]
        return tuple(send for send in sends if send is not None)

    def called(self, fragment: int, version: int) -> Send | None:
        """The syncer calls for a contribution to a fragment, which is at this version.

        Returns None if none can be sent now: the work stays pending. While it is unknown which units of a checkpoint
        are leased to this incarnation, the answer to the call waits for `keep_units`.
        """
        if not self.fragments[fragment].is_held:
            return None
        if self._is_unsure and self.fragments[fragment].has_units:
            self._calls[fragment] = version
            return None
        return self._send(fragment, None) if self._rounds.called(fragment, version) else None

    def _send(self, fragment: int, sync_every: int | None) -> Send | None:
        round_ = self._rounds.next_round(fragment)
        if round_ is None:
            return None
        self._rounds.sent(fragment, self.step, sync_every)
        return self.fragments[fragment].offer(fragment, round_, apply_at=self.step + self.rules.schedule.overlap)

    def credit(self, tokens: int) -> None:
        """Tokens of a step whose gradients were merged before it was taken (`exchanged="gradients"`)."""
        self.tokens += tokens
        for work in self.fragments:
            if work.is_held:
                work.ledger.trained += tokens
                work.ledger.merged += tokens

    # --- in -----------------------------------------------------------------------------------------------------------

    def received(self, fragment: int, version: int, merged: int) -> tuple[InFlight, ...]:
        """A published version was received and decoded.

        `merged`: this learner's contributions up to this number are in this version or an earlier one, unless they were
        rejected; 0: none is. Returns the contributions in flight that are newly known to be merged.
        """
        listed = self.fragments[fragment].arrived(version, merged)
        if listed:
            self._rounds.listed(fragment)
        return listed

    def rejected(self, fragment: int, number: int, reason: str) -> InFlight | None:
        """A contribution was rejected: its tokens are discarded, or pending again if the reason is one of `KEPT`.

        Returns the contribution, or None if it is no longer in flight.
        """
        work = self.fragments[fragment]
        flight = next((each for each in work.in_flight if each.number == number and not each.listed), None)
        if flight is None or flight.is_rejected:
            return None
        flight.is_rejected = True
        if reason in KEPT:
            work.take_back(flight)
        else:
            work.ledger.discard(flight.tokens, reason)
        if not self._rounds.rejected(fragment, flight, reason):
            work.in_flight.remove(flight)
        return flight

    @property
    def sends_together(self) -> bool:
        """Whether there are inner steps after which all fragments are sent."""
        return self._rounds.sends_together

    def waiting(self) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of every answer that is due, not received, and blocks the learner."""
        return self._rounds.waiting(self.step)

    def answers_on_their_way(self) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of the answers to contributions in flight, as far as the versions are known
        beforehand."""
        return tuple(
            (fragment, version)
            for fragment, work in enumerate(self.fragments)
            for flight in work.in_flight
            if (version := self._rounds.answer_to(flight)) is not None
        )

    @property
    def has_unanswered(self) -> bool:
        """Whether a contribution is neither in a received version nor rejected."""
        flights = (flight for work in self.fragments for flight in work.in_flight if flight.number > 0)
        return any(not (flight.listed or flight.is_rejected) for flight in flights)

    def adoptions(self) -> tuple[tuple[int, int], ...]:
        """(fragment, version) to adopt at this boundary."""
        versions = ((f, self._rounds.adoption(f, self.step)) for f, work in enumerate(self.fragments) if work.received)
        return tuple((fragment, version) for fragment, version in versions if version is not None)

    def keeps_own(self, fragment: int, version: int) -> bool:
        """Whether adopting this version changes only the learner's anchor, not its parameters."""
        return self._rounds.keeps_own(fragment, version)

    def adopted(self, fragment: int, version: int) -> tuple[InFlight, ...]:
        """The learner has adopted `version`. Returns the contributions that this completes (merged or missed)."""
        work = self.fragments[fragment]
        if version not in work.received:
            raise VersionError(f"fragment {fragment} cannot adopt version {version}: it was not received.")
        keeps_pending = self.rules.keeps_pending or self.keeps_own(fragment, version)
        completed = tuple(flight for flight in work.in_flight if self._rounds.completes(flight, version))
        work.in_flight = [flight for flight in work.in_flight if flight not in completed]
        for flight in completed:
            if not flight.listed and not flight.is_rejected:
                work.ledger.discard(flight.tokens, MISSED)
        if not keeps_pending:
            work.overwrite()
        self._rounds.adopted(fragment, self.step, overwritten=not keeps_pending)
        work.version = version
        work.received = {v for v in work.received if v > version}
        return completed

    # --- a new incarnation, and checkpoints ---------------------------------------------------------------------------

    def rejoined(self, versions: Sequence[int], step: int, *, awaited: bool = False) -> None:
        """Start as a new incarnation: newest versions, a fresh ledger, and the run's step or its own, whichever is
        later. Contributions in flight are void.

        `awaited`: a round waits for the send that follows `step`, so the learner goes back to `step`.
        """
        self.earlier_tokens += self.tokens
        self._begin(versions, step if awaited else max(step, self.step))

    def drained(self) -> None:
        """The learner was evicted for good: it waits for no answer, and its unmerged work is lost."""
        for work in self.fragments:
            work.lose()

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues exactly."""
        fragments = [work.as_dict() for work in self.fragments]
        return {"step": self.step, "tokens": self.tokens, "fragments": fragments, "rounds": self._rounds.state_dict()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a state before `load_state_dict`.

        Raises:
            CheckpointError: the state is of a model cut into another number of fragments, or of a learner that holds
                others.
            ValueError, TypeError or LookupError: it is no state of a learner.
        """
        if len(state["fragments"]) != len(self.fragments):
            raise CheckpointError(
                f"the checkpoint has {len(state['fragments'])} fragments and this model {len(self.fragments)}; "
                "load it with the method it was saved under."
            )
        held = set[int]()
        for fragment, work in enumerate(state["fragments"]):
            if not isinstance(work, Mapping):
                raise TypeError(f"a {type(work).__name__} in place of a fragment")
            if FragmentWork.from_dict(work).is_held:
                held.add(fragment)
        if held != (own_held := {fragment for fragment, work in enumerate(self.fragments) if work.is_held}):
            raise CheckpointError(
                f"the checkpoint is of a learner that holds the fragments {sorted(held)}, and this one holds "
                f"{sorted(own_held)}; load it with the experts that it was saved with."
            )
        require_whole_numbers(state["step"], state["tokens"])
        own = self._rounds.state_dict()
        if state["rounds"].keys() != own.keys():
            raise ValueError(f"rounds with {list(state['rounds'])}")
        for name, values in own.items():
            _require_alike(state["rounds"][name], values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises as `check_state_dict`, before anything is changed."""
        self.check_state_dict(state)
        self.step = self._start_step = state["step"]
        self.tokens = state["tokens"]
        self.fragments[:] = [FragmentWork.from_dict(work) for work in state["fragments"]]
        self._rounds.load_state_dict(state["rounds"])
        self._is_unsure = self.has_units

    @property
    def unsent_units(self) -> tuple[Ranges, ...]:
        """By fragment, the units of data that the next contribution accounts for."""
        return tuple(union(work.pending_units, work.overwritten_units) for work in self.fragments)

    @property
    def has_units(self) -> bool:
        """Whether the next contribution to any fragment accounts for units of data."""
        return any(work.has_units for work in self.fragments)

    def keep_units(self, units: Ranges) -> tuple[Send, ...]:
        """Keep only those units, among those that were not sent, that are leased to this incarnation. Returns the
        answers to calls that waited for that."""
        for work in self.fragments:
            work.keep_units(units)
        calls, self._is_unsure, self._calls = self._calls, False, {}
        sends = [self.called(fragment, version) for fragment, version in sorted(calls.items())]
        return tuple(send for send in sends if send is not None)

    def forget_in_flight(self, *, keep_work: bool) -> tuple[int, ...]:
        """After `load_state_dict`: drop the contributions in flight that no received version lists, unless their
        answers are in the checkpoint.

        `keep_work`: no syncer has them, so their work is pending again; otherwise it is lost with the old incarnation.
        Returns the fragments that had any.
        """
        return tuple(
            fragment
            for fragment, work in enumerate(self.fragments)
            if all(self._rounds.answer_to(flight) is None for flight in work.in_flight)
            and work.forget(keep_work=keep_work)
        )

    def take_back(self) -> tuple[tuple[int, int], ...]:
        """The learner is stopped while it waits: the work of contributions is pending again if the versions of their
        answers are known beforehand and not received. If the syncer still merges one, the run continues without this
        incarnation, and the next one adopts the newest version. Returns (fragment, number) of each."""
        taken = []
        for fragment, work in enumerate(self.fragments):
            for flight in list(work.in_flight):
                answer = self._rounds.answer_to(flight)
                if answer is None or answer in work.received:
                    continue
                work.in_flight.remove(flight)
                if not flight.is_rejected:
                    work.take_back(flight)
                    taken.append((fragment, flight.number))
        return tuple(taken)

    def reincarnated(self) -> None:
        """After `load_state_dict`, under a new incarnation: keep the work, and forget its tokens.

        The syncer has counted the pending tokens of the old incarnation as lost, and counts an incarnation's tokens
        from 0.
        """
        self.tokens = 0
        for work in self.fragments:
            work.forget_tokens()


def _require_alike(found: Sequence[object], own: Sequence[object]) -> None:
    """Check for one value of the same type per fragment; None and a number count as one type."""
    if len(found) != len(own):
        raise ValueError(f"rounds with {len(found)} values, not {len(own)}")
    for each, like in zip(found, own, strict=True):
        if type(each) not in ((int, type(None)) if like is None else (type(like),)):
            raise TypeError(f"rounds with {each!r}")
