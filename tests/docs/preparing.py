"""What the Python blocks of a page find: the names that its text speaks of, and a syncer of the run `demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

import diloco
from diloco.protocol.contribution import Budget
from diloco.syncer.server import Options, Syncer

SYNCER = "syncer.example.org:7700"
"""Where pages say that the run `demo` is served."""

BUDGET = Budget(tokens=4096)


class Model(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(32, 8), nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        hidden = self.embed(input_ids[:, :-1])
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        wanted = input_ids[:, 1:].flatten()
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted))


def dataset(rows: int = 32) -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(rows * 9).remainder(32).view(rows, 9)
    return [{"input_ids": row, "labels": row} for row in tokens]


@dataclass
class Session:
    """A page's Python: its names, and what is to be ended with it.

    Attributes:
        directory: where the page is; it has `keys/` of the run.
        replaced: texts of the page, and what stands for them here.
        initialises: its learner gives the run its model.
    """

    directory: Path
    names: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    ends: ExitStack = field(default_factory=ExitStack)
    initialises: bool = False
    method: diloco.Method = field(
        default_factory=lambda: diloco.StreamingDiLoCo(
            sync_every=4, overlap=1, fragments=diloco.Balanced(2), quorum=diloco.AllLive(at_least=1)
        )
    )

    def common(self) -> None:
        """Names of nearly every page."""
        rows = dataset()
        self.names |= {
            "torch": torch, "diloco": diloco, "DataLoader": DataLoader,
            "dataset": rows, "loader": DataLoader(rows, batch_size=8),  # type: ignore[arg-type]
            "batches": cycle(DataLoader(rows, batch_size=8)),  # type: ignore[arg-type]
            "tokens": 64, "num_tokens": 64, "step": 1, "state": None, "evaluate": lambda model: None,
            "loss": torch.tensor(2.0), "held_out": 2.5, "build_model": Model,
        }  # fmt: skip
        self.take(Model())

    def take(self, model: nn.Module) -> None:
        """Have another model."""
        self.names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    def serve(
        self, method: diloco.Method | None = None, *, given: dict[str, Any] | None = None, initialised: bool = True
    ) -> None:
        """Serve a run of its own that has the page's model, from a learner with the arguments `given`; or none yet,
        so that the page's learner gives it its model."""
        self.close_learners()
        directory = self.directory / f"served-{len(list(self.directory.glob('served-*')))}"
        options = Options("127.0.0.1:0", directory, keys=self.directory / "keys" / "syncer", budget=BUDGET)
        syncer = self.ends.enter_context(Syncer("demo", method or self.method, options))
        self.replaced[SYNCER] = syncer.address
        self.initialises = False
        if initialised:
            first = self.connect("site-a", initialise=True)
            diloco.Learner(self.names["model"], self.names["optimizer"], exchange=first, **(given or {})).close()
        self.initialises = not initialised
        self.names["exchange"] = self.connect("paris")

    def connect(self, learner: str, *, initialise: bool | None = None) -> Any:
        return diloco.connect(
            self.replaced[SYNCER], run="demo", learner=learner,
            keys=str(self.directory / "keys" / learner),
            initialise=self.initialises if initialise is None else initialise,
        )  # fmt: skip

    def close_learners(self) -> bool:
        """Whether there were any."""
        learners = [name for name, value in self.names.items() if isinstance(value, diloco.Learner)]
        for name in learners:
            self.names.pop(name).close()
        return bool(learners)

    def run(self, text: str, where: str) -> None:
        """Execute a block. One that needs a syncer finds one; one that makes a learner finds the page's other learner
        gone, and an exchange of its own."""
        if SYNCER not in self.replaced and (SYNCER in text or "exchange=exchange" in text):
            self.serve()
        if "Learner(" in text and self.close_learners():
            self.names["exchange"] = self.connect("paris")
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        exec(compile(text, where, "exec"), self.names)


@contextmanager
def session(directory: Path) -> Iterator[Session]:
    with ExitStack() as ends:
        made = Session(directory, ends=ends)
        ends.callback(made.close_learners)
        made.common()
        yield made


