"""Injection of each kind of fault: how it begins and ends, as functions of the world.

`begin` returns whether there was something to hit: a process that is away is not killed again. A fault of the network
has hit if anything was on its way meanwhile.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.plan import SYNCER, TWIN, Fault
from tests.chaos.relay import Direction, Relay
from tests.chaos.world import World

from diloco.events import Joined

DIALLED_S = 4.0
"""Learners that wait for a syncer have dialled it in this time."""

Begin = Callable[[World, Fault], bool]


def nothing(world: World, fault: Fault) -> None:
    """The end of a fault that is over by itself."""


def at_once(world: World, fault: Fault, began_at: float) -> bool:
    """A fault has its effect at once."""
    return True


@dataclass(frozen=True)
class Injection:
    """How a kind of fault begins and ends.

    Attributes:
        has_worked: whether it has had its effect since it began (Unix time, in seconds): it ends then, after its time,
            since processes may take long to start.
        way: the way that it happens to; None: to no network.
    """

    begin: Begin
    end: Callable[[World, Fault], object] = nothing
    has_worked: Callable[[World, Fault, float], bool] = at_once
    way: Callable[[World, Fault], Relay] | None = None

    def num_touched(self, world: World, fault: Fault) -> int:
        """How often anything has happened to its way by now."""
        return 0 if self.way is None else self.way(world, fault).num_touched


# --- processes


def _ends_with(number: int) -> Begin:
    def begin(world: World, fault: Fault) -> bool:
        if not world.is_running(fault.target):
            return False
        world.family.kill(fault.target, fault.seconds, number)
        return True

    return begin


def begin_twin(world: World, fault: Fault) -> bool:
    """A second process joins under the name of a running learner. It knows of no epoch, so it would follow an older
    copy of the state."""
    if not world.is_running(fault.target) or world.is_stale:
        return False
    world.start_twin(fault.target)
    return True


def end_twin(world: World, fault: Fault) -> None:
    """It is killed, if it still runs."""
    child = world.family.children.pop(f"{fault.target}{TWIN}", None)
    if child is not None:
        child.process.kill()
        child.process.wait()


def has_joined(world: World, fault: Fault, began_at: float) -> bool:
    """A process of the name has joined the run."""
    return any(
        isinstance(event, Joined) and event.learner == fault.target and event.t > began_at
        for event in reversed(world.events)
    )


def pause(world: World, fault: Fault) -> bool:
    """SIGSTOP."""
    return _signal(world, fault.target, signal.SIGSTOP)


def resume(world: World, fault: Fault) -> bool:
    """SIGCONT."""
    return _signal(world, fault.target, signal.SIGCONT)


def _signal(world: World, name: str, number: int) -> bool:
    if not world.is_running(name):
        return False
    with suppress(ProcessLookupError):
        world.family.children[name].process.send_signal(number)
    return True


# --- disks


def fill(world: World, fault: Fault) -> bool:
    """No file of the process can grow any more. One that is still starting would fail in an import of a library that
    looks for a place for its temporary files."""
    return world.has_begun(fault.target) and _limit(world, fault.target, 0)


def free(world: World, fault: Fault) -> bool:
    """Files can grow again."""
    return _limit(world, fault.target, resource.RLIM_INFINITY)


def _limit(world: World, name: str, num_bytes: int) -> bool:
    if not world.is_running(name):
        return False
    with suppress(ProcessLookupError):
        resource.prlimit(world.pid(name), resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    return True


def damage(world: World, fault: Fault) -> bool:
    """Kill the syncer and change a file of its state: one of the newest objects, or the manifest."""
    if not world.is_running(SYNCER):
        return False
    world.family.kill(SYNCER, fault.seconds, wait=True)
    objects = sorted((world.state_dir / "objects").glob("*/*"), key=lambda path: path.stat().st_mtime)
    victims = [*objects[-3:], world.state_dir / "manifest.json"]
    _change(victims[int(fault.choice * len(victims))], fault.choice)
    return True


def _change(path: Path, choice: float) -> None:
    """Half of the times a byte is another one, half of the times the end is missing."""
    data = bytearray(path.read_bytes())
    place = int(choice * 997) % len(data)
    if int(choice * 1e6) % 2:
        data[place] ^= 0xFF
    else:
        del data[max(1, place) :]
    path.write_bytes(data)


def restore(world: World, fault: Fault) -> bool:
    """Kill the syncer, and put a copy in the place of its state."""
    if not world.is_running(SYNCER):
        return False
    world.family.kill(SYNCER, fault.seconds, wait=True)
    return world.restore()


def serve_an_older_copy(world: World, fault: Fault) -> bool:
    """Kill the syncer, and put the copy of its state in its place that was made before the faults. Not while there is a
    second process of a name (`begin_twin`)."""
    if not world.is_running(SYNCER) or world.has_twins:
        return False
    world.family.kill(SYNCER, 0.0, wait=True)
    world.go_stale()
    return True


def is_dialled(world: World, fault: Fault, began_at: float) -> bool:
    """The older copy has been served for long enough that learners have dialled it."""
    started_at = world.serves_an_older_copy_since
    return started_at is not None and time.time() - started_at > DIALLED_S


def serve_the_newest(world: World, fault: Fault) -> None:
    """Kill it, and put the state back."""
    if world.is_running(SYNCER):
        world.family.kill(SYNCER, 0.0, wait=True)
    if world.is_stale:
        world.be_true()


# --- networks


def _on_way(act: Callable[[World, Fault, Relay], object]) -> Injection:
    """Something that is done to the way of the target; in the end it is as before."""

    def begin(world: World, fault: Fault) -> bool:
        act(world, fault, world.ways[fault.target])
        return True

    return Injection(begin, heal, way=lambda world, fault: world.ways[fault.target])


def heal(world: World, fault: Fault) -> None:
    """The way is as before."""
    world.ways[fault.target].heal()


def partition(way: Relay) -> None:
    """Nothing arrives, in either direction, and new connections lead nowhere."""
    way.up.flows.clear()
    way.down.flows.clear()
    way.refuse()


def slow(world: World, fault: Fault, way: Relay) -> None:
    """Few bytes a second."""
    way.up.bytes_per_s = way.down.bytes_per_s = 30_000 * 10**fault.choice


def delay(world: World, fault: Fault, way: Relay) -> None:
    """Every piece takes longer."""
    way.up.delay_s = way.down.delay_s = 0.05 * 10**fault.choice


def corrupt(world: World, fault: Fault, way: Relay) -> None:
    """A bit of the next pieces is another one."""
    _either(way, fault).num_corrupt = 1 + int(3 * fault.choice)


def cut_transfer(world: World, fault: Fault, way: Relay) -> None:
    """A connection breaks in the middle of what it carries."""
    _either(way, fault).cut_after_bytes = int(fault.choice * world.plan.cut_bytes)


def _either(way: Relay, fault: Fault) -> Direction:
    return (way.up, way.down)[int(fault.choice * 1000) % 2]


INJECTIONS: dict[str, Injection] = {
    "kill learner": Injection(_ends_with(signal.SIGKILL)),
    "stop learner": Injection(_ends_with(signal.SIGTERM)),
    "pause learner": Injection(pause, resume),
    "freeze learner": Injection(pause, resume),
    "fill learner's disk": Injection(fill, free),
    "partition": _on_way(lambda world, fault, way: partition(way)),
    "long partition": _on_way(lambda world, fault, way: partition(way)),
    "one-way up": _on_way(lambda world, fault, way: way.up.flows.clear()),
    "one-way down": _on_way(lambda world, fault, way: way.down.flows.clear()),
    "half open": _on_way(lambda world, fault, way: way.swallow()),
    "slow link": _on_way(slow),
    "delay": _on_way(delay),
    "corruption": _on_way(corrupt),
    "cut": _on_way(lambda world, fault, way: way.cut()),
    "cut transfer": _on_way(cut_transfer),
    "kill syncer": Injection(_ends_with(signal.SIGKILL)),
    "stop syncer": Injection(_ends_with(signal.SIGTERM)),
    "pause syncer": Injection(pause, resume),
    "fill syncer's disk": Injection(fill, free),
    "damage state": Injection(damage),
    "restore": Injection(restore),
    "stale copy": Injection(serve_an_older_copy, serve_the_newest, is_dialled),
    "same name": Injection(begin_twin, end_twin, has_joined),
}
"""By `Kind.name`."""
