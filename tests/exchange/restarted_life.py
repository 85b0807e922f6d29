"""A rank of an FSDP2 island that torchrun starts, and starts again: rank 1 is lost once.

torchrun --nproc-per-node 2 --max-restarts 1 -m tests.exchange.restarted_life DIRECTORY ADDRESS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.exchange.island_life import Net, full, load_optimizer, optimizer_state, set_gradients, shaped
from tests.exchange.worlds import TIMEOUT_S
from torch.distributed import checkpoint as dcp

import diloco

RUN, STEPS, SAVED_AT, LOST_AT = "restarted", 12, 4, 7


def main(directory: Path, address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    saved = directory / "checkpoint"
    again = saved.exists()
    model = shaped(Net(seed=1), "fsdp, 2 ranks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    exchange = diloco.connect(address, run=RUN, learner="island", initialise=not again, join_timeout_s=TIMEOUT_S)
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        if again:
            learner.load_distributed_state_dict(saved)
            load_optimizer(model, optimizer, saved)
        while learner.steps < STEPS:
            if learner.steps == LOST_AT and not again and dist.get_rank() == 1:
                os._exit(9)
            set_gradients(model, 1, learner.steps + 1)
            optimizer.step()
            learner.step(tokens=5)
            if learner.steps == SAVED_AT and not again:
                entries = {"learner": learner.distributed_state_dict(), "optimizer": optimizer_state(model, optimizer)}
                dcp.save(entries, checkpoint_id=saved)
        learner.state_dict()
        weights = full(learner.global_state_dict())
        metrics = learner.metrics()
    if dist.get_rank() == 0:
        save_file(weights, directory / "island.safetensors")
        (directory / "island.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
