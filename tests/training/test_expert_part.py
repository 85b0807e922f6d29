"""Parts of mixtures: models with fewer experts, the inner optimizer's state of them, and learners that hold them."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import diloco
from diloco.cli.train import _connector
from diloco.config import RunConfig, parse_config
from diloco.core.presets import method_from_table
from diloco.errors import AuthError, CheckpointError, ConfigError, StoppedError
from diloco.event_log import read_events
from diloco.events import Adopted, Routed, RunStarted
from diloco.exchange.virtual.delivery import Fault
from diloco.following.follower import newest_model
from diloco.learner import Learner
from diloco.simulation.virtual_run import Scenario, simulate
from diloco.syncer.server import Options, Syncer
from diloco.tracking.values import trainer_point
from diloco.training.checkpoint import list_checkpoints, load_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.data.streams import held_out_batches
from diloco.training.expert_part import part_config, part_of, part_state
from diloco.training.held_out import BATCH, evaluate
from diloco.training.learners import Holding
from diloco.training.loop import Trainer
from diloco.training.mixture import buffer_roles
from diloco.training.model import build_model
from diloco.training.optimizers import load_optimizer, make_optimizer
from diloco.training.pretrained import checkpoint_state, global_model
from diloco.training.rank_group import RankGroup
from diloco.training.spec import LearnerSpec, StopRequest

Tiny = Callable[..., RunConfig]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def mixtral(**keys: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 8, **keys}))


def qwen(**keys: Any) -> PreTrainedModel:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, **keys}))


def deepseek(**keys: Any) -> PreTrainedModel:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 3}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **LATENT, **sizes, **keys}))


KINDS: dict[str, Callable[..., PreTrainedModel]] = {"mixtral": mixtral, "qwen3_moe": qwen, "deepseek_v3": deepseek}


def whole(kind: str, **keys: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = KINDS[kind](**keys)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            tensor.normal_(0, 0.3)  # routers are initialised as zeros, or nearly
    return model


def is_of_experts(name: str) -> bool:
    return ".experts." in name or ".mlp.gate." in name


# --- the part


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_rows_of_its_experts_and_copies_of_all_else(kind: str) -> None:
    model, experts = whole(kind), (2, 3, 6, 7)
    model.eval()
    model.get_submodule("model.layers.1").train()
    model.get_parameter("model.norm.weight").requires_grad_(False)
    before, random = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    part = part_of(model, experts)
    assert torch.equal(torch.get_rng_state(), random)
    assert type(part) is type(model)
    names = [name for name, _ in model.named_buffers()] + list(before)
    for name in names:
        own, given = (dict(it.named_buffers()) | it.state_dict() for it in (part, model))
        expected = given[name][list(experts)] if is_of_experts(name) else given[name]
        assert torch.equal(own[name], expected), name
        assert own[name].dtype == given[name].dtype
        assert own[name].untyped_storage().data_ptr() != given[name].untyped_storage().data_ptr()
    assert sum(map(is_of_experts, before)) >= 3
    modes = [[(name, it.training) for name, it in each.named_modules()] for each in (part, model)]
    assert modes[0] == modes[1]
    trained = [[(name, it.requires_grad) for name, it in each.named_parameters()] for each in (part, model)]
    assert trained[0] == trained[1]
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())
    assert model.config.num_local_experts == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_keeps_tied_weights_and_dtypes(dtype: torch.dtype) -> None:
    model = whole("mixtral", tie_word_embeddings=True).to(dtype)
    part = part_of(model, range(4))
    assert part.get_input_embeddings().weight is part.get_output_embeddings().weight
    assert {each.dtype for each in part.parameters()} == {dtype}
    assert part.get_buffer("model.rotary_emb.inv_freq").dtype == model.get_buffer("model.rotary_emb.inv_freq").dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [(0, 1, 2, 3), (2, 3, 6, 7), (1, 3, 4, 6), tuple(range(8))])
def test_a_part_computes_what_the_whole_does_where_routers_choose_among_its_experts(
    kind: str, experts: tuple[int, ...]
) -> None:
    if kind == "deepseek_v3" and experts == (1, 3, 4, 6):
        pytest.skip("its routers choose groups of neighbours")
    model = whole(kind).eval()
    if kind == "deepseek_v3" and len(experts) == 4:
        model.get_submodule("model.layers.1.mlp.gate").topk_group = 2  # as many groups as are held
    tokens = torch.randint(64, (3, 17))
    others = [expert for expert in range(8) if expert not in experts]
    free = model(input_ids=tokens).logits

    def masked(_: nn.Module, __: Any, output: Any) -> Any:
        logits = output.clone()
        logits[..., others] = float("-inf")
        return logits

    part = part_of(model, experts)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "deepseek_v3":  # it chooses by sigmoids, to which it adds a bias
            model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[others] = float("-inf")
        else:
            linear = torch.nn.functional.linear
            routers = {id(each.mlp.gate.weight) for each in model.model.layers}
            patch.setattr(
                torch.nn.functional, "linear",
                lambda x, w, *b: masked(model, None, linear(x, w, *b)) if id(w) in routers else linear(x, w, *b),
            )  # fmt: skip
        restricted = model(input_ids=tokens).logits
    torch.testing.assert_close(part(input_ids=tokens).logits, restricted, atol=1e-6, rtol=1e-5)
    assert torch.equal(restricted, free) == (len(experts) == 8)


def test_groups_of_deepseek_stay_groups() -> None:
    config = whole("deepseek_v3", n_routed_experts=16, topk_group=3).config
    for experts, groups in [(range(8), (2, 2)), ((0, 1, 4, 5, 8, 9, 14, 15), (4, 3)), (range(4, 8), (1, 1))]:
        part = part_config(config, experts)
        assert (part.n_routed_experts, part.n_group, part.topk_group) == (len(experts), *groups)
        model = part_of(DeepseekV3ForCausalLM(config), experts)
        assert (model.config.n_group, model.get_submodule("model.layers.1.mlp.gate").num_group) == (groups[0],) * 2
        assert torch.isfinite(model(input_ids=torch.randint(64, (2, 9))).logits).all()
    assert (config.n_routed_experts, config.n_group, config.topk_group) == (16, 4, 3)


@pytest.mark.parametrize(
    ("make", "experts", "message"),
    [
        (mixtral, (3,), r"experts 3 are fewer than the 2 that the router chooses for each token .*hold as many"),
        (qwen, (0, 5), "experts 0, 5 are fewer than the 3"),
        (mixtral, (7, 8), r"the experts \[7, 8\] cannot be held of a model with 8; name numbers from 0 to 7"),
        (mixtral, (-1, 2), r"the experts \[-1, 2\] cannot be held"),
        (mixtral, (3, 2), r"the experts \[3, 2\] cannot be held .* in ascending order, each once"),
        (mixtral, (2, 2, 3), r"the experts \[2, 2, 3\] cannot be held"),
        (mixtral, (), r"the experts \[\] cannot be held"),
        (deepseek, (0, 1, 2), r"experts 0-2 do not fill the groups .* they are \[2, 1\] of the groups \[0, 1\]; hold"),
        (deepseek, (0, 2, 4), r"they are \[1, 1, 1\] of the groups \[0, 1, 2\]; hold equally many of each, at least 2"),
        (
            lambda: deepseek(num_experts_per_tok=4, topk_group=1, n_group=2), (0, 1, 4, 5),
            r"chooses 4 experts of 1 of 2 groups \(n_group\): they are \[2, 2\] .* and 4 in 1 groups",
        ),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_held(make: Callable[..., PreTrainedModel], experts: Any, message: str) -> None:
    model = make()
    for refuse in (lambda: part_of(model, experts), lambda: part_config(model.config, experts)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_models_without_fused_experts_have_no_part() -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no part with fewer experts"):
        part_of(dense, (0, 1))
    with pytest.raises(ConfigError, match="a model of type llama has no experts to hold"):
        part_config(dense.config, (0, 1))
    listed = mixtral()
    for layer in listed.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    with pytest.raises(ConfigError, match="MixtralForCausalLM has no part with fewer experts; it takes a model"):
        part_of(listed, (0, 1))
    with pytest.raises(ConfigError, match="Sequential has no part"):
        part_of(nn.Sequential(mixtral()), (0, 1))  # type: ignore[type-var]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_part_continues_with_the_inner_state_of_its_experts(kind: str, optimizer: str) -> None:
    config = parse_config('[run]\nname = "a"\ntokens = 614400\n', overrides=[f"inner.optimizer={optimizer}"])
    model, experts = whole(kind), [2, 3, 6, 7]
    of_model = make_optimizer(model, config)
    for seed in range(3):
        torch.manual_seed(seed)
        for each in model.parameters():
            each.grad = torch.randn_like(each)
        of_model.step()
    part = part_of(model, experts)
    of_part = make_optimizer(part, config)
    load_optimizer(of_part, part_state(copy.deepcopy(of_model.state_dict()), of_part, experts))
    for name, each in model.named_parameters():  # a further step of both, with the same gradients
        each.grad = torch.randn_like(each)
        part.get_parameter(name).grad = each.grad[experts].clone() if is_of_experts(name) else each.grad.clone()
        state, own = of_model.state[each], of_part.state[part.get_parameter(name)]
        assert {"exp_avg", "exp_avg_sq", "momentum_buffer"} & set(own)
        for key, value in state.items():
            expected = value[experts] if is_of_experts(name) and value.ndim else value
            assert torch.equal(own[key], expected), (name, key)
    for each_optimizer in (of_model, of_part):
        each_optimizer.step()
    for name, each in model.named_parameters():
        if is_of_experts(name) and ".gate." in name and optimizer == "muon":
            continue  # Muon orthogonalises a router as one matrix
        expected = each[experts] if is_of_experts(name) else each
        torch.testing.assert_close(part.get_parameter(name), expected, atol=1e-6, rtol=1e-5)


def test_the_part_continues_with_factored_inner_state() -> None:
    model, experts = whole("mixtral"), [2, 3, 6, 7]
    of_model = torch.optim.Adafactor(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    of_model.step()
    part = part_of(model, experts)
    of_part = torch.optim.Adafactor(part.parameters())
    of_part.load_state_dict(part_state(of_model.state_dict(), of_part, experts))
    for each in part.parameters():
        each.grad = torch.ones_like(each)
    of_part.step()
    rows = {value.shape[0] for each in part.parameters() if each.ndim == 3 for value in of_part.state[each].values()
            if value.ndim}  # fmt: skip
    assert rows == {len(experts)}


def test_a_part_from_a_configuration_allocates_no_whole_model(tmp_path: Path) -> None:
    config = whole("mixtral").config
    config.to_json_file(tmp_path / "config.json")
    text = f'[run]\nname = "a"\ntokens = 614400\n[model]\nconfig = "{tmp_path / "config.json"}"\n'
    table = parse_config(text, overrides=["model.vocab_size=256"]).model
    random = torch.get_rng_state()
    part = build_model(table, 256, 32, 0, experts=(4, 5, 6, 7))
    assert torch.equal(torch.get_rng_state(), random)
    assert part.config.num_local_experts == 4
    assert part.get_parameter("model.layers.0.mlp.experts.down_proj").shape == (4, 16, 24)
    mixtral(vocab_size=256).save_pretrained(tmp_path / "model")
    weights = parse_config(
        text.split("[model]", maxsplit=1)[0], overrides=[f"model.weights={tmp_path / 'model'}"]
    ).model
    assert build_model(weights, 256, 32, 0, experts=(4, 5)).config.num_local_experts == 2
    assert build_model(weights, 256, 32, 0).config.num_local_experts == 8


# --- learners that hold a part

PARTS = (
    "method={preset='DiLoCo', sync_every=6, fragments={type='Experts', groups=4, trunk={type='Whole'}}}",
    "run.steps=24", "run.tokens=1_000_000", "schedule.steps=24",
)  # fmt: skip
MODELS = {
    "mixtral": "type='mixtral', num_local_experts=8, num_experts_per_tok=2",
    "qwen3_moe": "type='qwen3_moe', num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8",
    "deepseek_v3": "type='deepseek_v3', n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, "
    + ", ".join(f"{key}={value}" for key, value in LATENT.items()),
}


@pytest.fixture
def parts(tiny: Tiny) -> Callable[..., RunConfig]:
    """The tiny run with a mixture of 8 experts; the experts that a learner holds, and overrides."""

    def make(held: str | None, *overrides: str, kind: str = "mixtral") -> RunConfig:
        sizes = "hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, "
        model = f"model={{{sizes}num_key_value_heads=2, {MODELS[kind]}}}"
        own = () if held is None else (f"train.holds_experts='{held}'",)
        return tiny(model, *PARTS, *own, *overrides)

    return make


def assembled(directory: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The whole model, from the last checkpoints of learners that hold parts of it, in the order of their experts."""
    saved = [load_checkpoint(list_checkpoints(directory / name / "checkpoints")[-1]) for name in names]
    states = [global_model(each) for each in saved]
    biased = ("mlp.experts.", "mlp.gate.")
    return {
        name: torch.cat([each[name] for each in states]) if any(it in name for it in biased) else value
        for name, value in states[0].items()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_halves_train_one_mixture_whose_loss_is_that_of_all_experts(
    parts: Callable[..., RunConfig], tmp_path: Path, kind: str
) -> None:
    common = ("warm_start.steps=6", "checkpoint.every_steps=24", "train.log_every_steps=3", "evaluate.every_steps=12")
    configs = {name: parts(held, *common, kind=kind) for name, held in (("a", "0-3"), ("b", "4-7"))}
    result = simulate(configs, Scenario(), tmp_path / "sim")
    whole = assembled(tmp_path / "sim", ["a", "b"])
    model = build_model(configs["a"].model, 256, 32, 7)
    assert all(whole[name].shape == each.shape for name, each in model.named_parameters())
    batches = held_out_batches(load_corpus(configs["a"].data), 32, 16, BATCH)
    assert result.loss == evaluate(model, whole, batches)
    assert result.losses == [(result.duration_s, result.loss)]
    for name, summary in result.summaries.items():
        assert summary is not None
        assert summary.metrics["versions"] == ([3, 3, -1, -1, 3] if name == "a" else [-1, -1, 3, 3, 3])
        assert summary.held_out_loss not in (None, result.loss)  # of its own part
        events = list(read_events(tmp_path / "sim" / name / "events.jsonl"))
        assert all(each.version >= 0 for each in events if isinstance(each, Adopted))
        routed = [each for each in events if isinstance(each, Routed) and each.step > 6]
        assert {each.not_held for each in routed} == {4}
        others = slice(4, 8) if name == "a" else slice(0, 4)
        assert all(not any(row[others]) and len(row) == 8 for each in routed for row in each.tokens)
        point = trainer_point(routed[0])
        assert point is not None
        assert all(value <= 3 for key, value in point.values.items() if key.endswith("/idle"))
    sent = [summary.metrics["num_bytes"] for summary in result.summaries.values() if summary is not None]
    assert sent[0]["contributions"] == sent[1]["contributions"] == sent[1]["updates"]
    assert sent[1]["joins"] < 4 * sum(each.numel() for each in model.parameters())  # b never had the whole model


def test_four_quarters_and_a_holder_of_all(parts: Callable[..., RunConfig], tmp_path: Path) -> None:
    held = {"a": None, "b": "0-1", "c": "2-3", "d": "0-1,6-7"}
    configs = {name: parts(text, "run.learners=4") for name, text in held.items()}
    result = simulate(configs, Scenario(), tmp_path / "sim")
    ends = {name: each.held_out_loss for name, each in result.summaries.items() if each is not None}
    assert ends["a"] == result.loss
    assert len(set(ends.values())) == 4


@pytest.mark.slow
def test_a_holder_that_is_killed_comes_back_with_its_part(parts: Callable[..., RunConfig], tmp_path: Path) -> None:
    configs = {n: parts(h, "checkpoint.every_steps=5") for n, h in (("a", "0-3"), ("b", "4-7"))}
    for killed in range(2):
        place = tmp_path / f"sim-{killed}"
        result = simulate(configs, Scenario(faults=[Fault(killed, 9.5, 12.0)]), place)
        assert all(each is not None and each.steps == 24 for each in result.summaries.values())
        name = "ab"[killed]
        starts = [each for each in read_events(place / name / "events.jsonl") if isinstance(each, RunStarted)]
        part = 4 * 2 * (16 * 48 + 24 * 16 + 16)  # parameters of 4 experts in 2 layers
        assert [it.num_parameters for it in starts][1] == build_model(
            configs["a"].model, 256, 32, 7
        ).num_parameters() - part
        assert starts[1].step >= 5


def together(
    configs: Sequence[RunConfig],
    resume_from: Sequence[Path] | None = None,
    watch: Callable[[Trainer], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Learners in one process, each with its own configuration; the state of each one's part at the end."""

    def life(index: int, exchange: Any) -> dict[str, Tensor]:
        config, method = configs[index], method_from_table(configs[index].method)

        def attach(
            model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, tokens: int, holding: Holding
        ) -> Learner:
            exchange.initial_step, exchange.initial_tokens = steps, tokens
            learner = Learner(
                model, optimizer, method=method, exchange=exchange, holds_experts=holding.experts, whole=holding.whole,
                buffers=buffer_roles(model),
            )  # fmt: skip
            if watch is not None:
                watch(trainer)
            return learner

        path = None if resume_from is None else resume_from[index]
        spec = LearnerSpec(f"part-{index}", shard=index, initialise=index == 0, resume_from=path)
        trainer = Trainer(config, spec, attach=attach)
        trainer.train()
        return {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}

    return diloco.run_local(life, learners=len(configs))


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.slow) if index else each for index, each in enumerate(MODELS)]
)
def test_a_run_of_parts_stopped_and_resumed_is_the_same_to_the_bit(
    parts: Callable[..., RunConfig], tmp_path: Path, kind: str
) -> None:
    def configs(place: str, *overrides: str) -> list[RunConfig]:
        common = ("run.learners=3", "train.global_batch=12", f"run.dir={tmp_path / place}", *overrides)
        return [parts(held, *common, kind=kind) for held in (None, "0-3", "4-7")]

    through = together(configs("through"))
    together(configs("again", "checkpoint.every_steps=10", "checkpoint.keep=9"))
    at = [tmp_path / "again" / f"part-{index}" / "checkpoints" / "step-0000000010" for index in range(3)]
    for expected, found in zip(through, together(configs("again"), at), strict=True):
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name

    all_held, half, other = configs("again")[0], configs("again")[1], configs("again", "train.holds_experts='2-5'")[1]
    for config, path, held in [
        (other, at[1], r"experts 0-3, and this one holds experts 2-5 \(train.holds_experts\); resume with those"),
        (half, at[0], "the whole model, and this one holds experts 0-3"),
        (all_held, at[1], "experts 0-3, and this one holds the whole model"),
    ]:
        with pytest.raises(CheckpointError, match=f"is of a learner that holds {held}"):
            Trainer(config, LearnerSpec("x", resume_from=path), attach=lambda *_: pytest.fail("joined")).train()
    with pytest.raises(CheckpointError, match="has only the experts that its learner held; export the run's model"):
        checkpoint_state(at[1])


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_the_whole_model_is_dropped_once_its_learner_has_joined(
    parts: Callable[..., RunConfig], optimizer: str
) -> None:
    wholes: list[weakref.ref[Any]] = []
    found: list[Trainer] = []

    def joined(trainer: Trainer) -> None:
        if found:
            return
        found.append(trainer)
        (whole, state) = trainer._training._whole or pytest.fail("no whole model")
        named = dict(whole.named_parameters())
        groups = (p for group in state["param_groups"] for p in group["params"])
        assert set(state["state"]) == set(groups)
        wholes.extend(weakref.ref(each) for each in (whole, named["model.layers.0.mlp.experts.down_proj"]))
        for name, each in trainer.model.named_parameters():
            own = trainer.optimizer.state[each]
            moments = [value for key, value in own.items() if key != "step"]
            assert moments
            assert all(value.shape == each.shape and value.any() for value in moments), name

    common = ("warm_start.steps=6", f"inner.optimizer={optimizer}")
    configs = [parts("0-3", *common), parts("4-7", *common)]
    states = together(configs, watch=joined)
    gc.collect()
    assert len(wholes) == 2
    assert all(each() is None for each in wholes)
    assert states[0]["model.layers.0.mlp.experts.down_proj"].shape == (4, 16, 24)
    held = [each.shape for state in found[0].optimizer.state.values() for each in state.values()]
    assert not any(shape[:1] == (8,) for shape in held)


