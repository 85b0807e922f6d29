"""The contract of an exchange: the same method and data give the bits of `core.reference`, and no learner is left
hanging. A new exchange is a line in RUNS."""

from collections.abc import Collection, Iterator

import pytest
import torch
from tests.exchange.plain_loop import in_a_plain_loop
from tests.exchange.scenarios import EXPERTS, LEARNERS, SCENARIOS, Result, Scenario, make_model
from tests.exchange.worlds import WORLDS, World, in_process

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

TRAINED = [name for name, scenario in SCENARIOS.items() if not scenario.fault]

OVER_SOCKETS = [
    "diloco", "diloco, adam", "diloco, tokens and feedback", "parameters", "streaming, offsets", "diloco, fp16",
    "sparseloco", "streaming, overlap 4", "delayed, 2H, by layer", "eager, int4, by layer", "screened",
    "bf16 parameters", "part of the fragments", "own overlaps", "resumed", "resumed, adam", "resumed, eager",
    "averaged, adam, lossy", "averaged, eager", "averaged, resumed", "local", "local, resumed", "base",
    "base, resumed", "experts, tokens", "parts, resumed", "held, delayed", "held, resumed",
]  # fmt: skip
"""What `make test` runs over a syncer: each codec, content of a message and kind of saved state once. The same state
machines run every scenario in one process."""

RUNS: dict[str, tuple[World, Collection[str]]] = {
    "local": (in_process, SCENARIOS),
    "remote": (WORLDS["remote"], OVER_SOCKETS),
    "remote, others": (WORLDS["remote"], [name for name in SCENARIOS if name not in OVER_SOCKETS]),
    "virtual": (WORLDS["virtual"], SCENARIOS),
    "collective": (WORLDS["collective"], SCENARIOS),
}
"""By exchange: how it runs scenarios, and which."""

Results = dict[str, list[Result]]


@pytest.fixture(scope="module")
def reference() -> Results:
    """Every scenario that is trained to its end, in one plain loop."""
    return {name: in_a_plain_loop(SCENARIOS[name]) for name in TRAINED}


@pytest.fixture(scope="module")
def local() -> Results:
    """Every scenario in one process."""
    return in_process(list(SCENARIOS.values()), None)


def is_run(exchange: str, scenario: Scenario) -> bool:
    """Whether an exchange runs a scenario; it refuses the others by design."""
    if exchange.startswith("remote"):
        return not scenario.fault and scenario.method["exchanged"] != "gradients"
    return not scenario.holds if exchange == "collective" else not (scenario.holds and scenario.resume_at)


def marks(exchange: str) -> list[pytest.MarkDecorator]:
    return [] if exchange in ("local", "remote") else [pytest.mark.slow]


