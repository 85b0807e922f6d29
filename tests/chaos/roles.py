"""Chaos of a run of reinforcement learning: kills and freezes of every role, the syncer among them.

    python -m tests.chaos.roles --seed 7 --faults 100

A syncer, two trainers, two rollout workers and two reward workers run as processes with a tiny model. Faults come one
after the other, some two at once: SIGKILL, with a restart by the same command at once or after a while, and SIGSTOP,
for less and for more than `syncer.lost_floor_s`. After each strike, in every status that the syncer answers

    acknowledged = waiting + leased + merged + stale + without signal + refused

exactly; neither the first nor any end is less than before, also where the syncer was killed; more groups are merged,
and the struck processes work again, before the next strike; and no process has ended by itself. The syncer is killed
once its store has what its status has shown, and its store has to have that then. Exit code 1: something does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import until
from benchmarks.roles import STATES, SYNCER, Roles, role_of

from diloco.cli._signals import interrupted_by_signals

LOST_S = 4.0

RUN_FILE = f"""
run = {{name = "roles", tokens = 1_000_000_000_000, learners = 2}}
method = {{preset = "DiLoCo", sync_every = 2}}
train = {{threads = 1}}
inner = {{lr = 1e-6}}
schedule = {{kind = "constant", steps = 1000}}
syncer = {{lost_floor_s = {LOST_S}, reconnect_floor_s = 2.0}}
rl = {{group_size = 4, groups_per_step = 4, max_prompt_tokens = 12, max_tokens = 6}}
engine = {{prompts = 4, threads = 1}}
task.letters = {{source = "tests.rl.letters:Letters"}}
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
"""
"""A learning rate that teaches nothing: once the rewards are all equal, no group has a signal to be merged for."""

NAMES = (SYNCER, "trainer-0", "trainer-1", "rollout-0", "rollout-1", "reward-0", "reward-1")

KINDS = {"kill": (0.0, 0.0), "kill, back later": (0.3, 2.0), "short freeze": (0.1, 0.7), "long freeze": (1.3, 2.5)}
"""Seconds until it ends, from and to, in `LOST_S`."""

TWICE = 0.25
"""Share of strikes with a second fault, which begins within a lost_floor_s of the first."""

PAUSE_S = (0.0, 3.0)
"""Before a strike, from and to."""

LOOK_S = 0.2
"""Between two looks at the run."""

LIMIT_S = 600.0
"""Only a run that hangs reaches it."""


@dataclass(frozen=True)
class Fault:
    """What is done to one process.

    Attributes:
        after_s: since the strike began.
        seconds: until the process is started again or thawed.
    """

    kind: str
    name: str
    after_s: float
    seconds: float


@dataclass(frozen=True)
class Strike:
    """One fault, or two of different processes. `pause_s`: before it."""

    pause_s: float
    faults: tuple[Fault, ...]


def schedule(seed: int, num_faults: int) -> list[Strike]:
    """The strikes of a seed: each kind happens to each process once before one happens to it again."""
    draws, strikes, deck, left = random.Random(seed), list[Strike](), list[tuple[str, str]](), num_faults
    while left:
        if len(deck) < 2:
            fresh = [(kind, name) for kind in KINDS for name in NAMES]
            draws.shuffle(fresh)
            deck = fresh + deck
        chosen = [deck.pop()]
        if left > 1 and draws.random() < TWICE:
            other = next(at for at in reversed(range(len(deck))) if deck[at][1] != chosen[0][1])
            chosen.append(deck.pop(other))
        spans = [(LOST_S * draws.random() * (number > 0), KINDS[kind]) for number, (kind, _) in enumerate(chosen)]
        faults = [
            Fault(kind, name, round(after_s, 3), round(LOST_S * draws.uniform(*span), 3))
            for (kind, name), (after_s, span) in zip(chosen, spans, strict=True)
        ]
        strikes.append(Strike(round(draws.uniform(*PAUSE_S), 3), tuple(faults)))
        left -= len(faults)
    return strikes


def steps_of(strike: Strike) -> Iterator[tuple[float, bool, Fault]]:
    """The beginnings (True) and ends of its faults, each with its time, in order."""
    begun = [(each.after_s, True, each) for each in strike.faults]
    ended = [(each.after_s + each.seconds, False, each) for each in strike.faults]
    yield from sorted(begun + ended, key=lambda it: (it[0], not it[1]))


def do(roles: Roles, strike: Strike) -> None:
    """All of a strike, until every process is started and thawed again."""
    began_s = time.monotonic()
    for at_s, begins, fault in steps_of(strike):
        while time.monotonic() < began_s + at_s:
            roles.watch()
            time.sleep(LOOK_S / 4)
        if fault.kind.startswith("kill"):
            (roles.kill_now if begins else roles.restart)(fault.name)
        else:
            (roles.freeze if begins else roles.thaw)(fault.name)


def recover(roles: Roles, names: set[str]) -> None:
    """Check the run until the syncer answers, more groups are merged, and these processes work again."""
    look_until(roles, lambda: True, f"after a fault of {sorted(names)} the syncer does not answer")
    first, left = roles.shown, set(names)

    def is_well() -> bool:
        left.difference_update({name for name in left if works(name, first, roles.shown)})
        return not left and bool(roles.groups["merged"] > first["groups"]["merged"])

    look_until(roles, is_well, f"{sorted(names)} were hit, and no group is merged, or some work no more")


def look_until(roles: Roles, holds: Callable[[], bool], what: str) -> None:
    """Look until the syncer answers and this holds, or something is wrong."""

    def is_done() -> bool:
        time.sleep(LOOK_S)
        return (roles.look() and holds()) or bool(roles.wrong)

    until(is_done, what, LIMIT_S)


def works(name: str, first: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a process has done something new between two statuses."""
    if name == SYNCER:
        return True
    if role_of(name) == "trainer":  # the next version may have what it sent before
        then, fragment = first["fragments"][0]["version"], now["fragments"][0]
        return bool(fragment["version"] > then + 1 and name in fragment["last_contributors"])
    before, after = (
        sum(each["generated"] + each["scored"] for each in status["groups"]["workers"] if each["name"] == name)
        for status in (first, now)
    )
    return bool(after > before)


