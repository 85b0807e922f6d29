"""Which fault happens when, to which process: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SYNCER, STANDBY, PAIR = "syncer", "standby", "pair"
"""Processes, and what faults aim at: the syncer that serves the run, the other one, both or what is between them."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: of it.
        target: "learner": a learner's process; "way": a learner's ways to all syncers; "syncer": the one that serves;
            "standby": the other one; "pair": both of them, or what is between them.
        weight: how often it is drawn, against the others.
        seconds: the shortest and the longest time that it lasts.
        settles_s: afterwards its target is left alone for so long.
        what: what it does, for people.
        needs: "standby": a second syncer; "one": that there is none; "": nothing.
    """

    name: str
    target: str
    weight: float
    seconds: tuple[float, float]
    settles_s: float
    what: str
    needs: str = ""


def kinds(lost_s: float) -> tuple[Kind, ...]:
    """All kinds. `lost_s`: the deadline after which a silent learner is given up."""
    short, long = (0.1, 0.5 * lost_s), (1.5 * lost_s, 2.5 * lost_s)
    over = (lost_s, lost_s + 3.0)  # and until the standby has taken over
    return (
        Kind("kill learner", "learner", 4, (0.5, 2.0), 6.0, "SIGKILL; started again after a while"),
        Kind("stop learner", "learner", 2, (0.5, 2.0), 6.0, "SIGTERM: it checkpoints and leaves; started again"),
        Kind("pause learner", "learner", 3, short, 2.0, "SIGSTOP, SIGCONT before its deadline"),
        Kind("freeze learner", "learner", 2, long, 4.0, "SIGSTOP, SIGCONT after its deadline: it was evicted"),
        Kind("same name", "learner", 2, (10.0, 16.0), 8.0, "a second process with the learner's keys and name"),
        Kind("fill learner's disk", "learner", 2, (1.0, 3.0), 2.0, "RLIMIT_FSIZE 0: no file can grow"),
        Kind("partition", "way", 3, short, 2.0, "nothing arrives either way, and no end is told; then all of it"),
        Kind("long partition", "way", 2, long, 4.0, "the same beyond the deadline"),
        Kind("one-way up", "way", 2, (0.1, 2 * lost_s), 3.0, "nothing of the learner's arrives at the syncer"),
        Kind("one-way down", "way", 2, (0.1, 2 * lost_s), 3.0, "nothing of the syncer's arrives at the learner"),
        Kind("half open", "way", 3, long, 4.0, "bytes on open connections are acknowledged and swallowed"),
        Kind("slow link", "way", 2, (1.0, 3.0), 2.0, "30 to 300 kB/s each way"),
        Kind("delay", "way", 2, (1.0, 3.0), 2.0, "50 to 500 ms for every piece"),
        Kind("corruption", "way", 3, (0.0, 0.5), 2.0, "a bit of one to three pieces is changed"),
        Kind("cut", "way", 4, (0.0, 0.0), 2.0, "all connections break"),
        Kind("cut transfer", "way", 4, (0.5, 1.5), 2.0, "a connection breaks after so many more bytes, up or down"),
        Kind("kill syncer", "syncer", 4, (0.2, 1.5), 4.0, "SIGKILL; started again after a while"),
        Kind("stop syncer", "syncer", 2, (0.2, 1.5), 4.0, "SIGTERM; started again"),
        Kind("pause syncer", "syncer", 2, (0.1, 2 * lost_s), 3.0, "SIGSTOP, SIGCONT"),
        Kind("fill syncer's disk", "syncer", 2, (1.0, 4.0), 4.0, "RLIMIT_FSIZE 0: no file can grow"),
        Kind(
            "damage state",
            "syncer",
            1,
            (0.2, 0.5),
            6.0,
            "SIGKILL, a file of the state is damaged; check --repair",
            "one",
        ),
        Kind("restore", "syncer", 1, (0.2, 0.5), 6.0, "SIGKILL, the state of a backup in its place", "one"),
        Kind("stale copy", "syncer", 1, (10.0, 14.0), 6.0, "SIGKILL, an older copy serves for a while", "one"),
        Kind("kill first", "syncer", 5, over, 10.0, "SIGKILL until the standby serves; back as its standby", "standby"),
        Kind("freeze first", "syncer", 3, over, 10.0, "SIGSTOP until the standby serves, then SIGCONT", "standby"),
        Kind("isolate first", "syncer", 3, over, 10.0, "no way to its standby and to most learners", "standby"),
        Kind("part first from half", "syncer", 2, long, 6.0, "no way to half of the learners", "standby"),
        Kind("part first from most", "syncer", 2, long, 6.0, "no way to more than half of them", "standby"),
        Kind("part the two", "pair", 3, long, 8.0, "no way from one syncer to the other", "standby"),
        Kind("kill both", "pair", 2, (0.5, 2.0), 14.0, "SIGKILL of both syncers; started again", "standby"),
        Kind("kill standby", "standby", 3, (0.5, 2 * lost_s), 10.0, "SIGKILL; started again after a while", "standby"),
        Kind("freeze standby", "standby", 2, long, 8.0, "SIGSTOP, SIGCONT after its deadline", "standby"),
        Kind("fill standby's disk", "standby", 2, (1.0, 4.0), 6.0, "RLIMIT_FSIZE 0: no file can grow", "standby"),
        Kind("promote", "standby", 2, (0.0, 0.0), 10.0, "diloco syncer promote --force: they change places", "standby"),
    )


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when, from the first moment of trouble on.
        kind: `Kind.name`.
        target: a learner's name, or "syncer", "standby" or "pair".
        seconds: how long.
        choice: from 0 to 1, what is left open: which file, how many bytes, how slow.
    """

    at_s: float
    kind: str
    target: str
    seconds: float
    choice: float

    @property
    def ends_s(self) -> float:
        """When it is over."""
        return self.at_s + self.seconds


def schedule(
    seed: int, seconds: float, learners: Sequence[str], among: Sequence[Kind], every_s: float
) -> tuple[Fault, ...]:
    """The faults of a seed, by time: one every `every_s` on average, and none that begins after `seconds`.

    A process or way that a fault has hit is left alone until that is over and the process has had the time to come
    back, and so are both syncers where one is hit; several others are hit at a time.
    """
    draws = random.Random(seed)
    faults: list[Fault] = []
    free_s: dict[str, float] = {}
    at_s = 0.0
    while (at_s := at_s + draws.expovariate(1 / every_s)) < seconds:
        kind = draws.choices(among, [each.weight for each in among])[0]
        target = draws.choice(learners) if kind.target in ("learner", "way") else kind.target
        hit = target if target in learners else PAIR
        lasts_s, choice = draws.uniform(*kind.seconds), draws.random()
        if free_s.get(hit, 0.0) <= at_s:
            faults.append(Fault(round(at_s, 3), kind.name, target, round(lasts_s, 3), round(choice, 6)))
            free_s[hit] = at_s + lasts_s + kind.settles_s
    return tuple(faults)
