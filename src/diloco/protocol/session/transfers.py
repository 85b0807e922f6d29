"""Transfers of a session: a learner's contributions until their verdicts, and the versions that it holds and fetches.

A restarted syncer may lack contributions that the process before it acknowledged. So all contributions without a
verdict are sent once to each new process, in ascending order of their numbers. Verdicts are durable: a contribution
with a verdict is never sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from diloco.protocol.contribution import NOTHING, Contribution, Verdict
from diloco.protocol.members import Claim
from diloco.protocol.session.requests import Fetch


@dataclass
class _Offer:
    """An offered contribution. `boot`: the process of the syncer that acknowledged it; None: none has."""

    contribution: Contribution
    boot: int | None = None


class Outbox:
    """Contributions of one incarnation."""

    def __init__(self, num_fragments: int) -> None:
        self._newest = [0] * num_fragments
        self._merged: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(num_fragments)]  # (version, number)
        self._offers: dict[tuple[int, int], _Offer] = {}  # without a verdict, in the order offered

    def add(self, c: Contribution) -> None:
        """A new contribution; numbers ascend by fragment."""
        self._newest[c.fragment] = c.number
        self._offers[c.fragment, c.number] = _Offer(c)

    def next(self, boot: int) -> Contribution | None:
        """The first contribution that this process of the syncer has not acknowledged; None: it has all."""
        return next((offer.contribution for offer in self._offers.values() if offer.boot != boot), None)

    def acknowledged(self, c: Contribution, boot: int) -> None:
        """This process of the syncer has acknowledged a contribution."""
        if (offer := self._offers.get((c.fragment, c.number))) is not None:
            offer.boot = boot

    def take(self, verdicts: Iterable[Verdict]) -> list[tuple[Verdict, Contribution]]:
        """Record verdicts. Returns the new ones, by fragment and number, each with its contribution."""
        news = []
        for verdict in sorted(verdicts, key=lambda each: (each.fragment, each.number)):
            offer = self._offers.pop((verdict.fragment, verdict.number), None)
            if offer is None:
                continue
            news.append((verdict, offer.contribution))
            if verdict.reason is None:
                self._merged[verdict.fragment].append((verdict.version, verdict.number))
        return news

    @property
    def confirmed(self) -> tuple[int, ...]:
        """By fragment, the highest number up to which the verdicts on all contributions are known."""
        confirmed = list(self._newest)
        for fragment, number in self._offers:
            confirmed[fragment] = min(confirmed[fragment], number - 1)
        return tuple(confirmed)

    def merged_in(self, fragment: int, version: int) -> int:
        """The highest number known to be merged in this version or an earlier one; 0: none is. Versions only ascend."""
        merged = self._merged[fragment]
        highest = max(number for at, number in merged if at <= version)
        self._merged[fragment] = [(0, highest), *((at, number) for at, number in merged if at > version)]
        return highest

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """The contributions without a verdict."""
        return tuple(offer.contribution for offer in self._offers.values())


class ModelCache:
    """The versions in a learner's cache of the global model; the tensors are elsewhere.

    Arguments:
        fragments: that are fetched; None: all of them.

    Attributes:
        held: the version of each fragment that is fetched.
    """

    def __init__(self, num_fragments: int, fragments: Collection[int] | None = None) -> None:
        self.held = [NOTHING] * num_fragments
        self._fragments = sorted(range(num_fragments) if fragments is None else fragments)
        self._published = [NOTHING] * num_fragments
        self._behind: list[int] = []  # fragments with newer versions: those first that have waited longest for a fetch
        self._whole: set[int] = set()  # fragments whose next update led to a wrong digest
        self._calls = set[tuple[int, int]]()
        self._has_static = False

    @property
    def is_complete(self) -> bool:
        """Whether all that the learner holds is fetched."""
        return self._has_static and self._missing is None

    @property
    def _missing(self) -> int | None:
        return next((fragment for fragment in self._fragments if self.held[fragment] == NOTHING), None)

    def has(self, versions: Sequence[int]) -> bool:
        """Whether these are the versions of the fragments that are fetched."""
        return all(self.held[fragment] == versions[fragment] for fragment in self._fragments)

    def published(self, versions: Sequence[int]) -> None:
        """These versions of the fragments are published."""
        for fragment in self._fragments:
            if versions[fragment] > self._published[fragment]:
                self._published[fragment] = versions[fragment]
                if fragment not in self._behind:
                    self._behind.append(fragment)

    def called(self, calls: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Record the open calls, as (fragment, version). Returns the new ones for the newest version."""
        news = [(f, v) for f, v in calls if (f, v) not in self._calls and v >= self._published[f]]
        self._calls = set(calls)
        return news

    def next(self, claim: Claim) -> Fetch | None:
        """The next fetch; None: all newest published versions are fetched."""
        if (missing := self._missing) is not None:
            return Fetch(claim, missing, NOTHING, joining=True)
        if not self._has_static:
            return Fetch(claim, None, NOTHING, joining=True)
        self._behind = [fragment for fragment in self._behind if self.held[fragment] < self._published[fragment]]
        if not self._behind:
            return None
        fragment = self._behind[0]
        return Fetch(claim, fragment, NOTHING if fragment in self._whole else self.held[fragment])

    def fetched(self, fetch: Fetch, version: int) -> None:
        """A fetch brought this version."""
        if fetch.fragment is None:
            self._has_static = True
            return
        self.held[fetch.fragment] = version
        self._whole.discard(fetch.fragment)
        if fetch.fragment in self._behind:  # with a newer version still it is fetched again after the others
            self._behind.remove(fetch.fragment)
            self._behind.append(fetch.fragment)

    def restored(self, versions: Sequence[int]) -> None:
        """The learner holds these versions, from a checkpoint."""
        for fragment in self._fragments:
            self.held[fragment] = versions[fragment]

    def distrust(self, fragment: int) -> None:
        """The update gave other bits than the published ones: fetch the whole fragment."""
        self._whole.add(fragment)