Preparation = Callable[[Session], None]


def with_leases(session: Session) -> None:
    """Samples are read in this process: gRPC's server, which a user has elsewhere, stands no fork."""
    session.serve()
    session.replaced["num_workers=4"] = "num_workers=0"


def with_events(session: Session) -> None:
    """The log of the run that is over."""
    (session.directory / "events.jsonl").symlink_to(session.directory / "runs" / "demo" / "syncer" / "events.jsonl")


def with_a_learner(session: Session) -> None:
    session.serve()
    session.run("learner = diloco.Learner(model, optimizer, exchange=exchange)", "preparation")


def with_the_runs_model(session: Session) -> None:
    """The model of the run that commands find, and not that of the page's learner."""
    from diloco.config import load_config
    from diloco.training.model import build_model

    config = load_config(session.directory / "run.toml")
    session.names["build_model"] = lambda: build_model(config.model, 256, config.data.sequence_length, seed=1)


def with_accelerate(session: Session) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = session.names["optimizer"]
    session.names |= {"accelerator": accelerator, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
    session.serve()


def with_transformers(session: Session) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    session.take(LlamaForCausalLM(config))
    session.names["name"] = "base"
    session.names["model"].save_pretrained(session.directory / "base")
    session.names["Trainer"] = Trainer
    session.names["arguments"] = TrainingArguments(
        str(session.directory / "trained"), max_steps=8, per_device_train_batch_size=8, use_cpu=True, report_to=[],
        disable_tqdm=True, include_num_input_tokens_seen="all",
    )  # fmt: skip
    session.serve()


def with_lightning(session: Session) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    session.common()
    module = Module()
    session.take(module)
    session.names |= {"lightning": lightning, "ModelCheckpoint": ModelCheckpoint, "module": module}
    session.serve()


def with_ranks(session: Session) -> None:
    """A job of one rank on the CPU. The test's environment ends its process group."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    session.replaced['"cuda"'] = '"cpu"'
    session.names |= {
        "init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "dcp": dcp, "path": "checkpoint",
        "get_optimizer_state_dict": get_optimizer_state_dict, "set_optimizer_state_dict": set_optimizer_state_dict,
    }  # fmt: skip
    session.serve()


def with_fsdp1(session: Session) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    session.take(FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu")))


def with_buffers(session: Session) -> None:
    session.take(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    session.serve(given={"buffers": "average"})


def with_named_buffers(session: Session) -> None:
    router = nn.Module()
    router.register_buffer("bias", torch.zeros(4))
    model = nn.Module()
    model.norm, model.router, model.head = nn.BatchNorm1d(4), router, spectral_norm(nn.Linear(4, 4))
    session.take(nn.ModuleDict({"layer": model}))
    session.serve(initialised=False)


def with_an_adapter(session: Session) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    with_transformers(session)
    session.serve(initialised=False)
    session.names |= {"peft": peft, "AutoModelForCausalLM": AutoModelForCausalLM, "LoraConfig": peft.LoraConfig}


def with_a_lighthouse(session: Session) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200)
    session.ends.callback(lighthouse.shutdown)
    session.replaced["http://127.0.0.1:29510"] = lighthouse.address().replace("localhost", "127.0.0.1")
    session.names["METHOD"] = diloco.DiLoCo(sync_every=4)


def with_wandb(session: Session) -> None:
    import wandb

    with_a_learner(session)
    session.names["wandb"] = wandb
    session.ends.enter_context(wandb.init(mode="disabled"))


def with_digits(session: Session) -> None:
    """The example's run: a syncer on this machine without keys, and no model yet."""
    session.names["METHOD"] = session.method
    syncer = session.ends.enter_context(
        Syncer("digits", session.method, Options("127.0.0.1:0", session.directory / "served"))
    )
    session.replaced["127.0.0.1:7700"] = syncer.address


def with_experts(session: Session) -> None:
    from tests.test_examples import load

    moe = load("moe")
    session.take(moe.Mixture())
    session.names |= {"METHOD": moe.METHOD, "index": 1}
    session.serve(moe.METHOD)
