"""A `for` loop: what is marked "diloco" is all that a user adds.

    diloco syncer …                                                              docs/two-sites.md
    python examples/integrations/plain/train.py HOST:PORT --shard 0              and the same again after a crash
    python examples/integrations/plain/train.py HOST:PORT --shard 1

Gradients of two micro-batches are accumulated. Batches come from two worker processes through torchdata's
`StatefulDataLoader`, which a checkpoint resumes in the middle of an epoch.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import diloco  # diloco

MICRO_BATCHES = 2


class Windows(Dataset[Tensor]):
    """This learner's half of 320 windows of 17 bytes of a text, the squares of the numbers."""

    def __init__(self, shard: int) -> None:
        text = " ".join(str(number**2) for number in range(1000)).encode()
        self.windows = torch.tensor([list(text[16 * row : 16 * row + 17]) for row in range(shard, 320, 2)])

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class Model(nn.Module):
    """Predicts a byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 256)
        self.dropout = nn.Dropout(0.1)  # takes random numbers, which a checkpoint has to resume too

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.dropout(torch.tanh(self.hidden(self.embed(tokens[:, :-1])))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("syncer", help="its address, HOST:PORT")
    parser.add_argument("--shard", type=int, default=0, help="which half of the data")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--output", type=Path, help="default: runs/plain-SHARD")
    chosen = parser.parse_args()
    chosen.output = chosen.output or Path(f"runs/plain-{chosen.shard}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    checkpoint = chosen.output / "checkpoint.pt"

    torch.manual_seed(chosen.shard)
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Windows(chosen.shard)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(chosen.shard))
    loader = StatefulDataLoader(
        data, batch_size=8, sampler=order, generator=torch.Generator(), num_workers=2, drop_last=True
    )
    name = f"learner-{chosen.shard}"
    exchange = diloco.connect(chosen.syncer, run="tiny", learner=name, initialise="if-empty")  # diloco
    learner = diloco.Learner(model, optimizer, exchange=exchange)  # diloco
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["random"])
        learner.load_state_dict(saved["learner"])  # diloco

    batches = endless(loader)
    while not learner.done:  # diloco
        tokens = 0
        for _ in range(MICRO_BATCHES):
            batch = next(batches)
            (model(batch) / MICRO_BATCHES).backward()
            tokens += batch[:, 1:].numel()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=tokens)  # diloco
        if learner.steps % chosen.save_every == 0:
            saved = {
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
                "random": torch.get_rng_state(),
            }
            saved["learner"] = learner.state_dict()  # diloco
            torch.save(saved, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)

    learner.finish()  # diloco
    save_file(learner.global_state_dict(), chosen.output / "model.safetensors")  # diloco
    learner.close()  # diloco


def endless(loader: StatefulDataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
