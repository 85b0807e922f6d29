"""Invariants of a run's versions and ledgers, for chaos in real time and storms in virtual time: pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class BrokenInvariantError(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, sentence: str) -> None:
    """Raises BrokenInvariantError. Checks after every event raise it themselves: formatting a sentence takes time."""
    if not holds:
        raise BrokenInvariantError(sentence)


@dataclass
class Versions:
    """Versions that were durable and versions that were seen, over all processes.

    Attributes:
        digests: of each fragment's versions that are part of the run, by (fragment, version).
        ever: the digests of all that there ever were, also of those that the run went back behind.
        shown: the newest version of each fragment that a syncer has published.
    """

    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    ever: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    shown: dict[int, int] = field(default_factory=dict)

    def initial(self, fragment: int, digest: str) -> None:
        """A fragment of the run's initial model is durable."""
        require((fragment, 0) not in self.digests, "the run was initialised twice")
        self._put(fragment, 0, digest)

    def durable(self, fragment: int, version: int, digest: str) -> None:
        """A version is durable: it follows the one before."""
        require((fragment, version - 1) in self.digests, f"version {version} of fragment {fragment} follows none")
        require((fragment, version) not in self.digests, f"version {version} of fragment {fragment} is there twice")
        self._put(fragment, version, digest)

    def published(self, fragment: int, version: int) -> None:
        """A syncer publishes a version: it is durable, and published versions never go back."""
        if (fragment, version) not in self.digests:
            raise BrokenInvariantError(f"version {version} of fragment {fragment} is shown and not durable")
        if version < self.shown.get(fragment, 0):
            raise BrokenInvariantError(f"fragment {fragment} went back to version {version}")
        self.shown[fragment] = version

    def restored(self, fragment: int, version: int, digest: str) -> None:
        """A syncer starts with the newest durable version: none is lost."""
        newest = self.newest(fragment)
        require(version == newest, f"version {newest} of fragment {fragment} is lost")
        require(self.digests[fragment, newest] == digest, f"fragment {fragment} has changed on the disk")

    def went_back(self, versions: Sequence[int]) -> int:
        """The state was replaced on purpose by an older one, at these versions; returns how many versions that gave
        up."""
        later = [(fragment, version) for fragment, version in self.digests if version > versions[fragment]]
        for key in later:
            del self.digests[key]
        for fragment, version in enumerate(versions):
            self.shown[fragment] = min(self.shown.get(fragment, 0), version)
        return len(later)

    def newest(self, fragment: int) -> int:
        """The newest durable version."""
        return max(version for each, version in self.digests if each == fragment)

    def held(self, learner: str, fragment: int, version: int, digest: str) -> None:
        """A learner holds the bits that were published."""
        require(
            digest in self.ever.get((fragment, version), ()),
            f"{learner} holds other bits of fragment {fragment} at {version}",
        )

    def _put(self, fragment: int, version: int, digest: str) -> None:
        self.digests[fragment, version] = digest
        self.ever[fragment, version].add(digest)


def check_ledger(what: str, ledger: Mapping[str, int], discarded: Mapping[str, int]) -> None:
    """Every trained token is pending, merged, discarded or lost, and none of these counts is negative."""
    parts = {**{key: ledger[key] for key in ("pending", "merged", "lost")}, **discarded}
    negative = {key: tokens for key, tokens in parts.items() if tokens < 0}
    require(not negative, f"{what}: {negative} tokens")
    total = sum(parts.values())
    require(ledger["trained"] == total, f"{what}: {ledger['trained']} tokens trained, and {total} accounted for")
