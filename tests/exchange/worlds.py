"""Ways to run a scenario's learners: in this process, and as processes of their own over a process group.

python -m tests.exchange.worlds DIRECTORY RANK WORLD_SIZE      one of those processes: runs every scenario in DIRECTORY

Over a syncer the same processes dial a `Syncer` per scenario. It runs what exchanges outer gradients; what happens to
learners that fail is its own business (they are given up, the others go on) and is tested elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.exchange.scenarios import FAILURES, LEARNERS, Result, Scenario, failed, live
from tests.processes import start_module
from tests.syncer.runs import PATIENT

import diloco
from diloco import Method
from diloco.exchange.base import Exchange
from diloco.exchange.local import Local, Lost, run_virtual
from diloco.exchange.virtual.run import VirtualRun
from diloco.planning.network import Network, Route
from diloco.syncer.server import Options, Syncer

TIMEOUT_S = 600.0
"""For a whole world, and for each wait in it; a world takes some 10 s on two idle cores."""

SYNCERS = 8
"""At a time: each looks after its deadlines and counts its bytes, whether learners are there or not."""

World = Callable[[Sequence[Scenario], Path], dict[str, list[Result]]]


RunLearners = Callable[[Callable[[int, Local], Result]], list[Result]]


STAYS_S = 10_000.0
"""Virtual seconds that a learner stays for the others, of which one may be behind by the time of its transfers."""


def in_process(scenarios: Sequence[Scenario], _: Path) -> dict[str, list[Result]]:
    """`diloco.run_local`, which raises the first learner's error for all."""
    return {
        scenario.name: _local(scenario, lambda life: diloco.run_local(life, learners=LEARNERS))
        for scenario in scenarios
    }


def in_virtual_time(scenarios: Sequence[Scenario], _: Path) -> dict[str, list[Result]]:
    """Over modelled links, by learners of unequal speed: what arrives when is another matter than in any other world.
    As over a syncer, all are there before the first step.

    A run in which parts are held is not resumed: one learner has trained before the next brings back what that holds.
    Eager learners have equal links and speeds: a part of theirs is that of those who are live, and who is quicker
        leaves earlier.
    """
    return {
        scenario.name: _local(_all_present(scenario), _over_links(alike="Eager" in str(scenario.method)))
        for scenario in scenarios
        if not (scenario.holds and scenario.resume_at)
    }


def _over_links(*, alike: bool) -> RunLearners:
    def run_learners(life: Callable[[int, Exchange], Result]) -> list[Result]:
        speed = [1] * LEARNERS if alike else range(1, LEARNERS + 1)
        links = {f"{way}-{index}": 1e4 * speed[index] for index in range(LEARNERS) for way in ("up", "down")}
        paths = [Route((f"up-{i}", "line"), (f"down-{i}",), 0.1 * speed[i]) for i in range(LEARNERS)]
        names = [f"learner-{index:03d}" for index in range(LEARNERS)]
        network = Network(links | {"line": 2e4}, paths)
        run = VirtualRun(names, lambda index, step: 0.1 + 0.02 * ((speed[index] + step) % 3), [0.0] * LEARNERS, network)
        return [result for result in run_virtual(life, run) if not isinstance(result, Lost)]

    return run_learners


def _local(scenario: Scenario, run_learners: RunLearners) -> list[Result]:
    carried: list[dict[str, Any]] = [{} for _ in range(LEARNERS)]
    results: list[Result] = []
    for part in range(scenario.parts):

        def life(index: int, exchange: Local, part: int = part) -> Result:
            return live(scenario, part, index, exchange, carried[index], lambda: exchange.sleep(STAYS_S))

        try:
            results = run_learners(life)
        except FAILURES as error:
            return [failed(error)] * LEARNERS
    return results


def over_gloo(scenarios: Sequence[Scenario], directory: Path) -> dict[str, list[Result]]:
    """`diloco.Collective` in one process per learner, each with the whole model."""
    scenarios = [scenario for scenario in scenarios if not scenario.holds]
    (directory / "scenarios.json").write_text(json.dumps([scenario.to_dict() for scenario in scenarios]))
    start_processes("tests.exchange.worlds", directory, LEARNERS)
    return {scenario.name: [read(directory, scenario.name, rank) for rank in range(LEARNERS)] for scenario in scenarios}


