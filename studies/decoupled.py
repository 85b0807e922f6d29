"""Learners of unequal speed at equal wall-clock: lock-step, called rounds with and without grace, weights, adoption."""

from collections.abc import Sequence
from dataclasses import replace

import diloco
from diloco.core.quorum import Called
from studies.arms import Arm
from studies.report import Gaps, Row, Study, chosen_outer, main

SPEEDS = (1.0, 1.0, 0.6, 0.4)
BUDGET_S = 450.0
CONTROL = Arm(speeds=SPEEDS, budget_s=BUDGET_S)


def rows() -> Sequence[Row]:
    outer = chosen_outer(4)
    fragments = diloco.ByLayer(layers=1, pattern="strided")
    base = diloco.DecoupledDiLoCo(sync_every=24, overlap=2, fragments=fragments, codec="fp32", outer=outer)
    streaming = diloco.StreamingDiLoCo(
        sync_every=24, overlap=1, mix=0.0, fragments=fragments, codec="fp32", outer=outer
    )
    methods = {
        "lock-step streaming": streaming,
        "K = M": replace(base, quorum=Called(at_least=4, grace=0.0)),
        "K = 1": replace(base, quorum=Called(at_least=1, grace=0.0)),
        "K = 1 + grace": base,
        "K = 1 + grace, weights by tokens": replace(base, weight="tokens"),
        "K = 1 + grace, uniform weights": replace(base, weight="uniform"),
        "K = 1 + grace, discounted": replace(base, weight="discounted"),
        "K = 1 + grace, mean": replace(base, merge=diloco.Mean()),
        "K = 1 + grace, unscaled": replace(base, partial="full"),
        "K = 1 + grace, displacement kept": replace(base, adopt=diloco.KeepDisplacement()),
        "K = 1 + grace, late work dropped": replace(base, quorum=Called(late="drop")),
    }
    return [Row(label, replace(CONTROL, method=method.to_dict())) for label, method in methods.items()]


def verdict(gaps: Gaps) -> tuple[bool | None, str]:
    lock, grace, one = (gaps[each].mean for each in ("lock-step streaming", "K = 1 + grace", "K = 1"))
    return grace < lock - 0.01 and grace <= one + 0.01, (
        f"K = 1 + grace is {lock - grace:.3f} better than lock-step at equal wall-clock and {one - grace:+.3f} against K = 1 without grace; "
        f"K = M {gaps['K = M'].mean - grace:+.3f}; uniform weights {gaps['K = 1 + grace, uniform weights'].mean - grace:+.3f}, displacement "
        f"kept {gaps['K = 1 + grace, displacement kept'].mean - grace:+.3f}"
    )


STUDY = Study(
    name="decoupled",
    claim="With learners of unequal speed K = 1 + grace beats waiting for all, at equal wall-clock (arXiv 2604.21428).",
    rows=rows,
    verdict=verdict,
    equal="virtual wall-clock: 450 s, in which the fastest take 450 steps (± 10 % jitter) and the slowest 180",
    control=CONTROL,
    notes=[
        (
            "Speeds 1 : 1 : 0.6 : 0.4, H = 24, P = 4, τ = 2, no network latency. Every learner's lr schedule ends with the budget. The data "
            "parallel control has all learners at full speed, which no lock-step run could have, so gaps to it are upper bounds; "
            "lock-step streaming waits for the slowest. The isolated learner is a fast one."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
