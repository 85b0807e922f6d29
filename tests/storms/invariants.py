"""What holds in every storm, after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.chaos.versions import BrokenInvariantError, Versions, require

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import digest
from diloco.protocol.accounting import Key, key_of
from diloco.protocol.contribution import NOTHING, VERSION
from diloco.protocol.learner import LearnerCore
from diloco.protocol.syncer import SyncerCore
from diloco.run.global_model import FragmentAnswer
from diloco.run.ports import MergedRound, SavedRun


@dataclass
class Ledger:
    """What was durable and what was seen, over all processes.

    Attributes:
        versions: of all fragments.
        merged: contributions that are in a durable version, with that version.
        verdicts: that are durable: why a contribution is rejected; None: it is merged.
        epochs: in which versions became durable, by fragment and version.
        held_by: the fragments that each process holds, by its number.
        held_as: likewise, by learner and incarnation.
        trained: tokens of each learner in each fragment that it held, counted or not.
    """

    versions: Versions = field(default_factory=Versions)
    merged: dict[Key, int] = field(default_factory=dict)
    verdicts: dict[Key, str | None] = field(default_factory=dict)
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    held_by: dict[int, frozenset[int]] = field(default_factory=dict)
    held_as: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_rounds: int = 0

    def recorded(self, verdicts: dict[Key, str | None]) -> None:
        """These verdicts are durable."""
        for key, reason in verdicts.items():
            before = self.verdicts.setdefault(key, reason)
            require(before == reason, f"the verdict on {key} was {before}, and is {reason}")

    def durable(self, merged: MergedRound[GlobalFragment, object], epoch: int) -> None:
        """A version is durable: it follows the one before, and no contribution is in two."""
        held, fragment = merged.held, merged.update.fragment
        require(held.digest == digest(held.theta), f"fragment {fragment}: a wrong digest is durable")
        self.versions.durable(fragment, held.version, held.digest)
        self.epochs[fragment, held.version] = epoch
        self.num_rounds += 1
        for c in merged.action.contributions:
            if c.learner in merged.refused:
                continue
            key = key_of(c)
            require(key not in self.merged, f"{key} is merged in versions {self.merged.get(key)} and {held.version}")
            self.merged[key] = held.version

    def initial(self, fragments: tuple[GlobalFragment, ...]) -> None:
        """The model that the run began with is durable."""
        for held in fragments:
            self.versions.initial(held.fragment, held.digest)

    def shown(self, held: GlobalFragment, epoch: int, first: int) -> None:
        """A driver of this epoch, which began with version `first`, shows a version: it is of the one line that was
        published, and this driver has published it."""
        one = held.fragment, held.version
        if self.versions.digests.get(one) != held.digest:
            raise BrokenInvariantError(
                f"version {held.version} of fragment {held.fragment} is shown and not durable with these bits"
            )
        if held.version > first and self.epochs[one] != epoch:
            raise BrokenInvariantError(
                f"version {held.version} of fragment {held.fragment} is shown in epoch {epoch}, and was published in "
                f"epoch {self.epochs[one]}"
            )

    def restored(self, saved: SavedRun[GlobalFragment]) -> None:
        """A driver begins with what was durable: no version is lost."""
        for held in saved.fragments:
            self.versions.restored(held.fragment, held.version, held.digest)

    def fetched(
        self, fragment: int, base: int, fetched: FragmentAnswer[GlobalFragment, object], num_due: int, first: int
    ) -> None:
        """A driver, which began with version `first`, answers a fetch: an update, if it has published so few after
        `base`."""
        newest = fetched.held.version
        is_kept = max(first, newest - num_due) <= base < newest
        require(
            fetched.payload is not None or not is_kept,
            f"the update of fragment {fragment} from {base} to {base + 1} is not kept at {newest}",
        )
        require(
            fetched.payload is None or (fetched.update.base, fetched.update.version) == (base, base + 1),
            f"the update that follows version {base} of fragment {fragment} is {fetched.update}",
        )

    def held(self, learner: str, held: GlobalFragment) -> None:
        """A learner holds the bits that were published."""
        self.versions.held(learner, held.fragment, held.version, digest(held.theta))

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
        self.told(learner, incarnation, fragment, number, reason)

    def told(self, learner: str, incarnation: int, fragment: int, number: int, reason: str | None) -> None:
        """A learner is told a verdict: it is durable."""
        key = learner, incarnation, fragment, number
        require(
            key in self.verdicts and self.verdicts[key] == reason,
            f"{key} is told the verdict {reason}, and {self.verdicts.get(key, 'none')} is durable",
        )


def check_dealt(core: SyncerCore, sizes: Mapping[str, int]) -> None:
    """Of learners whose sets are dealt, members have one, sets keep their sizes, and no group that has too few holders
    could have one of another group's.

    Arguments:
        sizes: by learner, the number of groups that it is dealt; 0: its set is fixed.
    """
    dealing, others = core.dealing, []
    for name, member in core.members.items():
        require((name in dealing.sets) == (sizes[name] > 0), f"{name} is to be dealt {sizes[name]}: {dealing.sets}")
        if name not in dealing.sets:
            others.append([group for group in range(dealing.num_groups) if member.holds(group)])
    for name, own in dealing.sets.items():
        require(len(own) == sizes[name], f"{name} was dealt {own}, not {sizes[name]} groups")
    promised = dealing.sets.keys() - core.members.keys()
    require(promised <= dealing._promised_until.keys(), f"{promised} have sets, and are neither members nor expected")
    turn = min(it.version for it in core.fragments[dealing.num_groups :]) // dealing.every if dealing.every else 0
    require(dealing.saved()["turn"] == turn, f"turn {dealing.saved()['turn']} where it is {turn}")
    count = Counter(group for own in (*dealing.sets.values(), *others) for group in own)
    for own in dealing.sets.values():
        lacking = [it for it in range(dealing.num_groups) if it not in own and count[it] < dealing.copies]
        spare = [it for it in own for few in lacking if count[it] >= count[few] + 2]
        require(not spare, f"{count} learners hold each group; one with {own} could hold one of {lacking} for {spare}")


def check_learner(name: str, core: LearnerCore, held: frozenset[int]) -> None:
    """The learner's ledger balances: what is pending is in its hands or in flight. `held`: the fragments that it holds;
    of the others it has nothing."""
    for fragment, work in enumerate(core.fragments):
        in_flight = 0
        if (work.version != NOTHING) != (fragment in held) or work.ledger.trained != core.tokens * (fragment in held):
            raise BrokenInvariantError(f"{name}, {core.tokens} tokens, holds {sorted(held)}; {fragment} has {work}")
        for flight in work.in_flight:
            if not flight.listed and not flight.is_rejected:
                in_flight += flight.tokens
        if work.ledger.pending != work.pending_tokens + in_flight:
            raise BrokenInvariantError(
                f"{name}, fragment {fragment}: {work.ledger} has not {work.pending_tokens} pending and "
                f"{in_flight} in flight"
            )
