"""The contract of an exchange: the same method and data give the bits of `core.reference`, and no learner is left
hanging. A new exchange is a line in WORLDS."""

import pytest
import torch
from tests.exchange.plain_loop import in_a_plain_loop
from tests.exchange.scenarios import EXPERTS, LEARNERS, SCENARIOS, Result, Scenario, make_model
from tests.exchange.worlds import WORLDS, in_process

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

TRAINED = [name for name, scenario in SCENARIOS.items() if not scenario.fault]

Results = dict[str, list[Result]]


@pytest.fixture(scope="module")
def reference() -> Results:
    """Every scenario that is trained to its end, in one plain loop."""
    return {name: in_a_plain_loop(SCENARIOS[name]) for name in TRAINED}


@pytest.fixture(scope="module")
def local() -> Results:
    """Every scenario in one process."""
    return in_process(list(SCENARIOS.values()), None)


@pytest.fixture(
    scope="module",
    params=["local", *(pytest.param(each, marks=[] if each == "remote" else pytest.mark.slow) for each in WORLDS)],
)
def results(request: pytest.FixtureRequest, local: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every scenario over one exchange."""
    if request.param == "local":
        return Able(local)
    results = Able(WORLDS[request.param](list(SCENARIOS.values()), tmp_path_factory.mktemp(request.param)))
    results.books_survive = request.param != "remote"
    return results


class Able(Results):
    """What an exchange ran; asking for what it refuses by design skips the test.

    `books_survive`: a resumed learner goes on with its books. A syncer closes them when a learner leaves and opens new
        ones.
    """

    books_survive = True

    def __missing__(self, name: str) -> list[Result]:
        pytest.skip(f"a syncer does not run {name!r}")


@pytest.mark.parametrize("name", TRAINED)
def test_same_bits_on_every_exchange(name: str, results: "Able", reference: Results) -> None:
    for mine, theirs in zip(results[name], reference[name], strict=True):
        assert mine.error is None
        assert mine.facts["versions"] == theirs.facts["versions"]
        assert mine.tensors.keys() == theirs.tensors.keys()
        different = [key for key, value in mine.tensors.items() if not torch.equal(value, theirs.tensors[key])]
        assert not different


@pytest.mark.parametrize("name", TRAINED)
def test_same_books_on_every_exchange(name: str, results: "Able", local: Results) -> None:
    for mine, theirs in zip(results[name], local[name], strict=True):
        if results.books_survive or not SCENARIOS[name].resume_at:
            for key in ("tokens", "merges", "ledger"):
                assert mine.facts[key] == theirs.facts[key], key
        for key in ("learner", "steps", "versions"):
            assert mine.facts[key] == theirs.facts[key], key
        for ledger, version in zip(mine.facts["ledger"], mine.facts["versions"], strict=True):
            accounted = ledger["pending"] + ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
            assert accounted == ledger["trained"] == (mine.facts["tokens"] if version >= 0 else 0)


@pytest.mark.parametrize(
    "name",
    [name for name in TRAINED if len(set(SCENARIOS[name].overlaps.values())) < 2 and not SCENARIOS[name].holds],
)
def test_learners_hold_one_global_model(name: str, results: Results) -> None:
    first, *others = results[name]
    for other in others:
        assert first.facts["versions"] == other.facts["versions"]
        own = "global.norm.running" if SCENARIOS[name].buffers == "local" else "none"
        for key in (key for key in first.tensors if key.startswith("global.") and not key.startswith(own)):
            assert torch.equal(first.tensors[key], other.tensors[key]), key


@pytest.mark.parametrize("name", [name for name in TRAINED if SCENARIOS[name].holds])
def test_learners_hold_one_version_of_each_expert_that_they_hold(name: str, results: Results) -> None:
    rows: dict[tuple[str, int], torch.Tensor] = {}
    for index, result in enumerate(results[name]):
        held = SCENARIOS[name].held(index)
        experts = range(EXPERTS) if held is None else held.experts
        for key, value in result.tensors.items():
            for expert, row in zip(experts, value, strict=True) if key.startswith("global.moe") else ():
                assert torch.equal(rows.setdefault((key, expert), row), row), key
    assert {expert for _, expert in rows} == set(range(EXPERTS))


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
    pairs = {
        "resumed": "streaming, overlap 4", "resumed, adam": "diloco, adam", "resumed, eager": "eager, int4, by layer",
        "averaged, resumed": "averaged, eager", "local, resumed": "local", "base, resumed": "base",
    }  # fmt: skip
    for resumed, whole in pairs.items():
        for mine, theirs in zip(results[resumed], results[whole], strict=True):
            assert mine.error is None
            different = [key for key, value in mine.tensors.items() if not torch.equal(value, theirs.tensors[key])]
            assert not different
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
    for name in ("averaged", "averaged, adam, lossy", "averaged, keep displacement", "averaged, eager"):
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
