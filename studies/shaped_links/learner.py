"""The processes on the links: a learner of a syncer, one of a process group, one of torchft, its lighthouse. Each says
one line when ready.

    python -m studies.shaped_links.learner diloco '{"address": …, "name": …, "num_steps": …}'

A learner says "ready" once it has joined, reads the time of `time.monotonic` (which is that of the machine) at which
all take their first step, and says in the end what it measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from studies.shaped_links.cases import FRAGMENTS, LAYERS, RUN, STEP_S, STREAMING, SYNC_EVERY, WIDTH
from studies.shaped_links.links import DEVICE, LEARNERS, learner_ip

TORCHFT_OVERLAP = 5
GROUP_TIMEOUT_S = 60
GROUP_PORT = 29511


class Steps:
    """A model whose steps take `STEP_S`: a small real one, then sleep, in a hook of the optimizer that runs before all
    later hooks."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.model = nn.Sequential(*self.layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._generator = torch.Generator().manual_seed(index)
        self._ends_s = 0.0
        self.took_s = 0.0
        self.optimizer.register_step_post_hook(lambda *_: self._pad())
        self.one()  # gradients have their memory
        self.took_s = 0.0

    def one(self) -> None:
        """One inner step; torchft's hooks come after the padding."""
        self._began_s = time.monotonic()
        self.optimizer.zero_grad(set_to_none=False)
        batch: Tensor = torch.randn(1, WIDTH, generator=self._generator)
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def _pad(self) -> None:
        while (left_s := self._began_s + STEP_S - time.monotonic()) > 0:
            time.sleep(left_s)
        self.took_s += time.monotonic() - self._began_s


def timed(steps: Steps, num_steps: int, boundary: Callable[[int], None]) -> dict[str, Any]:
    """Begin when told to, with all learners; seconds of all steps with what follows each, and of the steps alone."""
    print("ready", flush=True)
    begins_s = float(sys.stdin.readline())
    time.sleep(max(0.0, begins_s - time.monotonic()))
    for step in range(1, num_steps + 1):
        steps.one()
        boundary(step)
    return {"seconds": time.monotonic() - begins_s, "steps_s": steps.took_s}


def ours(task: dict[str, Any]) -> dict[str, Any]:
    """A learner of a syncer."""
    import diloco
    from diloco.exchange.probe import measure_link

    steps = Steps(task["index"])
    dialled = {"run": RUN, "learner": task["name"], "keys": task["keys"]}
    latency_s = measure_link(task["address"], **dialled, seconds=1e-9, repeats=1).latency_s if task["pings"] else None
    exchange = diloco.connect(task["address"], **dialled, initialise=task["index"] == 0, join_timeout_s=120.0)
    adopted: list[tuple[int, tuple[int, ...]]] = []

    def boundary(step: int) -> None:
        learner.step(tokens=1)
        if not adopted or learner.versions != adopted[-1][1]:
            adopted.append((step, learner.versions))

    with diloco.Learner(steps.model, steps.optimizer, exchange=exchange) as learner:
        measured = timed(steps, task["num_steps"], boundary)
        blocked_s = learner.metrics()["blocked_s"]
    return {**measured, "blocked_s": blocked_s, "adopted": adopted, "latency_s": latency_s}


def collective(task: dict[str, Any]) -> dict[str, Any]:
    """A learner of a process group, streaming in fp32, with the offsets of torchft; learner 0's store is where the
    ranks find each other."""
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    from datetime import timedelta

    from torch import distributed as dist

    import diloco
    from diloco.core.presets import method_from_table

    steps, rank, timeout = Steps(task["index"]), task["index"], timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore(learner_ip(0), GROUP_PORT, LEARNERS, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=LEARNERS, timeout=timeout)
    method = method_from_table(tomllib.loads(STREAMING.run_file(""))["method"])
    sent = tuple((p + 1) * SYNC_EVERY // FRAGMENTS - STREAMING.overlap for p in range(FRAGMENTS))  # as torchft sends
    method = replace(method, offsets=sent)
    exchange = diloco.Collective(timeout_s=GROUP_TIMEOUT_S)
    with diloco.Learner(steps.model, steps.optimizer, method=method, exchange=exchange) as learner:
        measured = timed(steps, task["num_steps"], lambda _: learner.step(tokens=1))
    dist.destroy_process_group()
    return measured


def torchfts(task: dict[str, Any]) -> dict[str, Any]:
    """A learner of torchft's DiLoCo, streaming: fp32, as it comes."""
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    steps, ip = Steps(task["index"]), learner_ip(task["index"])
    store = TCPStore(ip, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=None, state_dict=None, min_replica_size=LEARNERS,
        use_async_quorum=False, timeout=timeout, quorum_timeout=timeout, connect_timeout=timeout, rank=0, world_size=1,
        store_addr=ip, store_port=store.port, lighthouse_addr=task["lighthouse"], replica_id=task["name"], hostname=ip,
        init_sync=False,
    )  # fmt: skip
    outer = [torch.optim.SGD(layer.parameters(), lr=0.4, momentum=0.9, nesterov=True) for layer in steps.layers]
    try:
        with DiLoCo(manager, steps.layers, steps.optimizer, outer, SYNC_EVERY, fragment_sync_delay=TORCHFT_OVERLAP):
            measured = timed(steps, task["num_steps"], lambda _: None)
        expected = task["num_steps"] // (SYNC_EVERY // FRAGMENTS)
        if manager.current_step() != expected:
            raise RuntimeError(f"torchft committed {manager.current_step()} synchronisations, not {expected}")
    finally:
        manager.shutdown()
    return measured


def lighthouse(task: dict[str, Any]) -> dict[str, Any]:
    """torchft's, with its defaults; serves until its input is closed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=task["bind"], min_replicas=LEARNERS)
    print("ready", flush=True)
    sys.stdin.read()
    server.shutdown()
    return {}


if __name__ == "__main__":
    kind = {"diloco": ours, "collective": collective, "torchft": torchfts, "lighthouse": lighthouse}[sys.argv[1]]
    print(json.dumps(kind(json.loads(sys.argv[2]))), flush=True)
