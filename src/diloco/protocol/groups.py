"""Groups of reinforcement learning: their assignment to workers and trainers.

    prompt → leased → generated → leased → scored → leased → merged

Prompts are the numbers 0, 1, 2, …; every worker computes prompt n itself. A rollout worker leases a prompt and sends a
group, its completions; it has the prompt's number. A reward worker leases the group and scores it. From then on the
group is a unit of data that `protocol.leases` offers to trainers, which are ordinary learners: it returns with a
trainer that leaves, and it is merged when every fragment has a fate for it, in a published version. A group that will
not be trained ends otherwise:

    stale            a fragment has gone `max_staleness` versions beyond the one that the group was made with
    without signal   all its rewards are equal, so that every advantage is zero
    refused          it cannot be scored, or a trainer cannot use it

At any time, exactly:

    acknowledged = waiting + leased + merged + stale + without signal + refused

**Durability.** A group's bytes and its state are in the store before it is acknowledged, and scores before their worker
hears of it: both are in the run's record. Groups that arrive between two records share one object, a pack. Leases of
workers are not durable: a worker states with every message what it holds, and gets it back from the next syncer unless
another worker has it. So a lost message is repaired by the next one. Of two workers with one prompt or group, the first
answer counts.

**Staleness.** A model version is the tuple of the fragments' versions in one manifest. The staleness of a group is the
largest difference, over the fragments, between the versions it is trained on and those it was made with.

No clock, socket or tensor is used here.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.errors import ConfigError, NoRoomError, PayloadError, StaleIncarnationError
from diloco.protocol.leases import GroupRules, Leases
from diloco.protocol.units import Ranges, common, count, minus, numbers_of, ranges_of, split, union, units_of
from diloco.protocol.workers import Key, Score, Work, Workers


@dataclass(frozen=True)
class Made:
    """A group as its worker sends it.

    Attributes:
        versions: of the fragments of the model that has generated it.
        weights: digest of that model (`digest_of`).
        digest: SHA-256 of the bytes.
        num_tokens: of all completions.
        rewards: if they were scored in the same process.
        fault: what is wrong with the bytes, in a sentence; "": nothing.
    """

    number: int
    task: str
    versions: tuple[int, ...]
    weights: str
    digest: str
    num_bytes: int
    num_tokens: int
    rewards: tuple[float, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class Group:
    """A group that is not settled, and where it is.

    Attributes:
        pack, start: the object with its bytes, and the first one.
        rewards: empty: it has none yet.
    """

    made: Made
    worker: str
    process: int
    pack: int
    start: int
    rewards: tuple[float, ...] = ()

    def staleness(self, versions: Sequence[int]) -> int:
        """Versions from those that it was made with to these."""
        return max(max(0, now - then) for now, then in zip(versions, self.made.versions, strict=True))


@dataclass(frozen=True)
class Assigned:
    """The answer to a worker.

    Attributes:
        numbers: prompts or groups that are leased to it now. It drops all others.
        groups: of a reward worker and a trainer, those groups.
        why: why it got fewer than it wants; "": it did not.
        versions: of the run.
    """

    numbers: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    why: str = ""
    versions: tuple[int, ...] = ()


@dataclass
class TaskRewards:
    """Rewards of a task: the number of scored groups, and the mean over the last ones (weight of the newest: 1/50)."""

    num: int = 0
    mean: float = 0.0

    def add(self, reward: float) -> None:
        """Add the mean reward of a group."""
        self.num += 1
        self.mean += (reward - self.mean) / min(self.num, 50)


class Groups:
    """All groups of a run.

    Arguments:
        leases: of trainers.

    Attributes:
        frontier: all prompts from this one on were never leased.
        workers: with the free prompts below it, and the groups that wait for a reward worker.
        groups: those that are not settled, by number.
        counts: of all groups: "acknowledged", and those that are settled, by their end; "dropped": of prompts that no
            group is made of.
        staleness: of groups when a trainer leased them.
        tasks: rewards by task.
    """

    def __init__(self, leases: Leases, versions: Sequence[int]) -> None:
        self._leases = leases
        self.frontier, self.workers = 0, Workers()
        self.groups: dict[int, Group] = {}
        self.counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.tasks: dict[str, TaskRewards] = {}
        self._offered = Ranges()  # groups with rewards
        self._versions = tuple(versions)
        self._digests: list[dict[int, str]] = [{} for _ in versions]
        self._packs: Counter[int] = Counter()  # groups by their pack
        self._pack, self._pack_bytes, self._packed_at = 1, 0, -math.inf
        self._is_waiting = False  # workers wait for a record
        self._unsaved: dict[int, int] = {}  # groups that are not durable, with the record that has them (0: none yet)

    @property
    def rules(self) -> GroupRules | None:
        """Of the run; None: no trainer has joined."""
        return None if self._leases.data is None else self._leases.data.groups

    # --- workers ------------------------------------------------------------------------------------------------------

    def work(self, now: float, work: Work, *, paused: str | None = None) -> Assigned:
        """A message of a rollout or a reward worker. If it has scores, answer it once a record with them is durable.

        Arguments:
            paused: why no worker gets anything now; None: the run is not paused.

        Raises:
            ConfigError: its settings differ from the run's. StaleIncarnationError, PayloadError: as `Workers.heard`.
        """
        worker, key = self.workers.heard(now, work), (work.role, work.worker)
        self._is_waiting |= bool(work.scores)
        if worker is None:
            return Assigned(why="this message was overtaken by a newer one", versions=self._versions)
        if (rules := self.rules) is None:
            return Assigned(why="no trainer has joined the run yet", versions=self._versions)
        self._check_settings(key, work.digest, rules)
        is_rollout = work.role == "rollout"
        for score in work.scores:
            if not is_rollout:
                self._score(key, score, rules)
            elif score.number in worker.holds:
                self._drop(key, score.number, score.reason)
        if is_rollout:
            self._claim(work.holds, rules)
        self.workers.holds(key, work.holds)
        why = self._give(key, work.wants, rules) if paused is None else paused
        held = tuple(sorted(worker.holds))
        return Assigned(held, () if is_rollout else tuple(self.groups[n] for n in held), why, self._versions)

    def _give(self, key: Key, wants: int, rules: GroupRules) -> str:
        """Lease up to so many to a worker; returns why it gets fewer."""
        role, why = key[0], ""
        if role == "rollout":
            if wants > (room := self._room(rules)):
                why, wants = f"the run's queue of {rules.queue} groups is full", room
            num_new = max(0, wants - count(self.workers.free[role]))
            self._claim([self.frontier + num_new - 1] if num_new else [], rules)
        elif wants > count(self.workers.free[role]):
            why = "no group waits for a reward"
        given, _ = split(self.workers.free[role], wants)
        self.workers.lease(key, given)
        return why

    def _room(self, rules: GroupRules) -> int:
        """How many more prompts may be leased."""
        num_ahead = len(self.groups) - self._num_trained + len(self.workers.leased("rollout"))
        return 0 if len(self._packs) >= MAX_PACKS else max(0, rules.queue - num_ahead)

    @property
    def _num_trained(self) -> int:
        """Groups that trainers have leased; in a run of other data they may have leased millions of units."""
        return count(common(self._leases.leased, self._offered))

    def _check_settings(self, key: Key, digest: str, rules: GroupRules) -> None:
        if digest != rules.digest:
            error = (
                f"{key[0]} {key[1]!r} has other settings of [rl] and [task] (with rl.kl, of run.seed too) or another "
                f"tokenizer (digest {digest[:12]}) than the run's trainers ({rules.digest[:12]}); give all of them the "
                "same run file."
            )
            self.workers.refuse(key, error)
            raise ConfigError(error)

    def _claim(self, prompts: Sequence[int], rules: GroupRules) -> None:
        """Make all prompts up to these free. A restarted syncer may not know yet of prompts that workers hold."""
        stop = max((number + 1 for number in prompts), default=0)
        if self.frontier < stop <= self.frontier + 2 * rules.queue:
            self.workers.offer("rollout", range(self.frontier, stop))
            self.frontier = stop

    def _drop(self, key: Key, number: int, reason: str) -> None:
        """No group can be made of a prompt that this worker holds, or what it sent is no good: it isn't leased again,
        since it may be so for every worker."""
        holds = self.workers.live[key].holds
        self.counts["dropped"] += number in holds
        holds.discard(number)
        self.workers.refuse(key, reason)

    def was_suspended(self, seconds: float) -> None:
        """As `SyncerCore.was_suspended`."""
        self._packed_at += seconds
        for worker in self.workers.live.values():
            worker.seen_at += seconds

    # --- groups -------------------------------------------------------------------------------------------------------

    def made(self, now: float, worker: str, process: int, made: Made) -> bool:
        """The bytes of a group were received, and are well formed. Returns whether they must be stored, in the pack of
        the next record; otherwise the group was sent before, or is stale already. Answer once a record is durable.

        Raises:
            PayloadError: the group is not accepted. StaleIncarnationError: as `work`.
        """
        key: Key = ("rollout", worker)
        known = self.workers.live.get(key)
        if known is None or process in known.former or process != known.process:
            raise StaleIncarnationError(
                f"process {process:x} is not rollout worker {worker!r} now; ask for prompts before sending groups."
            )
        known.seen_at = now
        group, number = self.groups.get(made.number), made.number
        if not self._pack_bytes and len(self._packs) >= MAX_PACKS + MORE_PACKS:
            raise NoRoomError("the run has too many unsettled groups to name them in its manifest; repeat the call.")
        if group is not None and (group.worker, group.process, group.made) == (worker, process, made):
            self._is_waiting = True
            return False
        try:
            self._check(made)
        except PayloadError as error:
            self._drop(key, number, str(error))
            raise
        self.workers.end("rollout", number)  # the first answer counts
        known.versions, self._is_waiting = made.versions, True
        self.workers.count(key, "generated")
        self.counts["acknowledged"] += 1
        group = Group(made, worker, process, self._pack, self._pack_bytes)
        if group.staleness(self._versions) > self._max_staleness:
            self.counts["stale"] += 1
            return False
        self.groups[number], self._unsaved[number] = group, 0
        self._packs[self._pack] += 1
        self._pack_bytes += made.num_bytes
        return True

    @property
    def _max_staleness(self) -> int:
        return 0 if self.rules is None else self.rules.max_staleness

    def _check(self, made: Made) -> None:
        rules, number = self.rules, made.number
        if rules is None:
            raise PayloadError(f"group {number} has no leased prompt: no trainer has joined the run yet; drop it.")
        if made.fault:
            raise PayloadError(f"group {number} is not well formed: {made.fault}")
        if not self.workers.has("rollout", number):
            raise PayloadError(f"group {number} was sent before, or its prompt is not leased; drop it.")
        if len(made.versions) != len(self._versions) or not self._are_known(made.versions):
            raise PayloadError(
                f"group {number} was made with versions {list(made.versions)} of the fragments, and the run has "
                f"{list(self._versions)}; follow this run."
            )
        if (weights := self.weights_of(made.versions)) is not None and weights != made.weights:
            raise PayloadError(
                f"group {number} was made with weights of digest {made.weights[:12]}, and the run published "
                f"{weights[:12]} as versions {list(made.versions)}; load them again."
            )
        if made.rewards and not rules.inline:
            raise PayloadError(f"group {number} has rewards, but reward workers score this run's groups; send none.")
        if made.rewards and not _are_usable(made.rewards, rules):
            raise PayloadError(f"group {number} has rewards {list(made.rewards)}; send {rules.group_size} numbers.")

    def _are_known(self, versions: Sequence[int]) -> bool:
        """Whether these versions were published, or are being published: a worker may read a version from a bucket
        before the syncer knows that it is stored."""
        return all(
            0 <= its <= now or its in digests
            for its, now, digests in zip(versions, self._versions, self._digests, strict=True)
        )

    def weights_of(self, versions: Sequence[int]) -> str | None:
        """The digest of the weights of these versions; None: they are not kept."""
        digests = [by_version.get(version) for by_version, version in zip(self._digests, versions, strict=True)]
        return None if None in digests else digest_of(digest for digest in digests if digest is not None)

    def due_at(self, now: float) -> float:
        """When a record is due; infinite: nothing waits for one. The more packs there are, the more groups one gets."""
        if not self._is_waiting:
            return math.inf
        return max(now, self._packed_at + max(PACK_S, len(self._packs) / PACKS_PER_S))

    def _score(self, key: Key, score: Score, rules: GroupRules) -> None:
        """A worker is done with a group. The second score of a group changes nothing."""
        group = self.groups.get(score.number)
        if group is None or group.rewards or score.number in self._unsaved:
            return
        self.workers.end("reward", score.number)
        if score.reason or not _are_usable(score.rewards, rules):
            self.workers.refuse(key, score.reason or f"group {score.number} got rewards {list(score.rewards)}")
            self._settle(score.number, "refused")
            return
        self.workers.count(key, "scored")
        self._reward(score.number, score.rewards)

    def _reward(self, number: int, rewards: tuple[float, ...]) -> None:
        group = self.groups[number]
        task = group.made.task if group.made.task in self.tasks or len(self.tasks) < MAX_TASKS else "others"
        self.tasks.setdefault(task, TaskRewards()).add(sum(rewards) / len(rewards))
        if min(rewards) == max(rewards):
            self._settle(number, "without signal")
            return
        self.groups[number] = replace(group, rewards=rewards)
        self._offered = union(self._offered, units_of([number]))
        self._leases.offer(units_of([number]))

    def _settle(self, number: int, end: str) -> None:
        pack = self.groups.pop(number).pack
        self._packs[pack] -= 1
        if not self._packs[pack]:
            del self._packs[pack]
        self._offered = minus(self._offered, units_of([number]))
        self.counts[end] += 1

    # --- trainers -----------------------------------------------------------------------------------------------------

    def _among(self, units: Ranges) -> list[int]:
        return numbers_of(common(units, self._offered))

    def leased(self, units: Ranges) -> None:
        """Trainers have leased these groups."""
        self.staleness.update(self.groups[n].staleness(self._versions) for n in self._among(units))

    def of_trainer(self, learner: str, incarnation: int) -> Assigned:
        """The groups that a trainer has leased."""
        lease = self._leases.leases.get((learner, incarnation))
        units = () if lease is None else tuple(self._among(lease.units))
        return Assigned(units, tuple(self.groups[n] for n in units), "", self._versions)

    def given_up(self, learner: str, units: Ranges, reasons: Mapping[int, str]) -> None:
        """A trainer's lease of these groups has ended without training: they are stale, or it cannot use them."""
        self._is_waiting |= bool(reasons)
        for number in self._among(units):
            is_stale = reasons[number] == STALE
            self._settle(number, STALE if is_stale else "refused")
            if not is_stale:
                self.workers.refuse(("trainer", learner), reasons[number])

    def look(self) -> None:
        """Leases of trainers have changed: count the groups that are merged now, and those that were returned and are
        too old."""
        if not self.groups:
            return
        for number in numbers_of(self._merged(self._leases)):
            self._settle(number, "merged")
        self._drop_stale()

    def _merged(self, leases: Leases) -> Ranges:
        return minus(self._offered, union(leases.leased, leases.returned))

    # --- versions -----------------------------------------------------------------------------------------------------

    def publishes(self, fragment: int, version: int, digest: str) -> None:
        """This version will be published, or was."""
        digests = self._digests[fragment]
        digests[version] = digest
        for old in [each for each in digests if each < version - self._max_staleness - 1]:
            del digests[old]

    def published(self, versions: Sequence[int]) -> None:
        """These are the newest versions."""
        self._versions = tuple(versions)
        self.look()

    def _drop_stale(self) -> None:
        """Groups that are too old, or of versions that a repair has lost, end as stale, unless a trainer has them."""
        leased, versions = set(self._among(self._leases.leased)), self._versions
        for number, group in list(self.groups.items()):
            is_gone = not self._are_known(group.made.versions)
            if number not in leased and (is_gone or group.staleness(versions) > self._max_staleness):
                if group.rewards:
                    self._leases.withdraw(units_of([number]))
                self._unsaved.pop(number, None)
                self.workers.end("reward", number)
                self._settle(number, STALE)

    # --- the state ----------------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, int]:
        """The number of groups: acknowledged, and in each state; prompts that are leased are not among them."""
        leased = self._num_trained + len(self.workers.leased("reward"))
        ends = {end: self.counts[end] for end in ENDS}
        return {
            "acknowledged": self.counts["acknowledged"], "waiting": len(self.groups) - leased, "leased": leased, **ends,
        }  # fmt: skip

    def status(self) -> dict[str, Any] | None:
        """Plain values for `diloco status`; None: no trainer has joined."""
        if (rules := self.rules) is None:
            return None
        return {
            **self.totals(), "prompts": len(self.workers.leased("rollout")), "queue": rules.queue,
            "max_staleness": rules.max_staleness,
            "staleness": {str(versions): num for versions, num in sorted(self.staleness.items())},
            "rewards": {name: task.mean for name, task in self.tasks.items()},
            "scored": {name: task.num for name, task in self.tasks.items()},
            "workers": self.workers.status(), "refusals": list(self.workers.refusals),
        }  # fmt: skip

    def saved(self, serial: int, then: Leases) -> dict[str, Any] | None:
        """Plain values (JSON) for the record with this serial number; None: no trainer has joined.

        Arguments:
            then: the leases as the record has them.
        """
        if self.rules is None:
            self._is_waiting = False
            return None
        merged = set(numbers_of(self._merged(then)))
        kept = {number: group for number, group in self.groups.items() if number not in merged}
        counts = {**self.counts, "merged": self.counts["merged"] + len(merged)}
        self._unsaved = {number: at or serial for number, at in self._unsaved.items()}
        self._is_waiting = False
        if self._pack_bytes:
            self._pack, self._pack_bytes = self._pack + 1, 0
        prompts = union(self.workers.free["rollout"], units_of(self.workers.leased("rollout")))
        return {
            "frontier": self.frontier, "free": prompts, "groups": [_as_list(group) for group in kept.values()],
            "counts": counts, "pack": self._pack, "packs": sorted({group.pack for group in kept.values()}),
            "keep": self._max_staleness + 1,
            "digests": [[[version, digest] for version, digest in each.items()] for each in self._digests],
            "staleness": [[k, v] for k, v in self.staleness.items()],
            "tasks": {name: [task.num, task.mean] for name, task in self.tasks.items()},
        }  # fmt: skip

    def restore(self, values: Mapping[str, Any] | None) -> None:
        """Continue from `saved`; the leases were restored before."""
        if values is None:
            return
        self.frontier, self.workers.free["rollout"] = values["frontier"], ranges_of(values["free"])
        self.groups = {group.made.number: group for group in map(_group_of, values["groups"])}
        self._packs = Counter(group.pack for group in self.groups.values())
        self._offered = units_of(n for n, group in self.groups.items() if group.rewards)
        self.counts, self._pack = Counter(values["counts"]), values["pack"]
        self.staleness = Counter(dict(values["staleness"]))
        self.tasks = {name: TaskRewards(*task) for name, task in values["tasks"].items()}
        for own, saved, newest in zip(self._digests, values["digests"], self._versions, strict=True):
            own |= {version: digest for version, digest in saved if version not in own and version <= newest}
        # A repair went back: these were merged.
        lost = minus(union(self._leases.leased, self._leases.returned), self._offered)
        self._leases.withdraw(lost)
        self.counts["merged"] -= count(lost)
        self.counts[STALE] += count(lost)
        self.published(self._versions)
        for number, group in list(self.groups.items()):
            if not group.rewards:
                self._is_durable(number, group.made.rewards)

    def recorded(self, now: float, serial: int) -> None:
        """The record with this serial number is durable."""
        self._packed_at = now
        for number in [number for number, at in self._unsaved.items() if 0 < at <= serial]:
            del self._unsaved[number]
            self._is_durable(number, self.groups[number].made.rewards)

    def _is_durable(self, number: int, rewards: tuple[float, ...]) -> None:
        """A new group is durable: it goes to trainers if its worker has scored it, otherwise to a reward worker."""
        if rewards:
            self._reward(number, rewards)
        else:
            self.workers.offer("reward", [number])


