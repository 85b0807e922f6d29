"""What happens in a storm: its method, its learners, and its faults, all drawn from the seed and all plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from tests.run.simulated import POINTS
from tests.storms.draws import Draws
from tests.storms.units import AHEAD_STEPS, DATA

import diloco
from diloco.core.codecs import CODECS
from diloco.core.fragments import Experts, layout_of
from diloco.core.layout import Layout, Role, TensorSpec, place
from diloco.core.merges import MERGES
from diloco.core.method import Method
from diloco.core.outer import OUTER_OPTIMIZERS
from diloco.core.quorum import QUORUMS
from diloco.errors import ConfigError
from diloco.protocol.leases import DataSet, GroupRules
from diloco.protocol.rounds.base import Rules

FAULTS_END_S = 25.0
"""Virtual time by which the last fault has happened."""

NUM_HELD_SETS = 7
"""Of a storm; one after the other for the processes of a learner."""

Kind = Literal["cut", "half open", "freeze", "kill learner", "same name", "kill syncer", "tear write", "refuse writes"]
OLDER_COPY = "older copy"
"""
    cut             all connections of a learner break; what is on them is lost; each end hears of it at its own time
    half open       nothing that is on a learner's connections arrives, and no end hears of it for long
    freeze          a learner's process and its messages stand still for some seconds
    kill learner    its process dies; it is back after some seconds, from no checkpoint, an old one or the newest
    same name       another process joins by a learner's name while the first one is alive, which gives up
    kill syncer     its process dies, between any two effects; it is back after some seconds, from its disk
    tear write      a request of the syncer to the store ends at one of its steps, with the process
    refuse writes   the store refuses all requests for some seconds
    older copy      the syncer dies, and for some seconds one is started on an older copy of its state; drawn apart
"""

StoreKind = Literal["lose answers", "land late", "store away", "stop syncer"]
STORE_FAULTS = get_args(StoreKind)
"""What else happens between a syncer and its store, for some seconds.

    lose answers   requests take effect, and most answers are lost
    land late      most requests are not answered, and take effect later, perhaps after others, or without a syncer
    store away     no request arrives; perhaps for minutes
    stop syncer    the syncer is stopped, and gives up the run; it is back after some seconds
"""

PairKind = Literal[
    "kill first", "kill standby", "kill both", "sleep", "sleep in a swap", "cut off store", "cut off learners",
    "isolate", "promote", "stop first",
]  # fmt: skip
"""Where there are two syncers; "first" is the one that serves the run then.

    kill first, kill standby, kill both   as "kill syncer"
    sleep              a syncer's process stands still for some seconds
    sleep in a swap    the first does so from its next swap on, whose answer it finds when it wakes up
    cut off store      one of the two does not reach the store for some seconds
    cut off learners   one of the two does not reach half of the learners, or more
    isolate            the first reaches neither the store nor those learners
    promote            a person promotes the standby
    stop first         as "stop syncer"
"""

Going = Literal["restore", "repair", "repair without record"]
"""Where a run goes back; the syncer is back after some seconds, on the versions that are left.

    restore   the state becomes that of a backup
    repair    the newest versions of any fragments cannot be read, and earlier ones are served
    repair without record   so it is, and what the syncer knew besides is lost
"""
GOINGS = get_args(Going)

OrderKind = Literal["pause", "evict", "lower quorum"]
"""What an operator does; "pause" for some seconds, "lower quorum" to 1."""
ORDERS = get_args(OrderKind)

WorkerKind = Literal["kill worker", "freeze worker", "cut worker", "same worker"]
WORKER_FAULTS = get_args(WorkerKind)
"""What befalls a worker of reinforcement learning.

    kill worker     its process dies, and forgets all; it is back after some seconds
    freeze worker   its process stands still for some seconds
    cut worker      its messages are lost for some seconds
    same worker     another process works under its name
