"""What a learner resumes from: the whole state of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.fuzz.examining import Target
from tests.fuzz.files import fill
from tests.fuzz.mutations import JSON, SAFETENSORS, joined, mutated_parts, parted
from tests.syncer.runs import Net, method

import diloco
from diloco.errors import CheckpointError
from diloco.exchange.base import Exchange
from diloco.training.checkpoint import load_checkpoint, save_checkpoint

MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"

STEPS = 6
"""Inner steps before a checkpoint, and after it was loaded: beyond a round."""

METHODS: dict[bytes, diloco.Method] = {
    b"scheduled": method(codec="int4"),
    b"eager": diloco.EagerDiLoCo(sync_every=4, fragments=method().fragments),
    b"pushed": diloco.AsyncDiLoCo(sync_every=4, fragments=method().fragments),
}


def _train(learner: diloco.Learner, model: Net, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        learner.step(tokens=5)


def _life(name: bytes, exchange: Exchange, resume: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.Learner(model, optimizer, method=METHODS[name], exchange=exchange, resume=resume) as learner:
        _train(learner, model, STEPS)
        return learner.state_dict()


def _live(name: bytes, resume: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of one learner alone; returns its state."""
    return diloco.run_local(lambda _, exchange: _life(name, exchange, resume), learners=1)[0]


def _written(state: dict[str, Any]) -> list[bytes]:
    with tempfile.TemporaryDirectory() as root:
        path = save_checkpoint(Path(root), STEPS, {"learner": state}, keep=1).path
        return [(path / MANIFEST).read_bytes(), (path / TENSORS).read_bytes()]


def _loaded(parts: list[bytes]) -> dict[str, Any]:
    """The checkpoint, whose manifest is made to know of the tensors that are there."""
    manifest, tensors = parts
    try:
        said = json.loads(manifest)
        said["files"][TENSORS] = {"num_bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
        manifest = json.dumps(said).encode()
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    with tempfile.TemporaryDirectory() as root:
        fill(Path(root), {f"step-1/{MANIFEST}": manifest, f"step-1/{TENSORS}": tensors})
        state = load_checkpoint(Path(root) / "step-1")
    match state:
        case {"learner": dict() as found}:
            return found
    raise CheckpointError("the checkpoint has no learner.")


def resume() -> Target:
    """`Learner(resume=…)` of a wrong state; what is taken goes on to train."""
    seeds = tuple(joined([name, *_written(_live(name))]) for name in METHODS)

    def read(data: bytes) -> None:
        name, *parts = [*parted(data), b""][:3]
        if name in METHODS and len(parts) == 2:
            _live(name, _loaded(parts))

    def mutate(data: bytes, random: Random) -> bytes:
        return mutated_parts(data, lambda index: (None, JSON, SAFETENSORS)[min(index, 2)], random)

    return Target("resume", seeds, read, mutate)
