"""A learner's contributions until their verdicts: which to send next, and which are merged.

A restarted syncer may lack contributions that the process before it acknowledged. So all contributions without a
verdict are sent once to each new process, in ascending order of their numbers. Verdicts are durable: a contribution
with a verdict is never sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco.protocol.contribution import Contribution, Verdict


@dataclass
class _Offer:
    """`boot`: the process of the syncer that has acknowledged it; None: none has."""

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
        """The first one that this process of the syncer has not acknowledged; None: it has all."""
        return next((offer.contribution for offer in self._offers.values() if offer.boot != boot), None)

    def acknowledged(self, c: Contribution, boot: int) -> None:
        """This process of the syncer has it."""
        if (offer := self._offers.get((c.fragment, c.number))) is not None:
            offer.boot = boot

    def take(self, verdicts: Iterable[Verdict]) -> list[tuple[Verdict, Contribution]]:
        """Take in verdicts. Returns the new ones, by fragment and number, each with its contribution."""
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
        """The highest number that is merged in this version or an earlier one, as far as is known; 0: none is. Versions
        only ascend."""
        merged = self._merged[fragment]
        highest = max(number for at, number in merged if at <= version)
        self._merged[fragment] = [(0, highest), *((at, number) for at, number in merged if at > version)]
        return highest

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """Those without a verdict."""
        return tuple(offer.contribution for offer in self._offers.values())