"""


@dataclass(frozen=True)
class WorkerPlan:
    """A rollout or a reward worker.

    Attributes:
        latency_s: of its way, one way.
        work_s: that a group takes.
        at_once: groups that it has at a time.
        is_inline: a rollout worker scores its own groups.
    """

    role: Literal["rollout", "reward"]
    latency_s: float
    work_s: float
    at_once: int
    starts_s: float
    is_inline: bool = False


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when.
        learner: which one, or which worker; the syncer's faults leave it out.
        seconds: how long.
        choice: "kill learner": 0 no checkpoint, 1 an old one, 2 the newest. "tear write": the index of the step. "older
            copy": 0 the oldest, 1 one from the middle, 2 the newest. "restore": the backup after so many thirds of all.
            "sleep", "cut off store": 2 the standby. "sleep in a swap": 0 it lands while the first is asleep. "cut off
            learners", "isolate": 0 half of the learners, 1 more; 2 the standby from half.
    """

    at_s: float
    kind: Kind | Literal["older copy"] | StoreKind | PairKind | Going | OrderKind | WorkerKind
    learner: int = 0
    seconds: float = 0.0
    choice: int = 0


@dataclass(frozen=True)
class Plan:
    """One storm.

    Attributes:
        steps: the inner step of the run after which learners finish.
        step_s: of each learner.
        latency_s: of each learner's way, one way.
        sizes: elements of each fragment.
        starts_s: when each learner starts.
        overlaps: each learner's own τ; None: the method's.
        trains: of each learner, per fragment, the indices of the tensors that it trains; None: all. Of a mixture, one
            that comes back from no checkpoint trains what the next learner in this list does.
        spool_fits: how many contributions the spool takes until `room_at_s`; None: all.
        repeats: how often a push, heartbeat or notice arrives twice.
        num_units: of leased data that each learner trains in a step; 0: data is not leased.
        goes_back: the run does, on purpose (`Going`).
        steered: an operator gives orders (`OrderKind`).
        num_experts: of the mixture that the model is; 0: it is none.
        holds: sets of fragments that processes hold (`held_by`); empty: all hold all.
        dealt: how many groups of experts the syncer deals to each learner; 0: its set is one of `holds`.
        standby: there are two syncers.
        lease_s: of the syncer on its store; infinite: that is a directory.
        shortest_swap_s: of the store.
        keep_s: how long objects stay that are not named any more.
        rules: of groups of reinforcement learning, which learners lease; None: other data.
        workers: that make them.
    """

    seed: int
    method: Method
    steps: int
    step_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    sizes: tuple[int, ...]
    starts_s: tuple[float, ...]
    faults: tuple[Fault, ...]
    overlaps: tuple[int | None, ...]
    trains: tuple[tuple[tuple[int, ...] | None, ...], ...]
    spool_fits: int | None
    room_at_s: float
    repeats: float
    num_units: int = 0
    goes_back: bool = False
    steered: bool = False
    num_experts: int = 0
    holds: tuple[frozenset[int], ...] = ()
    dealt: tuple[int, ...] = ()
    standby: bool = False
    lease_s: float = math.inf
    shortest_swap_s: float = 0.0
    keep_s: float = 10.0
    rules: GroupRules | None = None
    workers: tuple[WorkerPlan, ...] = ()

    @property
    def data(self) -> DataSet:
        """That learners lease."""
        return DATA if self.rules is None else DataSet(1, 0, self.rules.digest, groups=self.rules)

    @property
    def looks_back(self) -> bool:
        """Whether older states of the run are needed."""
        return self.goes_back or any(each.kind == OLDER_COPY for each in self.faults)

    @cached_property
    def layout(self) -> Layout:
        """Of the model: a fragment is two vectors, or one number; a mixture has experts, and a trunk."""
        if self.num_experts:
            return layout_of(_mixture(self.num_experts), (), self.method.fragments)
        return Layout(tuple(place(index, _tensors(index, size)) for index, size in enumerate(self.sizes)), ())

    def trained_by(self, learner: int, process: int) -> tuple[tuple[int, ...] | None, ...]:
        """What a learner's process of this number, from 1, trains."""
        return self.trains[(learner + self.num_experts * (process - 1)) % len(self.trains)]

    def held_by(self, learner: int, process: int) -> frozenset[int] | None:
        """The fragments that a learner's process of this number, from 1, holds; None: it has the whole model. One that
        comes back from no checkpoint holds others than the one before."""
        return self.holds[(learner + 3 * (process - 1)) % len(self.holds)] if self.holds else None

    def num_dealt(self, learner: int) -> int:
        """How many groups the syncer deals to a learner; 0: its set is not dealt."""
        return self.dealt[learner] if self.dealt else 0

    @cached_property
    def trunk(self) -> frozenset[int]:
        """The fragments of a mixture that all learners hold."""
        return frozenset(f for f, own in enumerate(self.method.fragments.experts_of(self.layout)) if not own)

    def rules_of(self, learner: int) -> Rules:
        """The method as a learner's state machine knows it."""
        overlap = self.overlaps[learner]
        method = self.method if overlap is None else self.method.with_own_overlap(overlap)
        return Rules.of(method, len(self.sizes))


