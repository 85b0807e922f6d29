"""What holds in every storm, after every event."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.core.contribution import VERSION, Contribution
from diloco.core.held import HeldFragment
from diloco.core.layout import digest
from diloco.core.learner import LearnerCore
from diloco.core.syncer import SyncerCore
from diloco.run.ports import MergedRound, SavedRun


class BrokenInvariantError(AssertionError):
    """Something that must hold does not."""


def require(holds: bool, sentence: str) -> None:
    """Raises BrokenInvariantError."""
    if not holds:
        raise BrokenInvariantError(sentence)


@dataclass
class Ledger:
    """What was durable and what was seen, over all processes.

    Attributes:
        digests: of each fragment's versions that were durable, by (fragment, version).
        shown: the newest version of each fragment that a driver has published.
        merged: contributions that are in a durable version, with that version.
    """

    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    merged: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    num_rounds: int = 0

    def durable(self, merged: MergedRound[HeldFragment, object]) -> None:
        """A version is on the disk: it follows the one before, and no contribution is in two."""
        held, fragment = merged.held, merged.update.fragment
        require(
            (fragment, held.version - 1) in self.digests, f"version {held.version} of fragment {fragment} follows none"
        )
        require(
            (fragment, held.version) not in self.digests,
            f"version {held.version} of fragment {fragment} is there twice",
        )
        require(held.digest == digest(held.theta), f"fragment {fragment}: a wrong digest is on the disk")
        self.digests[fragment, held.version] = held.digest
        self.num_rounds += 1
        for c in merged.action.contributions:
            if c.learner in merged.refused:
                continue
            key = _key(c)
            require(key not in self.merged, f"{key} is merged in versions {self.merged.get(key)} and {held.version}")
            self.merged[key] = held.version

    def initial(self, fragments: tuple[HeldFragment, ...]) -> None:
        """The model that the run began with is on the disk."""
        for held in fragments:
            require((held.fragment, 0) not in self.digests, "the run was initialised twice")
            self.digests[held.fragment, 0] = held.digest

    def published(self, fragment: int, version: int) -> None:
        """A driver shows a version: it is durable, and shown versions never go back."""
        require(
            (fragment, version) in self.digests, f"version {version} of fragment {fragment} is shown and not durable"
        )
        require(version >= self.shown.get(fragment, 0), f"fragment {fragment} went back to version {version}")
        self.shown[fragment] = version

    def restored(self, saved: SavedRun[HeldFragment]) -> None:
        """A driver begins with what was durable: no version is lost."""
        for held in saved.fragments:
            newest = max(version for fragment, version in self.digests if fragment == held.fragment)
            require(held.version == newest, f"version {newest} of fragment {held.fragment} is lost")
            require(
                self.digests[held.fragment, newest] == held.digest, f"fragment {held.fragment} has changed on the disk"
            )

    def held(self, learner: str, held: HeldFragment) -> None:
        """A learner holds the bits that were published."""
        known = self.digests.get((held.fragment, held.version))
        require(
            digest(held.theta) == known, f"{learner} holds other bits of fragment {held.fragment} at {held.version}"
        )

    def listed(self, learner: str, incarnation: int, fragment: int, number: int, version: int) -> None:
        """A learner counts a contribution as merged: it is."""
        at = self.merged.get((learner, incarnation, fragment, number))
        require(
            at is not None and at <= version,
            f"{learner} ({incarnation}) counts contribution {number} to fragment {fragment} as merged by "
            f"{version}: {at}",
        )

    def rejected(self, learner: str, incarnation: int, fragment: int, number: int, reason: str) -> None:
        """A learner counts a contribution as rejected: it is in no version, and was measured from one that there is."""
        require(reason != VERSION, f"{learner}'s contribution {number} to fragment {fragment} is of no known version")
        at = self.merged.get((learner, incarnation, fragment, number))
        require(at is None, f"{learner}'s contribution {number} to fragment {fragment}, {reason}, is in version {at}")


def check_syncer(core: SyncerCore) -> None:
    """The ledger of every learner balances: nothing is counted twice, and no token is made up."""
    for learner, account in core.accounting.accounts.items():
        for fragment, ledger in enumerate(account.ledgers):
            acknowledged = sum(
                c.accounted for c in core.accounting.open.values() if c.learner == learner and c.fragment == fragment
            )
            require(
                ledger.pending >= acknowledged,
                f"{learner}, fragment {fragment}: {ledger} has less pending than the {acknowledged} acknowledged",
            )
            if learner not in core.members:
                require(
                    ledger.pending == acknowledged,
                    f"{learner} is gone, and has {ledger.pending} tokens pending of {acknowledged}",
                )


def check_learner(name: str, core: LearnerCore) -> None:
    """The learner's ledger balances: what is pending is in its hands or in flight."""
    for fragment, work in enumerate(core.fragments):
        in_flight = sum(flight.tokens for flight in work.in_flight if not flight.listed and not flight.is_rejected)
        require(
            work.ledger.pending == work.pending_tokens + in_flight,
            f"{name}, fragment {fragment}: {work.ledger} has not {work.pending_tokens} pending and "
            f"{in_flight} in flight",
        )


def _key(c: Contribution) -> tuple[str, int, int, int]:
    return c.learner, c.incarnation, c.fragment, c.number