STALE = "stale"
ENDS = ("merged", STALE, "without signal", "refused")
"""States of groups that are settled."""

PACK_S, PACKS_PER_S = 0.2, 200.0
"""Between two records for groups alone, at least, and the number of packs at which it is a second longer."""

MAX_PACKS = 1900
"""That a manifest names, before no more prompts are leased."""

MORE_PACKS = 100
"""Room for those of prompts that are leased already."""

MAX_REWARD = 1e6
"""The largest reward, by its amount: fp32 has room for sums of their squares. NaN is no reward."""

MAX_TASKS = 64
"""Whose rewards are kept apart."""


def digest_of(digests: Iterable[str]) -> str:
    """The digest of a model's weights from those of its fragments."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _are_usable(rewards: tuple[float, ...], rules: GroupRules) -> bool:
    return len(rewards) == rules.group_size and all(abs(reward) <= MAX_REWARD for reward in rewards)


def _as_list(group: Group) -> list[Any]:
    return [[*vars(group.made).values()], group.worker, group.process, group.pack, group.start, group.rewards]


def _group_of(values: Sequence[Any]) -> Group:
    made, worker, process, pack, start, rewards = values
    number, task, versions, weights, digest, num_bytes, num_tokens, own, _ = made
    its = Made(number, task, tuple(versions), weights, digest, num_bytes, num_tokens, tuple(own))
    return Group(its, worker, process, pack, start, tuple(rewards))
