"""LoRA over a real syncer: the frozen base does not cross the wire, and the syncer does not keep it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.syncer.runs import RUN, start
from torch import Tensor, nn

import diloco
from diloco.cli import main
from diloco.core.quorum import AllLive
from diloco.errors import DilocoError, LayoutError

METHOD = diloco.DiLoCo(sync_every=3, quorum=AllLive(at_least=2))
WIDTH = 128


class Blocks(nn.Module):
    """A pretrained model: the same values in every process."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


def adapted(seed: int = 0, index: int = 0) -> Any:
    peft = pytest.importorskip("peft")
    base = Blocks(seed)
    torch.manual_seed(50 + index)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "1", "2", "3"]))


def train(model: nn.Module, index: int, address: str, found: dict[int, Any], static: Any = "digest") -> None:
    """One learner's life; what it ends with is put into `found`."""
    model.train()
    model.base_model.model.norm.eval()
    exchange = diloco.connect(address, run=RUN, learner=f"l{index}", initialise=index == 0, join_timeout_s=300)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    try:
        with diloco.Learner(model, inner, exchange=exchange, static=static) as learner:
            for step in range(7):
                generator = torch.Generator().manual_seed(100 * index + step)
                inner.zero_grad()
                model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
                inner.step()
                learner.step(tokens=4)
            found[index] = {"num_bytes": learner.metrics()["num_bytes"], "global": learner.global_state_dict()}
    except DilocoError as error:
        exchange.close()
        found[index] = error


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two learners, and two more that may not join it."""
    folder: Path = tmp_path_factory.mktemp("lora")
    found: dict[int, Any] = {}
    models = [adapted(index=index) for index in range(2)]
    with start(folder, METHOD) as syncer:
        threads = [
            threading.Thread(target=train, args=(model, index, syncer.address, found))
            for index, model in enumerate(models)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        train(adapted(seed=1), 2, syncer.address, found)
        train(adapted(), 3, syncer.address, found, static="exchange")
    kept = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return {"found": found, "kept_bytes": kept, "models": models, "state_dir": folder / "state"}


def test_bytes_on_the_wire_and_on_the_syncers_disk_are_the_adapters(ended: dict[str, Any]) -> None:
    model = ended["models"][0]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert frozen > 15 * trained
    for index in range(2):
        assert not isinstance(ended["found"][index], DilocoError), ended["found"][index]
        num_bytes = ended["found"][index]["num_bytes"]
        assert num_bytes["contributions"] == 2 * 4 * trained
        assert num_bytes["updates"] == 2 * 4 * trained
        assert num_bytes["joins"] < 2 * 4 * trained + 1000  # the learner that initialises fetches what it has sent
    assert ended["kept_bytes"] < 4 * frozen


def test_the_global_model_is_the_adapters(ended: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    first, second = (ended["found"][index]["global"] for index in range(2))
    trained = {name for name, p in ended["models"][0].named_parameters() if p.requires_grad}
    assert set(first) == trained | {"base_model.model.norm.num_batches_tracked"}
    assert all(torch.equal(first[name], second[name]) for name in trained)
    fresh = adapted(index=9)
    exported = peft.get_peft_model_state_dict(fresh, state_dict=first)
    assert len(exported) == len(trained)
    peft.set_peft_model_state_dict(fresh, exported)
    for name in trained:
        assert torch.equal(fresh.state_dict()[name], first[name])


def test_a_raw_export_is_the_adapters(ended: dict[str, Any], tmp_path: Path) -> None:
    run_file, out = tmp_path / "run.toml", tmp_path / "adapters.safetensors"
    run_file.write_text(f'[run]\nname = "{RUN}"\ntokens = 1_000_000\n')
    with pytest.raises(SystemExit) as done:
        main(["export", str(run_file), "--raw", str(out), "--store", str(ended["state_dir"])])
    assert not done.value.code
    exported, first = load_file(out), ended["found"][0]["global"]
    assert exported.keys() == first.keys()
    adapted(index=9).load_state_dict(exported, strict=False)
    assert all(torch.equal(exported[name], each) for name, each in first.items() if each.is_floating_point())


@pytest.mark.parametrize(
    ("index", "words"), [(2, ["layers.0.base_layer.weight", "digest"]), (3, ["which each learner brings"])]
)
def test_a_learner_with_another_base_or_answer_is_refused_by_name(
    index: int, words: list[str], ended: dict[str, Any]
) -> None:
    error = ended["found"][index]
    assert isinstance(error, LayoutError)
    assert all(word in str(error) for word in words), error
