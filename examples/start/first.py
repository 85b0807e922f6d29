import torch

import diloco


def train(index, exchange):
    torch.manual_seed(index)  # every learner sees other data
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with diloco.Learner(model, optimizer, method=diloco.DiLoCo(sync_every=20), exchange=exchange) as learner:
        for _ in range(400):
            x = torch.randn(16, 8)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=16)
        return learner.global_state_dict()["weight"]


weights = diloco.run_local(train, learners=4)
print(weights[0])
print("the same on all learners:", all(torch.equal(each, weights[0]) for each in weights))
