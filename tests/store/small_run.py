"""A run of two fragments in a store, published without a syncer, for the tests of what is durable."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import safetensors.torch
import torch

import diloco
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout, TensorSpec, digest, place
from diloco.core.update import Update
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore
from diloco.run.ports import InitialModel, MergedRound
from diloco.store.store import Store, checked_values

NUM_ELEMENTS = 1000
STATIC = safetensors.torch.save({"rope.inv_freq": torch.arange(4.0)})
METHOD = diloco.DiLoCo(sync_every=30)
LAYOUT = Layout(tuple(place(f, [TensorSpec("ab"[f], (NUM_ELEMENTS,), "float32")]) for f in (0, 1)), ())


def theta_of(fragment: int, version: int) -> torch.Tensor:
    return torch.arange(NUM_ELEMENTS, dtype=torch.float32) + 1000.0 * fragment + version / 8


def held_of(fragment: int, version: int) -> GlobalFragment:
    theta = theta_of(fragment, version)
    if version == 0:
        return GlobalFragment(fragment, 0, theta, {}, None, digest(theta))
    state = {"momentum": -theta, "steps": torch.tensor(version)}
    return GlobalFragment(fragment, version, theta, state, theta / 3, digest(theta))


def merged_of(fragment: int, version: int) -> MergedRound[GlobalFragment, torch.Tensor]:
    """By two learners, of 32 and 64 tokens."""
    contributions = tuple(
        Contribution(name, 1, fragment, version, version - 1, version - 1, tokens, 1, step=version)
        for name, tokens in (("site-a", 32), ("site-b", 64))
    )
    weights = (1.0, 0.5)
    action = MergeRound(fragment, version - 1, contributions, weights, 1.0, frozenset(("site-a", "site-b")), "all")
    held = held_of(fragment, version)
    update = Update(fragment, version - 1, version, ("site-a", "site-b"), weights, 1.0, held.digest, lossless=False)
    return MergedRound(action, update, held, torch.empty(0, dtype=torch.uint8), 0)


def initialise(store: Store, run: str = "demo", run_id: str = "0" * 32) -> None:
    fragments = (held_of(0, 0), held_of(1, 0))
    store.initialise(
        run, METHOD, InitialModel(LAYOUT, fragments, STATIC, "site-a", "seed 17", run_id, step=3, tokens=5)
    )


def publish(store: Store, fragment: int, version: int) -> None:
    store.publish(merged_of(fragment, version), {"step": version})


def check(store: Store, versions: dict[int, int]) -> None:
    saved = store.load()
    assert saved is not None
    assert {fragment.fragment: fragment.version for fragment in saved.fragments} == versions
    for index, fragment in enumerate(saved.fragments):
        assert torch.equal(fragment.theta, theta_of(index, fragment.version))
        assert fragment.digest == digest(fragment.theta)
        if fragment.version:
            assert torch.equal(fragment.outer_state["momentum"], -fragment.theta)
            assert fragment.outer_state["steps"].item() == fragment.version
            assert fragment.residual is not None
            assert torch.equal(fragment.residual, fragment.theta / 3)


def record_at(step: int) -> dict[str, object]:
    """As a run's with a learner that has trained."""
    core = SyncerCore(Rules.of(METHOD, 2), [0, 0])
    core.joined(0.0, "site-a")
    core.heartbeat(0.0, "site-a", 1, Report(step=step, steps=step, tokens=5 * step, step_s=1.0))
    return dict(core.saved().values)


def files(store: Store) -> list[str]:
    return sorted(path.name for path in (store.path / "tensors").iterdir())


def newest_file(store: Store, fragment: int) -> Path:
    return max((store.path / "tensors").glob(f"f{fragment:05d}-*"))


def lengthen(path: Path, num_versions: int) -> None:
    """Put so many versions of fragment 0 before its newest, whose files are superseded."""
    with closing(sqlite3.connect(path / "store.sqlite")) as db, db:
        db.executemany(
            "INSERT INTO versions VALUES (0, ?, 0, ?, ?, ?, 1.0, 1, 1.0, 0)",
            [(-number, f"superseded-{number}", "0" * 64, "0" * 64) for number in range(1, num_versions + 1)],
        )


def started(path: Path) -> dict[int, int]:
    """The versions that a start serves, all of them verified. Raises StoreError."""
    with Store(path) as store:
        saved = store.load()
        with checked_values(path):
            assert saved is not None
            SyncerCore(Rules.of(saved.method, 2), [0, 0]).restore(0.0, saved.record or record_at(1))
        store.begin(saved)
        store.tidy(saved)
        for index, held in enumerate(saved.fragments):
            assert torch.equal(held.theta, theta_of(index, held.version))
            assert held.digest == held_of(index, held.version).digest
        return {fragment.fragment: fragment.version for fragment in saved.fragments}


def flip(position: float) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(position * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage
