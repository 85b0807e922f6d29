"""A follower of the run of examples/start: judges each version on data that no learner has, and keeps the best.

diloco syncer examples/start/run.toml
python examples/start/learner.py paris
python examples/start/learner.py oslo
python examples/follow.py [127.0.0.1:7700]
"""

import math
import sys

import torch
from torch import nn

import diloco

model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 32))
x = torch.rand(1000, 32, generator=torch.Generator().manual_seed(0))
best, best_version = math.inf, None

for version in diloco.follow(*(sys.argv[1:] or ["127.0.0.1:7700"]), run="first", poll_s=0.1):
    model.load_state_dict(version.state_dict())
    with torch.no_grad():
        loss = (model(x) - x.sort().values).square().mean().item()
    print(f"{version}: held-out loss {loss:.4f}", flush=True)
    if loss < best:
        best, best_version = loss, version
        torch.save(model.state_dict(), "best.pt")

print(f"best.pt is {best_version}")
