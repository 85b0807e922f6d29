"""Learners of several ranks give and take the inner optimizer's state: rank by rank between islands of one shape."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import start_module
from tests.syncer.runs import method, start
from tests.syncer.test_healing import join, moments

from diloco import Heal
from diloco.syncer.server import Syncer

pytestmark = pytest.mark.timeout(120)


class Island:
    """The two processes of a learner."""

    def __init__(self, directory: Path, syncer: Syncer, name: str, kind: str, source: str) -> None:
        self._files = [directory / f"{name}-{rank}.pt" for rank in range(2)]
        self._processes = [
            start_module(
                "tests.syncer.healing_ranks_life", str(directory), syncer.address, name, str(rank), kind, source
            )
            for rank in range(2)
        ]

    @property
    def runs(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def end(self) -> list[dict[str, Any]]:
        """What each rank has saved."""
        for process in self._processes:
            process.join(90)
            assert process.exitcode == 0
        return [torch.load(file) for file in self._files]


@contextmanager
def under_way(directory: Path, kind: str) -> Iterator[tuple[Syncer, list[dict[str, Any]]]]:
    """A run that an island has founded; what it has saved is there after the block."""
    saved: list[dict[str, Any]] = []
    with start(directory, method()) as syncer:
        founder = Island(directory, syncer, "founder", kind, "")
        try:
            while not (directory / "under-way").exists():
                assert founder.runs
                threading.Event().wait(0.02)
            yield syncer, saved
        finally:
            (directory / "end").touch()
        saved += founder.end()


def assert_same(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs) == 4
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_sharded_islands_of_one_shape_have_the_bits_of_each_others_shards(tmp_path: Path) -> None:
    """And a process with whole parameters, which no peer has, is told so."""
    with under_way(tmp_path, "fsdp") as (syncer, founder):
        ranks = Island(tmp_path, syncer, "same", "fsdp", "peer").end()
        learner, optimizer = join(syncer, Heal("peer", rewarm_steps=3, timeout_s=30.0))
        with learner:
            assert learner.healed is not None
            assert (learner.healed.source, learner.healed.rewarm_steps) == ("global", 3)
            assert "founder has another inner optimizer, trains other tensors or divides them" in learner.healed.reason
            assert not optimizer.state
    for rank, theirs in zip(ranks, founder, strict=True):
        assert rank["healed"] == {"source": "peer", "rewarm_steps": 0, "peer": "founder", "reason": ""}
        assert rank["factor"] == 1.0
        ((_, mine),) = rank["past"].items()
        assert_same(mine, theirs["past"][int(mine[0]["step"])])
    assert any(  # they do hold different pieces
        not torch.equal(one["exp_avg"], other["exp_avg"])
        for one, other in zip(*(next(iter(rank["past"].values())) for rank in ranks), strict=True)
    )


def test_replicas_and_a_single_process_are_each_others_peers(tmp_path: Path) -> None:
    with under_way(tmp_path, "ddp") as (syncer, founder):
        learner, optimizer = join(syncer, Heal("peer", timeout_s=30.0))
        with learner:
            assert learner.healed is not None
            assert (learner.healed.source, learner.healed.peer) == ("peer", "founder")
            mine = moments(optimizer)
    assert_same(mine, founder[0]["past"][int(mine[0]["step"])])
