"""A frozen base and running statistics in an island of two ranks that trains with a learner of one process."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.exchange import frozen_life
from tests.exchange.frozen_life import WIDTH, Adapted
from tests.exchange.scenarios import Result
from tests.exchange.worlds import read, start_processes
from tests.syncer.runs import PATIENT

import diloco
from diloco.core.quorum import AllLive
from diloco.syncer.server import Options, Syncer

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

METHOD = diloco.DiLoCo(sync_every=3, quorum=AllLive(at_least=2))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    directory: Path = tmp_path_factory.mktemp("frozen")
    with ExitStack() as stack:
        syncers = {
            name: stack.enter_context(
                Syncer(name, METHOD, Options("127.0.0.1:0", directory / f"syncer {name}", deadlines=PATIENT))
            )
            for name in ("lora", "exchanged", "norm")
        }
        addresses = {name: syncer.address for name, syncer in syncers.items()}
        (directory / "addresses.json").write_text(json.dumps(addresses))
        start_processes(frozen_life.__name__, directory, 3)
    found = {name: [read(directory, name, process) for process in range(3)] for name in ("lora", "exchanged", "norm")}
    return found | {"other base": [read(directory, "other base", 2)]}


@pytest.mark.slow
def test_a_sharded_base_has_the_digest_of_a_whole_one_and_nothing_of_it_is_sent(
    results: dict[str, list[Result]],
) -> None:
    num_trained = 2 * 4 * WIDTH
    for result in results["lora"]:
        assert result.error is None
        assert set(result.tensors) == {"down.weight", "up.weight"}
        assert all(torch.equal(each, results["lora"][2].tensors[name]) for name, each in result.tensors.items())
    assert sum(results["lora"][2].facts["num_bytes"].values()) < 6 * 4 * num_trained < 4 * 3 * WIDTH**2
    [refused] = results["other base"]
    assert refused.error is not None
    assert refused.error[0] == "LayoutError"
    assert "'base.1.weight'" in refused.error[1]


@pytest.mark.slow
def test_a_sharded_base_that_is_exchanged_becomes_that_of_the_run(results: dict[str, list[Result]]) -> None:
    start = Adapted(0).state_dict()
    for result in results["exchanged"]:
        assert result.error is None
        assert result.tensors.keys() == start.keys()
        assert all(torch.equal(result.tensors[name], value) for name, value in start.items() if "base" in name)


def test_every_rank_adopts_the_same_statistics(results: dict[str, list[Result]]) -> None:
    first, second, alone = results["norm"]
    assert first.error is second.error is alone.error is None
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(first.tensors[name], second.tensors[name])
        assert torch.equal(first.tensors[name], alone.tensors[name])
        assert not torch.equal(first.tensors[f"own.{name}"], second.tensors[f"own.{name}"])  # a step later
    assert first.tensors["norm.running_var"].min() > 0
