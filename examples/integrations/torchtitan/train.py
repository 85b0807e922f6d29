"""A torchtitan job: what is marked "diloco" is all that a user adds.

    diloco syncer …                                                              docs/two-sites.md
    torchrun … examples/integrations/torchtitan/train.py HOST:PORT --shard 0     and the same again after a crash
    torchrun … examples/integrations/torchtitan/train.py HOST:PORT --shard 1

Further options are torchtitan's, such as --parallelism.tensor-parallel-degree 2. Gradients of two micro-batches are
accumulated. Batches come from two worker processes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import tyro
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig, ParallelismConfig
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from diloco.integrations.torchtitan import Attachment, attach  # diloco


class Windows(IterableDataset):
    """This learner's half of the windows of a text, the squares of the numbers, again and again."""

    def __init__(self, length: int, shard: int, rank: int, num_ranks: int) -> None:
        self.text, self.length, self.at = " ".join(str(number**2) for number in range(1000)).encode(), length, 0
        self.starts = range(length * shard, len(self.text) - length - 1, 2 * length)[rank::num_ranks]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            start = self.starts[self.at % len(self.starts)]
            self.at += 1
            tokens = torch.tensor(list(self.text[start : start + self.length + 1]))
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        shard: int
        infinite: bool = True  # as validators set it

    def __init__(
        self, config: Config, *, dp_world_size, dp_rank, tokenizer, seq_len, local_batch_size, snapshot_every_n_steps=1
    ):
        super().__init__(
            Windows(seq_len, config.shard, dp_rank, dp_world_size), dp_rank, dp_world_size,
            snapshot_every_n_steps=snapshot_every_n_steps, num_workers=config.num_workers, batch_size=local_batch_size,
        )  # fmt: skip


class Bytes(BaseTokenizer):
    """The loader's windows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def job(model: str, layers: int, shard: int, steps: int, save_every: int, output: Path) -> Trainer.Config:
    spec = import_module(f"torchtitan.models.{model}").model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(output),
        tokenizer=Bytes.Config(),
        dataloader=Loader.Config(shard=shard, num_workers=2),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, global_batch_size=8, seq_len=32, steps=steps, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default needs a newer torch than 2.13
        checkpoint=CheckpointManager.Config(enable=True, interval=save_every),
        validator=Validator.Config(enable=True, freq=save_every - 1, steps=2, dataloader=Loader.Config(shard=0)),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        metrics=MetricsProcessor.Config(log_freq=10, disable_color_printing=True),
        debug=DebugConfig(seed=shard),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("syncer", help="its address, HOST:PORT")
    parser.add_argument("--shard", type=int, default=0, help="which half of the data")
    parser.add_argument("--model", default="llama3", help="whose debugmodel, of torchtitan.models")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="inner steps of the run")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--output", type=Path, help="default: runs/torchtitan-SHARD")
    chosen, options = parser.parse_known_args()
    chosen.output = chosen.output or Path(f"runs/torchtitan-{chosen.shard}")

    init_logger()
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    name = f"learner-{chosen.shard}"
    attachment = Attachment(syncer=chosen.syncer, run="tiny", learner=name, initialise="if-empty")  # diloco
    config = job(chosen.model, chosen.layers, chosen.shard, chosen.steps, chosen.save_every, chosen.output)
    config = attach(config, attachment)  # diloco
    trainer = tyro.cli(type(config), default=config, args=options).build()
    try:
        trainer.train()
    finally:
        trainer.close()
    mine = {
        canonical_fqn(name): parameter.detach().full_tensor()
        for part in trainer.model_parts  # several where this rank has several stages of a pipeline
        for name, parameter in part.named_parameters()
    }
    of_ranks = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, mine)
    if torch.distributed.get_rank() == 0:
        whole = {name: tensor for tensors in of_ranks for name, tensor in tensors.items()}
        save_file(whole, chosen.output / "model.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