def over_syncer(scenarios: Sequence[Scenario], directory: Path) -> dict[str, list[Result]]:
    """`diloco.connect` in one process per learner; all are there before the first step."""
    able = [
        over for s in scenarios if not s.fault and s.method["exchanged"] != "gradients" for over in [_all_present(s)]
    ]
    results = {}
    for number, start in enumerate(range(0, len(able), SYNCERS)):
        results |= _over_syncers(able[start : start + SYNCERS], directory / str(number))
    return results


def _over_syncers(scenarios: Sequence[Scenario], directory: Path) -> dict[str, list[Result]]:
    addresses = {}
    directory.mkdir()
    with ExitStack() as stack:
        for number, scenario in enumerate(scenarios):
            options = Options("127.0.0.1:0", directory / f"syncer-{number}", deadlines=PATIENT)
            syncer = stack.enter_context(Syncer(scenario.name, Method.from_dict(scenario.method), options))
            addresses[scenario.name] = syncer.address
        (directory / "addresses.json").write_text(json.dumps(addresses))
        (directory / "scenarios.json").write_text(json.dumps([scenario.to_dict() for scenario in scenarios]))
        start_processes("tests.exchange.worlds", directory, LEARNERS)
    return {scenario.name: [read(directory, scenario.name, rank) for rank in range(LEARNERS)] for scenario in scenarios}


def _all_present(scenario: Scenario) -> Scenario:
    quorum = {"type": "AllLive", "at_least": LEARNERS}
    return replace(scenario, method={**scenario.method, "quorum": quorum})


WORLDS: dict[str, World] = {
    "virtual": in_virtual_time,
    "collective": over_gloo,
    "remote": over_syncer,
}


# --- processes --------------------------------------------------------------------------------------------------------


def start_processes(module: str, directory: Path, world_size: int, expect: Sequence[int] = ()) -> None:
    """Run `python -m module DIRECTORY RANK WORLD_SIZE` for every rank to its end, with warnings as errors.

    `expect`: the exit status of each rank; by default all 0.
    """
    logs = [directory / f"rank{rank}.log" for rank in range(world_size)]
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            output = stack.enter_context(log.open("w"))
            to = output.fileno()
            process = start_module(module, str(directory), str(rank), str(world_size), out=to, err=to)
            stack.callback(_stop, process)
            processes.append(process)
        deadline = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in processes]
    expected = list(expect) or [0] * world_size
    assert statuses == expected, "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)


def _stop(process: BaseProcess) -> None:
    process.kill()
    process.join()


def join_world(directory: Path, rank: int, world_size: int) -> None:
    """The default process group, found through a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S)
    )  # fmt: skip


def write(directory: Path, name: str, rank: int, result: Result) -> None:
    stem = directory / f"{name.replace(' ', '_')}.{rank}"
    save_file({key: value.contiguous() for key, value in result.tensors.items()}, f"{stem}.safetensors")
    Path(f"{stem}.json").write_text(json.dumps({"facts": result.facts, "error": result.error}))


def read(directory: Path, name: str, rank: int) -> Result:
    stem = directory / f"{name.replace(' ', '_')}.{rank}"
    plain = json.loads(Path(f"{stem}.json").read_text())
    return Result(load_file(f"{stem}.safetensors"), plain["facts"], plain["error"])


def _exchanges(directory: Path, rank: int, world_size: int) -> Callable[[str, int], Exchange]:
    """How this process reaches the others: by scenario and part."""
    addresses = directory / "addresses.json"
    if not addresses.exists():
        join_world(directory, rank, world_size)
        return lambda name, part: diloco.Collective(timeout_s=TIMEOUT_S)
    address = json.loads(addresses.read_text())
    return lambda name, part: diloco.connect(
        address[name], run=name, learner=f"learner-{rank:03d}", initialise=rank == 0 and part == 0,
        join_timeout_s=TIMEOUT_S,
    )  # fmt: skip


def _main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    exchange = _exchanges(directory, rank, world_size)
    store = torch.distributed.FileStore(str(directory / "meeting"), world_size)

    def meet(place: str) -> None:
        """Until all processes are there."""
        store.set(f"{place} {rank}", "")
        store.wait([f"{place} {other}" for other in range(world_size)])

    for values in json.loads((directory / "scenarios.json").read_text()):
        scenario = Scenario(**values)
        carried: dict[str, Any] = {}
        for part in range(scenario.parts):
            place = f"{scenario.name} {part}"
            wait = [] if scenario.fault else [partial(meet, f"{place} ends")]
            try:
                result = live(scenario, part, rank, exchange(scenario.name, part), carried, *wait)
            except FAILURES as error:
                result = failed(error)
            meet(f"{place} has ended")
            write(directory, scenario.name, rank, result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
