"""Checkpoints: each is a directory with tensors in safetensors and everything else in `manifest.json`. No pickle.

A checkpoint is written under a temporary name, every file is synced, and a rename makes it visible, so a crash at any
time leaves the previous checkpoint in place. An older checkpoint is removed after the newer one is durable, also where
both are of the same step; it is renamed before its files are removed. The manifest has the size and sha256 of the
tensor file. Nothing is pickled.

    step-0000000120                 a checkpoint
    step-0000000120.newer           its replacement of the same step, after a crash during the replacement
    unusable-step-0000000120        a checkpoint that was damaged or of another format, set aside by a start
    .step-0000000120.<host>.<pid>   being written by a process; the next save removes it if that process is dead
    .step-0000000120.removed.<host>.<pid>   being removed by a process; likewise
"""

import hashlib
import json
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from diloco import events as ev
from diloco.errors import CheckpointError, StoreError, first_line, translated
from diloco.escaping import MALFORMED
from diloco.whole_files import free_path, hidden_name, remove_leftovers, sync_directory, whole_file

log = logging.getLogger("diloco")

FORMAT = 6
_MANIFEST = "manifest.json"
_TENSORS = "tensors.safetensors"
_NEWER = ".newer"


@dataclass(frozen=True)
class SavedCheckpoint:
    """The path and size of a checkpoint."""

    path: Path
    num_bytes: int


