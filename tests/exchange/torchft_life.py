"""Processes of `test_torchft.py`: a lighthouse, a scenario of the contract, a learner that reports its steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tests.exchange.worlds import TIMEOUT_S


def lighthouse(min_replicas: str, silence_ms: str) -> None:
    """Serves until its input is closed; takes a learner that was silent for so long for dead."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=int(min_replicas), join_timeout_ms=200, heartbeat_timeout_ms=int(silence_ms)
    )
    print(server.address().replace("localhost", "127.0.0.1"), flush=True)
    sys.stdin.read()
    server.shutdown()


def scenario(name: str, index: str, address: str, out: str) -> None:
    from tests.exchange.scenarios import SCENARIOS, live

    from diloco.exchange.torchft import TorchFT

    torch.set_num_threads(1)
    carried: dict[str, Any] = {}
    for part in range(SCENARIOS[name].parts):
        exchange = TorchFT(f"learner-00{index}", lighthouse=address, host="127.0.0.1", timeout_s=TIMEOUT_S)
        result = live(SCENARIOS[name], part, int(index), exchange, carried)
    torch.save({"tensors": result.tensors, "ledger": result.facts["ledger"]}, out)
    print("{}")


def train(replica: str, steps: str, address: str, gate: str = "") -> None:
    """Three steps an interval, reporting; up to so many, or so many more ("+60").

    With a gate, the learner waits after step 6 for a line of input.
    """
    import diloco
    from diloco.core.fragments import digest
    from diloco.exchange.base import Arrived, Event
    from diloco.exchange.torchft import TorchFT

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    contributors: list[list[str]] = []

    class Noting(TorchFT):
        def poll(self) -> Sequence[Event]:
            events = super().poll()
            contributors.extend(list(event.update.contributors) for event in events if isinstance(event, Arrived))
            return events

    exchange = Noting(replica, lighthouse=address, host="127.0.0.1", timeout_s=TIMEOUT_S)
    print(json.dumps({"opening": 0}), flush=True)
    with diloco.Learner(model, optimizer, method=diloco.DiLoCo(sync_every=3), exchange=exchange) as learner:
        first_step = learner.steps
        print(json.dumps({"joined_at": first_step}), flush=True)
        last = int(steps) + (first_step if steps.startswith("+") else 0)
        while learner.steps < last:
            generator = torch.Generator().manual_seed(learner.steps + (1000 if replica == "b" else 0))
            x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=10)
            print(json.dumps({"step": learner.steps, "merged": len(contributors)}), flush=True)
            if gate and learner.steps == 6:
                sys.stdin.readline()
        state = torch.cat([value.flatten() for value in learner.global_state_dict().values()])
        metrics = learner.metrics()
        kept = {"versions": metrics["versions"], "ledger": metrics["ledger"]}
        end = {"first_step": first_step, **kept, "contributors": contributors, "digest": digest(state)}
        print(json.dumps(end), flush=True)


if __name__ == "__main__":
    {"lighthouse": lighthouse, "scenario": scenario, "train": train}[sys.argv[1]](*sys.argv[2:])
