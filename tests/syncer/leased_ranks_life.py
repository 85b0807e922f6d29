"""One of two ranks of a DDP job that is one learner of leased samples: python -m tests.syncer.leased_ranks_life
DIRECTORY ADDRESS RANK

It trains twice, the second time from the checkpoint of the first. The samples of each step are in `rank-RANK.json`.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from tests.syncer.leased_life import NUM_SAMPLES, Samples
from tests.syncer.runs import RUN, Net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import diloco

STEPS, BATCH = 10, 3


def main(directory: Path, address: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory / 'ranks'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    trained: list[list[int]] = []
    for part in (1, 2):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        exchange = diloco.connect(address, run=RUN, learner="island", initialise=part == 1, join_timeout_s=300)
        saved = directory / f"rank-{rank}.pt"
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            if part == 2:
                assert learner.load_state_dict(torch.load(saved))
            sampler = diloco.LeasedSampler(learner, NUM_SAMPLES, BATCH, seed=3, lease_batches=2)
            loader = DataLoader(Samples(), batch_sampler=sampler)
            for batch in islice(sampler.batches(loader), STEPS):
                model(batch / NUM_SAMPLES).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trained.append([int(index) for index in batch[:, 0]])
                learner.step(tokens=len(batch))
            torch.save(learner.state_dict(), saved)
    (directory / f"rank-{rank}.json").write_text(json.dumps(trained))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
