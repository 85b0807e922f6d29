"""A rank of an island is lost: torchrun starts its ranks again, and they rejoin as one learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.exchange import restarted_life
from tests.exchange.restarted_life import RUN, STEPS

import diloco
from diloco.following.follower import newest_model
from diloco.syncer.server import Options, Syncer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # includes a torchrun that starts its ranks twice


def test_the_ranks_of_an_island_come_back_as_one_learner(tmp_path: Path) -> None:
    method = diloco.DiLoCo(sync_every=3)
    with Syncer(RUN, method, Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
            "1", "-m", restarted_life.__name__, str(tmp_path), syncer.address,
        ]  # fmt: skip
        # torchrun would give the ranks that it starts again the store with the addresses of those that are gone.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        newest = newest_model(syncer.address, run=RUN).state_dict()
    metrics = json.loads((tmp_path / "island.json").read_text())
    assert (metrics["incarnation"], metrics["steps"]) == (2, STEPS)
    # The run had gone on from the checkpoint, to the round after step 6: the learner continues from there.
    assert metrics["versions"] == [STEPS // 3]
    found = load_file(tmp_path / "island.safetensors")
    assert found.keys() == newest.keys()
    for name, value in newest.items():
        assert torch.equal(found[name], value), name
