"""Reinforcement learning in storms: workers that generate and score groups as clients of the real driver, trainers that
read them, and what holds of groups after every event."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.chaos.versions import require
from tests.storms.plans import Fault, WorkerPlan
from tests.storms.units import Reader
from tests.storms.wire import gone

from diloco.errors import DilocoError, PayloadError, StaleIncarnationError
from diloco.exchange.virtual.syncer import SimulatedDriver
from diloco.protocol.groups import ENDS, STALE, Assigned, Groups, Made, digest_of
from diloco.protocol.leases import Grant, GroupRules, Leases
from diloco.protocol.manifest import Manifest
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.units import Ranges, common, count, minus, numbers_of, ranges_of, union
from diloco.protocol.workers import Score, Work

if TYPE_CHECKING:
    from tests.storms.learners import Process
    from tests.storms.world import Storm

PULSE_S = 1.0
"""Between two messages of a worker."""

ANSWER_S = 5.0
"""After which a call without an answer has failed."""

PATIENCE_S = 90.0
"""After the last fault: bound of what workers take for one group, or for one message."""

LOST, AGAIN = 0.03, 0.05
"""How often a message is lost, and arrives once more, up to so many seconds later."""
AGAIN_S = 20.0

Reply = Callable[[Any], None]


class Line:
    """A client's way to the syncers, one call at a time: calls and answers are late, lost, or arrive twice.

    Arguments:
        awake: does something in the client's process; later if that is frozen, never if it is dead.
    """

    def __init__(self, storm: Storm, name: str, latency_s: float, awake: Callable[[Callable[[], None]], None]) -> None:
        self._storm, self._name, self._latency_s, self._awake = storm, name, latency_s, awake
        self._address = 0
        self.cut_until_s = -math.inf

    def call(self, request: Callable[[SimulatedDriver, Reply], None], answered: Reply) -> None:
        """`answered`: called once, with an answer or an error."""
        storm, address, is_open = self._storm, self._address, [True]

        def end(answer: Any) -> None:
            if is_open[0]:
                is_open[0] = False
                answered(answer)

        def fail() -> None:
            if is_open[0]:
                self._address = (address + 1) % storm.num_addresses
                end(gone())

        storm.after(ANSWER_S, lambda: self._awake(fail))
        if storm.now_s < self.cut_until_s or storm.door(address) is None:
            storm.after(self._latency_s, lambda: self._awake(fail))
            return
        boot = storm.boot_at(address)

        def reply(answer: Any) -> None:
            self._carry(lambda: self._awake(lambda: end(answer)))

        def arrives() -> None:
            door = storm.door(address)
            if storm.now_s < storm.asleep_until_s(address):
                storm.at(storm.asleep_until_s(address), arrives)
            elif door is not None and storm.boot_at(address) == boot:
                storm.touched()
                try:
                    request(door.driver, reply)
                except DilocoError as error:
                    if not isinstance(error, PayloadError | StaleIncarnationError):
                        self._address = (address + 1) % storm.num_addresses
                    reply(error)

        self._carry(arrives)
        if storm.draws.unit(f"{self._name} again") < AGAIN:
            storm.after(storm.draws.between(f"{self._name} again after", 0.0, AGAIN_S), arrives)

    def _carry(self, arrives: Callable[[], None]) -> None:
        draws = self._storm.draws
        if draws.unit(f"{self._name} lost") < LOST or self._storm.now_s < self.cut_until_s:
            return
        is_slow = draws.unit(f"{self._name} is slow") < 0.05
        slow_s = draws.between(f"{self._name} slow", 0.0, 3.0) if is_slow else 0.0
        self._storm.after(self._latency_s * (1 + draws.unit(f"{self._name} way")) + slow_s, arrives)


class WorkerProcess:
    """One process of a rollout or a reward worker.

    Attributes:
        number: its own.
        holds: prompts or groups that it has, each with the time since.
        done: those that it is done with, and not answered for, with the time since.
    """

    def __init__(self, worker: GroupWorker, number: int) -> None:
        self.number, self.is_alive = number, True
        self.holds: dict[int, float] = {}
        self.done: dict[int, tuple[float, Made | Score, bytes]] = {}
        self._worker, self._storm, self._plan = worker, worker.storm, worker.plan
        self._order = self._heard = 0
        self._over: dict[int, int] = {}  # answered for, each with the newest message before
        self._frozen_until_s = -math.inf
        self.line = Line(self._storm, worker.name, self._plan.latency_s, self._awake)
        self._pulse()

    def _awake(self, do: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self._storm.now_s < self._frozen_until_s:
            self._storm.at(self._frozen_until_s, lambda: self._awake(do))
            return
        do()

    def freeze(self, seconds: float) -> None:
        """Stand still."""
        self._frozen_until_s = max(self._frozen_until_s, self._storm.now_s + seconds)

    # --- leases -------------------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        for number in list(self.done):
            self._send(number)
        self._say()
        self._storm.after(PULSE_S, lambda: self._awake(self._pulse))

    def _say(self) -> None:
        self._order += 1
        scores = tuple(it for _, it, _ in self.done.values() if isinstance(it, Score))
        wants = max(0, self._plan.at_once - len(self.holds))
        rules = self._storm.plan.rules
        assert rules is not None
        work = Work(
            self._plan.role, self._worker.name, self.number, self._order, rules.digest, tuple(sorted(self.holds)),
            wants, scores,
        )  # fmt: skip
        self.line.call(lambda driver, reply: driver.work(work, reply), partial(self._answered, work))

    def _answered(self, work: Work, answer: Assigned | DilocoError) -> None:
        if isinstance(answer, StaleIncarnationError):
            self._worker.gave_up(self)
        if isinstance(answer, DilocoError):
            return
        for score in work.scores:
            self._storm.group_book.is_scored(score)
            self._is_over(score.number)
        if work.order < self._heard or "overtaken" in answer.why:
            return
        self._heard = work.order
        for number in self.holds.keys() - self.done.keys() - set(answer.numbers):
            del self.holds[number]
        for number in answer.numbers:
            if number not in self.holds and self._over.get(number, 0) < work.order:
                self._begin(number)

    def _is_over(self, number: int) -> None:
        self.holds.pop(number, None)
        self.done.pop(number, None)
        self._over[number] = self._order

    # --- work ---------------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        manifest, digests = self._storm.place.manifest, self._storm.ledger.versions.digests
        assert manifest is not None
        versions, since_s = manifest.versions, self._storm.now_s
        weights = digest_of(digests[fragment, version] for fragment, version in enumerate(versions))
        self.holds[number] = since_s
        seconds = self._plan.work_s * self._storm.draws.between(f"{self._worker.name} works", 0.5, 2.0)
        self._storm.after(seconds, lambda: self._awake(lambda: self._end(number, since_s, versions, weights)))

    def _end(self, number: int, since_s: float, versions: tuple[int, ...], weights: str) -> None:
        if self.holds.get(number) != since_s or number in self.done:
            return
        name, draws = self._worker.name, self._storm.draws
        rewards = rewards_of(draws.unit(f"{name} rewards"))
        if self._plan.role == "reward":
            is_no_good = draws.unit(f"{name} fails") < 0.05
            score = Score(number, () if is_no_good else rewards, "the task hangs" if is_no_good else "")
            self.done[number] = self._storm.now_s, score, b""
            return
        data = f"{number} by {name} {self.number} at {self._storm.now_s}".encode()
        made = Made(
            number, "sums", versions, weights, hashlib.sha256(data).hexdigest(), len(data), 10,
            rewards if self._plan.is_inline else (),
        )  # fmt: skip
        self.done[number] = self._storm.now_s, made, data
        self._send(number)

    def _send(self, number: int) -> None:
        _, made, data = self.done[number]
        if isinstance(made, Made):
            name, process = self._worker.name, self.number

            def request(driver: SimulatedDriver, reply: Reply) -> None:
                driver.made(name, process, [made], [data], reply)

            self.line.call(request, partial(self._sent, made))

    def _sent(self, made: Made, answer: Sequence[Score] | DilocoError) -> None:
        if made.number not in self.done or self.done[made.number][1] != made:
            return
        if not answer:
            self._storm.group_book.was_acknowledged(made)
            self._is_over(made.number)
        elif not isinstance(answer, DilocoError):  # another one was faster, or its rewards are no numbers
            require(self._storm.plan.goes_back or "load them again" not in answer[0].reason, f"{answer}")
            self.holds.pop(made.number)
            self.done.pop(made.number)
        elif isinstance(answer, StaleIncarnationError):  # a syncer that has just begun does not know it
            self._say()


def rewards_of(drawn: float) -> tuple[float, ...]:
    """Most have a signal."""
    return (drawn, 1.0) if drawn < 0.8 else (0.5, 0.5) if drawn < 0.95 else (math.nan, 1.0)


class GroupWorker:
    """A worker over all its processes."""

    def __init__(self, storm: Storm, index: int, plan: WorkerPlan) -> None:
        self.storm, self.plan = storm, plan
        self.name = f"{plan.role}-{index}"
        self.processes: list[WorkerProcess] = []
        self._num_processes = 0
        storm.at(plan.starts_s, self.start)

    def start(self) -> None:
        """A new process."""
        self._num_processes += 1
        self.processes = [it for it in self.processes if it.is_alive]
        self.processes.append(WorkerProcess(self, self._num_processes))

    def come_back(self) -> None:
        """After a kill, or when all processes of its name have given up."""
        if not any(it.is_alive for it in self.processes):
            self.start()

    def gave_up(self, process: WorkerProcess) -> None:
        """Another process has its name."""
        process.is_alive = False
        self.storm.after(2.0, self.come_back)

    def strike(self, fault: Fault) -> None:
        """A fault of it."""
        for process in self.processes:
            match fault.kind:
                case "kill worker":
                    process.is_alive = False
                case "freeze worker":
                    process.freeze(fault.seconds)
                case "cut worker":
                    process.line.cut_until_s = self.storm.now_s + fault.seconds
        if fault.kind == "kill worker":
            self.storm.after(fault.seconds, self.come_back)
        elif fault.kind == "same worker":
            self.start()


class GroupReader(Reader):
    """One process of a learner reads this many groups a step. It gives up those that are too old for what it holds, and
    a few that it cannot use."""

    def __init__(self, process: Process, storm: Storm) -> None:
        super().__init__(storm.plan.num_units, storm.plan.data)
        self._process, self._storm = process, storm
        self._versions: dict[int, tuple[int, ...]] = {}
        self._dropped: Ranges = ()
        self._untold: dict[int, str] = {}
        self._line = Line(storm, process.name, storm.plan.latency_s[process.index], process._awake)
        self._order = 0
        self._pulse()

    def _pulse(self) -> None:
        if self._untold or self._lacks:
            self.tell()
        self._storm.after(PULSE_S, lambda: self._process._awake(self._pulse))

    @property
    def _lacks(self) -> bool:
        return any(unit not in self._versions for unit in numbers_of(tuple(self.queue._held)))

    def granted(self, grant: Grant) -> None:
        """A lease is there. What was dropped, and claimed again, is given up once more."""
        if grant.number == 1:
            self._versions, self._dropped = {}, common(grant.claimed, self._dropped)
            self._untold = dict.fromkeys(numbers_of(self._dropped), STALE)
        self.tell()

    def tell(self) -> None:
        """Ask for the groups that are leased, and give up what is not used."""
        self._order += 1
        incarnation, told = self._process.incarnation, dict(self._untold)
        scores = tuple(Score(number, reason=reason) for number, reason in told.items())
        work = Work("trainer", self._process.name, incarnation, self._order, "", scores=scores)

        def answered(answer: Assigned | DilocoError) -> None:
            if isinstance(answer, DilocoError) or incarnation != self._process.incarnation:
                return
            for number in told:
                self._untold.pop(number, None)
            for group in answer.groups:
                self._storm.group_book.is_there(group.made)
                self._versions[group.made.number] = group.made.versions
            self._process.has_groups()

        self._line.call(lambda driver, reply: driver.work(work, reply), answered)

    def is_ready(self) -> bool:
        if not self.queue.is_sure or self._lacks:
            return False
        held = [0 if each is None else each.version for each in self._process.client.held]
        rules = self._storm.plan.rules
        assert rules is not None
        while count(minus(self.queue._taken, self._dropped)) < self._num_units:
            if not (drawn := self.queue.draw(1)):
                return False
            self.queue.take()
            [number] = drawn
            is_stale = max(map(int.__sub__, held, self._versions[number])) > rules.max_staleness
            if is_stale or self._storm.draws.unit(f"{self._process.name} cannot use it") < 0.03:
                self._dropped = union(self._dropped, ((number, number + 1),))
                self._untold[number] = STALE if is_stale else "it cannot be used"
        return True

    def trained(self) -> Ranges:
        return minus(super().trained(), self._dropped)


class GroupBook:
    """What is durable of groups, over all syncers, and what holds of the groups of one.

    Attributes:
        live: groups of the newest record, each with its worker, process and digest.
        ever: digests of all that were in one.
    """

    def __init__(self, rules: GroupRules | None, num_fragments: int) -> None:
        self.live: dict[int, tuple[str, int, str]] = {}
        self.ever: dict[str, int] = {}
        self._rules, self._num_fragments = rules, num_fragments
        self._goes_back = False
        self._settled = set[int]()
        self._scored, self._has_rewards = set[int](), set[int]()
        self._counts: Counter[str] | None = Counter()
        self._versions: tuple[int, ...] = (0,) * num_fragments

    def went_back(self, record: Mapping[str, Any] | None, manifest: Manifest) -> None:
        """The run goes on with this record; what it says of merges that are lost is mended with the next one."""
        values = (record or {}).get("groups")
        groups = [] if values is None else values["groups"]
        self.live = {made[0]: (worker, process, made[4]) for made, worker, process, *_ in groups}
        self._settled, self._counts, self._versions, self._goes_back = set(), None, manifest.versions, True
        self._has_rewards = {made[0] for made, *_, rewards in groups if rewards}

    def durable(
        self, record: Mapping[str, Any], manifest: Manifest, objects: Mapping[str, Any], merges: Sequence[Counter[int]]
    ) -> None:  # fmt: skip
        """A record is durable, with these merges of units in the versions of each fragment."""
        self._versions = manifest.versions
        if (values := record["groups"]) is None:
            require(not manifest.packs and not self._counts, "a record lacks the groups")
            return
        packs = dict(manifest.packs)
        needed = sorted({pack for _, _, _, pack, *_ in values["groups"]})
        require(len(packs) == len(manifest.packs), f"{manifest.packs} have a number twice")
        require(sorted(packs) == needed == values["packs"], f"packs {sorted(packs)} are named, and {needed} needed")
        for name in packs.values():
            require(name.endswith(hashlib.sha256(objects[name]).hexdigest()), f"pack {name} has another hash")
        before, self.live = self.live, {}
        for (number, _, _, _, digest, num_bytes, *_), worker, process, pack, start, rewards in values["groups"]:
            found = hashlib.sha256(objects[packs[pack]][start : start + num_bytes]).hexdigest()
            require(found == digest, f"group {number} has other bytes in pack {pack}")
            require(number not in self._settled, f"group {number} was settled, and is there again")
            self.live[number] = worker, process, digest
            require(before.get(number, self.live[number]) == self.live[number], f"group {number} is another one")
            self.ever[digest] = number
            require(rewards or number not in self._has_rewards, f"group {number} has lost its rewards")
            if rewards:
                self._scored.add(number)
                self._has_rewards.add(number)
        self._check_ends(before.keys() - self.live.keys(), Counter(values["counts"]), merges)
        leases = Leases(self._num_fragments)
        leases.restore(record["leases"], {(learner, number) for learner, number, _ in record["leases"]["leases"]})
        offered = ranges_of((group[0][0], group[0][0] + 1) for group in values["groups"] if group[-1])
        require(union(leases.leased, leases.returned) == offered, "other groups are offered than have rewards")
        for totals in leases.totals:
            num = totals.fates.total()
            require(num == values["counts"]["merged"], f"{num} groups are done, and {values['counts']} counted")

    def _check_ends(self, gone: set[int], counts: Counter[str], merges: Sequence[Counter[int]]) -> None:
        self._settled |= gone
        before, self._counts = self._counts, counts
        num = len(self.live) + sum(counts[end] for end in ENDS)
        require(counts["acknowledged"] == num, f"{counts} and {len(self.live)} live groups do not add up")
        if before is None:
            return
        grown = {end: counts[end] - before[end] for end in ("acknowledged", *ENDS)}
        require(min(grown.values()) >= 0, f"{before} went back to {counts}")
        num_merged = sum(any(number in each for each in merges) for number in gone)
        num_others = sum(grown[end] for end in ENDS if end != "merged")
        require(grown["merged"] <= num_merged, f"{grown['merged']} more groups are merged, and {num_merged} can be")
        require(len(gone) - num_merged <= num_others, f"{len(gone)} groups are gone, and {grown} counted")
        require(len(gone) <= grown["merged"] + num_others, f"{len(gone)} groups are gone, and {grown} counted")

    def was_acknowledged(self, made: Made) -> None:
        """A worker hears that its group is durable; if it was stale already, that is all."""
        assert self._rules is not None
        is_stale = max(map(int.__sub__, self._versions, made.versions)) > self._rules.max_staleness
        require(made.digest in self.ever or is_stale, f"group {made.number} is acknowledged, and not durable")

    def is_scored(self, score: Score) -> None:
        """A worker hears that its score is durable; after the run went back, perhaps of a group that is gone."""
        is_known = self._goes_back or score.number in self._scored or score.number in self._settled
        require(is_known, f"the score of group {score.number} is acknowledged, and not durable")

    def is_there(self, made: Made) -> None:
        """A trainer gets this group."""
        require(made.digest in self.ever, f"group {made.number} is leased, and not durable")


def check_groups(core: SyncerCore) -> None:
    """All adds up, by counting again where each group is."""
    groups, rules = core.groups, core.groups.rules
    if rules is None:
        return
    totals, leases = groups.totals(), core.leases
    ends = sum(groups.counts[end] for end in ENDS)
    trained, scoring = set(numbers_of(leases.leased)), _held(groups, "reward")
    leased = (trained | scoring) & groups.groups.keys()
    require(trained <= groups.groups.keys() and scoring <= groups.groups.keys(), "what is settled is leased")
    require(totals["leased"] == len(leased), f"{totals} and {len(leased)} leased groups")
    require(totals["acknowledged"] == len(groups.groups) + ends, f"{totals} do not add up")
    require(sum(totals.values()) == 2 * totals["acknowledged"], f"{totals} do not add up")
    offered = {number for number, group in groups.groups.items() if group.rewards}
    require(trained | set(numbers_of(leases.returned)) == offered, "other groups are offered than have rewards")
    prompts, free = _held(groups, "rollout"), set(numbers_of(groups.workers.free["rollout"]))
    require(not prompts & free and not (prompts | free) & groups.groups.keys(), "a prompt is in two places")
    num = len(prompts | free) + totals["acknowledged"] + groups.counts["dropped"]
    require(num == groups.frontier, f"{num} prompts are accounted for, of {groups.frontier}")
    require(groups._unsaved.keys() <= groups.groups.keys() - offered - scoring, "what is not durable is used")
    versions = [each.version for each in core.fragments]
    for number in groups.groups.keys() - trained:
        its = groups.groups[number].staleness(versions)
        require(its <= rules.max_staleness, f"group {number} waits with a staleness of {its}")
    require(max(groups.staleness, default=0) <= rules.max_staleness, f"groups of staleness {groups.staleness} leased")
    for fragment, each in enumerate(leases.totals):
        num = each.fates.total()
        require(num == groups.counts["merged"], f"fragment {fragment}: {num} fates of {groups.counts} groups")


def check_lease(core: SyncerCore, new: Ranges, num_before: int) -> None:
    """These groups were leased to a trainer. `num_before`: that were leased before."""
    groups, rules = core.groups, core.groups.rules
    if rules is None:
        return
    require(groups.staleness.total() - num_before == count(new), f"{groups.staleness}: {count(new)} are new")
    for number in numbers_of(new):
        its = groups.groups[number].staleness([each.version for each in core.fragments])
        require(its <= rules.max_staleness, f"group {number} is leased with a staleness of {its}")


def _held(groups: Groups, role: str) -> set[int]:
    held = [number for key, worker in groups.workers.live.items() if key[0] == role for number in worker.holds]
    require(len(held) == len(set(held)), f"{sorted(held)} are leased twice")
    return set(held)


class GroupProgress:
    """That workers go on; it is looked at once a second."""

    def __init__(self, storm: Storm, workers: Sequence[GroupWorker]) -> None:
        self._storm, self._workers = storm, workers
        self._since: dict[object, float] = {}

    def look(self) -> None:
        """Raises BrokenInvariantError."""
        storm = self._storm
        waits = {
            (worker.name, process.number, number): since_s
            for worker in self._workers
            for process in worker.processes
            for number, (since_s, _, _) in process.done.items()
            if process.is_alive
        }
        driver = storm.driver
        if driver is not None and driver.state.is_initialised and (rules := driver.core.groups.rules) is not None:
            groups = driver.core.groups
            waits |= dict.fromkeys((n for n, group in groups.groups.items() if not group.rewards), storm.now_s)
            if groups._room(rules):
                waits["prompts", groups.counts["acknowledged"]] = storm.now_s
        self._since = {what: self._since.get(what, since_s) for what, since_s in waits.items()}
        for what, since_s in self._since.items():
            waited_s = storm.now_s - max(since_s, storm.calm_s)
            require(waited_s < PATIENCE_S, f"{what} does not go on since {since_s:.1f} s")
