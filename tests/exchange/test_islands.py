"""Islands of several ranks and of different shapes train one run: real processes over gloo, and a real syncer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.exchange import island_life
from tests.exchange.island_life import SHAPES, Net, live
from tests.exchange.scenarios import Result
from tests.exchange.worlds import read, start_processes

import diloco
from diloco.core.rounds import AllLive
from diloco.exchange.base import Exchange
from diloco.syncer.server import Options, Syncer

pytestmark = pytest.mark.timeout(300)  # includes a world of processes

STEPS = 9
LEARNERS = 3
ALL = AllLive(at_least=LEARNERS)
METHODS = {
    "diloco": diloco.DiLoCo(sync_every=3, quorum=ALL),
    "streaming": diloco.StreamingDiLoCo(
        sync_every=4, overlap=2, mix=0.5, fragments=diloco.ByLayer(layers=1), error_feedback=True, quorum=ALL
    ),
    "eager": diloco.EagerDiLoCo(sync_every=3, quorum=ALL),
}

Results = dict[str, list[list[Result]]]


def run_islands(directory: Path, shapes: Sequence[str], initialises: int = 0) -> Results:
    """By method and island the results of its ranks."""
    directory.mkdir()
    addresses = {}
    with ExitStack() as stack:
        for name, method in METHODS.items():
            syncer = stack.enter_context(Syncer(name, method, Options("127.0.0.1:0", directory / f"syncer {name}")))
            addresses[name] = syncer.address
        run = {"shapes": list(shapes), "addresses": addresses, "steps": STEPS, "initialises": initialises}
        (directory / "islands.json").write_text(json.dumps(run))
        start_processes(island_life.__name__, directory, sum(SHAPES[shape] for shape in shapes))
    results: Results = {}
    for name in METHODS:
        first = 0
        results[name] = []
        for shape in shapes:
            results[name].append([read(directory, name, first + rank) for rank in range(SHAPES[shape])])
            first += SHAPES[shape]
    return results


def singles(name: str, initialises: int) -> list[Result]:
    """The same updates by three learners of one process each, in this process."""

    def life(index: int, exchange: Exchange) -> Result:
        return live(Net(seed=index or initialises), exchange, METHODS[name], index, STEPS)

    return diloco.run_local(life, learners=LEARNERS)


@pytest.mark.parametrize(
    ("shapes", "initialises"),
    [
        (("ddp", "fsdp", "single"), 0),
        (("single", "fsdp and tp", "tp"), 1),
        (("hsdp", "single", "fsdp, 2 ranks"), 0),
        (("stages", "stages of fsdp", "single"), 1),
        (("single", "fsdp1", "fsdp, 2 ranks"), 1),
    ],
    ids=str,
)
def test_islands_of_different_shapes_train_as_single_processes(
    shapes: tuple[str, ...], initialises: int, tmp_path: Path
) -> None:
    results = run_islands(tmp_path / "run", shapes, initialises)
    for name in METHODS:
        reference = singles(name, initialises)
        for ranks, single in zip(results[name], reference, strict=True):
            for rank in ranks:
                different = [key for key, each in rank.tensors.items() if not torch.equal(each, single.tensors[key])]
                assert not different, name
                assert rank.facts["versions"] == single.facts["versions"]
            assert {key for rank in ranks for key in rank.tensors} == single.tensors.keys()
            kept = [rank.facts["anchors"] for rank in ranks]
            assert [sum(each) for each in zip(*kept, strict=True)] == single.facts["anchors"]
            if len(ranks) > 1:
                assert max(map(sum, kept)) < sum(single.facts["anchors"])  # no rank keeps the whole model
