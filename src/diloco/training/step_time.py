"""How long an inner step of a run takes on this machine, without any exchange."""

import statistics
import time
from dataclasses import dataclass

import torch

from diloco.config import RunConfig
from diloco.training.data.corpus import load_corpus
from diloco.training.rank_group import RankGroup
from diloco.training.state import TrainingState

WARM_UP_STEPS = 3
"""Not timed: the first steps allocate, and choose kernels."""


@dataclass(frozen=True)
class StepTime:
    """The measured step time of one learner.

    Attributes:
        step_s: mean time of an inner step, seconds.
        stdev_s: between steps.
        num_steps: how many were timed.
        accelerators: ranks that took them together.
        memory_bytes: of one accelerator; None where the model is on the CPU.
        num_parameters, num_layers: of the model.
    """

    step_s: float
    stdev_s: float
    num_steps: int
    accelerators: int
    memory_bytes: int | None
    num_parameters: int
    num_layers: int


def measure_step_time(config: RunConfig, shard: int, *, seconds: float, at_least: int = 10, job: RankGroup) -> StepTime:
    """Take inner steps as the learner of this shard would, for `seconds` and `at_least` so many.

    Every rank of a `job` calls it. Raises ConfigError when the run file cannot be trained here.
    """
    job.check_batch(config.learner_batch, config.train.accumulate)
    island = TrainingState(config, load_corpus(config.data), job)
    island.narrow(shard, config.learner_batch)
    island.specialise()
    device = next(island.model.parameters()).device
    for _ in range(WARM_UP_STEPS):
        _step_s(island, device)
    times: list[float] = []
    while job.shared(float(len(times) < at_least or sum(times) < seconds)):
        times.append(_step_s(island, device))
    return StepTime(
        step_s=statistics.fmean(times),
        stdev_s=statistics.stdev(times),
        num_steps=len(times),
        accelerators=job.size,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        num_parameters=sum(parameter.numel() for parameter in island.model.parameters()),
        num_layers=int(island.model.config.get_text_config().num_hidden_layers),  # type: ignore[union-attr, operator]
    )


def _step_s(island: TrainingState, device: torch.device) -> float:
    started = time.perf_counter()
    island.take_step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a step is over when the device is done
    return time.perf_counter() - started
