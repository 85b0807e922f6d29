"""Leases assign units of a run's data to learners, so that each unit is merged once.

**Units.** The training data is `num_units` units (windows, samples). Every pass has its own order, a seeded permutation
that learners know and the syncer does not. Unit u of the run is the one at position u mod num_units of pass
u // num_units. So the run's data is the numbers 0, 1, 2, …, and a lease is a few ranges of them.

**States.** A unit is free, leased or done; in every pass and at any time the three sets partition all units. The syncer
leases the lowest free units: returned units before new ones, and earlier passes before later ones. It never waits for
units that another learner has, not even at the end of a pass.

**Fates.** Work is sent fragment by fragment, so a unit gets a fate in each fragment: "merged", or discarded for a
reason (`protocol.contribution`: overwritten by an adoption, or its contribution was late, an outlier, …). In a fragment
that its learner does not hold its fate is "not held" from the start.

    done        it has a fate in every fragment, and at least one of them is "merged"
    free again  every fragment that its learner holds has discarded it; or its learner left before it had a fate in
                every fragment

No unit is skipped: a unit that is done was merged, and a fragment without it is one in which the method discarded it,
or that its learner did not hold. A unit that returns after some fragments have merged it is merged in these again, and
each such merge is counted as repeated:

    per fragment    Σ fates of done units = done − before
                    merges = fates["merged"] of done units + merged units under lease + repeated

**Durability.** All of this is in the syncer's record. A grant is sent once it is durable, and a fate is in the record
of its version. An acknowledged contribution stays with the syncer after its learner has left, so its units return only
with its verdict; after a restart, once the run is restored.

**Claims.** A learner that continues exactly from a checkpoint, under a new incarnation, has work on units whose lease
ended with the previous incarnation. Its first request claims them. It gets those that are still free, with their fates,
if it holds the same fragments; units that others have leased meanwhile are trained twice, and counted as unclaimed.

No clock, socket or permutation is used here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from diloco.errors import ConfigError, PayloadError
from diloco.protocol.contribution import KEPT, OVERLAP, Contribution, Decided
from diloco.protocol.units import (
    MERGED,
    Ranges,
    RecentMerges,
    UnitFates,
    common,
    count,
    fates_of,
    minus,
    ranges_of,
    split,
    union,
)

MAX_ASKED = 2**20
"""Most units in one request."""

MAX_LEASED = 2**24
"""Most units under lease to one learner; at this limit it gets none until some have their fates."""

UNHELD = "not held"
"""The fate of a unit in a fragment that its learner does not hold."""

MAX_PASSES = 16
"""Most passes in a status: with a small data set, one pass for each unit may have begun."""


@dataclass(frozen=True)
class GroupRules:
    """What the trainers of a run of reinforcement learning agree on (`protocol.groups`).

    Attributes:
        digest: of all settings that workers must share.
        vocab_size: tokens are below it.
        group_size: completions in a group.
        max_prompt_tokens, max_tokens: the longest prompt and completion.
        max_staleness: versions of a fragment after which a group is not trained any more.
        queue: groups that are generated ahead of the trainers, at most.
        inline: rollout workers score their groups; otherwise a group that comes with rewards is refused.
    """

    digest: str
    vocab_size: int
    group_size: int
    max_prompt_tokens: int
    max_tokens: int
    max_staleness: int
    queue: int
    inline: bool = False


@dataclass(frozen=True)
class DataSet:
    """The training data of a run; equal for all learners.

    Attributes:
        num_units: in one pass.
        passes: number of passes until the data ends; 0: unlimited.
        digest: identifies the data and its order.
        unit_tokens: tokens of one unit; the tokens that a model was trained on before the run are its first units. 0:
            unknown, and the run begins with unit 0.
        groups: the units are groups, which `Leases.offer` makes free one by one, and of which a request gets all that
            it asks for or none; None: all units are free from the start.
    """

    num_units: int
    passes: int
    digest: str
    unit_tokens: int = 0
    groups: GroupRules | None = None


@dataclass(frozen=True)
class Ask:
    """A request for a lease.

    Attributes:
        number: 1, 2, 3, … of this incarnation; a repeated number gets the same answer.
        num_units: requested.
        claim: only with number 1: per fragment, the units of an earlier incarnation in the next contribution; empty:
            none.
    """

    number: int
    num_units: int
    data: DataSet
    claim: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class Grant:
    """The answer to a request.

    Attributes:
        number: of the request; 0: of groups, fewer are free than it asks for.
        units: newly leased; empty: none is free, and the data has ended, unless it is of groups.
        claimed: the claimed units that are leased to this incarnation.
    """

    number: int
    units: Ranges
    claimed: Ranges = ()


@dataclass
class Holding(UnitFates):
    """Unfinished units of one incarnation: under lease; or, of an ended incarnation, returned.

    Attributes:
        grant: the newest.
        has_ended: whether the incarnation has ended; remaining units wait for verdicts of acknowledged contributions.
    """

    grant: Grant = Grant(0, ())
    has_ended: bool = False

    def as_list(self) -> list[Any]:
        """Plain values (JSON)."""
        return [self.units, [dict(by_fate) for by_fate in self.fates], astuple(self.grant), self.has_ended]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Holding:
        """Read the values of `as_list`."""
        units, fates, (number, granted, claimed), has_ended = values
        grant = Grant(number, ranges_of(granted), ranges_of(claimed))
        return cls(ranges_of(units), fates_of(fates), grant, has_ended)


@dataclass
class Totals:
    """Counts of units in one fragment.

    Attributes:
        fates: done units by fate.
        merges: merges of a unit into a version.
        repeated: merges of units that were returned later.
    """

    fates: Counter[str] = field(default_factory=Counter)
    merges: int = 0
    repeated: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values (JSON)."""
        return {"fates": dict(self.fates), "merges": self.merges, "repeated": self.repeated}


