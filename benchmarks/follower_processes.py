"""The processes of `benchmarks.followers`, apart from its syncer: a learner, and followers.

python -m benchmarks.follower_processes learner ADDRESS --width N --step-s S --stop FILE
python -m benchmarks.follower_processes followers ADDRESS --number N [--drain] --stop FILE

Each follower is a forked process with `diloco.follow`. One that drains reads the update of each version, or of the
newest one if there are several, and makes no model from it. A follower prints its number and "ready" once it
has the newest version, and then its number and a version for each that follows. They end once the file STOP exists.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

import diloco
from diloco.following.sources import open_source
from diloco.store.objects import read_manifest

RUN, SYNC_EVERY = "followed", 20
NUM_VIEWERS = 8
"""Keys of viewers: one caller has at most half of the syncer's reads."""
POLL_S = 0.2


def train(address: str, width: int, step_s: float, stop: Path) -> None:
    """Steps of a fixed length, and one change of the model in each round."""
    net = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    exchange = diloco.connect(address, run=RUN, learner="learner", keys=Path("keys/learner"), initialise=True)
    with diloco.Learner(net, optimizer, exchange=exchange) as learner:
        while not stop.exists():
            time.sleep(step_s)
            is_first = learner.steps % SYNC_EVERY == 0
            net.weight.grad = torch.full_like(net.weight, 1e-3) if is_first else None
            optimizer.step()
            learner.step(tokens=1)


def follow(address: str, index: int, *, is_drain: bool) -> None:
    keys = Path(f"keys/viewer-{index % NUM_VIEWERS}")
    if is_drain:
        drain(address, index, keys)
        return
    is_first = True
    for model in diloco.follow(address, run=RUN, keys=keys, poll_s=POLL_S):
        print(index, "ready" if is_first else model.number, flush=True)
        is_first = False


def drain(address: str, index: int, keys: Path) -> None:
    read = -1
    with closing(open_source(address, RUN, keys=keys, patience_s=None)) as source:
        while True:
            [[newest, *_]] = read_manifest(source).fragments
            if read == -1:
                print(index, "ready", flush=True)
            elif newest.version > read and newest.update is not None:
                source.get(newest.update)
                print(index, newest.version, flush=True)
            else:
                time.sleep(POLL_S)
            read = newest.version


def until_stop(address: str, index: int, is_drain: bool, stop: Path) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=follow, args=(address, index), kwargs={"is_drain": is_drain}, daemon=True).start()
    while not stop.exists():
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learner", "followers"))
    parser.add_argument("address")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--drain", action="store_true")
    parser.add_argument("--stop", type=Path, required=True)
    its = parser.parse_args()
    torch.set_num_threads(1)
    if its.what == "learner":
        train(its.address, its.width, its.step_s, its.stop)
        return
    context = multiprocessing.get_context("fork")  # torch is imported once
    followers = [
        context.Process(target=until_stop, args=(its.address, index, its.drain, its.stop))
        for index in range(its.number)
    ]
    for each in followers:
        each.start()
    for each in followers:
        each.join()


if __name__ == "__main__":
    main()