def save_checkpoint(directory: Path, step: int, state: dict[str, Any], keep: int) -> SavedCheckpoint:
    """Write `state` (nested dicts, lists, tuples, tensors and plain values) as `directory/step-…`, and keep the newest
    `keep` checkpoints.

    Older checkpoints that cannot be removed are only logged. Raises StoreError when the new one cannot be made durable;
    the earlier ones are then unchanged.
    """
    tensors: dict[str, Tensor] = {}
    plain = _pack(state, tensors, "")
    payload = save_tensors(_separate(tensors))
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {_TENSORS: {"num_bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}},
        "state": plain,
    }
    text = json.dumps(manifest, indent=1).encode()
    final = directory / f"step-{step:010d}"
    temporary = directory / hidden_name(final.name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory, "step-*")
        temporary.mkdir()
        for name, content in ((_TENSORS, payload), (_MANIFEST, text)):
            with whole_file(temporary / name) as partial:
                partial.write_bytes(content)
        sync_directory(temporary)
        _publish(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StoreError(
            f"cannot write the checkpoint {final} ({error}); free disk space or set [run] dir elsewhere"
        ) from error
    try:
        for old in list_checkpoints(directory)[:-keep]:
            _remove(old)
    except OSError as error:
        log.warning("the checkpoints before %s cannot be removed (%s); remove them yourself", final, error)
    return SavedCheckpoint(final, len(payload) + len(text))


def _publish(written: Path, final: Path) -> None:
    """Rename a written checkpoint to its final name, and then remove an earlier checkpoint of the same step."""
    newer = final.with_name(final.name + _NEWER)
    if newer.exists():  # left by a crash during a replacement
        _replace(newer, final)
    if final.is_dir():
        written.rename(newer)
        sync_directory(final.parent)
        _replace(newer, final)
    else:
        written.rename(final)
    sync_directory(final.parent)


def _replace(newer: Path, final: Path) -> None:
    if final.is_dir():
        _remove(final)
    newer.rename(final)


def _remove(checkpoint: Path) -> None:
    """Rename it first: a partly removed directory must not look like a checkpoint."""
    hidden = checkpoint.with_name(hidden_name(f"{checkpoint.name}.removed"))
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-*") if path.is_dir())


def latest_checkpoint(directory: Path) -> Path:
    """The newest checkpoint. Raises CheckpointError when there is none."""
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        raise CheckpointError(f"there is no checkpoint in {directory}; start without --resume")
    return checkpoints[-1]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load the saved state, with tensors on the CPU.

    Raises CheckpointError when a file is missing, damaged or of another format; the message names an earlier checkpoint
    if there is one.
    """
    if not path.is_dir() or not (path.name.startswith("step-") or (path / _MANIFEST).exists()):
        raise CheckpointError(f"{path} is not a checkpoint; name a step-… directory below checkpoints/")
    try:
        return _load(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_instead(path)}") from error


def newest_usable(directory: Path) -> tuple[Path | None, tuple[ev.CheckpointUnusable, ...]]:
    """Find the newest checkpoint that can be loaded, or None, and rename newer ones to `unusable-…`.

    Raises:
        StoreError: a damaged checkpoint cannot be renamed.
    """
    unusable = []
    while checkpoints := list_checkpoints(directory):
        path = checkpoints[-1]
        try:
            _load(path)
        except CheckpointError as error:
            unusable.append(ev.CheckpointUnusable(path=str(path), kept=str(_set_aside(path)), error=str(error)))
        else:
            return path, tuple(unusable)
    return None, tuple(unusable)


def _set_aside(path: Path) -> Path:
    kept = free_path(lambda number: path.with_name(f"unusable-{path.name}{f'.{number}' if number > 1 else ''}"))
    with translated(OSError, StoreError, f"cannot rename {path}", "rename or remove it, and start again"):
        path.rename(kept)
    return kept


def _load(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has checkpoint format {manifest['format']}, this version reads {FORMAT}")
        payload = (path / _TENSORS).read_bytes()
        expected = manifest["files"][_TENSORS]
        if len(payload) != expected["num_bytes"] or hashlib.sha256(payload).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path / _TENSORS} is damaged (its size or sha256 differs from the manifest)")
        state: dict[str, Any] = _unpack(manifest["state"], load_tensors(payload))
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint ({type(error).__name__}: {first_line(error)})"
        ) from error
    return state


def lineage_of(path: Path) -> dict[str, Any] | None:
    """The syncer that the learner of a loadable checkpoint followed (`protocol.lineage`); None: it followed none."""
    lineage: dict[str, Any] | None = _read_plain(path, lambda state: state["learner"].get("lineage"))
    return lineage


def has_joined(path: Path) -> bool:
    """Whether the learner of a loadable checkpoint was one of a run that had a model."""
    return bool(_read_plain(path, lambda state: state["joined"]))


def held_by(path: Path) -> list[int] | None:
    """The experts that the model of a loadable checkpoint has; None: all."""
    held: list[int] | None = _read_plain(path, lambda state: state.get("held"))
    return held


def _read_plain(path: Path, read: Callable[[dict[str, Any]], Any]) -> Any:
    with translated((OSError, *MALFORMED), CheckpointError, f"cannot read {path}", _instead(path)):
        return read(json.loads((path / _MANIFEST).read_bytes())["state"])


def _instead(path: Path) -> str:
    earlier = [other for other in list_checkpoints(path.parent) if other.name < path.name]
    return f"resume from {earlier[-1]} instead" if earlier else "there is no earlier one, start afresh"


def _pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """`value` as plain JSON values, with its tensors moved to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"__tensor__": name}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _pack(item, tensors, f"{name}/{key}") for key, item in value.items()}
        items = [
            [_pack(key, tensors, f"{name}/k{i}"), _pack(item, tensors, f"{name}/{i}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return {"__items__": items}
    if isinstance(value, list | tuple):
        packed = [_pack(item, tensors, f"{name}/{i}") for i, item in enumerate(value)]
        return {"__tuple__": packed} if isinstance(value, tuple) else packed
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot store; use tensors and plain values"
    )


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__items__" in value:
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(_unpack(item, tensors) for item in value["__tuple__"])
    return {key: _unpack(item, tensors) for key, item in value.items()}


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, each in a storage of its own, as safetensors requires."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != own.nbytes:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        separate[name] = own
    return separate


def random_state() -> dict[str, Any]:
    """The random state of Python, numpy and torch (CPU, and CUDA where it is used)."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
    }


def to_bytes(state: dict[str, Any]) -> Tensor:
    """Encode a state (as for `save_checkpoint`) as one vector of uint8."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_pack(state, tensors, ""))
    return torch.frombuffer(bytearray(save_tensors(_separate(tensors), metadata={"state": plain})), dtype=torch.uint8)


def from_bytes(raw: Tensor) -> dict[str, Any]:
    """Decode a state that `to_bytes` encoded. Raises CheckpointError for other bytes."""
    advice = "decode only bytes that to_bytes encoded"
    with translated((SafetensorError, *MALFORMED), CheckpointError, "a state cannot be read from bytes", advice):
        content = raw.numpy().tobytes()
        header_bytes = int.from_bytes(content[:8], "little")
        plain = json.loads(content[8 : 8 + header_bytes])["__metadata__"]["state"]
        state: dict[str, Any] = _unpack(json.loads(plain), load_tensors(content))
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore every generator from `random_state`."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