def run(directory: Path, seed: int, num_faults: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run it until the first thing that does not hold; returns what happened."""
    (directory / "run.toml").write_text(RUN_FILE)
    began_s, done, waits = time.monotonic(), Counter[tuple[str, str]](), list[float]()
    with Roles(directory, directory / "run.toml", rewards=2) as roles:
        for name in NAMES:
            roles.restart(name)
        look_until(roles, lambda: bool(roles.groups["merged"]), "nothing is merged")
        try:
            for strike in schedule(seed, num_faults):
                if roles.wrong:
                    break
                time.sleep(strike.pause_s)
                done.update((fault.kind, role_of(fault.name)) for fault in strike.faults)
                do(roles, strike)
                ended_s = time.monotonic()
                recover(roles, {fault.name for fault in strike.faults})
                waits.append(round(time.monotonic() - ended_s, 1))
                kinds = " and ".join(f"{each.kind} of {each.name} ({each.seconds:.1f} s)" for each in strike.faults)
                say(f"{time.monotonic() - began_s:5.0f} s  {sum(done.values())}: {kinds}, well after {waits[-1]} s; "
                    f"{counts_of(roles)}")  # fmt: skip
        except TimeoutError as error:
            roles.wrong.append(str(error))
        if not roles.wrong:
            for name in reversed(NAMES):
                roles.stop(name)
        return {
            "seed": seed, "seconds": round(time.monotonic() - began_s, 1), "num_faults": sum(done.values()),
            "num_strikes": len(waits), "lost_floor_s": LOST_S,
            "faults": {kind: {role: num for (its, role), num in sorted(done.items()) if its == kind} for kind in KINDS},
            "groups": counts_of(roles), "steps": roles.shown["step"],
            "versions": roles.shown["fragments"][0]["version"], "processor_s": roles.processor_s(),
            "waits_s": waits, "violations": roles.wrong,
        }  # fmt: skip


def counts_of(roles: Roles) -> dict[str, int]:
    """Groups of the last status, by state."""
    return {state: roles.groups[state] for state in ("acknowledged", *STATES)}


def main() -> int:
    """Run it from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.roles", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--out", type=Path, help="an empty directory (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with interrupted_by_signals(), tempfile.TemporaryDirectory() as temporary:
        directory = (options.out or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        found = run(directory, options.seed, options.faults, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return bool(found["violations"])


def show(found: dict[str, Any]) -> None:
    """For people."""
    for kind, by_role in found["faults"].items():
        print(f"{sum(by_role.values()):4}  {kind}: " + ", ".join(f"{role} {num}" for role, num in by_role.items()))
    print(f"{found['num_faults']} faults in {found['num_strikes']} strikes and {found['seconds']:.0f} s")
    print("groups: " + ", ".join(f"{num} {state}" for state, num in found["groups"].items()))
    print("\n".join(found["violations"]) or "the states add up after each, nothing is lost, no process ended by itself")


if __name__ == "__main__":
    sys.exit(main())
