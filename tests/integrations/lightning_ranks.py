"""A learner in Lightning for the tests of several ranks: its batches follow from its name, rank and step alone.

python tests/integrations/lightning_ranks.py ADDRESS NAME STEPS SAVE_EVERY OUTPUT KIND [--initialise | --resume]

KIND is how the ranks hold the model: `one`; `ddp`; `fsdp`, with distributed checkpoints; `fsdp-one-file`; `tensor`.
Ranks have the same batches with `fsdp`, so that any number of them makes the same steps, and with `tensor`. Gradients
are clipped with `fsdp-one-file`; ranks add up the squares in another order than one process.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import diloco
from diloco.integrations.lightning import DilocoCallback


class Model(lightning.LightningModule):
    def __init__(self, seed: int, *, same_batches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed, self.same_batches = seed, same_batches
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank = 0 if self.same_batches else self.global_rank
        generator = torch.Generator().manual_seed(10_000 * self.seed + 1_000 * rank + self.global_step)
        return self.loss(torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(torch.ones(5, 4), torch.zeros(5, 3)))

    def on_validation_end(self) -> None:
        assert self.trainer is not None
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"validated {self.global_step} {self.trainer.callback_metrics['loss'].item():.9f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Model):
    """FSDP2 from the meta device on, which computes in bf16."""

    def configure_model(self) -> None:
        self.layers.to("meta")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (self.layers[0], self.layers):
            fully_shard(module, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


class TensorParallel(Model):
    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


def made(kind: str, ranks: int, seed: int) -> tuple[Model, Any]:
    """The module and the Trainer's strategy."""
    match kind:
        case "ddp":
            return Model(seed), "ddp"
        case "fsdp":
            return Sharded(seed, same_batches=True), ModelParallelStrategy(ranks, 1)
        case "fsdp-one-file":
            return Sharded(seed), ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=False)
        case "tensor":
            return TensorParallel(seed, same_batches=True), ModelParallelStrategy(1, ranks)
    return Model(seed), "auto"


def main(address: str, name: str, steps: str, save_every: str, output: str, kind: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    exchange = diloco.connect(address, run="tiny", learner=name, initialise="--initialise" in arguments)
    model, strategy = made(kind, ranks, seed=int(name.rpartition("-")[2]))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=int(steps), logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, limit_val_batches=1,
        val_check_interval=int(steps), gradient_clip_val=0.5 if kind == "fsdp-one-file" else None,
        callbacks=[
            DilocoCallback(exchange, tokens=lambda batch: 5),
            ModelCheckpoint(output, save_last="link", every_n_train_steps=int(save_every)),
        ],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.zeros(1000))
    trainer.fit(model, loader, loader, ckpt_path="last" if "--resume" in arguments else None)
    final = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    if trainer.is_global_zero:
        save_file(final, Path(output) / "model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
