"""The loss against TRL's own lines, identities that hold in degenerate cases, and numbers computed by hand."""

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import ConfigError, LayoutError
from diloco.rl.loss import PRESETS, Loss, advantages, policy_loss, token_log_probs

N, T, MAX_TOKENS = 6, 9, 12
PLAIN = Loss(delta=None, importance_cap=None)
UNCLIPPED = replace(PLAIN, clip_low=1 - 1e-9, clip_high=1e9)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Log-probabilities whose ratios fall on both sides of every limit; lengths from 2 to T."""
    generator = torch.Generator().manual_seed(1)

    def near(log_probs: Tensor, distance: float) -> Tensor:
        return log_probs + distance * torch.randn(N, T, generator=generator, dtype=dtype)

    old = -torch.rand(N, T, generator=generator, dtype=dtype) * 3
    return {
        "log_probs": near(old, 0.8).requires_grad_(), "old": old, "rollout": near(old, 0.7),
        "reference": near(old, 0.5),
        "advantages": torch.tensor([1.3, -0.7, 0.2, -1.9, 0.0, 0.6], dtype=dtype),
        "mask": (torch.arange(T) < torch.tensor([[9], [2], [5], [7], [3], [4]])).to(dtype),
    }  # fmt: skip


def ours(settings: Loss, data: dict[str, Tensor], **counts: float) -> tuple[Tensor, Tensor]:
    """The loss and its gradient."""
    log_probs = data["log_probs"].detach().requires_grad_()
    loss = policy_loss(**{**data, "log_probs": log_probs}, settings=settings, max_tokens=MAX_TOKENS, **counts)
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad


def trl(settings: Loss, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
    """The same by `GRPOTrainer._compute_loss`, called on an object with the attributes that it reads."""
    trainer = pytest.importorskip("trl", reason="TRL is not installed").GRPOTrainer
    log_probs, mask = data["log_probs"].detach().requires_grad_(), data["mask"]
    cap = settings.importance_cap
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        model=SimpleNamespace(training=True), aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=settings.kl,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=settings.delta, steps_per_generation=1),
        loss_type={"tokens": "dapo", "sequences": "grpo", "constant": "dr_grpo"}[settings.normalise],
        epsilon_low=settings.clip_low, epsilon_high=settings.clip_high, max_completion_length=MAX_TOKENS,
        use_vllm=cap is not None, vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    nothing = torch.zeros(N, 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": nothing.expand(N, T),
        "completion_mask": mask, "advantages": data["advantages"], "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"], "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (data["old"] - data["rollout"]).exp().clamp(max=cap or math.inf),
    }  # fmt: skip
    loss = trainer._compute_loss(stand_in, None, inputs)
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad, stand_in._metrics["train"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_gradient_are_those_of_trl(preset: str, dtype: torch.dtype) -> None:
    data = batch(dtype)
    for delta in (None, 4.0, 1.5):
        for kl in (0.0, 0.04):
            for cap in (None, 2.0):
                settings = replace(PRESETS[preset], delta=delta, kl=kl, importance_cap=cap)
                loss, gradient = ours(settings, data)
                expected, expected_gradient, metrics = trl(settings, data)
                close = {"rtol": 0, "atol": 1e-13 if dtype == torch.float64 else 1e-6}  # rounding of other orders
                torch.testing.assert_close(loss, expected, **close)
                torch.testing.assert_close(gradient, expected_gradient, **close)
                assert metrics["clip_ratio/low_mean"][0] > 0  # the arrays reach both limits
                assert metrics["clip_ratio/high_mean"][0] > 0


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_are_those_of_trl(scale: Any) -> None:
    """TRL computes them in the middle of a method that generates: its branch is taken out and run."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    method = textwrap.dedent(inspect.getsource(trainer.GRPOTrainer._generate_and_score_completions))
    [branch] = [
        node for node in ast.walk(ast.parse(method))
        if isinstance(node, ast.If) and "== 'sum_then_normalize'" in ast.unparse(node.test)
    ]  # fmt: skip
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.25], [0.5, 0.5, 0.5, 0.5], [-3.0, 7.0, 7.0, 1e3]])
    names = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), scale_rewards=scale
        ),
        "rewards_per_func": rewards.reshape(-1, 1), "device": "cpu", "num_generations": 4,
        "unscorable_mask": torch.zeros(12, dtype=torch.bool), "torch": torch, "nanstd": trainer.nanstd,
    }  # fmt: skip
    exec(compile(ast.Module([branch], []), "trl", "exec"), names)
    torch.testing.assert_close(advantages(rewards, scale), names["advantages"].view(3, 4), rtol=1e-6, atol=1e-7)


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]])
    scaled = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # σ² = 4·0.25/3
    expected = torch.tensor([[scaled, -scaled, -scaled, scaled], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(advantages(rewards, "group"), expected)
    torch.testing.assert_close(advantages(rewards, "none")[0], torch.tensor([0.5, -0.5, -0.5, 0.5]), rtol=0, atol=0)


def test_golden_case_by_hand() -> None:
    """Probabilities of two sequences whose limits all act; the third token of the second one is padding."""
    new = torch.tensor([[0.6, 0.3, 0.5], [0.2, 0.3, 0.9]], dtype=torch.float64)
    old = torch.tensor([[0.4, 0.6, 0.5], [0.04, 0.6, 0.1]], dtype=torch.float64)  # r: 1.5 0.5 1; 5 0.5
    rollout = torch.tensor([[0.4, 0.2, 0.5], [0.08, 0.6, 0.1]], dtype=torch.float64)  # w: 1 3 1; 0.5 1
    reference = torch.tensor([[0.6, 0.6, 0.5], [0.2, 0.3, 0.1]], dtype=torch.float64)  # π_ref/π: 1 2 1; 1 1
    data = {
        "log_probs": new.log(), "old": old.log(), "rollout": rollout.log(), "reference": reference.log(),
        "advantages": torch.tensor([1.0, -2.0], dtype=torch.float64), "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }  # fmt: skip
    k = 1 - math.log(2)
    first = -1.28 - 2 * 0.5 - 1 + 0.1 * k
    second = 0.5 * 4 * 2 + 0.8 * 2
    expected = {
        "tokens": (first + second) / 5,
        "sequences": (first / 3 + second / 2) / 2,
        "constant": (first + second) / (2 * MAX_TOKENS),
    }
    for normalise, value in expected.items():
        loss, gradient = ours(Loss(normalise, kl=0.1), data)
        assert loss.item() == pytest.approx(value, rel=1e-12)
    # 0 where clipped; −w·r·A + β·(1 − π_ref/π) elsewhere
    per_token = torch.tensor([[0, -1 - 0.1, -1], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, per_token / (2 * MAX_TOKENS), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("preset", PRESETS)
def test_micro_batches_add_up_to_their_batch(preset: str) -> None:
    data, settings = batch(), replace(PRESETS[preset], kl=0.04)
    loss, gradient = ours(settings, data)
    counts = {"num_tokens": int(data["mask"].sum()), "num_sequences": N}
    pieces = [
        ours(settings, {name: each[part] for name, each in data.items()}, **counts)
        for part in (slice(0, 1), slice(1, 4), slice(4, N))
    ]
    exact = {"rtol": 1e-14, "atol": 1e-16}  # sums in another order
    torch.testing.assert_close(sum(piece[0] for piece in pieces), loss, **exact)
    torch.testing.assert_close(torch.cat([piece[1] for piece in pieces]), gradient, **exact)


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    data = batch()
    data["old"] = data["log_probs"]  # also as the same tensor
    loss, gradient = ours(PLAIN, data)
    count = data["mask"].sum()
    torch.testing.assert_close(gradient, -data["advantages"][:, None] * data["mask"] / count, rtol=1e-14, atol=0)
    direct = policy_loss(**data, settings=PLAIN)  # gradient with `old` still attached
    direct.backward()
    torch.testing.assert_close(data["log_probs"].grad, gradient, rtol=0, atol=0)
    torch.testing.assert_close(direct.detach(), loss, rtol=0, atol=0)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_give_no_gradient(scale: Any) -> None:
    data = batch()
    data["advantages"] = advantages(torch.full((2, 3), 0.7, dtype=torch.float64), scale).flatten()
    loss, gradient = ours(Loss(), data)
    assert loss == 0
    assert not gradient.any()


def test_wide_limits_leave_the_ratio_as_it_is() -> None:
    data = batch()
    loss, _ = ours(UNCLIPPED, data)
    ratio = (data["log_probs"] - data["old"]).exp() * data["mask"]
    expected = -(ratio * data["advantages"][:, None]).sum() / data["mask"].sum()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=0)
    capped = ours(replace(UNCLIPPED, importance_cap=1e9), data)[0]  # uncapped weights: π / π_rollout in all
    ratio = (data["log_probs"] - data["rollout"]).exp() * data["mask"]
    expected = -(ratio * data["advantages"][:, None]).sum() / data["mask"].sum()
    torch.testing.assert_close(capped, expected.detach(), rtol=1e-14, atol=0)


def test_without_kl_or_cap_the_reference_or_the_rollout_changes_nothing() -> None:
    data = batch()
    loss, gradient = ours(PLAIN, data)
    alone, alone_gradient = ours(PLAIN, data | {"reference": None, "rollout": None})
    assert torch.equal(loss, alone)
    assert torch.equal(gradient, alone_gradient)
    same = ours(replace(PLAIN, kl=0.5), data | {"reference": data["log_probs"].detach()})
    assert torch.equal(same[0], loss)
    assert torch.equal(same[1], gradient)


def test_padding_may_hold_anything_and_sequences_may_be_empty() -> None:
    data = batch()
    data["mask"][2] = 0
    expected = {preset: ours(replace(PRESETS[preset], kl=0.04), data) for preset in PRESETS}
    padding = data["mask"] == 0
    for name, junk in {"log_probs": math.inf, "old": math.nan, "rollout": -math.inf, "reference": math.nan}.items():
        data[name] = data[name].detach().masked_fill(padding, junk)
    for preset, (loss, gradient) in expected.items():
        again, gradient_again = ours(replace(PRESETS[preset], kl=0.04), data | {"mask": ~padding})
        assert torch.equal(again, loss)
        assert torch.equal(gradient_again, gradient)
        assert not gradient[padding].any()
        assert math.isfinite(loss)
    nothing = ours(Loss(), data | {"mask": torch.zeros(N, T)})
    assert nothing[0] == 0
    assert not nothing[1].any()


def test_a_ratio_that_overflows_has_a_finite_gradient() -> None:
    old = torch.tensor([[-200.0], [-200.0]])
    data = {"old": old, "rollout": old - 200, "reference": None, "mask": torch.ones(2, 1)}
    data |= {"log_probs": old + 199, "advantages": torch.tensor([1.0, -1.0])}
    loss, gradient = ours(Loss(), data)
    assert loss.item() == pytest.approx((-2 * 1.28 + 2 * 4) / 2)
    assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_log_probs_are_those_of_log_softmax(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 5, 11) * 4 + 1e3).to(dtype).requires_grad_()
    tokens = torch.randint(11, (3, 5))
    weights = torch.randn(3, 5)
    exact = logits.detach().double().requires_grad_()
    expected = torch.gather((exact / 0.7).log_softmax(-1), 2, tokens[..., None]).squeeze(2)
    (expected * weights).sum().backward()
    log_probs = token_log_probs(logits, tokens, 0.7)
    (log_probs * weights).sum().backward()
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected.float(), rtol=1e-4, atol=1e-3)  # 1e3 ÷ 0.7 rounded to fp32
    torch.testing.assert_close(
        logits.grad, exact.grad.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3
    )
    with torch.no_grad():
        assert torch.equal(token_log_probs(logits, tokens, 0.7), log_probs)


def test_token_log_probs_keep_no_copy_of_the_logits() -> None:
    logits = torch.randn(4, 8, 1000).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_log_probs(logits, torch.zeros(4, 8, dtype=torch.int64), 1.0)
    assert all(
        each.data_ptr() in range(logits.data_ptr(), logits.data_ptr() + 64_000) for each in kept if each.numel() > 8
    )
    assert kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalise": "batch"}, r"Loss\(normalise=…\) is 'batch'; use one of 'tokens', 'sequences', 'constant'"),
        ({"scale": "batch"}, r"Loss\(scale=…\) is 'batch'; use 'group' or 'none'"),
        ({"clip_low": 1.0}, r"Loss\(clip_low=…\) must be a number from 0 to 1 but below 1, not 1.0"),
        ({"clip_high": 0.0}, r"Loss\(clip_high=…\) must be a finite number above 0, not 0.0"),
        ({"kl": -0.1}, r"Loss\(kl=…\) must be a finite number above 0, not -0.1"),
        ({"importance_cap": math.nan}, r"Loss\(importance_cap=…\) must be a finite number above 0, not nan"),
        ({"delta": 1.28}, r"Loss\(delta=…\) must be above 1 \+ clip_high, which is 1.28, not 1.28"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loss(**options)


def test_arguments_that_do_not_fit_are_refused() -> None:
    data = batch()
    for missing, settings, message in (
        ({"rollout": None}, Loss(), r"Loss\(importance_cap=2.0\) needs rollout, which is None"),
        ({"reference": None}, Loss(kl=0.1), r"Loss\(kl=0.1\) needs reference"),
        ({}, Loss("constant"), r"Loss\(normalise='constant'\) needs max_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            policy_loss(**data | missing, settings=settings)
    with pytest.raises(LayoutError, match=r"advantages has the shape \(6, 1\); it must have \(6,\)"):
        policy_loss(**data | {"advantages": data["advantages"][:, None]}, settings=Loss())
    with pytest.raises(LayoutError, match=r"old has the shape \(9,\); it must have \(6, 9\)"):
        policy_loss(**data | {"old": data["old"][0]}, settings=Loss())
    with pytest.raises(LayoutError, match=r"rewards have the shape \(3, 1\)"):
        advantages(torch.zeros(3, 1), "group")
    with pytest.raises(LayoutError, match=r"tokens has the shape \(2, 2\); it must have \(2, 3\)"):
        token_log_probs(torch.zeros(2, 3, 4), torch.zeros(2, 2, dtype=torch.int64), 1.0)
    with pytest.raises(ConfigError, match="temperature must be a finite number above 0, not 0"):
        token_log_probs(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), 0)
