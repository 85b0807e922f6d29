"""Measure the time of an inner step of a run on this machine, without any exchange."""

import statistics
import time
from dataclasses import dataclass

import torch

from diloco.config import RunConfig
from diloco.training.data.corpus import load_corpus
from diloco.training.rank_group import RankGroup
from diloco.training.state import TrainingState

WARM_UP_STEPS = 3
"""Steps before the measurement: the first steps allocate memory and choose kernels."""


@dataclass(frozen=True)
class StepTime:
    """The measured step time of one learner.

    Attributes:
        step_s: mean time of an inner step, seconds.
        stdev_s: standard deviation over steps.
        num_steps: number of timed steps.
        accelerators: number of ranks.
        memory_bytes: memory of one accelerator; None where the model is on the CPU.
        num_parameters, num_layers: size of the model.
    """

    step_s: float
    stdev_s: float
    num_steps: int
    accelerators: int
    memory_bytes: int | None
    num_parameters: int
    num_layers: int


def measure_step_time(
    config: RunConfig, shard: int, *, seconds: float, at_least: int = 10, ranks: RankGroup
) -> StepTime:
    """Time the inner steps of the learner of this shard, for `seconds` and for `at_least` steps.

    Every rank must call it. Raises ConfigError when this machine cannot train the run file.
    """
    ranks.check_batch(config.learner_batch, config.train.accumulate)
    training = TrainingState(config, load_corpus(config.data), ranks)
    training.select_shard(shard, config.learner_batch)
    training.exclude_untrained()
    device = next(training.model.parameters()).device
    for _ in range(WARM_UP_STEPS):
        _step_s(training, device)
    times: list[float] = []
    while ranks.from_first(len(times) < at_least or sum(times) < seconds):
        times.append(_step_s(training, device))
    return StepTime(
        step_s=statistics.fmean(times),
        stdev_s=statistics.stdev(times),
        num_steps=len(times),
        accelerators=ranks.size,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        num_parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        num_layers=int(training.model.config.get_text_config().num_hidden_layers),  # type: ignore[union-attr, operator]
    )


def _step_s(training: TrainingState, device: torch.device) -> float:
    started = time.perf_counter()
    training.take_step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a step is over when the device is done
    return time.perf_counter() - started
