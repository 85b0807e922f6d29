"""Islands of several ranks and of different shapes train one run: real processes over gloo, and a real syncer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from tests.exchange import island_life
from tests.exchange.island_life import EXPERTS, PARTS, SHAPES, Net, live
from tests.exchange.scenarios import Result
from tests.exchange.worlds import read, start_processes
from tests.syncer.runs import PATIENT

import diloco
from diloco.core.quorum import AllLive
from diloco.exchange.base import Exchange
from diloco.syncer.server import Options, Syncer

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

STEPS = 9
LEARNERS = 3
ALL = AllLive(at_least=LEARNERS)
METHODS: dict[str, diloco.Method] = {
    "diloco": diloco.DiLoCo(sync_every=3, quorum=ALL),
    "streaming": diloco.StreamingDiLoCo(
        sync_every=4, overlap=2, mix=0.5, fragments=diloco.ByLayer(layers=1), error_feedback=True, quorum=ALL
    ),
    "eager": diloco.EagerDiLoCo(sync_every=3, quorum=ALL),
    "parts": diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=diloco.ByLayer(layers=1), quorum=ALL),
    "experts": diloco.DiLoCo(
        sync_every=2,
        quorum=ALL,
        fragments=diloco.Experts(groups=2, every=2, patterns=["layers.*.down.weight", "layers.*.norm.*"]),
    ),
}

Results = dict[str, list[list[Result]]]


@contextmanager
def syncers(directory: Path) -> Iterator[dict[str, str]]:
    """Of all methods; by name their addresses."""
    with ExitStack() as stack:
        addresses = {}
        for name, method in METHODS.items():
            options = Options("127.0.0.1:0", directory / f"syncer {name}", deadlines=PATIENT)
            addresses[name] = stack.enter_context(Syncer(name, method, options)).address
        yield addresses


def run_islands(
    directory: Path, shapes: Sequence[str], addresses: dict[str, str], *, initialises: int = 0,
    steps: range = range(1, STEPS + 1), saves: bool = False,
) -> Results:  # fmt: skip
    """By method and island the results of its ranks."""
    directory.mkdir()
    run = {
        "shapes": list(shapes), "addresses": addresses, "steps": [steps.start, steps.stop], "saves": saves,
        "initialises": initialises,
    }  # fmt: skip
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


def singles(name: str, initialises: int = 0) -> list[Result]:
    """The same updates by three learners of one process each, in this process."""

    def life(index: int, exchange: Exchange) -> Result:
        trains = PARTS.get(index) if name == "parts" else None
        model = Net(seed=index or initialises)
        experts = EXPERTS.get(index) if name == "experts" else None
        steps = range(1, STEPS + 1)
        return live(model, exchange, METHODS[name], index, steps, trains=trains, trains_experts=experts)

    return diloco.run_local(life, learners=LEARNERS)


def require_same_model(ranks: Sequence[Result], single: Result) -> None:
    for rank in ranks:
        different = [key for key, each in rank.tensors.items() if not torch.equal(each, single.tensors[key])]
        assert not different
        assert rank.facts["versions"] == single.facts["versions"]
    assert {key for rank in ranks for key in rank.tensors} == single.tensors.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "initialises"),
    [
        (("ddp", "fsdp", "single"), 0),
        (("single", "fsdp and tp", "tp"), 1),
        (("hsdp", "single", "fsdp, 2 ranks"), 0),
        (("stages", "stages of fsdp", "virtual stages"), 1),
        (("single", "fsdp1", "fsdp, 2 ranks"), 1),
    ],
    ids=str,
)
def test_islands_of_different_shapes_train_as_single_processes(
    shapes: tuple[str, ...], initialises: int, tmp_path: Path
) -> None:
    with syncers(tmp_path) as addresses:
        results = run_islands(tmp_path / "run", shapes, addresses, initialises=initialises)
    for name in METHODS:
        alone = singles(name, initialises)
        for ranks, single in zip(results[name], alone, strict=True):
            require_same_model(ranks, single)
            kept = [rank.facts["anchors"] for rank in ranks]
            assert [sum(each) for each in zip(*kept, strict=True)] == single.facts["anchors"]
            if len(ranks) > 1:
                assert max(map(sum, kept)) < sum(single.facts["anchors"])  # no rank keeps the whole model
        # The ranks of each island share what one process sends: nothing of fragments of which it trains nothing.
        sent = [sum(rank.facts["num_bytes"]["contributions"] for rank in ranks) for ranks in results[name]]
        assert sent == [single.facts["num_bytes"]["contributions"] for single in alone]
        assert 0 < min(sent) <= max(sent) == sent[-1]
        assert (min(sent) < max(sent)) == (name in ("parts", "experts"))


@pytest.mark.slow
def test_a_checkpoint_of_an_island_continues_with_any_number_of_ranks(tmp_path: Path) -> None:
    """All stop in the middle of a round, and each goes on in another shape, by torch.distributed.checkpoint."""
    with syncers(tmp_path) as addresses:
        run_islands(tmp_path / "before", ("fsdp", "single", "tp"), addresses, steps=range(1, 6), saves=True)
        after = ("fsdp, 2 ranks", "hsdp", "single")
        results = run_islands(tmp_path / "after", after, addresses, steps=range(6, STEPS + 1), saves=True)
    for name in METHODS:
        for ranks, single in zip(results[name], singles(name), strict=True):
            require_same_model(ranks, single)
