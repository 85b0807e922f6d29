"""What each kind of fault does: `begin` and `end` of a function of the world, by name.

`begin` says whether there was something to hit: a process that is away is not killed again.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.chaos.proxy import Direction
from diloco.chaos.schedule import SYNCER, Fault
from diloco.chaos.world import World

Act = Callable[[World, Fault], bool]


def nothing(world: World, fault: Fault) -> bool:
    """The end of a fault that is over by itself."""
    return True


@dataclass(frozen=True)
class Injection:
    """How a kind of fault begins and ends."""

    begin: Act
    end: Act = nothing


# --- processes


def _ends_with(number: int) -> Act:
    def begin(world: World, fault: Fault) -> bool:
        if not world.is_running(fault.target):
            return False
        world.family.kill(fault.target, number, back_after_s=fault.seconds)
        return True

    return begin


def pause(world: World, fault: Fault) -> bool:
    """Stop the process where it stands."""
    return _signal(world, fault.target, signal.SIGSTOP)


def resume(world: World, fault: Fault) -> bool:
    """Let it go on."""
    return _signal(world, fault.target, signal.SIGCONT)


def _signal(world: World, name: str, number: int) -> bool:
    if not world.is_running(name):
        return False
    with suppress(ProcessLookupError):
        world.family.children[name].process.send_signal(number)
    return True


# --- disks


def fill(world: World, fault: Fault) -> bool:
    """No file of the process can grow any more."""
    return _limit(world, fault.target, 0)


def free(world: World, fault: Fault) -> bool:
    """All can."""
    return _limit(world, fault.target, resource.RLIM_INFINITY)


def _limit(world: World, name: str, num_bytes: int) -> bool:
    if not world.is_running(name):
        return False
    with suppress(ProcessLookupError):
        resource.prlimit(world.pid(name), resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    return True


def damage(world: World, fault: Fault) -> bool:
    """Kill the syncer and change a file of its state: the newest tensors, the database, its log, or the description."""
    if not world.is_running(SYNCER):
        return False
    world.family.kill(SYNCER, back_after_s=fault.seconds)
    world.family.children[SYNCER].process.wait()
    tensors = sorted((world.state_dir / "tensors").glob("f*.safetensors"), key=lambda path: path.stat().st_mtime)
    others = [world.state_dir / name for name in ("run.json", "store.sqlite", "store.sqlite-wal")]
    victims = [*tensors[-1:], *tensors[-1:], *(path for path in others if path.exists() and path.stat().st_size)]
    if not victims:
        return False
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
    """Kill the syncer, and put the newest backup in the place of its state."""
    if not world.is_running(SYNCER):
        return False
    world.family.kill(SYNCER, back_after_s=fault.seconds)
    world.family.children[SYNCER].process.wait()
    return world.restore()


# --- networks


def partition(world: World, fault: Fault) -> bool:
    """Nothing arrives, in either direction, and new connections lead nowhere."""
    way = world.ways[fault.target]
    way.up.flows.clear()
    way.down.flows.clear()
    way.refuse()
    return bool(way.links)


def heal(world: World, fault: Fault) -> bool:
    """The way is as before."""
    world.ways[fault.target].heal()
    return True


def _stops(direction: Callable[[World, Fault], Direction]) -> Act:
    def begin(world: World, fault: Fault) -> bool:
        direction(world, fault).flows.clear()
        return bool(world.ways[fault.target].links)

    return begin


def swallow(world: World, fault: Fault) -> bool:
    """What is sent over open connections goes nowhere."""
    world.ways[fault.target].swallow()
    return bool(world.ways[fault.target].links)


def slow(world: World, fault: Fault) -> bool:
    """Few bytes a second."""
    for direction in _both(world, fault):
        direction.bytes_per_s = 30_000 * 10**fault.choice
    return True


def delay(world: World, fault: Fault) -> bool:
    """Every piece takes longer."""
    for direction in _both(world, fault):
        direction.delay_s = 0.05 * 10**fault.choice
    return True


def corrupt(world: World, fault: Fault) -> bool:
    """A bit of the next pieces is another one."""
    _either(world, fault).num_corrupt = 1 + int(3 * fault.choice)
    return bool(world.ways[fault.target].links)


def cut(world: World, fault: Fault) -> bool:
    """All connections break."""
    way = world.ways[fault.target]
    way.cut()
    return bool(way.links)


def cut_transfer(world: World, fault: Fault) -> bool:
    """A connection breaks in the middle of what it carries."""
    _either(world, fault).cut_after_bytes = int(fault.choice * 40_000)
    return bool(world.ways[fault.target].links)


def _both(world: World, fault: Fault) -> tuple[Direction, Direction]:
    way = world.ways[fault.target]
    return way.up, way.down


def _either(world: World, fault: Fault) -> Direction:
    return _both(world, fault)[int(fault.choice * 1000) % 2]


INJECTIONS: dict[str, Injection] = {
    "kill learner": Injection(_ends_with(signal.SIGKILL)),
    "stop learner": Injection(_ends_with(signal.SIGTERM)),
    "pause learner": Injection(pause, resume),
    "freeze learner": Injection(pause, resume),
    "fill learner's disk": Injection(fill, free),
    "partition": Injection(partition, heal),
    "long partition": Injection(partition, heal),
    "one-way up": Injection(_stops(lambda world, fault: world.ways[fault.target].up), heal),
    "one-way down": Injection(_stops(lambda world, fault: world.ways[fault.target].down), heal),
    "half open": Injection(swallow, heal),
    "slow link": Injection(slow, heal),
    "delay": Injection(delay, heal),
    "corruption": Injection(corrupt, heal),
    "cut": Injection(cut),
    "cut transfer": Injection(cut_transfer, heal),
    "kill syncer": Injection(_ends_with(signal.SIGKILL)),
    "stop syncer": Injection(_ends_with(signal.SIGTERM)),
    "pause syncer": Injection(pause, resume),
    "fill syncer's disk": Injection(fill, free),
    "damage state": Injection(damage),
    "restore": Injection(restore),
}
"""By `schedule.Kind.name`."""