def _tensors(fragment: int, size: int) -> list[TensorSpec]:
    sizes = [size - size // 2, size // 2]
    roles: tuple[Role, Role] = ("", "variance" if fragment else "averaged")
    return [
        TensorSpec(f"w{fragment}.{index}", (each,), "float32", roles[index]) for index, each in enumerate(sizes) if each
    ]


def _mixture(num_experts: int) -> list[TensorSpec]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed.w": (3,), "m.gate.w": (num_experts, 2), "m.gate.bias": (num_experts,), "m.experts.w": (num_experts, 3),
        "head.w": (2,),
    }  # fmt: skip
    return [
        TensorSpec(name, shape, "float32", "averaged" if name == "m.gate.bias" else "")
        for name, shape in shapes.items()
    ]


def plan_of(
    seed: int, *, leased: bool = False, standby: bool = False, goes_back: bool = False, steered: bool = False,
    parts: bool = False, groups: bool = False, held: bool = False, dealt: bool = False,
) -> Plan:  # fmt: skip
    """The storm of a seed. `leased`: with leased data. `standby`: with two syncers. `goes_back`: the run does.
    `steered`: an operator gives it orders. `parts`: learners train parts of a mixture. `groups`: they train groups of
    reinforcement learning. `held`: they hold parts of a mixture; which of the others it is besides is drawn. `dealt`:
    they do, and the syncer deals most of these."""
    draws, held = Draws(seed), held or dealt
    if held:
        leased, kind = draws.unit("is leased") < 0.5, draws.of("kind", _KINDS_OF_HELD)
        standby, goes_back, steered = (kind == each for each in ("standby", "goes back", "steered"))
    plan = _plan(draws, leased=leased or groups)
    if groups:
        plan = _with_groups(draws, plan)
    if parts or held:
        plan = _with_parts(draws, plan, fewest_groups=1 + held)
    if held:
        plan = _with_held(draws, plan)
    if dealt:
        plan = _with_dealt(draws, plan)
    if standby:
        return _with_standby(draws, plan)
    if steered:
        return _with_orders(draws, plan)
    return _that_goes_back(draws, plan) if goes_back else plan


_KINDS_OF_HELD = ("", "", "", "standby", "goes back", "steered")


def _plan(draws: Draws, *, leased: bool) -> Plan:
    num_learners, num_fragments = draws.whole("learners", 1, 4), draws.whole("fragments", 1, 3)
    method = None
    while method is None:
        method = _method(draws, num_learners, num_fragments)
    method = _refined(draws, method)
    each, has_room = range(num_learners), draws.unit("has room") < 0.8
    sizes = tuple(draws.whole("size", 1, 9) for _ in range(num_fragments))
    return Plan(
        draws.seed,
        method,
        steps=draws.whole("steps", 8, 30),
        step_s=tuple(draws.between("step_s", 0.15, 1.2) for _ in each),
        latency_s=tuple(draws.between("latency_s", 0.002, 0.2) for _ in each),
        sizes=sizes,
        starts_s=tuple(0.0 if draws.unit("is late") < 0.7 else draws.between("starts_s", 0.0, 8.0) for _ in each),
        faults=tuple(sorted([*_faults(draws, num_learners), *_store_faults(draws)], key=lambda it: it.at_s)),
        overlaps=_overlaps(draws, method, num_learners),
        trains=_trains(draws, method, num_learners, sizes),
        spool_fits=None if has_room else draws.whole("spool fits", 1, 3),
        room_at_s=0.0 if has_room else draws.between("room at", 2.0, 12.0),
        repeats=0.0 if draws.unit("repeats") < 0.7 else 0.1,
        num_units=draws.whole("num_units", 1, 5) if leased else 0,
        keep_s=draws.between("keep_s", 2.0, 30.0),
        **(_BUCKET if draws.unit("is a bucket") < 0.4 else {}),
    )


_BUCKET: dict[str, Any] = {"lease_s": 6.0, "shortest_swap_s": 1.0}