class Leases:
    """All leases of a run.

    Attributes:
        data: the training data; None: no learner has requested a lease.
        before: number of the run's first units on which its model was trained before the run.
        frontier: all units from this one on are free and were never leased.
        returned: free units below the frontier.
        leases: by learner and incarnation.
        left: by learner, returned units of its earlier incarnations that are still free.
        totals: by fragment.
        num_returned: number of returns of units so far.
        num_unclaimed: claimed units that others had leased meanwhile.
        num_lost: returns of done units, because a version with them was lost.
        recent: the units in the newest versions.
    """

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.data: DataSet | None = None
        self.before = self.frontier = 0
        self.returned: Ranges = ()
        self.leases: dict[tuple[str, int], Holding] = {}
        self.left: dict[str, Holding] = {}
        self.totals = [Totals() for _ in range(num_fragments)]
        self.num_returned = self.num_unclaimed = self.num_lost = 0
        self.recent = RecentMerges(num_fragments)

    # --- leasing ------------------------------------------------------------------------------------------------------

    def ask(
        self, learner: str, incarnation: int, ask: Ask, *, tokens_before: int = 0, held: Collection[int] | None = None
    ) -> Grant:  # fmt: skip
        """Lease units to a learner.

        Arguments:
            tokens_before: tokens on which the run's model was trained before the run.
            held: the fragments that the incarnation holds; None: all of them.

        Raises:
            ConfigError: the learner's data differs from the run's.
            PayloadError: the request is inconsistent.
        """
        self._check_data(learner, ask.data)
        if (rules := (self.data or ask.data).groups) is not None and ask.num_units > rules.queue:
            raise ConfigError(
                f"{learner!r} needs {ask.num_units} groups at once, and the run generates {rules.queue} ahead, as its "
                "first trainer has it; lower rl.groups_per_step, or begin another run with a larger rl.queue."
            )
        lease = self.leases.get((learner, incarnation)) or self._new()
        if 0 < ask.number == lease.grant.number:
            return lease.grant
        if ask.number != lease.grant.number + 1 or not 0 < ask.num_units <= MAX_ASKED:
            raise PayloadError(
                f"{learner!r} asks for lease {ask.number} of {ask.num_units} units after lease {lease.grant.number}; "
                f"number leases 1, 2, 3, … and ask for 1 to {MAX_ASKED} units."
            )
        if (ask.claim and ask.number != 1) or len(ask.claim) not in (0, self._num_fragments):
            raise PayloadError(
                f"{learner!r} claims units in lease {ask.number}; claim all fragments in the first lease."
            )
        if self.data is None:
            self.data = ask.data
            self.before = self.frontier = tokens_before // ask.data.unit_tokens if ask.data.unit_tokens else 0
        num_units = min(ask.num_units, MAX_LEASED - count(lease.units))
        if ask.data.groups is not None and count(self.returned) < num_units:
            if not ask.claim:
                return Grant(0, ())  # nothing has changed: the request is repeated
            num_units = 0
        self.leases[learner, incarnation] = lease
        claimed = self._claim(learner, lease, ask.claim, held) if ask.number == 1 else ()
        units = self._take(num_units)
        unheld = {UNHELD: units}
        fates = [{} if held is None or fragment in held else unheld for fragment in range(self._num_fragments)]
        lease.add(units, fates)
        lease.grant = Grant(ask.number, units, claimed)
        return lease.grant

    def _new(self) -> Holding:
        return Holding((), [{} for _ in range(self._num_fragments)])

    def _check_data(self, learner: str, data: DataSet) -> None:
        if data.num_units < 1:
            raise PayloadError(f"{learner!r} has data of {data.num_units} units; it needs at least one.")
        if self.data is not None and self.data != _with_queue_of(data, self.data):
            raise ConfigError(
                f"{learner!r} has {_described(data)}, but the run has {_described(self.data)}; give all "
                "learners the same data, seed, sequence length and passes, or the same [rl] and [task], or begin "
                "another run with a new run.name."
            )

    def _take(self, num: int) -> Ranges:
        """Take the lowest free units."""
        back, _ = split(self.returned, num)
        self.withdraw(back)
        end = self.frontier + (max(0, num - count(back)) if self.data is None or self.data.groups is None else 0)
        if self.data is not None and self.data.passes:
            end = max(self.frontier, min(end, self.data.passes * self.data.num_units))
        new, self.frontier = ranges_of([(self.frontier, end)]), end
        return union(back, new)

    def _claim(
        self, learner: str, lease: Holding, claim: Sequence[Ranges], held: Collection[int] | None
    ) -> Ranges:  # fmt: skip
        """Lease claimed units to a new incarnation if they are free and every fragment has its work on them."""
        left, wanted = self.left.pop(learner, None) or self._new(), union(*claim)
        got = common(wanted, left.units)
        for fragment, its in enumerate(claim):
            settled, unheld = left.settled(fragment), left.fates[fragment].get(UNHELD, ())
            if held is None or fragment in held:
                got = minus(common(got, union(its, settled)), union(common(its, settled), unheld))
            else:  # it claims the units of a batch in all fragments
                got = common(got, unheld)
        fates = left.taken(got)
        lease.add(got, fates)
        self.returned = minus(self.returned, got)
        self.num_returned -= count(got)
        for totals, by_fate in zip(self.totals, fates, strict=True):
            totals.repeated -= count(by_fate.get(MERGED, ()))
        self.num_unclaimed += count(wanted) - count(got)
        return got

    # --- groups -------------------------------------------------------------------------------------------------------

    def offer(self, units: Ranges) -> None:
        """Make groups free."""
        self.returned = union(self.returned, units)

    def withdraw(self, units: Ranges) -> None:
        """Take units that are free."""
        self.returned = minus(self.returned, units)
        for learner, left in list(self.left.items()):
            left.taken(units)
            if not left.units:
                del self.left[learner]

    def give_up(self, learner: str, incarnation: int, units: Ranges, open_: Iterable[Contribution]) -> Ranges:
        """End the lease of those of these groups that were not sent; returns them."""
        if (lease := self.leases.get((learner, incarnation))) is None:
            return ()
        fates = (its for by_fate in lease.fates for fate, its in by_fate.items() if fate != UNHELD)
        sent = union(_units_of(learner, incarnation, open_), *fates)
        given_up = minus(common(units, lease.units), sent)
        lease.taken(given_up)
        return given_up

    # --- fates --------------------------------------------------------------------------------------------------------

    def check(self, c: Contribution, open_: Iterable[Contribution]) -> None:
        """Check that a new contribution has only units of its incarnation without a fate in its fragment.

        `open_`: the contributions without a verdict.

        Raises:
            PayloadError: it has other units.
        """
        units = union(c.units, c.overwritten)
        if not units:
            return
        lease = self.leases.get((c.learner, c.incarnation)) or self._new()
        sent = _units_of(c.learner, c.incarnation, (it for it in open_ if it.fragment == c.fragment))
        free = minus(lease.units, union(lease.settled(c.fragment), sent))
        if others := minus(units, free):
            raise PayloadError(
                f"{c.learner!r} has work on unit {others[0][0]} and {count(others) - 1} other units of the data in "
                f"fragment {c.fragment}, which are not leased to incarnation {c.incarnation} or were sent before; "
                "nothing of it was counted."
            )
        if common(c.units, c.overwritten):
            raise PayloadError(f"{c.learner!r} sends units as trained and as overwritten; send each in one of the two.")

    def decided(self, c: Contribution, reason: str | None, open_: Iterable[Contribution], *, version: int) -> None:
        """Apply the verdict on a contribution.

        Arguments:
            reason: of its rejection; None: it is merged.
            version: the fragment's newest version, which contains a merged contribution.
        """
        lease = self.leases.get((c.learner, c.incarnation))
        if lease is None or not (c.units or c.overwritten):
            return
        lease.settle(c.fragment, c.overwritten, OVERLAP)
        if reason is None:
            lease.settle(c.fragment, c.units, MERGED)
            self.totals[c.fragment].merges += count(c.units)
            self.recent.merged(c.fragment, version, c.units)
        elif reason not in KEPT:
            lease.settle(c.fragment, c.units, reason)
        self._sort_out(c.learner, c.incarnation, lease, open_)

    def ended(self, learner: str, incarnation: int, open_: Iterable[Contribution]) -> None:
        """End an incarnation: units that are neither done nor acknowledged are returned."""
        if (lease := self.leases.get((learner, incarnation))) is not None:
            lease.has_ended = True
            self._sort_out(learner, incarnation, lease, open_)

    def _sort_out(self, learner: str, incarnation: int, lease: Holding, open_: Iterable[Contribution]) -> None:
        """End the lease of done and of returned units."""
        settled = lease.units
        for fragment in range(self._num_fragments):
            settled = common(settled, lease.settled(fragment))
        out = settled
        if lease.has_ended:
            out = minus(lease.units, _units_of(learner, incarnation, open_))
        done = common(common(settled, out), union(*(by_fate.get(MERGED, ()) for by_fate in lease.fates)))
        back = minus(out, done)
        done_fates = lease.taken(done)
        self.recent.done.add(done, done_fates)
        for totals, by_fate in zip(self.totals, done_fates, strict=True):
            totals.fates.update({fate: count(its) for fate, its in by_fate.items() if its})
        fates = lease.taken(back)
        for totals, by_fate in zip(self.totals, fates, strict=True):
            totals.repeated += count(by_fate.get(MERGED, ()))
        self.returned = union(self.returned, back)
        self.num_returned += count(back)
        if not lease.has_ended:
            return
        if back:
            self.left.setdefault(learner, self._new()).add(back, fates)
        if not lease.units:
            del self.leases[learner, incarnation]

    def lose(self, fragment: int, version: int) -> None:
        """Roll a fragment back to a version after a repair: done units merged into a later version are returned, as far
        as `recent` lists them. There are no leases: no learner is a member."""
        num_merges, lost = self.recent.lose(fragment, version)
        back = common(self.recent.done.units, lost)
        fates = self.recent.done.taken(back)
        for index, (totals, by_fate) in enumerate(zip(self.totals, fates, strict=True)):
            totals.fates.subtract({fate: count(its) for fate, its in by_fate.items()})
            totals.repeated += count(by_fate.get(MERGED, ())) if index != fragment else 0
        here = count(fates[fragment].get(MERGED, ()))
        for left in self.left.values():
            left.forget(fragment, lost, MERGED)
        self.totals[fragment].merges -= num_merges
        self.totals[fragment].repeated -= num_merges - here  # of units that were returned before
        self.returned = union(self.returned, back)
        self.num_returned += count(back)
        self.num_lost += count(back)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def leased(self) -> Ranges:
        """All units under lease."""
        return union(*(lease.units for lease in self.leases.values()))

    @property
    def done(self) -> Ranges:
        """All done units; of groups, `protocol.groups` counts them."""
        return minus(minus(ranges_of([(0, self.frontier)]), self.returned), self.leased)

    @property
    def passes_done(self) -> int:
        """Number of completed passes."""
        if self.data is None or self.data.groups is not None:
            return 0
        sets = (self.returned, *(lease.units for lease in self.leases.values()))
        return min([self.frontier, *(units[0][0] for units in sets if units)]) // self.data.num_units

    def status(self) -> dict[str, Any] | None:
        """Plain values for `diloco status`; None: no learner has requested a lease, or the units are groups.

        They include, for the first `MAX_PASSES` passes that have begun and are incomplete, the numbers of done, leased
        and free units, which add up to `num_units`.
        """
        if self.data is None or self.data.groups is not None:
            return None
        num, leased, passes, first = self.data.num_units, self.leased, list[dict[str, int]](), self.passes_done
        for number in range(first, min(self.frontier // num + 1, first + MAX_PASSES)):
            whole = ranges_of([(number * num, (number + 1) * num)])
            begun = min(max(self.frontier - number * num, 0), num)
            its_leased = count(common(leased, whole))
            free = count(common(self.returned, whole)) + num - begun
            row = {"pass": number, "done": num - its_leased - free, "leased": its_leased, "free": free}
            if begun or number == first:
                passes.append(row)
        by_learner: Counter[str] = Counter()
        for (learner, _), lease in self.leases.items():
            by_learner[learner] += count(lease.units)
        return {
            "num_units": num, "num_passes": self.data.passes or None, "before": self.before, "passes_done": first,
            "passes_begun": -(-self.frontier // num), "passes": passes, "learners": dict(by_learner),
            "returned": self.num_returned, "unclaimed": self.num_unclaimed, "lost": self.num_lost,
            "fragments": [totals.as_dict() for totals in self.totals],
        }  # fmt: skip

    # --- saving -------------------------------------------------------------------------------------------------------

    def after(self, decided: Sequence[Decided], open_: Sequence[Contribution]) -> Leases:
        """The state after these verdicts, while `open_` have none."""
        then = deepcopy(self) if decided and self.data is not None else self
        for index, (c, reason, version) in enumerate(decided):
            then.decided(c, reason, [*open_, *(later for later, *_ in decided[index + 1 :])], version=version)
        return then

    def saved(self) -> dict[str, Any] | None:
        """Plain values (JSON); None: no learner has requested a lease."""
        if self.data is None:
            return None
        return {
            "data": astuple(self.data),
            "before": self.before,
            "frontier": self.frontier,
            "returned": self.returned,
            "leases": [[*key, lease.as_list()] for key, lease in self.leases.items()],
            "left": {learner: lease.as_list() for learner, lease in self.left.items()},
            "totals": [totals.as_dict() for totals in self.totals],
            "num_returned": self.num_returned,
            "num_unclaimed": self.num_unclaimed,
            "num_lost": self.num_lost,
            "recent": self.recent.as_list(),
        }

    def restore(self, values: Mapping[str, Any] | None, living: Iterable[tuple[str, int]]) -> None:
        """Continue from `saved`. Unmerged units of incarnations other than the `living` are returned."""
        if values is None:
            return
        num_units, passes, digest, unit_tokens, groups = values["data"]
        self.data = DataSet(num_units, passes, digest, unit_tokens, None if groups is None else GroupRules(*groups))
        self.before, self.frontier = values["before"], values["frontier"]
        self.returned = ranges_of(values["returned"])
        self.leases = {(learner, number): Holding.from_list(lease) for learner, number, lease in values["leases"]}
        self.left = {learner: Holding.from_list(lease) for learner, lease in values["left"].items()}
        self.totals = [Totals(Counter(it["fates"]), it["merges"], it["repeated"]) for it in values["totals"]]
        self.num_returned, self.num_unclaimed = values["num_returned"], values["num_unclaimed"]
        self.num_lost, self.recent = values["num_lost"], RecentMerges.from_list(values["recent"])
        for learner, incarnation in sorted(self.leases.keys() - set(living)):
            self.ended(learner, incarnation, ())


def rolled_back(values: Mapping[str, Any] | None, versions: Sequence[int]) -> dict[str, Any] | None:
    """Return the values of `Leases.saved` after a repair has rolled the fragments back to these versions."""
    if values is None:
        return None
    leases = Leases(len(versions))
    leases.restore(values, ())
    for fragment, version in enumerate(versions):
        leases.lose(fragment, version)
    return leases.saved()


def _units_of(learner: str, incarnation: int, contributions: Iterable[Contribution]) -> Ranges:
    """The units in the contributions of one incarnation."""
    mine = [c for c in contributions if (c.learner, c.incarnation) == (learner, incarnation)]
    return union(*(units for c in mine for units in (c.units, c.overwritten)))


def _with_queue_of(data: DataSet, first: DataSet) -> DataSet:
    """The data of a learner, with the queue of the run's first trainer, which counts: each has its own batch."""
    if data.groups is None or first.groups is None:
        return data
    return replace(data, groups=replace(data.groups, queue=first.groups.queue))


def _described(data: DataSet | None) -> str:
    assert data is not None
    if data.groups is not None:
        its, other = data.groups, ("digest", "vocab_size", "queue")
        limits = ", ".join(f"{key} {value}" for key, value in vars(its).items() if key not in other)
        return f"groups by settings of [rl] and [task] with digest {data.digest[:12]}, {limits}"
    passes = f"{data.passes} passes" if data.passes else "passes without end"
    return f"data of {data.num_units} units in {passes}, of digest {data.digest[:12]}"
