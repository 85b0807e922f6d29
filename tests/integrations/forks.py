"""Forks processes, as a data loader does, while a learner is attached; prints how they have ended.

python tests/integrations/forks.py ADDRESS
"""

import multiprocessing
import sys
from collections import Counter

import torch
from torch import nn

import diloco


def main() -> None:
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = diloco.connect(sys.argv[1], run="tiny", learner="a", initialise=True)
    ends: Counter[int | None] = Counter()
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        for _ in range(40):
            learner.step(1)  # an exchange is under way
            process = multiprocessing.get_context("fork").Process(target=int)
            process.start()
            process.join(300)
            ends[process.exitcode] += 1
            process.kill()
    print(dict(ends))


if __name__ == "__main__":
    main()
