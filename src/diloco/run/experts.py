"""Which experts of a mixture each learner trains, by what it holds and its contributions since the driver began."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Member
from diloco.protocol.units import Ranges, as_lists, units_of
from diloco.run.ports import MergedRound


class ExpertStatus:
    """Of one run.

    Arguments:
        of_tensors: by fragment, the expert that each tensor belongs to (`Fragmentation.experts_of`); empty: the
            fragment has no experts.
    """

    def __init__(self, of_tensors: Sequence[Sequence[int]]) -> None:
        self._of_tensors = of_tensors
        self._groups = {fragment: frozenset(own) for fragment, own in enumerate(of_tensors) if own}
        self._trained: dict[str, dict[int, tuple[int, frozenset[int]]]] = {}  # by fragment, with the incarnation

    @property
    def trunk(self) -> list[int]:
        """The fragments without experts."""
        return [fragment for fragment in range(len(self._of_tensors)) if fragment not in self._groups]

    def contributed(self, c: Contribution) -> None:
        """A contribution was accepted."""
        if c.fragment in self._groups:
            self._trained.setdefault(c.learner, {})[c.fragment] = c.incarnation, self._trained_in(c)

    def merged(self, merged: MergedRound[Any, Any]) -> list[Ranges]:
        """Per contributor to a merge, the experts of the fragment that it trains; empty: the fragment has none."""
        contributions = merged.action.contributions
        if merged.action.fragment not in self._groups:
            return []
        return [
            units_of(expert for c in contributions if c.learner == learner for expert in self._trained_in(c))
            for learner in merged.update.contributors
        ]

    def of(self, member: Member) -> list[list[int]] | None:
        """The experts that a member trains, as ranges (first, stop); None: it holds all and has contributed to no
        group."""
        own = self._known(member) if member.held is None else self._trained_by(member)
        return as_lists(units_of(expert for each in own.values() for expert in each)) if own else None

    def held_by(self, member: Member) -> Ranges | None:
        """The experts that a member holds, as ranges (first, stop); None: the whole model."""
        if member.held is None:
            return None
        return units_of(expert for f, group in self._groups.items() if member.holds(f) for expert in group)

    def as_dict(self, members: Collection[Member]) -> dict[str, Any] | None:
        """Plain values: the `number` of experts, and as ranges `untrained`, those that no member trains. None: the run
        is of no mixture."""
        if not self._groups:
            return None
        trained = [self._trained_by(member) for member in members if not member.finished]
        untrained = {
            expert
            for fragment, group in self._groups.items()
            if trained
            for expert in group.difference(*(each[fragment] for each in trained))
        }
        return {"number": 1 + max(map(max, self._groups.values())), "untrained": as_lists(units_of(untrained))}

    def _trained_by(self, member: Member) -> dict[int, frozenset[int]]:
        """By group; all that it holds, until it has contributed there."""
        known, nothing = self._known(member), frozenset[int]()
        return {f: known.get(f, group) if member.holds(f) else nothing for f, group in self._groups.items()}

    def _known(self, member: Member) -> dict[int, frozenset[int]]:
        found = self._trained.get(member.learner, {}).items()
        return {fragment: own for fragment, (incarnation, own) in found if incarnation == member.incarnation}

    def _trained_in(self, c: Contribution) -> frozenset[int]:
        of_tensors = self._of_tensors[c.fragment]
        return frozenset(of_tensors if c.tensors is None else (of_tensors[index] for index in c.tensors))
