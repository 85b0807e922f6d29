"""`diloco export --raw`: the global model of a loop of one's own as a safetensors file."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import diloco
from diloco.cli import main
from diloco.exchange.base import Exchange
from diloco.syncer.server import Options, Syncer

METHOD = diloco.DiLoCo(sync_every=2, fragments=diloco.Balanced(2))


class Recurrent(nn.Module):
    """No layers in the names of its tensors; parameters in two dtypes, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 8), nn.Linear(8, 2).bfloat16()
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("num_seen", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.gru(x)[0] * self.scale).bfloat16())
        return out


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Linear(3, 8, bias=False), nn.Linear(8, 8), nn.Linear(3, 8)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(self.embed(x))) + self.head(x)


class Run:
    """A run of one learner, whose syncer has stopped; what the learner ended with."""

    def __init__(self, directory: Path, made: Callable[[], nn.Module]) -> None:
        self.state_dir = directory / "syncer"
        self.file = directory / "run.toml"
        with Syncer("own", METHOD, Options("127.0.0.1:0", self.state_dir)) as syncer:
            self.file.write_text(
                f'[run]\nname = "own"\ntokens = 1_000_000\nlearners = 1\n[syncer]\naddress = "{syncer.address}"\n'
            )
            self.without_a_model = said(self.file, directory / "none.safetensors")
            model = made()
            optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
            exchange = diloco.connect(syncer.address, run="own", learner="paris", initialise=True)
            with diloco.Learner(model, optimizer, exchange=exchange) as learner:
                for _ in range(6):
                    model(torch.randn(4, 5, 3)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    learner.step(tokens=20)
                learner.state_dict()  # waits for the answers on their way
                self.model = learner.global_state_dict()
                self.fetched = directory / "deep" / "fetched.safetensors"
                assert said(self.file, self.fetched) == (0, "")
        self.stored = directory / "stored.safetensors"
        assert said(self.file, self.stored, "--store", str(self.state_dir)) == (0, "")


def said(file: Path, out: Path, *options: str) -> tuple[int | str | None, str]:
    """The exit code of an export in this process, and its error."""
    with redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        main(["export", str(file), str(out), "--raw", *options])
    return ended.value.code, errors.getvalue()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("own"), Recurrent)


def test_the_file_is_the_global_model_under_the_loops_own_names(own: Run) -> None:
    for path in (own.fetched, own.stored):
        weights = load_file(path)
        assert weights.keys() == own.model.keys()
        for name, value in own.model.items():
            assert weights[name].dtype == value.dtype
            assert torch.equal(weights[name], value), name
        model = Recurrent()
        model.load_state_dict(weights)
        assert all(torch.equal(each, own.model[name]) for name, each in model.state_dict().items())
    with safe_open(own.stored, "pt") as file:
        assert file.metadata() == {"format": "pt", "run": "own"}
    assert own.stored.stat().st_mode == own.file.stat().st_mode  # that of the umask


def test_a_tied_weight_has_one_of_its_names(tmp_path: Path) -> None:
    run, model = Run(tmp_path, Tied), Tied()
    assert len(load_file(run.stored)) == len(run.model) - 1
    load_model(model, run.stored)
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(each, run.model[name]) for name, each in model.state_dict().items())
    again = Tied()
    again.load_state_dict(load_file(run.stored), strict=False)
    assert all(torch.equal(each, run.model[name]) for name, each in again.state_dict().items())


def test_what_is_there_is_not_overwritten_unasked(own: Run, tmp_path: Path) -> None:
    out, stored = tmp_path / "model.safetensors", ("--store", str(own.state_dir))
    out.write_bytes(b"mine")
    code, error = said(own.file, out, *stored)
    assert (code, error) == (1, f"diloco: {out} exists; choose another file, or overwrite it with --force.\n")
    assert out.read_bytes() == b"mine"
    assert said(own.file, out, *stored, "--force") == (0, "")
    assert load_file(out).keys() == own.model.keys()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_bad_input_is_one_sentence(own: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(own.file.read_text().replace('"own"', '"other"'))
    (tmp_path / "file").touch()
    out, empty = tmp_path / "model.safetensors", tmp_path / "empty"
    Syncer("own", METHOD, Options("127.0.0.1:0", empty)).close()
    for (code, error), wanted, words in [
        (own.without_a_model, 1, "has no model yet; start a learner that initialises it."),
        (said(own.file, out, "--store", str(empty)), 1, "has no model yet; start a learner that initialises it."),
        (said(other, out, "--store", str(own.state_dir)), 2, "holds run 'own', not 'other'; name that run"),
        (said(own.file, out, "--store", str(tmp_path)), 2, "there is no run in"),
        (said(own.file, out, "--checkpoint", str(tmp_path)), 1, "is not a checkpoint; name a step-… directory"),
        (said(own.file, tmp_path), 2, f"name the file, as {tmp_path}/model.safetensors"),
        (said(own.file, tmp_path / "file" / "x", "--store", str(own.state_dir)), 1, "choose another file"),
    ]:
        assert code == wanted, error
        assert words in error
        assert error.startswith("diloco: ")
        assert error.count("\n") == 1
    assert not out.exists()


def test_the_checkpoint_of_a_finished_learner_has_the_last_versions() -> None:
    """A learner that ends at an earlier step receives the others' last merges and adopts them no more."""
    from diloco.training.pretrained import global_model

    def life(index: int, exchange: Exchange) -> tuple[bool, dict[str, Tensor], dict[str, Tensor]]:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=diloco.DiLoCo(sync_every=5), exchange=exchange) as learner:
            while not learner.done:
                model(torch.randn(2, 3)).square().mean().backward()
                optimizer.step()
                learner.step(tokens=4 + index)
            learner.finish()
            state = learner.state_dict()
            saved = {"model": {}, "layout": learner.layout.to_dict(), "learner": state}
            is_behind = bool(state["received"])
            return is_behind, global_model(saved), learner.global_state_dict()

    results = diloco.run_local(life, learners=3, step_s=(1.0, 1.7, 0.6), tokens=500)
    assert any(is_behind for is_behind, *_ in results)
    for _, exported, own in results:
        assert exported.keys() == own.keys()
        assert all(torch.equal(value, own[key]) for key, value in exported.items())


def test_an_absent_extra_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "x"\ntokens = 1_000_000\n[method]\npreset = "DiLoCo"\n')
    script = "import sys; sys.modules['transformers'] = None; from diloco.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", script, "train", str(file), "--alone"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "diloco: transformers is not installed here; pip install 'diloco[train]'.\n"
