"""The global model of a run: each fragment's newest version, and the newest updates that led to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from diloco.core.update import Update
from diloco.errors import LayoutError
from diloco.protocol.contribution import Verdict
from diloco.run.ports import H, MergedRound, ModelLayout, P

KEPT_UPDATES = 3
"""The most updates of a fragment that are kept encoded in memory, for learners that are behind: as many as together
have fewer bytes than the fragment itself, but no fewer than the versions by which the schedule, or a learner's own
overlap, lets learners be behind. An update is dropped earlier once all learners have sent work based on its version."""


@dataclass(frozen=True)
class FragmentAnswer(Generic[H, P]):
    """The answer to a fetch of a fragment.

    Attributes:
        update: the description of the version.
        payload: of the update; None: the whole fragment is sent, losslessly.
        held: the fragment's newest version.
        verdicts: on the contributions to the fragment of the learner that fetches it, up to this version.
    """

    update: Update
    payload: P | None
    held: H
    verdicts: tuple[Verdict, ...] = ()


@dataclass
class _Fragment(Generic[H, P]):
    held: H
    contributors: tuple[str, ...]
    updates: deque[tuple[Update, P]] = field(default_factory=deque)


class GlobalModel(Generic[H, P]):
    """All fragments, and the frozen parameters and buffers.

    Arguments:
        fragments, contributors: the newest version of each fragment, and the learners whose work it merged.

    Attributes:
        layout: of the fragments.
        static: a safetensors file.
        newest: the last update published by this driver.
    """

    def __init__(
        self, layout: ModelLayout, static: bytes, fragments: Sequence[H], contributors: Sequence[tuple[str, ...]]
    ) -> None:
        self.layout = layout
        self.static = static
        self.newest: Update | None = None
        self._fragments: list[_Fragment[H, P]] = [
            _Fragment(*each) for each in zip(fragments, contributors, strict=True)
        ]

    def take(self, merged: MergedRound[H, P], intervals_in_flight: int) -> None:
        """A new version is published.

        `intervals_in_flight`: answers that a learner may have outstanding for a fragment when it sends the next
        contribution.
        """
        fragment = self._fragments[merged.update.fragment]
        fragment.held, fragment.contributors = merged.held, merged.update.contributors
        fragment.updates.append((merged.update, merged.payload))
        num_shorter = (4 * self.layout.fragments[merged.update.fragment].numel - 1) // merged.num_bytes
        num_kept = max(1 + intervals_in_flight, min(KEPT_UPDATES, num_shorter))
        while len(fragment.updates) > num_kept:
            fragment.updates.popleft()
        self.newest = merged.update

    def drop_updates(self, index: int, version: int) -> None:
        """Drop the updates of a fragment up to this version, which all learners have."""
        updates = self._fragments[index].updates
        while updates and updates[0][0].version <= version:
            updates.popleft()

    def held(self, index: int) -> H:
        """The newest version of a fragment.

        Raises:
            LayoutError: there is no such fragment.
        """
        if not 0 <= index < len(self._fragments):
            raise LayoutError(
                f"the run has fragments 0 to {len(self._fragments) - 1}, not {index}; use the run's layout."
            )
        return self._fragments[index].held

    @property
    def versions(self) -> tuple[int, ...]:
        """The published version of each fragment."""
        return tuple(fragment.held.version for fragment in self._fragments)

    @property
    def contributors(self) -> list[tuple[str, ...]]:
        """The contributors of each fragment's newest version."""
        return [fragment.contributors for fragment in self._fragments]

    def fetch(self, index: int, base: int) -> FragmentAnswer[H, P]:
        """The update that follows version `base`, encoded; the newest whole fragment if that update is not kept.

        Raises:
            LayoutError: there is no such fragment.
        """
        held = self.held(index)
        fragment = self._fragments[index]
        for update, payload in fragment.updates:
            if update.base == base:
                return FragmentAnswer(update, payload, held)
        whole = Update(
            index, held.version - 1, held.version, fragment.contributors, (), 1.0, held.digest, lossless=True
        )
        return FragmentAnswer(whole, None, held)
