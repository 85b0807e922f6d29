"""A syncer's books: where each learner's tokens are, and whose work is in which version.

Per learner and fragment, trained = pending + merged + discarded + lost (`core.ledger`). What the syncer has acknowledged is its own until
it is merged or rejected, whatever becomes of the learner; all else is the learner's, and lost with it. What is on disk belongs to the
versions on disk: a round that is being stored counts as merged here, and not yet in the `durable_` copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

from diloco.core.ledger import Ledger
from diloco.core.rounds import FragmentState, Reject, Round
from diloco.core.contribution import KEPT, OUTLIER, Contribution
from diloco.errors import PayloadError

MAX_COUNTED_TOKENS = 2**53
"""Of one learner: JSON, SQLite and a weight hold the number exactly, and the sum over learners too."""


class Books:
    """Arguments:
    fragments: as the syncer sees them; only looked at.
    ledgers: tokens by learner id, one ledger per fragment, as stored. What is pending of learners that are not in `alive` was
        acknowledged before a restart and not merged: it is lost.
    merged_rounds: as `durable_merged_rounds` said.
    alive: tokens that the living incarnations have trained, by learner id.
    """

    def __init__(
        self,
        fragments: Sequence[FragmentState],
        *,
        ledgers: Mapping[str, Sequence[Ledger]],
        merged_rounds: Mapping[str, Sequence[tuple[int, int]]],
        alive: Mapping[str, int],
    ) -> None:
        self._fragments = fragments
        self.ledgers = {learner: list(each) for learner, each in ledgers.items()}
        self.merged_rounds = {learner: list(rounds) for learner, rounds in merged_rounds.items()}
        """By learner, for each fragment: the newest of its contributions that is in a published version, as (incarnation, round)."""
        self._settled: dict[str, int] = {}  # tokens of a learner's earlier incarnations
        for learner, each in self.ledgers.items():
            self._settled[learner] = each[0].trained - alive.get(learner, 0)
            if learner not in alive:
                for ledger in each:
                    ledger.lose()

    # --- learners ---------------------------------------------------------------------------------------------------------

    @property
    def run_tokens(self) -> int:
        """Tokens trained by all learners, living and gone."""
        return sum(each[0].trained for each in self.ledgers.values())

    def begin(self, learner: str) -> None:
        """A new incarnation, which has trained nothing."""
        if learner not in self.ledgers:
            self.ledgers[learner] = [Ledger() for _ in self._fragments]
        self._settled[learner] = self.ledgers[learner][0].trained if self._fragments else 0

    def trained(self, learner: str, tokens: int) -> None:
        """This incarnation has trained `tokens` in all; they only ever grow.

        Raises:
            PayloadError: all its learner's incarnations together would have trained more than can be counted.
        """
        if self._settled[learner] + tokens > MAX_COUNTED_TOKENS:
            raise PayloadError(
                f"{learner!r} would have trained {self._settled[learner] + tokens} tokens, and {MAX_COUNTED_TOKENS} can be counted."
            )
        for ledger in self.ledgers[learner]:
            ledger.trained = max(ledger.trained, self._settled[learner] + tokens)

    def end(self, learner: str) -> None:
        """It is gone: acknowledged contributions stay, the rest of its pending tokens is lost."""
        for fragment, ledger in enumerate(self.ledgers[learner]):
            ledger.lost += ledger.pending - self.acknowledged(learner, fragment)

    # --- contributions ----------------------------------------------------------------------------------------------------

    def acknowledged(self, learner: str, fragment: int) -> int:
        """Tokens that its contributions here account for and its ledger does not count yet."""
        state = self._fragments[fragment]
        found = [c for round_ in state.rounds.values() for c in round_.missed]
        for number, round_ in state.rounds.items():
            if number != state.version or state.phase != "storing":
                found += round_.everything
        return sum(c.accounted for c in found if c.learner == learner)

    def is_counted(self, c: Contribution) -> bool:
        """Whether the tokens of a contribution are in the books already. All that its learner had trained when it was sent is in it
        or was accounted for before, so anything that is left uncounted is its own."""
        ledger = self.ledgers[c.learner][c.fragment]
        trained = self._settled[c.learner] + c.trained
        uncounted = trained - (ledger.trained - ledger.pending) - self.acknowledged(c.learner, c.fragment)
        return uncounted < c.accounted

    def reject(self, c: Contribution, reason: str) -> Reject:
        """Send a contribution back, and count the tokens that go with it."""
        if not self.is_counted(c):
            ledger = self.ledgers[c.learner][c.fragment]
            _count_discards(ledger, c)
            if reason not in KEPT:
                ledger.discard(c.tokens, reason)
        return Reject(c, reason)

    def discard(self, c: Contribution, reason: str) -> None:
        """An acknowledged contribution is given up."""
        _count_discards(self.ledgers[c.learner][c.fragment], c)
        self.ledgers[c.learner][c.fragment].discard(c.tokens, reason)

    # --- versions ---------------------------------------------------------------------------------------------------------

    def merged(self, fragment: int, round_: Round) -> None:
        """A round's tensor work is done."""
        _count_merged(self.ledgers, round_, fragment)

    def published(self, fragment: int, round_: Round) -> None:
        """Its version is visible."""
        _note_merged(self.merged_rounds, fragment, round_, len(self._fragments))

    def merged_round(self, learner: str, incarnation: int, fragment: int) -> int:
        """The newest round of a contribution of this incarnation that is in the published version or an earlier one; −1: none is."""
        last, round_ = self.merged_rounds.get(learner, [(0, -1)] * len(self._fragments))[fragment]
        return round_ if last == incarnation else -1

    def durable_ledgers(self) -> dict[str, list[Ledger]]:
        """Copies of the ledgers as they belong to the versions on disk: a round that is being stored does not count yet."""
        ledgers = deepcopy(self.ledgers)
        for fragment, round_ in self._storing():
            _count_merged(ledgers, round_, fragment, sign=-1)
            for c in round_.refused:
                _count_discards(ledgers[c.learner][fragment], c, sign=-1)
                ledgers[c.learner][fragment].discard(-c.tokens, OUTLIER)
        return ledgers

    def durable_merged_rounds(self) -> dict[str, list[tuple[int, int]]]:
        """`merged_rounds` as they belong to the versions on disk once the one that is being stored is there."""
        merged_rounds = {learner: list(rounds) for learner, rounds in self.merged_rounds.items()}
        for fragment, round_ in self._storing():
            _note_merged(merged_rounds, fragment, round_, len(self._fragments))
        return merged_rounds

    def _storing(self) -> Iterator[tuple[int, Round]]:
        for fragment, state in enumerate(self._fragments):
            if state.phase == "storing":
                yield fragment, state.rounds[state.version]


def _count_merged(ledgers: Mapping[str, Sequence[Ledger]], round_: Round, fragment: int, *, sign: int = 1) -> None:
    for c in round_.everything:
        ledgers[c.learner][fragment].merged += sign * c.tokens
        _count_discards(ledgers[c.learner][fragment], c, sign=sign)


def _count_discards(ledger: Ledger, c: Contribution, *, sign: int = 1) -> None:
    for reason, tokens in c.discarded:
        ledger.discard(sign * tokens, reason)


def _note_merged(
    merged_rounds: dict[str, list[tuple[int, int]]], fragment: int, round_: Round, num_fragments: int
) -> None:
    for c in round_.everything:
        rounds = merged_rounds.setdefault(c.learner, [(0, -1)] * num_fragments)
        rounds[fragment] = max(rounds[fragment], (c.incarnation, c.round))
