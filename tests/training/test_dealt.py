"""Learners whose experts the syncer deals: runs in virtual time, the inner state of kept experts, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, PreTrainedConfig

import diloco
from diloco.config import RunConfig, parse_config, require_holders
from diloco.core.fragments import Whole
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError, DilocoError, DrainedError, PayloadError, StoppedError
from diloco.event_log import read_events
from diloco.events import Joined, Merged
from diloco.exchange.local import Local
from diloco.exchange.virtual.delivery import Fault
from diloco.learner import Learner
from diloco.learner.held import HeldExperts
from diloco.planning.network import Network, Route
from diloco.simulation.virtual_run import Scenario, _Simulation, simulate
from diloco.training.checkpoint import has_joined, held_by, latest_checkpoint, load_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.dealt import DealtExperts
from diloco.training.learners import Holding
from diloco.training.loop import Trainer
from diloco.training.model import build_model
from diloco.training.rank_group import RankGroup
from diloco.training.spec import LearnerSpec, SharedInputs, StopRequest
from diloco.training.state import TrainingState

Tiny = Callable[..., RunConfig]


@pytest.fixture
def auto(tiny: Tiny) -> Callable[..., RunConfig]:
    """The tiny run of four learners whose experts are dealt: answers of `Experts`, and overrides."""

    def make(cut: str, *overrides: str, num_experts: int = 8) -> RunConfig:
        return tiny(
            f"model={{type='mixtral', num_local_experts={num_experts}, num_experts_per_tok=2, hidden_size=16, "
            "intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2}",
            f"method={{preset='DiLoCo', sync_every=4, fragments={{type='Experts', {cut}, trunk={{type='Whole'}}}}}}",
            "run.tokens=1_000_000", "run.steps=24", "schedule.steps=24", "run.learners=4", "train.global_batch=4",
            "train.holds_experts='auto'", *overrides,
        )  # fmt: skip

    return make


def run(config: RunConfig, scenario: Scenario, directory: Path) -> tuple[_Simulation, Any]:
    configs = dict.fromkeys("abcd", config)
    shared = SharedInputs(load_corpus(config.data))
    simulation = _Simulation(configs, method_from_table(config.method), scenario, directory, shared, None)
    return simulation, simulation.run()


def contributors(directory: Path, num_groups: int) -> list[set[str]]:
    """Of each group, all learners whose work was merged."""
    merged = [it for it in read_events(directory / "syncer" / "events.jsonl") if isinstance(it, Merged)]
    return [{name for it in merged if it.fragment == group for name in it.contributors} for group in range(num_groups)]


@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_with_every_turn_all_learners_move_on_by_a_group(
    auto: Callable[..., RunConfig], tmp_path: Path, overlap: int
) -> None:
    config = auto("groups=4, deal_every=1", "warm_start.steps=2", "checkpoint.every_steps=12", "evaluate.every_steps=8")
    if overlap:
        config = auto("groups=4, deal_every=1", "method.preset='StreamingDiLoCo'", f"method.overlap={overlap}")
    simulation, result = run(config, Scenario(), tmp_path / "sim")
    assert contributors(tmp_path / "sim", 4) == [set("abcd")] * 4
    driver = simulation._run.driver
    assert driver is not None
    for account in driver.core.accounting.accounts.values():
        assert [it.pending for it in account.ledgers] == [0] * 5
        assert all(it.trained == it.merged + it.lost + sum(it.discarded.values()) for it in account.ledgers)
        assert account.ledgers[4].trained == account.tokens  # all hold the trunk
        assert sum(it.trained for it in account.ledgers[:4]) == account.tokens  # and one group at a time
        assert overlap or account.ledgers[4].merged == account.tokens  # nothing is in flight where they leave
        assert account.incarnation == 6
    assert [driver.core.accounting.accounts[name].ended_at for name in "abcd"] == [24] * 4
    assert max(driver.state.versions[:4]) == min(driver.state.versions)
    for summary in result.summaries.values():
        assert summary.steps == 24
        assert summary.metrics["merges"] == 2 * driver.state.versions[4]  # over all of its parts
    joined = [it for it in read_events(tmp_path / "sim" / "syncer" / "events.jsonl") if isinstance(it, Joined)]
    assert len(joined) == 4 * 6


@pytest.mark.parametrize(
    ("cut", "overrides"),
    [
        ("groups=4, deal_every=1", ()),
        ("groups=4, deal_every=1", ("method.preset='StreamingDiLoCo'", "method.overlap=2")),
        ("groups=4, every=2, deal_every=2", ("warm_start.steps=4",)),
    ],
)
def test_no_work_is_lost_where_sets_turn_however_long_it_is_on_its_way(
    auto: Callable[..., RunConfig], tmp_path: Path, cut: str, overrides: tuple[str, ...]
) -> None:
    """With a warm start of an interval, the first turn is due between two sends of the experts."""
    network = Network({}, [Route((), (), 0.05)] * 4)
    simulation, result = run(auto(cut, *overrides), Scenario(network=network), tmp_path / "sim")
    assert simulation._run.driver is not None
    for name, account in simulation._run.driver.core.accounting.accounts.items():
        assert account.ledgers[4].merged == account.tokens == sum(it.merged for it in account.ledgers[:4]), name
        assert account.incarnation >= 2
    assert all(summary.steps == 24 for summary in result.summaries.values())


def test_experts_of_a_learner_that_is_lost_for_good_are_taken_over(
    auto: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = auto("groups=3", num_experts=6)  # four learners for three groups
    _, result = run(config, Scenario(faults=[Fault(1, 6.5)]), tmp_path / "lost")
    before, spare = {"a": 0, "b": 1, "c": 2, "d": 0}, 1
    assert result.summaries["b"] is None
    owners = contributors(tmp_path / "lost", 3)
    assert owners[spare] == {"a", "b"}
    assert owners[0] == {"a", "d"}
    assert owners[2] == {"c"}
    ends = {name: it.metrics["versions"][:3] for name, it in result.summaries.items() if it is not None}
    assert all((version >= 0) == (group == before[name]) for name in "cd" for group, version in enumerate(ends[name]))
    assert ends["a"][spare] > 2
    assert result.summaries["a"].metrics["incarnation"] == 2


def test_a_learner_comes_back_with_the_set_of_its_checkpoint_and_is_dealt_the_newest_one(
    auto: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = auto("groups=4, deal_every=2", "checkpoint.every_steps=6")
    _, result = run(config, Scenario(faults=[Fault(1, 7.5, 10.0)]), tmp_path / "sim")
    assert all(it is not None and it.steps == 24 for it in result.summaries.values())
    assert all("b" in names for names in contributors(tmp_path / "sim", 4)[2:])


def test_a_learner_that_is_stopped_before_it_has_joined_again_resumes_with_its_new_part(
    auto: Callable[..., RunConfig],
) -> None:
    """Also one that had been resumed, and one for which the run has no place any more."""
    config = auto("groups=4, deal_every=1", "run.steps=18", "evaluate.sequences=4")
    method = method_from_table(config.method)

    def life(index: int, exchange: Local) -> None:
        stopping, ends = StopRequest(), list[Local]()
        errors: dict[int, DilocoError] = {
            4: StoppedError("a signal"),
            8: StoppedError("a signal"),
            12: DrainedError(""),
        }

        def attach(model: Any, optimizer: Any, steps: int, tokens: int, holding: Holding) -> Learner:
            if index == 1 and holding.again and (error := errors.pop(steps, None)) is not None:
                if isinstance(error, StoppedError):
                    stopping.set()
                raise error
            ends.append(exchange.again() if holding.again or ends else exchange)
            ends[-1].is_dealt = holding.is_dealt
            return Learner(
                model, optimizer, method=method, exchange=ends[-1], holds_experts=holding.experts, whole=holding.whole,
                rewarm_steps=0, buffers="average",
            )  # fmt: skip

        spec = LearnerSpec("abcd"[index], shard=index, initialise=index == 0)
        for steps, reason in ((4, "stopped"), (8, "stopped"), (12, "drained"), (18, "steps")):
            stopping = StopRequest()
            trainer = Trainer(config, spec, attach, stop_request=stopping, deal=exchange.deal)
            summary = trainer.train()
            if index != 1:
                assert (summary.reason, summary.steps) == ("steps", 18)
                return
            assert (summary.reason, summary.steps, summary.tokens) == (reason, steps, steps * 32)
            if reason == "steps":
                return
            path = latest_checkpoint(config.dir / "b" / "checkpoints")
            saved, part = load_checkpoint(path), trainer.model.state_dict()
            assert all(torch.equal(part[name], each) for name, each in saved["model"].items())
            first = 2 * ((1 + steps // 4) % 4)  # at first it held 2 and 3
            assert (saved["step"], held_by(path)) == (steps, [first, first + 1])
            assert saved["run_tokens"] == 4 * 32 * steps
            assert not has_joined(path)
            spec = replace(spec, resume_from=path)

    diloco.run_local(life, learners=4)


def test_simulate_tells_the_loss_of_the_whole_model(auto: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = auto("groups=2, copies=2", "run.steps=8")
    result = simulate(dict.fromkeys("abcd", config), Scenario(), tmp_path / "sim")
    assert result.loss is not None


def test_the_inner_state_of_kept_experts_goes_on(auto: Callable[..., RunConfig]) -> None:
    config = auto("groups=4, copies=2, deal_every=1", "run.learners=2", "train.global_batch=2")
    method, corpus = method_from_table(config.method), load_corpus(config.data)
    held = [HeldExperts(experts, 8, groups, 4) for experts, groups in (((0, 1, 4, 5), (0, 2)), ((4, 5, 6, 7), (2, 3)))]

    def life(index: int, exchange: Local) -> None:
        def attach(model: Any, optimizer: Any, steps: int, tokens: int, holding: Holding) -> Learner:
            own = exchange.again() if holding.again else exchange
            own.is_dealt = holding.is_dealt
            return Learner(
                model, optimizer, method=method, exchange=own, holds_experts=holding.experts, whole=holding.whole
            )

        if index == 0:
            model = build_model(config.model, corpus.vocab_size, 32, 0)
            with Learner(model, torch.optim.SGD(model.parameters()), method=method, exchange=exchange) as learner:
                learner.step(tokens=1)
                exchange.sleep(9.0)
            return
        state = TrainingState(config, corpus, RankGroup(), held=held[0], begins_whole=False)
        state.attach(attach)
        for _ in range(2):
            state.take_step()
        name = "model.layers.0.mlp.experts.down_proj"
        before = state.optimizer.state[state.model.get_parameter(name)]
        trunk = state.optimizer.state[state.model.get_parameter("model.norm.weight")]
        position, tokens = state.stream.position, state.tokens
        state.leave_for(held[1])
        after = state.optimizer.state[state.model.get_parameter(name)]
        for key, value in before.items():
            if value.dim():
                assert torch.equal(after[key][:2], value[2:])
                assert torch.equal(after[key][2:], torch.zeros_like(value[2:]))
                assert bool(value[2:].any())
            else:
                assert torch.equal(after[key], value)
        kept = state.optimizer.state[state.model.get_parameter("model.norm.weight")]
        assert all(torch.equal(kept[key], value) for key, value in trunk.items())
        state.attach(attach, again=True)
        assert (state.stream.position, state.tokens) == (position, tokens)
        assert state.learner.versions == (-1, -1, 0, 0, 0)
        rows: Tensor = build_model(config.model, corpus.vocab_size, 32, 0).get_parameter(name)
        assert torch.equal(state.model.get_parameter(name), rows[4:])
        state.take_step()
        state.learner.close()

    diloco.run_local(life, learners=2)


# --- refusals

CUT = diloco.Experts(groups=4, trunk=Whole())
MIXTRAL = MixtralConfig(num_local_experts=8, num_experts_per_tok=2)
DEEPSEEK = DeepseekV3Config(n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2)


def dealt(config: PreTrainedConfig, cut: diloco.Fragmentation, num_learners: int) -> DealtExperts:
    return DealtExperts(config, diloco.DiLoCo(fragments=cut), num_learners, lambda _, size: tuple(range(size)))


@pytest.mark.parametrize(
    ("config", "cut", "num_learners", "message"),
    [
        (MIXTRAL, Whole(), 4, '"auto" finds no experts, since DiLoCo cuts the model by Whole'),
        (LlamaConfig(), CUT, 4, "a model of type llama has no experts to hold"),
        (MIXTRAL, diloco.Experts(groups=4, copies=3), 2, r"copies=3\) is more than the 2 planned learners"),
        (
            MIXTRAL,
            diloco.Experts(groups=4, copies=2, deal_every=1),
            2,
            r"no effect where each learner holds all 4 groups",
        ),
        (MIXTRAL, diloco.Experts(groups=8), 8, "experts 0 are fewer than the 2 that the router chooses"),
        (DEEPSEEK, diloco.Experts(groups=8), 4, r"groups=8\) cuts through the 4 groups of the router"),
        (DEEPSEEK, diloco.Experts(groups=8), 8, "experts 0-1 are fewer than the 4 that the router chooses"),
    ],
)
def test_sets_that_cannot_be_dealt(
    config: PreTrainedConfig, cut: diloco.Fragmentation, num_learners: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dealt(config, cut, num_learners)


def test_sets_that_can_be_dealt() -> None:
    assert dealt(MIXTRAL, CUT, 4).ask().experts == (0, 1)
    assert dealt(MIXTRAL, diloco.Experts(groups=4, copies=2), 4).ask().text == "0-3 of 8"
    assert dealt(MIXTRAL, CUT, 1).ask().experts == tuple(range(8))
    assert dealt(DEEPSEEK, CUT, 2).ask().groups == (0, 1)
    sets = dealt(MIXTRAL, CUT, 4)
    part = sets.saved([4, 5])
    assert part.groups == (2,)
    assert sets.other_than(part, ()) is None
    assert sets.other_than(part, (2,)) is None
    assert sets.other_than(part, (3,)) == HeldExperts((6, 7), 8, (3,), 4)


def test_a_loop_of_ones_own_has_fixed_sets(auto: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match='holds_experts="auto" is for the reference trainer'):
        HeldExperts.of("auto", diloco.DiLoCo(fragments=CUT))
    config = auto("groups=4")
    with pytest.raises(ConfigError, match="train.holds_experts needs a syncer"):
        Trainer(config, LearnerSpec("lone", role="isolated"))
    ranks = RankGroup()
    ranks.size = 2
    with pytest.raises(ConfigError, match='"auto" deals experts to learners of one process'):
        Trainer(auto("groups=4", "train.global_batch=8"), LearnerSpec("wide"), ranks=ranks)


def test_a_syncer_deals_no_more_groups_than_there_are() -> None:
    def ask(_: int, exchange: Local) -> None:
        assert exchange.deal(diloco.DiLoCo(fragments=CUT), 2) == (0, 1)
        assert exchange.deal(diloco.DiLoCo(fragments=CUT), 2) == (0, 1)
        with pytest.raises(PayloadError, match="asks for 5 groups of experts, and the run's method makes 4"):
            exchange.deal(diloco.DiLoCo(fragments=CUT), 5)

    diloco.run_local(ask, learners=1)


RUN_FILE = """
[run]
name = "a"
tokens = 614400
learners = 4
[train]
holds_experts = "auto"
[method]
preset = "DiLoCo"
fragments = { type = "Experts", groups = 4, copies = 2, deal_every = 3 }
[learner.x]
train.holds_experts = "0-3"
"""


def test_the_run_file_tells_for_how_many_learners_experts_are_dealt() -> None:
    for learner in (None, "x", "y"):
        config = parse_config(RUN_FILE, learner=learner)
        assert config.num_dealt == 3
    require_holders(parse_config(RUN_FILE), "run.toml")
    assert method_from_table(config.method).dealing == (4, 2, 3)
    for key, line in (("copies", ", deal_every = 3"), ("deal_every", ", copies = 2")):
        with pytest.raises(ConfigError, match=rf"run.toml: method\.fragments\.{key} has no effect without train\.hol"):
            require_holders(parse_config(RUN_FILE.replace('"auto"', '"0-7"').replace(line, "")), "run.toml")
    of_one = RUN_FILE[: RUN_FILE.index("[learner.x]")].replace('"auto"', '"0-3"')  # one machine's file, which is read
    of_one = parse_config(f'{of_one}[model]\ntype = "mixtral"\nnum_local_experts = 8\n')
    with pytest.raises(ConfigError, match=r"run.toml: no learner holds expert 4, which would stay"):
        require_holders(of_one, "run.toml")  # where it is for all
    with pytest.raises(ConfigError, match=r"\[pool\] and train.holds_experts = \"auto\" exclude each other"):
        parse_config(RUN_FILE + '[pool]\nschedule = "halving"\n')
    with pytest.raises(ConfigError, match="excludes error_feedback, which begins anew with each set"):
        diloco.DiLoCo(codec="int4", error_feedback=True, fragments=diloco.Experts(4, deal_every=2))
    with pytest.raises(ConfigError, match=r"excludes AllLive\(.*: a learner that leaves for others would lose"):
        diloco.DiLoCo(quorum=diloco.AllLive(drop=0.5), fragments=diloco.Experts(4, deal_every=2))
    with pytest.raises(ConfigError, match=r"deal_every=3\) is not a multiple of every=2"):
        diloco.Experts(groups=4, every=2, deal_every=3)
    assert set(diloco.DiLoCo(sync_every=8, fragments=diloco.Experts(4, deal_every=2)).schedule(5).offsets) == {8}
    for key, value in (("copies", 0), ("deal_every", -1)):
        with pytest.raises(ConfigError, match=rf"Experts\({key}=…\) must be a whole number of at least"):
            diloco.Experts(groups=4, **{key: value})