def test_a_learner_that_could_not_join_still_has_the_whole_model(parts: Callable[..., RunConfig]) -> None:
    config = parts("0-3", "warm_start.steps=6")

    def stop(*_: Any) -> Any:
        trainer.stop()
        raise StoppedError("stopped while it waits")

    trainer = Trainer(config, LearnerSpec("a", initialise=True), attach=stop)
    assert trainer.train().reason == "stopped"
    (path,) = list_checkpoints(config.dir / "a" / "checkpoints")
    saved = load_checkpoint(path)
    assert (saved["joined"], saved["held"], saved["step"]) == (False, None, 6)
    assert saved["model"]["model.layers.0.mlp.experts.down_proj"].shape == (8, 16, 24)
    assert any(each["exp_avg"].shape == (8, 16, 24) for each in saved["optimizer"]["state"].values())

    seen: list[Any] = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, _: int, holding: Holding) -> Any:
        seen.append((holding.experts, holding.whole is not None, steps))
        assert model.get_parameter("model.layers.0.mlp.experts.down_proj").shape == (4, 16, 24)
        moments = optimizer.state[model.get_parameter("model.layers.0.mlp.experts.down_proj")]["exp_avg"]
        assert torch.equal(moments, _of(saved, (8, 16, 24))[:4])
        raise AuthError("enough")

    for initialise in (True, False):  # the run may have a model by then
        spec = LearnerSpec("a", initialise=initialise, resume_from=path)
        with pytest.raises(AuthError, match="enough"):
            Trainer(config, spec, attach=look).train()
    assert seen == [("0-3 of 8", True, 6), ("0-3 of 8", False, 6)]