def _with_groups(draws: Draws, plan: Plan) -> Plan:
    """Without an older copy, which a worker would follow."""
    num_units = draws.whole("groups a step", 1, 2)
    asked = AHEAD_STEPS * num_units
    is_inline = draws.unit("is inline") < 0.3
    max_staleness, queue = draws.whole("max_staleness", 0, 4), draws.whole("queue", asked, 4 * asked)
    rules = GroupRules("storm", 9, 2, 9, 9, max_staleness, queue, inline=is_inline)
    num_rollouts, num_rewards = draws.whole("rollouts", 1, 3), draws.whole("rewards", 1, 2)
    roles = ("rollout",) * num_rollouts + ("reward",) * num_rewards
    workers = tuple(
        WorkerPlan(
            role,
            latency_s=draws.between("worker's latency", 0.002, 0.2),
            work_s=draws.between("work_s", 0.05, 0.5),
            at_once=draws.whole("at_once", 2, 6),
            starts_s=draws.between("worker starts", 0.0, 5.0),
            is_inline=is_inline,
        )
        for role in roles
    )
    faults = [each for each in plan.faults if each.kind != OLDER_COPY]
    for _ in range(draws.whole("worker faults", 0, 5)):
        kind, worker = draws.of("worker fault", WORKER_FAULTS), draws.whole("fault's worker", 0, len(workers) - 1)
        at_s, seconds = (
            draws.between("worker fault at", 0.5, FAULTS_END_S),
            draws.between("worker fault for", 0.1, 12.0),
        )
        faults.append(Fault(round(at_s, 3), kind, worker, round(seconds, 3)))
    faults.sort(key=lambda it: it.at_s)
    return replace(plan, faults=tuple(faults), num_units=num_units, rules=rules, workers=workers)


def _with_parts(draws: Draws, plan: Plan, *, fewest_groups: int) -> Plan:
    """Longer, since experts are sent less often than the trunk."""
    num_experts = draws.whole("experts", 2, 5)
    method = None
    while method is None:
        method = _of_mixture(draws, plan.method, num_experts, fewest_groups)
    plan = replace(
        plan, method=method, num_experts=num_experts, steps=plan.steps + draws.whole("steps of parts", 5, 20)
    )
    fragments = plan.layout.fragments
    trains = []
    for _ in plan.step_s:
        own = {expert for expert in range(num_experts) if draws.unit("trains expert") < 0.5}
        indices = [
            [i for i, each in enumerate(fragment.tensors) if Experts.expert_of(each.spec) in {None, *own}]
            for fragment in fragments
        ]
        trains.append(
            tuple(
                None if len(found) == len(fragment.tensors) else tuple(found)
                for fragment, found in zip(fragments, indices, strict=True)
            )
        )
    return replace(
        plan,
        sizes=tuple(fragment.numel for fragment in fragments),
        overlaps=tuple(_if_allowed(method, overlap) for overlap in plan.overlaps),
        trains=tuple(trains),
    )


def _of_mixture(draws: Draws, method: Method, num_experts: int, fewest_groups: int) -> Method | None:
    codecs, trunks = [None, *sorted(CODECS)], (diloco.Whole(), diloco.Balanced(2))
    fragments = Experts(
        draws.whole("groups", fewest_groups, min(3, num_experts)), draws.of("trunk", trunks),
        draws.whole("every", 1, 3),
        draws.of("up of experts", codecs), draws.of("down of experts", codecs),
        draws.of("outer of experts", (None, diloco.SGD(lr=0.7), diloco.Nesterov(lr=0.7, momentum=0.9))),
    )  # fmt: skip
    plain: dict[str, Any] = {"adopt": diloco.Replace()} if isinstance(method.adopt, diloco.Eager) else {}
    if method.merge.weighted and not method.merge.weighs_tensors:
        plain["merge"] = diloco.Mean()
    try:
        return replace(method, fragments=fragments, **plain)
    except ConfigError:
        return None


