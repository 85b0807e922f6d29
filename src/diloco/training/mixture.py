"""Mixtures of experts in the reference trainer: auxiliary loss, balancing bias, load of the experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco import events as ev
from diloco.core.names import named_buffers
from diloco.errors import ConfigError
from diloco.learner.experts import RoutedTokens
from diloco.learner.held import HeldExperts
from diloco.learner.roles import Buffers
from diloco.training.rank_group import RankGroup

BIAS = "e_score_correction_bias"
"""The buffer of a router that balances the load, as in DeepSeek-V3."""

BIAS_SPEED = 1e-3
"""γ of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""


def auxiliary_loss(model: nn.Module) -> tuple[float, dict[str, bool]]:
    """The coefficient of a model's auxiliary loss, and the arguments of `forward` that make it compute this loss.

    Models such as Mixtral and Qwen3-MoE have one; 0.0 for others, and where their configuration switches it off.
    """
    config: Any = getattr(model, "config", None)
    coefficient = (
        float(getattr(config, "router_aux_loss_coef", 0.0)) if hasattr(config, "output_router_logits") else 0.0
    )
    return coefficient, {"output_router_logits": True} if coefficient else {}


def buffer_roles(model: nn.Module, role: Buffers = "average") -> Buffers | Mapping[str, Buffers]:
    """`Learner(buffers=…)` for the models of run files: `role` for the balancing bias, if the model has one."""
    return {f"*{BIAS}": role} if any(name.endswith(BIAS) for name, _ in named_buffers(model)) else "refuse"


class Mixture:
    """Balances and measures the experts of a model that is trained.

    Arguments:
        speed: γ, by which a balancing bias moves at each step; None: `BIAS_SPEED`.
        held: the experts that the model has; None: all.

    Attributes:
        ranks: all ranks that take the same steps. Their tokens are counted together.

    Raises:
        ConfigError: a speed is given, and the model has no balancing bias.
    """

    def __init__(
        self, model: nn.Module, ranks: RankGroup, speed: float | None, held: HeldExperts | None = None
    ) -> None:
        self.ranks = ranks
        self._routed, self._held = RoutedTokens(model, entropy=True), held
        routers = (block.router for block in self._routed.found)
        self._biased = [(index, router) for index, router in enumerate(routers) if hasattr(router, BIAS)]
        if speed is not None and not self._biased:
            raise ConfigError(
                f"train.bias_speed = {speed} has no effect: the model has no router with a balancing bias; drop it"
            )
        self._speed = BIAS_SPEED if speed is None else speed
        self._balanced = self._read = self._routed.counts()

    @torch.no_grad()
    def balance(self) -> None:
        """After an inner step: b_e += γ·sign(mean load − load of e), with the loads of this step.

        DeepSeek-V3, arXiv 2412.19437, section 2.1.2. Other models have no such bias, and nothing happens.
        """
        if not self._biased:
            return
        counts = self._routed.counts()
        load = self.ranks.sum(counts - self._balanced.to(counts.device)).double()
        self._balanced = counts
        for index, router in self._biased:
            bias: Tensor = getattr(router, BIAS)
            own = load[index, : bias.numel()]
            bias.add_((own.mean() - own).sign().to(bias.device, bias.dtype), alpha=self._speed)

    def load(self, step: int) -> ev.Routed | None:
        """The load since the last call, over all ranks; None for a dense model. Every rank calls it."""
        if not self._routed.blocks:
            return None
        counts, entropy = self._routed.counts(), self._routed.read_entropy()
        since, self._read = counts - self._read.to(counts.device), counts
        whole = self.ranks.sum(torch.cat([since.double(), entropy.unsqueeze(1).to(counts.device)], 1)).cpu()
        rows = zip(self._routed.found, whole[:, :-1].long().tolist(), strict=True)
        tokens, not_held = tuple(tuple(row[: block.num_experts]) for block, row in rows), 0
        if (held := self._held) is not None:  # experts have the numbers of the run
            of_run = [dict(zip(held.experts, row, strict=True)) for row in tokens]
            tokens = tuple(tuple(row.get(expert, 0) for expert in range(held.num_experts)) for row in of_run)
            not_held = held.num_experts - len(held.experts)
        entropies = tuple((whole[:, -1] / self.ranks.size).tolist())
        return ev.Routed(step=step, blocks=self._routed.blocks, tokens=tokens, entropy=entropies, not_held=not_held)

    def close(self) -> None:
        """Stop counting; the model can be dropped."""
        self._routed.close()
