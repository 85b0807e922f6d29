"""A learner in Lightning for the tests of several ranks: its batches follow from its name, rank and step alone.

python tests/integrations/lightning_ranks.py ADDRESS NAME STEPS SAVE_EVERY OUTPUT [--initialise | --resume]
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn

import diloco
from diloco.integrations.lightning import DilocoCallback


class Model(lightning.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed, self.layers = seed, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.trainer is not None
        generator = torch.Generator().manual_seed(10_000 * self.seed + 1_000 * self.global_rank + self.global_step)
        x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
        return (self.layers(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(address: str, name: str, steps: str, save_every: str, output: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    exchange = diloco.connect(address, run="tiny", learner=name, initialise="--initialise" in arguments)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=int(steps), logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            DilocoCallback(exchange, tokens=lambda batch: 5),
            ModelCheckpoint(output, save_last=True, every_n_train_steps=int(save_every)),
        ],
    )  # fmt: skip
    model = Model(seed=int(name.rpartition("-")[2]))
    loader = torch.utils.data.DataLoader(torch.zeros(1000))
    trainer.fit(model, loader, ckpt_path="last" if "--resume" in arguments else None)
    if trainer.is_global_zero:
        save_file(model.state_dict(), Path(output) / "model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
