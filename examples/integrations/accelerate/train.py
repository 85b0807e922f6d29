"""A loop with accelerate: what is marked "diloco" is all that a user adds.

    diloco syncer …                                                              docs/two-sites.md
    python examples/integrations/accelerate/train.py HOST:PORT --shard 0         and the same again after a crash
    python examples/integrations/accelerate/train.py HOST:PORT --shard 1

Gradients of two micro-batches are accumulated; batches come from two worker processes, and a checkpoint resumes them in
the middle of an epoch. `accelerate launch --num-processes N` makes N ranks one learner, with
`--fsdp` too.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler

import diloco  # diloco
from diloco.integrations.accelerate import AcceleratedLearner  # diloco


class Model(nn.Module):
    """Predicts a byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 256)
        self.dropout = nn.Dropout(0.1)  # takes random numbers, which a checkpoint has to resume too

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.dropout(torch.tanh(self.hidden(self.embed(tokens[:, :-1])))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def windows(shard: int) -> TensorDataset:
    """A learner's half of 320 windows of 17 bytes of a text, the squares of the numbers."""
    text = " ".join(str(number**2) for number in range(1000)).encode()
    return TensorDataset(torch.tensor([list(text[16 * row : 16 * row + 17]) for row in range(shard, 320, 2)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("syncer", help="its address, HOST:PORT")
    parser.add_argument("--shard", type=int, default=0, help="which half of the data")
    parser.add_argument("--steps", type=int, default=200, help="of the learning rate schedule")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--fsdp", choices=["FULL_STATE_DICT", "SHARDED_STATE_DICT"], help="divide the model (FSDP2)")
    parser.add_argument("--output", type=Path, help="default: runs/accelerate-SHARD")
    chosen = parser.parse_args()
    chosen.output = chosen.output or Path(f"runs/accelerate-{chosen.shard}")

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=chosen.fsdp) if chosen.fsdp else None
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    set_seed(chosen.shard)
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.steps)
    data = windows(chosen.shard)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(chosen.shard))
    batches = BatchSampler(order, batch_size=8, drop_last=True)  # torchdata's, which can be resumed
    loader = DataLoader(data, batch_sampler=batches, generator=torch.Generator(), num_workers=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    name = f"learner-{chosen.shard}"
    exchange = diloco.connect(chosen.syncer, run="tiny", learner=name, initialise="if-empty")  # diloco
    learner = AcceleratedLearner(accelerator, model, optimizer, scheduler, exchange=exchange)  # diloco
    checkpoint = chosen.output / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(checkpoint)

    while not learner.done:  # diloco
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            learner.step(tokens=batch[:, 1:].numel())  # diloco
            if accelerator.sync_gradients and learner.steps % chosen.save_every == 0:
                accelerator.save_state(checkpoint)
            if learner.done:  # diloco
                break

    learner.finish()  # diloco
    with learner.global_model():  # diloco
        final = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            save_file(final, chosen.output / "model.safetensors")
    learner.close()  # diloco


if __name__ == "__main__":
    main()
