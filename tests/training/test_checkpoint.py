"""Checkpoints: whole or not there, exact, and refused when damaged."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.errors import CheckpointError, StoreError
from diloco.training.checkpoint import (
    from_bytes,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
    to_bytes,
)
from diloco.whole_files import hidden_name


def test_nested_state_comes_back_with_types_and_bits(tmp_path: Path) -> None:
    flat = torch.randn(6, generator=torch.Generator().manual_seed(0))
    state = {
        "views": [flat[:2], flat[2:]],
        "same": {"a": flat, "b": flat},
        "strided": flat.view(2, 3).t(),
        "empty": torch.empty(0, dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "counts": {0: {"step": torch.tensor(1.0)}, 7: None},
        "reserved": {"__tuple__": 3},
        "pair": (1, (0.1, float("inf")), "ü", True),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, state, keep=1).path)
    assert loaded.keys() == state.keys()
    assert torch.equal(torch.cat(loaded["views"]), flat)
    assert torch.equal(loaded["same"]["b"], flat)
    assert torch.equal(loaded["strided"], flat.view(2, 3).t())
    assert (loaded["empty"].dtype, loaded["empty"].shape) == (torch.bfloat16, (0,))
    assert loaded["scalar"].item() == 3
    assert loaded["counts"][0]["step"].item() == 1.0
    assert loaded["counts"][7] is None
    assert loaded["reserved"] == {"__tuple__": 3}
    assert loaded["pair"] == (1, (0.1, float("inf")), "ü", True)


def test_the_last_k_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        latest_checkpoint(tmp_path)
    for step in (5, 10, 100):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
    assert [load_checkpoint(path)["step"] for path in list_checkpoints(tmp_path)] == [10, 100]
    assert load_checkpoint(latest_checkpoint(tmp_path))["step"] == 100
    save_checkpoint(tmp_path, 100, {"step": "again"}, keep=2)
    assert load_checkpoint(latest_checkpoint(tmp_path))["step"] == "again"


@pytest.mark.parametrize("harm", ["flip", "truncate", "tensors", "manifest", "half manifest", "format"])
def test_damage_is_refused_and_names_the_checkpoint_before(tmp_path: Path, harm: str) -> None:
    save_checkpoint(tmp_path, 1, {"x": torch.ones(100)}, keep=2)
    path = save_checkpoint(tmp_path, 2, {"x": torch.ones(100)}, keep=2).path
    tensors, manifest = path / "tensors.safetensors", path / "manifest.json"
    content = bytearray(tensors.read_bytes())
    if harm == "flip":
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif harm == "truncate":
        tensors.write_bytes(content[:-1])
    elif harm == "tensors":
        tensors.unlink()
    elif harm == "manifest":
        manifest.unlink()
    elif harm == "half manifest":
        manifest.write_bytes(manifest.read_bytes()[:50])
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="step-0000000001" if harm != "format" else "format 99"):
        load_checkpoint(path)
    assert torch.equal(load_checkpoint(list_checkpoints(tmp_path)[0])["x"], torch.ones(100))


def test_another_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="is not a checkpoint; name a step-… directory below checkpoints/"):
            load_checkpoint(path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"x": 1}, keep=1)
    (tmp_path / "step-0000000002").write_text("a file where the directory should go")
    with pytest.raises(StoreError, match="cannot write the checkpoint"):
        save_checkpoint(tmp_path, 2, {"x": 2}, keep=1)
    assert load_checkpoint(latest_checkpoint(tmp_path)) == {"x": 1}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_unfinished_checkpoint_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"x": 1}, keep=2)
    (tmp_path / ".step-0000000002.17").mkdir()  # what a process killed in the middle leaves behind
    assert load_checkpoint(latest_checkpoint(tmp_path)) == {"x": 1}


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The power is cut at the n-th rename or removal."""

    class CutError(BaseException):
        pass

    seen = 0

    def counted(call: object) -> object:
        def counting(*arguments: object, **keywords: object) -> object:
            nonlocal seen
            seen += 1
            if seen == count:
                raise CutError
            return call(*arguments, **keywords)  # type: ignore[operator]

        return counting

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))

    def save_again_and_again() -> None:
        while True:
            save_checkpoint(Path.cwd(), 100, {"step": "again"}, keep=2)

    with pytest.raises(CutError):
        save_again_and_again()


@pytest.mark.parametrize("count", range(1, 11))
def test_wherever_a_save_is_cut_off_a_whole_checkpoint_is_the_newest(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of the same step is there, which it takes the place of."""
    for step in (10, 100):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, count)
    states = [load_checkpoint(path)["step"] for path in list_checkpoints(tmp_path)]
    assert states[-1] in (100, "again")
    assert states[0] == 10
    save_checkpoint(tmp_path, 100, {"step": "later"}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000010", "step-0000000100"]
    assert load_checkpoint(latest_checkpoint(tmp_path))["step"] == "later"


def test_what_a_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / hidden_name("step-0000000001")).mkdir()
    save_checkpoint(tmp_path, 3, {"x": 1}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000003"]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="/a/0 is a set"):
        save_checkpoint(tmp_path, 1, {"a": [{1, 2}]}, keep=1)


def test_a_state_crosses_as_bytes() -> None:
    state = {"numbers": [1, (2, None)], "tensor": torch.arange(5), "other": torch.rand(2, 3)}
    read = from_bytes(to_bytes(state))
    assert read["numbers"] == state["numbers"]
    assert torch.equal(read["tensor"], torch.arange(5))
    assert torch.equal(read["other"], state["other"])


def test_random_state_survives(tmp_path: Path) -> None:
    np.random.seed(3)
    random.seed(3)
    torch.manual_seed(3)
    path = save_checkpoint(tmp_path, 1, {"random": random_state()}, keep=1).path

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.normal()), float(torch.randn(()))

    before = draw()
    restore_random_state(load_checkpoint(path)["random"])
    assert draw() == before
