"""A Lightning `Trainer`: what is marked "diloco" is all that a user adds.

    diloco syncer …                                                              docs/two-sites.md
    python examples/integrations/lightning/train.py HOST:PORT --shard 0          and the same again after a crash
    python examples/integrations/lightning/train.py HOST:PORT --shard 1

Gradients of two batches are accumulated. Batches come from two worker processes through torchdata's
`StatefulDataLoader`, which Lightning's checkpoints resume in the middle of an epoch. They contain no random states, so
the module saves those that its dropout uses.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import diloco  # diloco
from diloco.integrations.lightning import DilocoCallback  # diloco

MICRO_BATCHES = 2


class Windows(Dataset[Tensor]):
    """This learner's half of 192 windows of 17 bytes of a text, the squares of the numbers."""

    def __init__(self, shard: int) -> None:
        text = " ".join(str(number**2) for number in range(1000)).encode()
        self.windows = torch.tensor([list(text[16 * row : 16 * row + 17]) for row in range(shard, 192, 2)])

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class Model(lightning.LightningModule):
    """Predicts a byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 256)
        self.dropout = nn.Dropout(0.1)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.dropout(torch.tanh(self.hidden(self.embed(tokens[:, :-1])))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.random = checkpoint["random"]

    def on_train_start(self) -> None:
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("syncer", help="its address, HOST:PORT")
    parser.add_argument("--shard", type=int, default=0, help="which half of the data")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of the run")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--output", type=Path, help="default: runs/lightning-SHARD")
    chosen = parser.parse_args()
    chosen.output = chosen.output or Path(f"runs/lightning-{chosen.shard}")

    torch.manual_seed(chosen.shard)
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    name = f"learner-{chosen.shard}"
    exchange = diloco.connect(chosen.syncer, run="tiny", learner=name, initialise="if-empty")  # diloco
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=chosen.steps,
        accumulate_grad_batches=MICRO_BATCHES,
        callbacks=[
            DilocoCallback(exchange, tokens=lambda batch: batch[:, 1:].numel()),  # diloco
            ModelCheckpoint(chosen.output, save_last=True, every_n_train_steps=chosen.save_every),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    order = torch.Generator().manual_seed(chosen.shard)
    loader = StatefulDataLoader(
        Windows(chosen.shard), batch_size=8, shuffle=True, generator=order, num_workers=2, drop_last=True
    )
    model = Model()
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        save_file(model.state_dict(), chosen.output / "model.safetensors")


if __name__ == "__main__":
    main()