def _of(saved: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    found = [each["exp_avg"] for each in saved["optimizer"]["state"].values() if each["exp_avg"].shape == shape]
    return found[0]


@pytest.mark.parametrize(
    ("held", "overrides", "message"),
    [
        ("0-8", (), "holds_experts='0-8 of 8' names expert 8, and the run's are 0 to 7; name those"),
        ("0-999999999", (), "names expert 999999999"),
        ("0-2", (), r"experts 2 to 3 are group 1 of Experts\(groups=4\), which a learner holds as a whole"),
        ("0-1", ("model.num_experts_per_tok=3",), "experts 0-1 are fewer than the 3 that the router chooses"),
        ("0-3", ("method={preset='DiLoCo'}",), "finds no experts, since DiLoCo cuts the model by"),
        ("0-3", ("method={preset='DataParallel'}",), "finds no experts, since DataParallel cuts the model by"),
        ("0-3", ("model={type='llama'}",), "a model of type llama has no experts to hold"),
    ],
)
def test_sets_that_cannot_be_held_are_refused_before_anything_is_joined(
    parts: Callable[..., RunConfig], held: str, overrides: tuple[str, ...], message: str
) -> None:
    for initialise in (True, False):
        with pytest.raises(ConfigError, match=message):
            Trainer(parts(held, *overrides), LearnerSpec("a", initialise=initialise))


def test_a_part_needs_a_syncer(parts: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match="train.holds_experts needs a syncer, which holds the experts"):
        Trainer(parts("0-3"), LearnerSpec("lone", role="isolated"))
    with pytest.raises(ConfigError, match="train.holds_experts needs a syncer"):
        Trainer(parts("0-3"), LearnerSpec("one"), peers=RankGroup())
    baseline = Trainer(parts("0-3"), LearnerSpec("all", role="baseline"))  # it is data parallel of the whole model
    assert baseline.model.config.num_local_experts == 8


TABLES = """
[run]
name = "a"
tokens = 614400
learners = 2
[model]
type = "mixtral"
num_local_experts = 8
[learner.x]
train.holds_experts = "0-3"
[learner.y]
train.holds_experts = "4-7"
"""


def test_the_run_file_gives_each_expert_a_holder(tmp_path: Path) -> None:
    assert parse_config(TABLES, learner="y").train.holds_experts == "4-7"
    for given, missing in [
        (TABLES.replace("4-7", "4-6"), 7),
        (TABLES.replace("4-7", "5-7"), 4),
        (TABLES.replace("0-3", "1-3"), 0),
        (TABLES.replace("4-7", "5-7").replace("num_local_experts = 8\n", ""), 4),  # the number is not known here
        (TABLES.replace('train.holds_experts = "4-7"', "train.batch = 4") + '[train]\nholds_experts = "0-3"', 4),
    ]:
        for learner in (None, "x"):
            with pytest.raises(
                ConfigError, match=f"run.toml: no learner holds expert {missing}, which would stay as it"
            ):
                parse_config(given, "run.toml", learner=learner)
    MixtralConfig(**SIZES, num_local_experts=16).to_json_file(tmp_path / "config.json")
    of_file = TABLES.replace('type = "mixtral"\nnum_local_experts = 8', f'config = "{tmp_path / "config.json"}"')
    with pytest.raises(ConfigError, match="no learner holds expert 8"):
        parse_config(of_file)
    for fine in (
        TABLES.replace('"4-7"', '"5-7"').replace("learners = 2", "learners = 3"),  # one is not listed
        TABLES.replace('train.holds_experts = "4-7"', 'train.trains_experts = "4-7"'),  # and holds all
        TABLES.replace('"4-7"', '"0-1,4-7"'),
        TABLES.partition("[learner.x]")[0] + '[train]\nholds_experts = "0-3"',  # the file that one learner has saved
    ):
        parse_config(fine)
    parse_config(TABLES, overrides=["train.holds_experts='0-1'"], learner="x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('holds_experts = "0-3,2"', r"\[train\] holds_experts='0-3,2' names 2 twice; name each number once"),
        ('holds_experts = ""', r"\[train\] holds_experts='' is not a list of numbers"),
        ('holds_experts = "0"\ntrains_experts = "0"', r"\[train\] trains_experts has no effect beside holds_experts"),
        ('holds_experts = "0"\nexpert_parallel = 2', r"\[train\] expert_parallel has no effect beside holds_experts"),
    ],
)
def test_tables_that_cannot_be(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(f'[run]\nname = "a"\ntokens = 614400\n[train]\n{line}\n')


def test_halves_over_a_syncer(parts: Callable[..., RunConfig], tmp_path: Path) -> None:
    given = parts("0-3")
    with Syncer(given.run.name, method_from_table(given.method), Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        common = (f"syncer.address={syncer.address}", "warm_start.steps=6", "checkpoint.every_steps=12")
        first = parts("0-3", *common, "run.steps=12")
        for index, (held, steps) in enumerate([("0-3", 12), ("4-7", 24), ("0-3", 30)]):
            config = parts(held, *common, f"run.steps={steps}")
            path = None if index < 2 else list_checkpoints(first.dir / "learner-0" / "checkpoints")[-1]
            spec = LearnerSpec(
                f"learner-{index % 2}", shard=index % 2, initialise=index != 1 and "if-empty", resume_from=path
            )
            trainer = Trainer(config, spec, attach=_connector(config, spec, StopRequest()))
            assert trainer.train().steps == steps
            assert trainer.model.config.num_local_experts == 4
        newest = newest_model(syncer.address, run=given.run.name)
        assert newest.versions == (4, 4, 2, 2, 4) or min(newest.versions) > 0
        assert newest.state_dict()["model.layers.0.mlp.experts.down_proj"].shape == (8, 16, 24)
