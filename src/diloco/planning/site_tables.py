"""The tables of a site file, each by itself: keys, units, defaults and what cannot be. `docs/site-file.md` lists every
key.

Quantities are written with their units and held in base units (bit/s, s, bytes, USD per byte or s).
"""

import math
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.planning.units import COMPUTE, LARGEST, PRICE_PER_BYTE, PRICE_PER_S, RATE, SIZE, TIME, Quantity
from diloco.planning.workload import PRESETS, ModelDescription, Workload
from diloco.tables import Table, nearest


def _given_as(quantity: Quantity, *, positive: bool = False) -> BeforeValidator:
    return BeforeValidator(lambda text: quantity.parse(text, positive=positive))


Rate = Annotated[float, _given_as(RATE, positive=True)]
Duration = Annotated[float, _given_as(TIME, positive=True)]
Delay = Annotated[float, _given_as(TIME)]
Size = Annotated[float, _given_as(SIZE, positive=True)]
Speed = Annotated[float, _given_as(COMPUTE, positive=True)]
BytePrice = Annotated[float, _given_as(PRICE_PER_BYTE)]
HourPrice = Annotated[float, _given_as(PRICE_PER_S)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


class SiteModelTable(ModelDescription):
    """The model: a preset, or its description."""

    preset: str | None = None  # a model of the papers: 1b, 10b, 100b, llama-405b, deepseek-v3
    active_parameters: float | None = Field(default=None, gt=0)  # those that a token uses, of a mixture of experts

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.num_ways + (self.preset is not None) != 1:
            raise ValueError("a model is its preset, its parameters and layers, or its config; give one of the three")
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f'there is no model preset "{self.preset}"; {nearest(self.preset, list(PRESETS))}')
        if (self.active_parameters or 0) > (self.parameters or math.inf):
            raise ValueError(
                f"a token cannot use {self.active_parameters:g} of {self.parameters:g} parameters; lower "
                "active_parameters"
            )
        return self

    def workload(self) -> Workload:
        """The model, without a step time."""
        if self.preset is not None:
            return PRESETS[self.preset].with_step(0.0)
        return self.described("the model" if self.config is None else self.config.parent.name)


class BudgetTable(Table):
    """How long to train, and what a method may cost in loss."""

    tokens: float = Field(gt=0, le=LARGEST)  # trained by all learners together
    tokens_per_step: float = Field(gt=0, le=LARGEST)  # of one step over all learners
    sequence_length: int = Field(default=2048, gt=0)  # in tokens
    loss_penalty_percent: float = Field(default=1.0, ge=0)  # of the loss of data parallel, that is allowed

    @model_validator(mode="after")
    def _holds_a_step(self) -> Self:
        if self.tokens_per_step > self.tokens:
            raise ValueError(
                f"a step of {self.tokens_per_step:.12g} tokens is more than all {self.tokens:.12g}; lower "
                "tokens_per_step"
            )
        return self


class SiteTable(Table):
    """Equal learners at one place. Everything here is of one learner; `learners` says how many there are."""

    name: Name
    learners: int = Field(default=1, ge=1, le=10_000)
    accelerators: int = Field(default=1, ge=1)
    memory: Size | None = None  # of one accelerator; without it nothing is said about whether the model fits
    step_time: Duration | None = None  # of an inner step at the learner's share of the batch
    speed: Speed | None = None  # peak of one accelerator, where the step time is not known
    # Of the peak, by the model's 6 FLOP per parameter and token.
    utilization: float | None = Field(default=None, gt=0, le=1)
    jitter_percent: float = Field(default=0.0, ge=0, lt=1000)  # standard deviation of the step time, of its mean
    up: Rate  # from the learner to the internet
    down: Rate
    latency: Delay = 0.0  # one way, to the syncer
    shares: Names = ()  # links that all traffic of its learners also passes through
    price_up: BytePrice | None = None
    price_down: BytePrice | None = None
    price_per_accelerator_hour: HourPrice | None = None

    @model_validator(mode="after")
    def _has_a_step_time(self) -> Self:
        if (self.speed is None) != (self.utilization is None):
            raise ValueError("speed and utilization belong together")
        if (self.step_time is None) == (self.speed is None):
            raise ValueError("give the step_time that was measured, or speed and utilization; one of the two")
        return self


class LinkTable(Table):
    """A link that several learners share, such as a building's line."""

    name: Name
    up: Rate
    down: Rate


class SiteSyncerTable(Table):
    """The syncer's links, merges and prices. Without this table its link is no limit and costs nothing."""

    up: Rate | None = None  # of each shard, from the syncer to the internet; none: no limit
    down: Rate | None = None
    shards: int = Field(default=1, ge=1)
    merge_time: Delay = 0.0  # of a round, whatever its size: closing, storing, telling
    merge_speed: Rate | None = None  # at which each shard works through encoded contributions; none: at once
    price_up: BytePrice | None = None
    price_down: BytePrice | None = None
    price_per_hour: HourPrice | None = None  # of each shard


class FaultsTable(Table):
    """Failures at random, of each learner by itself: exponential times between them."""

    mtbf: Duration  # mean time a learner runs between two failures
    repair: Delay
    seed: int = Field(default=0, ge=0)


class FaultTable(Table):
    """One failure of a trace."""

    learner: str  # or a site: all its learners
    at: Delay
    back: Duration | None = None  # none: it does not return

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.back is not None and self.back <= self.at:
            raise ValueError(f"back at {TIME.show(self.back)} is not after at = {TIME.show(self.at)}")
        return self
