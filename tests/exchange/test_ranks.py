"""A DDP job of two ranks is one learner, beside a learner of one rank: real processes over gloo."""

import pytest
import torch
from tests.exchange import ranks_life
from tests.exchange.ranks_life import METHODS, RESUMED, STEPS, WRAPPERS, backward, tokens_of
from tests.exchange.scenarios import Result, Scenario, finish, make_model, make_optimizer
from tests.exchange.worlds import read, start_processes

import diloco
from diloco.exchange.base import Exchange

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

Results = dict[str, list[Result]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three processes that go through ranks_life.py; the single learner's dies at last."""
    directory = tmp_path_factory.mktemp("ranks")
    start_processes(ranks_life.__name__, directory, 3, expect=(0, 0, 9))
    names = [
        *METHODS, *WRAPPERS, "says_what_the_ranks_are", "resumed", "refuses", "diverges", "is_drained",
        "dials_from_rank_0_only",
    ]  # fmt: skip
    results = {name: [read(directory, name, rank) for rank in range(3)] for name in names}
    lost = "loses_the_other_learner"
    return results | {lost: [read(directory, lost, rank) for rank in range(2)]}


def in_process(name: str) -> list[Result]:
    """The same two learners by `run_local`; the first takes the mean gradient of both ranks' data, as DDP does."""

    def life(index: int, exchange: Exchange) -> Result:
        ranks = (0, 1) if index == 0 else (2,)
        model = make_model(Scenario("", {}), ranks[0])
        optimizer = make_optimizer(Scenario("", {}), model)
        with diloco.Learner(model, optimizer, method=METHODS[name], exchange=exchange) as learner:
            for step in range(1, STEPS + 1):
                for rank in ranks:
                    backward(model, rank, step, scale=1 / len(ranks))
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=sum(map(tokens_of, ranks)))
            return finish(model, learner)

    return diloco.run_local(life, learners=2)


@pytest.mark.parametrize("name", METHODS)
def test_the_ranks_of_a_learner_hold_the_same_bits(name: str, world: Results) -> None:
    first, second, _ = world[name]
    for key, value in first.tensors.items():
        assert torch.equal(value, second.tensors[key]), key
    for key in ("learner", "steps", "tokens", "versions", "merges", "ledger", "run_tokens"):
        assert first.facts[key] == second.facts[key], key


@pytest.mark.parametrize("name", METHODS)
def test_a_learner_of_two_ranks_trains_like_one_of_one(name: str, world: Results) -> None:
    reference = in_process(name)
    for mine, theirs in zip((world[name][0], world[name][2]), reference, strict=True):
        different = [key for key, value in theirs.tensors.items() if not torch.equal(value, mine.tensors[key])]
        assert not different
        for key in ("learner", "steps", "tokens", "versions", "merges", "ledger"):
            assert mine.facts[key] == theirs.facts[key], key


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_are_one_learner_however_they_average_their_gradients(wrapper: str, world: Results) -> None:
    for mine, ddp in zip(world[wrapper], world["diloco"], strict=True):
        assert mine.tensors.keys() == ddp.tensors.keys()
        different = [key for key, value in ddp.tensors.items() if not torch.equal(value, mine.tensors[key])]
        assert not different
        assert mine.facts["learner"] == ddp.facts["learner"]
        assert mine.facts["tokens"] == ddp.facts["tokens"]


def test_ranks_of_which_nothing_says_what_they_are_are_refused_and_told_both_ways_out(world: Results) -> None:
    results = [result.facts for result in world["says_what_the_ranks_are"]]
    for facts in results:
        kind, text = facts["nothing"]
        assert kind == "ConfigError"
        assert "torch.distributed has 3 ranks" in text
        assert "ranks=torch.distributed.group.WORLD" in text
        assert 'ranks="self"' in text
        assert facts["unknown"][0] == "ConfigError"
        assert "ranks='own'" in facts["unknown"][1]
    for facts in results[:2]:
        assert facts["contradiction"][0] == "ConfigError"
        assert "ranks [0, 1] train its model together" in facts["contradiction"][1]
        assert facts["after a forward pass"] == [0, 1]
    assert results[0]["two groups"][0] == "ConfigError"
    assert "by ranks [0, 1] and others by ranks [0, 2]; pass the process group" in results[0]["two groups"][1]
    assert [facts["name"] for facts in results] == ["learner-000", "learner-001", "learner-002"]
    assert "this process is not one of the ranks of ranks=" in results[1]["not a member"][1]


