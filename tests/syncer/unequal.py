"""A learner of a given speed: python -m tests.syncer.unequal ADDRESS NAME SECONDS_PER_STEP [initialise]

Trains until it is told to stop (SIGTERM), leaves, and prints its metrics as one line of JSON. An inner step lasts as long as it is
told to: a slow island, not a busy machine.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time

import torch
from tests.syncer.runs import RUN, Net

import diloco

TOKENS = 5


def main(address: str, name: str, step_s: float, initialise: bool) -> None:
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = Net(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exchange = diloco.connect(address, run=RUN, learner=name, initialise=initialise)
    longest_boundary_s = 0.0
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        while not stop.is_set():
            ends_at = time.monotonic() + step_s
            x, y = torch.randn(TOKENS, 4, generator=generator), torch.randn(TOKENS, 3, generator=generator)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stop.wait(max(0.0, ends_at - time.monotonic()))
            started = time.monotonic()
            learner.step(tokens=TOKENS)
            longest_boundary_s = max(longest_boundary_s, time.monotonic() - started)
        metrics = learner.metrics()
    print(json.dumps({**metrics, "longest_boundary_s": longest_boundary_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:] == ["initialise"])
