"""One question about links: what bandwidth does a method need, and what does one come to?

`Graph` asks the papers' graph of equal learners (`utilization.py`), `Around` learners around a syncer (`star.py`). Both
say what a link is worth, 0 to 1; it rises with the bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from diloco.core.codecs.formats import wire_format
from diloco.planning.graph import PRECISION, smallest_rate, utilization
from diloco.planning.settings import Setting
from diloco.planning.star import Learners, Prediction, pace, predict_learners
from diloco.planning.workload import Workload

AROUND_PRECISION = 0.01
"""Of a bandwidth between learners and a syncer, relative: the model is no better than that."""


@dataclass(frozen=True)
class Graph:
    """Equal learners, reductions layer by layer."""

    workload: Workload
    setting: Setting

    measure = "computing"
    precision = PRECISION

    def value(self, bit_per_s: float) -> float:
        """Compute ÷ wall clock."""
        return utilization(self.workload, self.setting, bit_per_s)

    def details(self, bit_per_s: float) -> dict[str, Any]:
        """Further values beside the answer: none."""
        return {}

    @property
    def never(self) -> str:
        """The reason why a target may be out of reach of any bandwidth."""
        return "latency alone costs more" if self.setting.latency_s else "the last layer is always waited for"


@dataclass(frozen=True)
class Around:
    """Learners around a syncer; `bit_per_s` is what each one's link carries, up and down."""

    workload: Workload
    setting: Setting
    learners: Learners

    precision = AROUND_PRECISION

    @property
    def measure(self) -> str:
        """The kind of value: utilisation or, for learners that always compute, the share of the intended merges."""
        return "pace" if self.setting.method == "decoupled" else "computing"

    def predict(self, bit_per_s: float, *, traced: bool = False) -> Prediction:
        """The prediction for learners on links of `bit_per_s`."""
        return predict_learners(self.workload, self.setting, self.learners, bit_per_s, traced=traced)

    def value(self, bit_per_s: float) -> float:
        """Mean utilisation, or pace."""
        return pace(self.predict(bit_per_s), self.setting)

    def details(self, bit_per_s: float) -> dict[str, Any]:
        """Utilisation in percent, H as achieved, steps to an answer, learners in a merge; none without a limit."""
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
        if len(set(self.learners.speeds)) > 1 and self.setting.method != "decoupled":
            return "the slowest learner makes the others wait"
        return "latency, the merge or the syncer's own link cost more"


Question = Graph | Around


def required_bit_per_s(question: Question, targets: list[float]) -> list[float]:
    """The smallest bandwidth for each target (0 to 1); infinite where none will do."""
    workload, setting = question.workload, question.setting
    bits = workload.num_parameters * wire_format(setting.up).bits_per_value
    value = lru_cache(maxsize=None)(question.value)
    start = bits / (setting.sync_every * workload.step_s)
    return [smallest_rate(value, target, start, question.precision) for target in targets]