def test_what_a_closed_learner_of_several_ranks_refuses(world: Results) -> None:
    first, second, single = (result.facts["after close"] for result in world["diloco"])
    assert first == second
    assert first[0] == first[2] == "ConfigError"
    assert "not connected any more; use the global model before close()" in first[1]
    assert first[3] == single[1]
    assert "save its state before close()" in single[1]


def test_tokens_of_all_ranks_and_learners_are_summed(world: Results) -> None:
    job, single = tokens_of(0) + tokens_of(1), tokens_of(2)
    assert [result.facts["tokens"] for result in world["diloco"]] == [STEPS * job, STEPS * job, STEPS * single]
    known_after = [0, 0, 3, 3, 3, 6, 6, 6, 9, 9]  # steps
    assert world["diloco"][2].facts["run_tokens"] == [(job + single) * steps for steps in known_after]


def test_only_rank_0_sends_and_receives_over_a_process_group(world: Results) -> None:
    for name in METHODS:
        first, second, other = (result.facts["num_bytes"] for result in world[name])
        assert first["contributions"] > 0
        assert other["contributions"] > 0
        assert second == {}


def test_a_resumed_job_continues_with_the_same_bits(world: Results) -> None:
    for mine, whole in zip(world["resumed"], world[RESUMED], strict=True):
        for key, value in whole.tensors.items():
            assert torch.equal(value, mine.tensors[key]), key
        assert mine.facts["ledger"] == whole.facts["ledger"]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("layout", "LayoutError", "learners do not hold the same model: tensor 'embed.weight'"),
        ("method", "ConfigError", "sync_every is 3 on learner-000 and 7 on learner-001"),
        ("rank's method", "ConfigError", "rank 1 of this learner was given another method than rank 0"),
        (
            "rank's model",
            "LayoutError",
            "tensor 'weight' is (4, 4) float32 on rank 1 of this learner and (3, 4) float32 on an earlier one",
        ),
        ("rank's re-warm-up", "ConfigError", "rank 1 of this learner was given another rewarm_steps than rank 0"),
        ("rank 0 alone", "ConfigError", "step() on 1 and global_state_dict() on 1 of them"),
        ("another step", "CheckpointError", "the checkpoints of this learner's ranks are of steps [1, 3]"),
        ("checkpoint", "CheckpointError", "the checkpoint is of rank 1 of 2 of its learner, and this is rank 0 of 2"),
    ],
)
def test_an_error_is_raised_on_every_rank(what: str, kind: str, words: str, world: Results) -> None:
    first, second, _ = (result.facts.get(what) for result in world["refuses"])
    assert first == second
    assert first[0] == kind
    assert words in first[1]


def test_the_other_learner_hears_of_it(world: Results) -> None:
    facts = world["refuses"][2].facts
    for what in ("layout", "method"):
        assert facts[what] == world["refuses"][0].facts[what]
    assert facts["checkpoint"][0] == "ExchangeError"  # the job left instead of loading one


def test_a_diverged_model_is_an_error_on_every_rank(world: Results) -> None:
    errors = [result.facts["error"] for result in world["diverges"]]
    assert errors[0] == errors[1] == errors[2]
    assert errors[0][0] == "NonFiniteError"
    assert "failed on learner-000" in errors[0][1]


def test_all_ranks_of_a_drained_learner_are_to_finish_after_the_same_step(world: Results) -> None:
    after_a_round = [False, False, True] * 2
    assert [result.facts["drained"] for result in world["is_drained"]] == [after_a_round, after_a_round, [False] * 6]


def test_only_rank_0_asks_the_exchange(world: Results) -> None:
    for result in world["dials_from_rank_0_only"][:2]:
        assert result.facts["error"] == ["UnknownRunError", "rank 0 found no run."]


def test_a_lost_learner_is_an_error_on_every_rank(world: Results) -> None:
    first, second = (result.facts["error"] for result in world["loses_the_other_learner"])
    assert first == second
    assert first[0] == "ExchangeError"