@pytest.fixture(scope="module", params=[pytest.param(each, marks=marks(each)) for each in RUNS])
def results(request: pytest.FixtureRequest, local: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The scenarios of one exchange."""
    if request.param == "local":
        return Able(local)
    world, names = RUNS[request.param]
    results = Able(world([SCENARIOS[name] for name in names], tmp_path_factory.mktemp(request.param)))
    assert set(results) == {name for name in names if is_run(request.param, SCENARIOS[name])}
    results.books_survive = not request.param.startswith("remote")
    return results


class Able(Results):
    """What an exchange ran; asking for anything else skips the test.

    `books_survive`: a resumed learner goes on with its books. A syncer closes them when a learner leaves and opens new
        ones.
    """

    books_survive = True

    def __missing__(self, name: str) -> list[Result]:
        pytest.skip("this exchange does not run that scenario")


def pairs(some: Results, others: Results) -> Iterator[tuple[str, Result, Result]]:
    """The learners of each scenario that is trained by both, with its name."""
    for name in TRAINED:
        if name in some:
            for one, other in zip(some[name], others[name], strict=True):
                yield name, one, other


def test_same_bits_on_every_exchange(results: "Able", reference: Results) -> None:
    for name, mine, theirs in pairs(results, reference):
        assert mine.error is None, name
        assert mine.facts["versions"] == theirs.facts["versions"], name
        assert mine.tensors.keys() == theirs.tensors.keys(), name
        different = [key for key, value in mine.tensors.items() if not torch.equal(value, theirs.tensors[key])]
        assert not different, name


def test_same_books_on_every_exchange(results: "Able", local: Results) -> None:
    for name, mine, theirs in pairs(results, local):
        if results.books_survive or not SCENARIOS[name].resume_at:
            for key in ("tokens", "merges", "ledger"):
                assert mine.facts[key] == theirs.facts[key], f"{name}: {key}"
        for key in ("learner", "steps", "versions"):
            assert mine.facts[key] == theirs.facts[key], f"{name}: {key}"
        for ledger, version in zip(mine.facts["ledger"], mine.facts["versions"], strict=True):
            accounted = ledger["pending"] + ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
            assert accounted == ledger["trained"] == (mine.facts["tokens"] if version >= 0 else 0), name


def test_learners_hold_one_global_model(results: Results) -> None:
    for name in set(TRAINED) & set(results):
        if len(set(SCENARIOS[name].overlaps.values())) > 1 or SCENARIOS[name].holds:
            continue
        first, *others = results[name]
        for other in others:
            assert first.facts["versions"] == other.facts["versions"], name
            own = "global.norm.running" if SCENARIOS[name].buffers == "local" else "none"
            for key in (key for key in first.tensors if key.startswith("global.") and not key.startswith(own)):
                assert torch.equal(first.tensors[key], other.tensors[key]), f"{name}: {key}"


def test_learners_hold_one_version_of_each_expert_that_they_hold(results: Results) -> None:
    if not (names := [name for name in TRAINED if SCENARIOS[name].holds and name in results]):
        pytest.skip("this exchange runs no scenario with parts")
    for name in names:
        rows: dict[tuple[str, int], torch.Tensor] = {}
        for index, result in enumerate(results[name]):
            held = SCENARIOS[name].held(index)
            experts = range(EXPERTS) if held is None else held.experts
            for key, value in result.tensors.items():
                for expert, row in zip(experts, value, strict=True) if key.startswith("global.moe") else ():
                    assert torch.equal(rows.setdefault((key, expert), row), row), f"{name}: {key}"
        assert {expert for _, expert in rows} == set(range(EXPERTS)), name


def test_training_moves_every_parameter(results: Results) -> None:
    """Guards the comparisons above: the runs are not equal because nothing happened."""
    for name in set(TRAINED) & set(results):
        start, held = make_model(SCENARIOS[name], 0, whole=True).state_dict(), SCENARIOS[name].held(2)
        if held is not None:
            start |= {key: value[list(held.experts)] for key, value in start.items() if key.startswith("moe.")}
        if SCENARIOS[name].static == "digest":
            assert {key for key in start if f"global.{key}" not in results[name][2].tensors} == {
                "scale",
                "shift",
                "empty",
            }
            start = {key: value for key, value in start.items() if f"global.{key}" in results[name][2].tensors}
        for key, value in start.items():
            moved = not torch.equal(results[name][2].tensors[f"global.{key}"], value)
            assert moved == (key not in ("scale", "shift", "seed", "empty")), f"{name}: {key}"


def test_frozen_tensors_become_learner_0s(results: Results) -> None:
    scenario = SCENARIOS["diloco"]
    start = make_model(scenario, 0).state_dict()
    for result in results["diloco"]:
        for key in ("scale", "shift", "seed", "empty"):
            assert torch.equal(result.tensors[f"parameters.{key}"], start[key])


def test_a_resumed_run_continues_with_the_same_bits(results: "Able") -> None:
    wholes = {
        "resumed": "streaming, overlap 4", "resumed, adam": "diloco, adam", "resumed, eager": "eager, int4, by layer",
        "averaged, resumed": "averaged, eager", "local, resumed": "local", "base, resumed": "base",
    }  # fmt: skip
    if not wholes.keys() & set(results):
        pytest.skip("none of them is resumed")
    for resumed in wholes.keys() & set(results):
        assert wholes[resumed] in results
        for mine, theirs in zip(results[resumed], results[wholes[resumed]], strict=True):
            assert mine.error is None
            different = [key for key, value in mine.tensors.items() if not torch.equal(value, theirs.tensors[key])]
            assert not different, resumed
            assert mine.facts["ledger"] == theirs.facts["ledger"] or not results.books_survive


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("other layout", "LayoutError", ["learner-000", "learner-001", "'embed.weight'", "(160, 24)", "(161, 24)"]),
        ("other method", "ConfigError", ["sync_every is", "4 on learner-000", "5 on learner-001"]),
        ("other buffers", "LayoutError", ["learner-001", "'shift'", "averaged", "kept local"]),
        ("other base", "LayoutError", ["learner-001", "'shift'", "digest"]),
        ("nan", "NonFiniteError", ["NaN"]),
    ],
)
def test_what_cannot_go_on_ends_every_learner(name: str, kind: str, words: list[str], results: Results) -> None:
    for result in results[name]:
        assert result.error is not None
        assert result.error[0] == kind
        assert all(word in result.error[1] for word in words), result.error[1]


def test_an_error_in_one_learners_code_leaves_nobody_hanging(results: Results) -> None:
    assert len(results["error"]) == LEARNERS
    assert results["error"][1].error == ["ArithmeticError", "the training code failed"]


def test_statistics_that_are_kept_local_differ_and_averaged_ones_do_not_fall_below_0(results: Results) -> None:
    first, second, _ = (result.tensors["parameters.norm.running_var"] for result in results["local"])
    assert not torch.equal(first, second)
    averaged = {"averaged", "averaged, adam, lossy", "averaged, keep displacement", "averaged, eager"} & set(results)
    assert averaged
    for name in averaged:
        for result in results[name]:
            assert result.tensors["global.norm.running_var"].min() >= 0
            assert result.tensors["global.norm.num_batches_tracked"] == SCENARIOS[name].steps


def test_nothing_of_a_base_crosses(results: "Able") -> None:
    """The same trained model without and with a base in it; what joins is smaller by the base."""
    with_base, without = results["base"][1].facts["num_bytes"], results["streaming, overlap 4"][1].facts["num_bytes"]
    assert with_base["contributions"] == without["contributions"]
    assert with_base["updates"] == without["updates"]
    assert without["joins"] - with_base["joins"] >= 4 * (160 + 33)


def test_every_scenario_differs() -> None:
    assert len({str(Scenario(**(s.to_dict() | {"name": ""}))) for s in SCENARIOS.values()}) == len(SCENARIOS)


def test_an_overlap_of_ones_own_that_is_the_methods_changes_no_bit(local: Results) -> None:
    own, common = local["own overlaps that are the method's"], local["streaming, overlap 4"]
    for mine, theirs in zip(own, common, strict=True):
        assert all(torch.equal(value, theirs.tensors[key]) for key, value in mine.tensors.items())