def _with_held(draws: Draws, plan: Plan) -> Plan:
    """With sets that leave some groups to one learner, or to none until another one comes; and with more learners that
    are late, or that die and come back."""
    groups = [fragment for fragment in range(len(plan.sizes)) if fragment not in plan.trunk]
    share = draws.of("share held", (0.3, 0.5, 0.8))
    holds = [
        plan.trunk.union(group for group in groups if draws.unit("holds group") < share) for _ in range(NUM_HELD_SETS)
    ]
    last = len(plan.step_s) - 1
    starts_s = [
        draws.between("holder starts", 3.0, 15.0) if learner and draws.unit("holder is late") < 0.3 else at_s
        for learner, at_s in enumerate(plan.starts_s)
    ]
    faults = list(plan.faults)
    for _ in range(draws.whole("faults of holders", 0, 3)):
        kind, learner = draws.of("holder's fault", ("kill learner", "same name")), draws.whole("holder", 0, last)
        at_s, seconds = draws.between("holder's fault at", 1.0, FAULTS_END_S), draws.between("holder away", 0.1, 12.0)
        faults.append(
            Fault(round(at_s, 3), kind, learner, round(seconds, 3), draws.of("holder's choice", (0, 0, 1, 2)))
        )
    trains = tuple((None,) * len(plan.sizes) if draws.unit("trains all it holds") < 0.7 else own for own in plan.trains)
    return replace(
        plan,
        holds=tuple(holds),
        starts_s=tuple(starts_s),
        faults=tuple(sorted(faults, key=lambda it: it.at_s)),
        trains=trains,
    )


