"""The inner step: forward, backward, clip, optimizer. No other learner takes part in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from diloco.config import TrainTable
from diloco.core.names import unwrapped
from diloco.errors import ConfigError
from diloco.training.expert_parallel import clip_gradients
from diloco.training.held_out import next_token_loss
from diloco.training.mixture import auxiliary_loss
from diloco.training.rank_group import synchronised

P = TypeVar("P")


@contextmanager
def flushed_denormals(enabled: bool) -> Iterator[None]:
    """Treat magnitudes below 2⁻¹²⁶ as zero: they slow small models down, and an inner step does not need them.

    The setting applies to the calling thread and to threads that it starts meanwhile, so start none inside.
    """
    if enabled:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if enabled:
            torch.set_flush_denormal(False)


@dataclass(frozen=True)
class StepResult:
    """Scalars of one inner step, left on the device so that a step does not wait for them."""

    loss: Tensor  # nats per token, without an auxiliary loss
    gradient_norm: Tensor  # before clipping


class InnerStep:
    """Runs inner steps of one model (or of its DistributedDataParallel wrapper) and optimizer.

    Raises ConfigError for bfloat16 autocast on a CUDA device that does not support it.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, table: TrainTable, device: torch.device
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._peaks: list[float] = [group["lr"] for group in optimizer.param_groups]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._excluded: tuple[nn.Parameter, ...] = ()
        self._auxiliary, self._arguments = auxiliary_loss(unwrapped(model))
        self._accumulate = table.accumulate
        self._clip = float("inf") if table.clip is None else table.clip
        self._flush = table.flush_denormals
        self._device = device
        supported = device.type != "cuda" or torch.cuda.is_bf16_supported()
        if table.autocast == "bfloat16" and not supported:
            raise ConfigError('train.autocast = "bfloat16" is not supported by this CUDA device; use "off"')
        self._autocast = table.autocast == "bfloat16" or (
            table.autocast == "auto" and device.type == "cuda" and supported
        )

    def exclude(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compute no gradients of these parameters in later steps, so that no optimizer changes them."""
        self._excluded = tuple(parameters)

    def run(self, batch: Tensor, lr_factor: float) -> StepResult:
        """Take an optimizer step on int64 `batch` (B, T + 1) in `accumulate` equal micro-batches.

        `lr_factor` scales the peak learning rate of every parameter group in this step.
        """

        def losses(part: Tensor) -> tuple[Tensor, Tensor]:
            output = self._model(input_ids=part[:, :-1], use_cache=False, **self._arguments)
            loss = next_token_loss(output.logits, part[:, 1:]) / self._accumulate
            return loss, loss + self._auxiliary * output.aux_loss / self._accumulate if self._auxiliary else loss

        parts = batch.to(self._device, non_blocking=True).chunk(self._accumulate)
        return self.run_parts(parts, losses, lr_factor)

    def run_parts(
        self, parts: Sequence[P], losses: Callable[[P], tuple[Tensor, Tensor]], lr_factor: float
    ) -> StepResult:  # fmt: skip
        """As `run`, on micro-batches whose losses add up to that of the step.

        Arguments:
            losses: of a part: the one to report, and the one to minimise.
        """
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_factor
        total = torch.zeros((), device=self._device)
        with flushed_denormals(self._flush), self._without_excluded():
            for part in parts:
                with synchronised(self._model, last=part is parts[-1]):
                    with self._precision():
                        reported, loss = losses(part)
                        total += reported.detach()
                    loss.backward()
        norm = self._update()
        self._optimizer.zero_grad()
        return StepResult(total, norm)

    @contextmanager
    def _without_excluded(self) -> Iterator[None]:
        """Compute no gradients of excluded parameters; under DDP and FSDP2 drop these gradients afterwards."""
        frozen = () if isinstance(self._model, DistributedDataParallel | FSDPModule) else self._excluded
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for parameter in self._excluded:
                parameter.grad = None

    def _update(self) -> Tensor:
        """Clip and step. The hook runs after the hook that exchanges gradients, so it clips their mean."""
        norms = []

        def clip(*_: object) -> None:
            torch.set_flush_denormal(self._flush)
            norms.append(clip_gradients(self._parameters, self._clip))

        hook = self._optimizer.register_step_pre_hook(clip)
        try:
            self._optimizer.step()
        finally:
            torch.set_flush_denormal(False)
            hook.remove()
        return norms[0]

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()
