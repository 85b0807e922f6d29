"""A learner of leased samples in a process of its own, until the file `stop` is there: python -m
tests.syncer.leased_life DIRECTORY ADDRESS NAME [--initialise] [--steps=N]

It saves a checkpoint now and then, and continues from it when it is started again. The samples that it trained are
in `NAME.trained`, one step a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tests.syncer.runs import RUN, Net
from torch.utils.data import DataLoader, Dataset

import diloco

NUM_SAMPLES, BATCH, SAVED_EVERY = 120, 3, 7


class Samples(Dataset[torch.Tensor]):
    """Four numbers, of which the first is the sample's."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0, 2.0, 3.0])


def main(directory: Path, address: str, name: str, *options: str) -> None:
    torch.set_num_threads(1)
    saved, stop = directory / f"{name}.pt", directory / "stop"
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    initialises = "--initialise" in options and not saved.exists()
    [steps] = [int(option.partition("=")[2]) for option in options if option.startswith("--steps=")] or [10**9]
    exchange = diloco.connect(address, run=RUN, learner=name, initialise=initialises, join_timeout_s=300)
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        if saved.exists():
            learner.load_state_dict(torch.load(saved))
        sampler = diloco.LeasedSampler(learner, NUM_SAMPLES, BATCH, seed=3, lease_batches=4)
        loader = DataLoader(Samples(), batch_sampler=sampler)
        with open(directory / f"{name}.trained", "a") as trained:
            for number, batch in enumerate(islice(sampler.batches(loader), steps), 1):
                model(batch / NUM_SAMPLES).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                print(*map(int, batch[:, 0]), file=trained, flush=True)
                learner.step(tokens=len(batch))
                if number % SAVED_EVERY == 0:
                    torch.save(learner.state_dict(), saved.with_suffix(".new"))
                    saved.with_suffix(".new").replace(saved)
                if stop.exists():
                    break


def trained_by(directory: Path) -> Iterator[int]:
    """Samples that any learner has trained."""
    for path in directory.glob("*.trained"):
        yield from map(int, path.read_text().split())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