def _with_dealt(draws: Draws, plan: Plan) -> Plan:
    """With sets that the syncer deals, of most learners, and perhaps deals anew every few rounds."""
    is_dealt, cut = [True, *(draws.unit("set is dealt") < 0.8 for _ in plan.step_s[1:])], plan.method.fragments
    assert isinstance(cut, Experts)
    num_dealt, quorum = sum(is_dealt), plan.method.quorum
    turns = 0 if isinstance(quorum, diloco.AllLive) and quorum.drop else draws.whole("deal every", 0, 3)
    cut = replace(cut, copies=draws.whole("copies", 1, min(2, num_dealt)), deal_every=turns * cut.every)
    feedback = 0.0 if turns else plan.method.error_feedback  # which excludes turns
    size = -(-cut.copies * cut.groups // num_dealt)
    method = replace(plan.method, fragments=cut, error_feedback=feedback)
    return replace(plan, method=method, dealt=tuple(size * each for each in is_dealt))


def _with_standby(draws: Draws, plan: Plan) -> Plan:
    """Longer, since a takeover takes its time, and with faults of both syncers and of what is between them."""
    faults = [each for each in plan.faults if each.kind != OLDER_COPY]
    for _ in range(draws.whole("pair faults", 1, 5)):
        kind, choice = draws.of("pair fault", get_args(PairKind)), draws.whole("pair fault's choice", 0, 2)
        at_s, seconds = draws.between("pair fault at", 1.0, 45.0), draws.between("pair fault for", 0.3, 25.0)
        learner = draws.whole("pair fault's learner", 0, len(plan.step_s) - 1)
        faults.append(Fault(round(at_s, 3), kind, learner, round(seconds, 3), choice))
    bucket = {**_BUCKET, "lease_s": draws.of("lease_s", (3.0, 10.0))}
    return replace(
        plan,
        steps=plan.steps + draws.whole("more steps", 20, 70),
        faults=tuple(sorted(faults, key=lambda it: it.at_s)),
        standby=True,
        **bucket,
    )


def _with_orders(draws: Draws, plan: Plan) -> Plan:
    """Longer, since learners stand still while the run is paused."""
    faults = [each for each in plan.faults if each.kind != OLDER_COPY]
    for _ in range(draws.whole("orders", 1, 4)):
        kind, learner = draws.of("order", ORDERS), draws.whole("order's learner", 0, len(plan.step_s) - 1)
        at_s, seconds = draws.between("order at", 1.0, FAULTS_END_S), draws.between("order for", 0.1, 12.0)
        faults.append(Fault(round(at_s, 3), kind, learner, round(seconds, 3)))
    return replace(
        plan,
        steps=plan.steps + draws.whole("steps with orders", 5, 20),
        faults=tuple(sorted(faults, key=lambda it: it.at_s)),
        steered=True,
    )


def _that_goes_back(draws: Draws, plan: Plan) -> Plan:
    """Longer, since learners take up work again, and without what a state that is older on purpose makes void: a copy
    that learners refuse, and a second process of a name, of which the state may not know."""
    faults = [each for each in plan.faults if each.kind not in (OLDER_COPY, "same name")]
    for _ in range(draws.whole("times back", 1, 2)):
        kind, choice = draws.of("goes back by", GOINGS), draws.whole("goes back to", 0, 2)
        at_s, seconds = draws.between("goes back at", 5.0, FAULTS_END_S), draws.between("goes back for", 0.5, 8.0)
        faults.append(Fault(round(at_s, 3), kind, 0, round(seconds, 3), choice))
    return replace(
        plan,
        steps=plan.steps + draws.whole("steps again", 10, 30),
        faults=tuple(sorted(faults, key=lambda it: it.at_s)),
        goes_back=True,
    )


def _overlaps(draws: Draws, method: Method, num_learners: int) -> tuple[int | None, ...]:
    if draws.unit("own overlaps") < 0.5:
        return (None,) * num_learners
    choices = [None, *range(method.sync_every), *[method.sync_every] * method.sync_every]
    return tuple(_if_allowed(method, draws.of("own overlap", choices)) for _ in range(num_learners))


def _if_allowed(method: Method, overlap: int | None) -> int | None:
    if overlap is not None:
        try:
            method.with_own_overlap(overlap)
        except ConfigError:
            return None
    return overlap


def _trains(
    draws: Draws, method: Method, num_learners: int, sizes: Sequence[int]
) -> tuple[tuple[tuple[int, ...] | None, ...], ...]:
    everything: tuple[tuple[int, ...] | None, ...] = (None,) * len(sizes)
    if isinstance(method.adopt, diloco.Eager) or draws.unit("learners train parts") < 0.7:
        return (everything,) * num_learners
    each = []
    for _ in range(num_learners):
        chosen = [tuple(index for index in range(min(size, 2)) if draws.unit("trains") < 0.6) for size in sizes]
        parts = tuple(None if len(c) == min(size, 2) else c for c, size in zip(chosen, sizes, strict=True))
        each.append(parts if any(chosen) else everything)
    return tuple(each)


def _faults(draws: Draws, num_learners: int) -> tuple[Fault, ...]:
    faults = [_fault(draws, num_learners) for _ in range(draws.whole("faults", 0, 6))]
    if draws.unit("has an older copy") < 0.2:  # of a syncer that was started again since
        for kind, earliest_s, latest_s in (("kill syncer", 2.0, 8.0), (OLDER_COPY, 9.0, FAULTS_END_S - 5.0)):
            at_s, seconds = draws.between(f"{kind} at", earliest_s, latest_s), draws.between(f"{kind} for", 0.5, 8.0)
            faults.append(Fault(round(at_s, 3), kind, 0, round(seconds, 3), draws.whole(f"{kind} of", 0, 2)))
    return tuple(sorted(faults, key=lambda it: it.at_s))


def _store_faults(draws: Draws) -> list[Fault]:
    if draws.unit("has store faults") < 0.4:
        return []
    faults = []
    for _ in range(draws.whole("store faults", 1, 3)):
        kind, at_s = draws.of("store fault", STORE_FAULTS), draws.between("store fault at", 0.0, FAULTS_END_S - 5.0)
        is_long = kind == "store away" and draws.unit("away for long") < 0.2
        seconds = draws.between("store fault for", 0.3, 150.0 if is_long else 10.0)
        faults.append(Fault(round(at_s, 3), kind, 0, round(seconds, 3)))
    return faults


def _fault(draws: Draws, num_learners: int) -> Fault:
    kind = draws.of("fault", get_args(Kind))
    learner = draws.whole("fault's learner", 0, num_learners - 1)
    at_s, seconds = draws.between("fault at", 0.0, FAULTS_END_S - 5.0), draws.between("fault for", 0.1, 8.0)
    choice = draws.whole("fault's choice", 0, len(POINTS) - 1 if kind == "tear write" else 2)
    is_syncers = kind in ("kill syncer", "tear write", "refuse writes")
    return Fault(round(at_s, 3), kind, 0 if is_syncers else learner, round(seconds, 3), choice)


def _method(draws: Draws, num_learners: int, num_fragments: int) -> Method | None:
    """None: the answers that were drawn contradict each other."""
    at_least = draws.whole("at_least", 1, num_learners)
    quorum = draws.of("quorum", sorted(kind.__name__ for kind in QUORUMS))
    options: dict[str, Any] = {"at_least": at_least}
    takes = {each.name for kind in QUORUMS if kind.__name__ == quorum for each in fields(kind)}
    if "drop" in takes and draws.unit("drops") < 0.2:
        options |= {"drop": 0.3, "drop_seed": draws.whole("drop_seed", 1, 99)}
    if "late" in takes:
        options["late"] = draws.of("late", ("merge", "merge", "drop"))
    if "grace" in takes:
        options |= {"grace": draws.of("grace", (0.0, 0.8)), "grace_cap_s": draws.between("grace_cap_s", 0.1, 2.0)}
    if "dynamic_steps" in takes:
        options["dynamic_steps"] = draws.unit("dynamic") < 0.3
    sync_every = draws.whole("sync_every", 1, 7)
    codecs = sorted(CODECS)
    outer = draws.of("outer", ("SGD", "Nesterov", "Adam", "DelayedNesterov"))
    outers = {
        "SGD": diloco.SGD(lr=0.7), "Nesterov": diloco.Nesterov(lr=0.7, momentum=0.9), "Adam": diloco.Adam(lr=0.1),
        "DelayedNesterov": diloco.DelayedNesterov(lr=0.7, momentum=0.9, buffer=2),
    }  # fmt: skip
    assert outers.keys() == {kind.__name__ for kind in OUTER_OPTIMIZERS}
    try:
        method = Method(
            name="storm", paper="", sync_every=sync_every, overlap=draws.whole("overlap", 0, sync_every),
            fragments=diloco.Named([[f"w{index}.*"] for index in range(num_fragments)]),
            wait=draws.unit("waits") < 0.6, up=CODECS[draws.of("up", codecs)],
            down=CODECS[draws.of("down", codecs)],
            weight=draws.of("weight", ("uniform", "tokens", "tokens^2/steps", "discounted")),
            quorum=QUORUMS.read({"type": quorum, **options}), partial=draws.of("partial", ("full", "scale")),
            screen=diloco.NormOutliers() if draws.unit("screens") < 0.2 else None,
            outer=outers[outer], outer_at=draws.of("outer_at", ("syncer", "syncer", "learners")),
        )  # fmt: skip
        Rules.of(method, num_fragments)
    except ConfigError:
        return None
    return method


def _refined(draws: Draws, method: Method) -> Method:
    """With other answers to the questions of the arithmetic, each where the method can have it."""
    merge = MERGES.read({"type": draws.of("merge", sorted(kind.__name__ for kind in MERGES))})
    screen = draws.of("screen", (diloco.NormOutliers(1.5), diloco.NormZScore(0.8)))
    adopt = draws.of("adopt", (diloco.Replace(), diloco.Replace(), diloco.Mix(0.5), diloco.KeepDisplacement()))
    decay = draws.of("error_feedback", (0.0, 0.5, 1.0))
    changes: list[dict[str, Any]] = [
        {"merge": merge, "weight": method.weight if merge.weighted else "uniform"},
        {"adopt": adopt},
        {"error_feedback": decay},
        {"screen": method.screen and screen},
    ]
    if draws.unit("eager") < 0.5:  # with outer steps on the learners
        plain = {"merge": diloco.Mean(), "screen": None, "wait": True, "overlap": method.sync_every}
        changes.append({"adopt": diloco.Eager(), **plain})
    for each in changes:
        with suppress(ConfigError):
            method = replace(method, **each)
    return method


def told(plan: Plan, faults: Sequence[Fault]) -> str:
    """A plan in a few lines."""
    method = plan.method
    head = (
        f"seed {plan.seed}: {len(plan.step_s)} learners, {len(plan.sizes)} fragments, {plan.steps} steps, "
        f"{method.quorum.to_dict()}, sync_every={method.sync_every}, overlap={method.overlap}, wait={method.wait}, "
        f"up={method.up.name}, down={method.down.name}, error_feedback={method.error_feedback}, merge={method.merge}, "
        f"screen={method.screen}, outer={type(method.outer).__name__} at {method.outer_at}, adopt={method.adopt}, "
        f"overlaps={plan.overlaps}, fragments={method.fragments}, trains={plan.trains}"
    )
    if plan.holds:
        head += f", holds={[sorted(held) for held in plan.holds]}"
    if plan.rules is not None:
        head += f", {plan.num_units} groups a step, {plan.rules}, {plan.workers}"
    return "\n".join([head, *(f"  {fault}" for fault in faults)])
