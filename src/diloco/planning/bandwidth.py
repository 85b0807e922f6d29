"""The bandwidth that a method needs, and the utilisation that it reaches on a given link.

`GraphLinkModel` is the papers' graph of equal learners (`graph.py`), `SyncerLinkModel` learners around a syncer
(`prediction.py`). Both give a value between 0 and 1 that rises with the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from diloco.core.codecs.formats import wire_format
from diloco.errors import ConfigError
from diloco.planning.exchange_plan import ExchangePlan, Merging, exchange_of
from diloco.planning.graph import utilization
from diloco.planning.prediction import Prediction, predict, star_network
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload

PRECISION, SYNCER_PRECISION = 1e-6, 0.01
"""Relative precision of the bandwidth search; the model of learners around a syncer is no more precise than that."""
_WIDEST = 2.0**30
"""Upper end of the search, in multiples of the bandwidth that sends a period's bits in a period's compute time."""


@dataclass(frozen=True)
class GraphLinkModel:
    """Equal learners, reductions layer by layer."""

    workload: Workload
    setting: Setting

    measure = "computing"
    precision = PRECISION

    def value(self, bit_per_s: float) -> float:
        """Compute ÷ wall clock."""
        return utilization(self.workload, self.setting, bit_per_s)

    def details(self, bit_per_s: float) -> dict[str, Any]:
        """Further values for the output: none."""
        return {}

    @property
    def never(self) -> str:
        """The reason why a target may be out of reach of any bandwidth."""
        return "latency alone costs more" if self.setting.latency_s else "the last layer is always waited for"


@dataclass(frozen=True)
class SyncerLinkModel:
    """Learners around a syncer, each on a link of its own, all links alike.

    Attributes:
        speeds: of each learner, relative to the workload's step time.
        syncer_bit_per_s: rate of the syncer's link, of all its shards together.
        merging: the syncer's time for a round.

    Raises:
        ConfigError: no learners, or a speed that is not above 0.
    """

    workload: Workload
    setting: Setting
    speeds: tuple[float, ...]
    syncer_bit_per_s: float = math.inf
    merging: Merging = Merging()

    precision = SYNCER_PRECISION

    def __post_init__(self) -> None:
        for speed in self.speeds:
            if not 0 < speed < math.inf:
                raise ConfigError(f"a learner of speed {speed:g} never completes a step; give speeds above 0.")
        if not self.speeds:
            raise ConfigError("0 learners train nothing; give --learners 1 or more.")

    @property
    def measure(self) -> str:
        """The kind of value: utilisation or, for decoupled learners, which always compute, the pace of merges."""
        return "pace" if self.setting.method == "decoupled" else "computing"

    @property
    def exchange(self) -> ExchangePlan:
        """What each learner sends and receives."""
        return exchange_of(self.workload, self.setting, self.merging)

    def predict(self, bit_per_s: float) -> Prediction:
        """Predict a run over links of `bit_per_s` up and down. Equal learners that hold the same are simulated as
        one."""
        exchange, num = self.exchange, len(self.speeds)
        step_s = [self.workload.step_s / speed for speed in self.speeds]
        kinds = max(1, len(exchange.held))
        copies = num // kinds if len(set(step_s)) == 1 and num % kinds == 0 else 1
        syncer_bit_per_s = self.syncer_bit_per_s / copies
        network = star_network(num // copies, bit_per_s, bit_per_s, self.setting.latency_s, syncer_bit_per_s)
        return predict(network, step_s[: num // copies], exchange, copies=copies)

    def value(self, bit_per_s: float) -> float:
        """Return the mean utilisation; for decoupled learners the pace, H ÷ achieved H."""
        found = self.predict(bit_per_s)
        if self.measure == "computing":
            return found.mean_utilization
        return min(1.0, self.setting.sync_every / found.period_steps)

    def details(self, bit_per_s: float) -> dict[str, Any]:
        """Utilisation in percent, achieved H, steps to an answer, learners in a merge; empty for an infinite
        bandwidth."""
        if math.isinf(bit_per_s):
            return {}
        found = self.predict(bit_per_s)
        each = [round(100 * utilization, 3) for utilization in found.utilization]
        return {
            "utilization": round(100 * found.mean_utilization, 3), "utilization_of_learners": each,
            "period_steps": round(found.period_steps, 3), "stale_steps": round(found.stale_steps, 3),
            "contributors": round(found.contributors, 3),
        }  # fmt: skip

    @property
    def never(self) -> str:
        """The reason why a target may be out of reach of any bandwidth."""
        if len(set(self.speeds)) > 1 and self.setting.method != "decoupled":
            return "the slowest learner makes the others wait"
        return "latency, the merge or the syncer's own link cost more"


LinkModel = GraphLinkModel | SyncerLinkModel


def required_bit_per_s(link_model: LinkModel, targets: list[float]) -> list[float]:
    """Return the smallest bandwidth for each target (0 to 1); infinity where no bandwidth suffices.

    Raises:
        ConfigError: a target that is not above 0 and at most 1.
    """
    workload, setting = link_model.workload, link_model.setting
    bits = workload.num_parameters * wire_format(setting.up).bits_per_value
    value = lru_cache(maxsize=None)(link_model.value)
    start = bits / (setting.sync_every * workload.step_s)
    return [_smallest_rate(value, target, start, link_model.precision) for target in targets]


def required_of_syncer(link_model: SyncerLinkModel, target: float) -> float:
    """Return the smallest rate of the syncer's link for a target (0 to 1), with learners on links of any rate."""

    def value(bit_per_s: float) -> float:
        return replace(link_model, syncer_bit_per_s=bit_per_s).value(math.inf)

    exchange = link_model.exchange
    bits = 8 * len(link_model.speeds) * max(map(exchange.per_interval, (exchange.up_bytes, exchange.down_bytes)))
    start = bits / (link_model.setting.sync_every * link_model.workload.step_s)
    return _smallest_rate(value, target, start, link_model.precision)


def _smallest_rate(value: Callable[[float], float], target: float, start: float, precision: float) -> float:
    """Find the smallest rate where a rising `value` is at least `target`, by bisection."""
    if not 0 < target <= 1:
        raise ConfigError(f"a target of {100 * target:g} % is out of range; give percentages above 0 and up to 100.")
    if value(math.inf) < target:
        return math.inf
    high = start
    while value(high) < target:
        high *= 4
        if high > start * _WIDEST:
            return math.inf
    low = high / 4
    while value(low) >= target:
        low, high = low / 4, low
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if value(middle) >= target else (middle, high)
    return high
