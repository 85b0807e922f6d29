import sys

import torch
from torch import nn

import diloco

name = sys.argv[1]
torch.manual_seed(sum(name.encode()))  # every learner sees other data
model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

exchange = diloco.connect("127.0.0.1:7700", run="first", learner=name, initialise="if-empty")
with diloco.Learner(model, optimizer, exchange=exchange) as learner:
    while not learner.done:
        x = torch.rand(64, 32)
        loss = (model(x) - x.sort().values).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=64)
        if learner.steps % 50 == 0:
            learner.log(training_loss=loss.item())
    learner.finish()
    torch.save(learner.global_state_dict(), f"{name}.pt")
    print(f"{name} leaves at step {learner.steps}, the run has {learner.run_tokens:,} tokens")
