"""What a learner does when: sans-I/O bookkeeping of one learner's fragments, versions and tokens.

    events:   stepped(tokens) · called(fragment) · received(fragment, version, …) · rejected(fragment, round, …) · rejoined(versions, step)
    answers:  which fragments to send · which answers to wait for · which versions to adopt

One boundary after every inner step:

    sends = core.stepped(tokens)          measure and offer these displacements; sends come before applications
    send = core.called(f)                 the same for a fragment that the syncer calls
    while core.waiting(): …               feed `received` and `rejected` until nothing due is missing (only where the method waits)
    for f, v in core.adoptions(): …       the global fragment f becomes version v on this learner; core.adopted(f, v)

Who says when a fragment is sent decides what is adopted when:

    scheduled   after the schedule's steps; a version is adopted τ steps after the send that it answers
    called      at the boundary after the syncer's call; every version is adopted at the boundary after it has come
    pushed      after H own steps of work; the newest version is adopted once the learner's own work is in one

No tensor, clock, socket or thread is in here; `diloco.Learner` drives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from diloco.core.flights import Flight, FragmentBook, Send
from diloco.core.method import Method
from diloco.core.quorum import AllLive, Called
from diloco.core.schedule import Schedule
from diloco.core.contribution import DROPPED, KEPT, MISSED, OUTLIER, TWICE
from diloco.errors import CheckpointError, VersionError

Mode = Literal["scheduled", "called", "pushed"]


def mode_of(method: Method) -> Mode:
    """Who says when a fragment is sent."""
    if isinstance(method.quorum, AllLive):
        return "scheduled"
    return "called" if isinstance(method.quorum, Called) else "pushed"


class LearnerCore:
    """The bookkeeping of one learner.

    Arguments:
        schedule: which fragment is sent after which inner step, and τ.
        versions: the version of each fragment that the learner holds.
        wait: the method's answer to "does a learner block when an answer is due and not there?".
        keeps_pending: the adoption rule's; False discards the tokens trained between a send and its answer.
        step: the inner step to start from; a late joiner starts at the run's.
        mode: who says when a fragment is sent.
    """

    def __init__(
        self,
        schedule: Schedule,
        versions: Sequence[int],
        *,
        wait: bool = True,
        keeps_pending: bool = False,
        step: int = 0,
        mode: Mode = "scheduled",
    ) -> None:
        self.schedule = schedule
        self.wait = wait
        self.keeps_pending = keeps_pending
        self.mode = mode
        self.step = step
        self.tokens = 0
        self.books = self._new_books(versions)

    def _new_books(self, versions: Sequence[int]) -> list[FragmentBook]:
        return [
            FragmentBook(version, push_at=self.schedule.next_send(f, self.step)) for f, version in enumerate(versions)
        ]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner holds."""
        return tuple(book.held for book in self.books)

    def stepped(self, tokens: int, *, sync_every: int | None = None) -> tuple[Send, ...]:
        """One more inner step on `tokens` tokens; returns the fragments to send after it.

        `sync_every`: where learners push, the inner steps from this push to the next; None: the schedule's H.
        """
        self.step += 1
        self.tokens += tokens
        for book in self.books:
            book.stepped(tokens)
        if self.mode == "scheduled":
            sends = [self._send(f) for f in self.schedule.sends(self.step)]
        elif self.mode == "pushed":
            sends = [self._push(f, sync_every) for f, book in enumerate(self.books) if book.push_at <= self.step]
        else:
            sends = [self.called(f) for f, book in enumerate(self.books) if book.asked]
        return tuple(send for send in sends if send is not None)

    def called(self, fragment: int, version: int | None = None) -> Send | None:
        """The syncer asks for a fragment, which is at this version: all work on it since the last send or adoption.

        None if the version held was answered already: what was trained since stays pending. Where the call is for a newer version
        (a call may be quicker than the version itself), and where there is no work yet, it is answered after the next step that can.
        """
        book = self.books[fragment]
        if book.flights and book.flights[-1].base == book.held:
            book.asked = book.asked or (version is not None and version > book.held)
            return None
        book.asked = book.pending_steps == 0
        return None if book.asked else self._offer(fragment, book.held)

    def _push(self, fragment: int, sync_every: int | None) -> Send | None:
        book = self.books[fragment]
        if book.flights and book.flights[-1].base == book.held:
            return None  # the answer to the last one is still on its way; the work goes with the next
        book.push_every = sync_every or self.schedule.sync_every_at(self.step + 1)
        book.push_at = self.step + book.push_every
        book.answered = False
        return self._offer(fragment, book.held)

    def credit(self, tokens: int) -> None:
        """Tokens of a step whose gradients were merged before it was taken (`exchanged="gradients"`)."""
        self.tokens += tokens
        for book in self.books:
            book.ledger.trained += tokens
            book.ledger.merged += tokens

    def _send(self, fragment: int) -> Send | None:
        book = self.books[fragment]
        # An overlap of whole intervals keeps their answers on their way while the next displacement is sent. Any further one is late:
        # the work stays pending and goes with the next send.
        published = book.held
        round_ = book.flights[-1].round + 1 if book.flights else published
        if round_ - published > self.schedule.intervals_in_flight:
            return None
        return self._offer(fragment, round_)

    def _offer(self, fragment: int, round_: int) -> Send:
        return self.books[fragment].offer(fragment, round_, apply_at=self.step + self.schedule.overlap)

    def received(self, fragment: int, version: int, merged_round: int) -> tuple[Flight, ...]:
        """A published version is here, decoded. `merged_round`: this learner's contributions up to that round are in it or in an
        earlier version; −1: none is. Returns the flights of which that is news."""
        return self.books[fragment].arrived(version, merged_round)

    def rejected(self, fragment: int, round_: int, reason: str) -> bool:
        """A contribution was refused: its tokens are discarded, or pending again if it only came out of step.

        Where the round goes on without it, its answer is waited for all the same: a learner that ran ahead would be late again.
        Returns whether it was still in flight.
        """
        book = self.books[fragment]
        flight = next((each for each in book.flights if each.round == round_ and not each.listed), None)
        if flight is None:
            return False
        if reason in KEPT:
            book.take_back(flight)
        else:
            book.ledger.discard(flight.tokens, reason)
        if reason in (DROPPED, MISSED, TWICE, OUTLIER) and self.mode == "scheduled":
            flight.tokens, flight.kept = 0, reason == DROPPED
            return True
        book.flights.remove(flight)
        book.answered = True
        return True

    def keeps_own(self, fragment: int, version: int) -> bool:
        """Whether the learner's contribution to this version was dropped: it goes on from its own parameters, and only what is measured
        next starts from the new version."""
        return any(flight.kept and flight.round + 1 == version for flight in self.books[fragment].flights)

    def waiting(self) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of every answer that is due now, not here, and waited for."""
        if not self.wait:
            return ()
        if self.mode == "pushed":
            return tuple(
                (f, b.held + 1) for f, b in enumerate(self.books) if b.flights and not (b.answered and b.received)
            )
        return tuple((f, v) for f, v in self._due() if v not in self.books[f].received and not self._overtaken(f, v))

    def adoptions(self) -> tuple[tuple[int, int], ...]:
        """(fragment, version) to adopt at this boundary.

        Scheduled: a fragment in flight takes exactly the version its flight is for, when it is due. One with nothing in flight (a
        joiner between two rounds, a rejected contribution) takes the newest version there is.
        """
        due = dict(self._due()) if self.mode == "scheduled" else {}
        adopt: list[tuple[int, int]] = []
        for f, book in enumerate(self.books):
            newest = max(book.received, default=None)
            if f in due and due[f] in book.received:
                adopt.append((f, due[f]))
            elif newest is not None and self._takes_newest(book, f in due and self._overtaken(f, due[f])):
                adopt.append((f, newest))
        return tuple(adopt)

    def _takes_newest(self, book: FragmentBook, overtaken: bool) -> bool:
        match self.mode:
            case "scheduled":
                return not book.flights or overtaken
            case "called":
                return True
            case "pushed":
                return book.answered

    def adopted(self, fragment: int, version: int) -> tuple[Flight, ...]:
        """The learner now holds `version`; returns the flights this settles (listed, or missed for good)."""
        book = self.books[fragment]
        if version not in book.received:
            raise VersionError(f"fragment {fragment} cannot adopt version {version}: it was not received.")
        # Where nobody blocks on a round, a contribution that is not in this version is late, and goes into a later one.
        scheduled = self.mode == "scheduled"
        keeps_pending = self.keeps_pending or self.keeps_own(fragment, version)
        settled = tuple(flight for flight in book.flights if (flight.round < version if scheduled else flight.listed))
        book.flights = [flight for flight in book.flights if flight not in settled]
        for flight in settled:
            if not flight.listed and not flight.kept:
                book.ledger.discard(flight.tokens, MISSED)
        if not keeps_pending:
            book.overwrite()
            if self.mode == "pushed":
                # Work begins here; after a late answer the next push would have next to none in it.
                book.push_at = self.step + book.push_every
        book.held, book.answered = version, False
        book.received = {v for v in book.received if v > version}
        return settled

    def rejoined(self, versions: Sequence[int], step: int, *, awaited: bool = False) -> None:
        """A new incarnation: newest versions, a fresh ledger, and the run's step or its own, whichever is later. What was on its way
        went with the old one.

        `awaited`: a round waits for the send that follows `step`, so that the learner takes the steps after it again.
        """
        self.step = step if awaited else max(step, self.step)
        self.tokens = 0
        self.books = self._new_books(versions)

    def _due(self) -> list[tuple[int, int]]:
        return [(f, book.flights[0].round + 1) for f, book in enumerate(self.books)
                if book.flights and book.flights[0].apply_at <= self.step]  # fmt: skip

    def _overtaken(self, fragment: int, version: int) -> bool:
        """The version waited for will not come any more: a newer one that was not ours to contribute to is here."""
        return any(v > version for v in self.books[fragment].received) and version not in self.books[fragment].received

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues exactly."""
        return {"step": self.step, "tokens": self.tokens, "books": [book.as_dict() for book in self.books]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: the state is of a model cut into another number of fragments.
        """
        if len(state["books"]) != len(self.books):
            raise CheckpointError(
                f"the checkpoint has {len(state['books'])} fragments and this model {len(self.books)}; "
                "load it with the method it was saved under."
            )
        self.step, self.tokens = state["step"], state["tokens"]
        self.books = [FragmentBook.from_dict(book) for book in state["books"]]

    def forget_flights(self, *, keep_work: bool) -> tuple[int, ...]:
        """After `load_state_dict`, where nobody blocks: whose contributions nobody has heard of will not hear of them any more.

        `keep_work`: nobody has them, so their work is pending again. Otherwise all went with the old incarnation, and work begins
        here. Returns the fragments that this is about.
        """
        if self.mode == "scheduled":
            return ()
        return tuple(f for f, book in enumerate(self.books) if book.forget_flights(keep_work=keep_work))

    def reincarnated(self) -> None:
        """After `load_state_dict`, under a new incarnation: the work goes on, but its tokens count no more.

        A syncer counted what the old incarnation had pending as lost with it, and counts an incarnation's tokens from 0.
        """
        self.tokens = 0
        for book in self.books:
            book.forget_tokens()
