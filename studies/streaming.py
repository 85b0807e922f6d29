"""Whether fragments, overlap and mixing cost anything against DiLoCo."""

from collections.abc import Sequence

import diloco
from studies.arms import Arm
from studies.gaps import Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main

FRAGMENTS = diloco.ByLayer(layers=1, pattern="strided")


def rows() -> Sequence[Row]:
    outer = chosen_outer(4)
    found = [Row("DiLoCo", Arm(method=diloco.DiLoCo(sync_every=30, outer=outer).to_dict()))]
    for overlap, mix in ((0, 0.0), (1, 0.0), (5, 0.0), (1, 0.5), (5, 0.5)):
        method = diloco.StreamingDiLoCo(
            sync_every=30, overlap=overlap, mix=mix, outer=outer, codec="fp32", fragments=FRAGMENTS
        )
        found.append(Row(f"streaming, τ={overlap}, α={mix:g}", Arm(method=method.to_dict())))
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    gap = {label: each - gaps["DiLoCo"] for label, each in gaps.items() if label.startswith("streaming")}
    cost = {label: each.mean for label, each in gap.items()}
    worst = max(cost, key=lambda label: cost[label])
    return every(below(each, 0.02) for each in gap.values()), (
        f"against DiLoCo τ = 0, 1, 5 without mixing cost {cost['streaming, τ=0, α=0']:+.3f}, "
        f"{cost['streaming, τ=1, α=0']:+.3f}, {cost['streaming, τ=5, α=0']:+.3f}; α = 0.5 costs "
        f"{cost['streaming, τ=1, α=0.5']:+.3f} at τ = 1; the dearest is {worst}"
    )


STUDY = Study(
    name="streaming",
    claim="Fragments, τ = 0 … 5 and α = 0.5 cost nothing against DiLoCo (arXiv 2501.18512).",
    rows=rows,
    verdict=verdict,
    notes=[
        (
            "M = 4, H = 30, one layer a fragment and the embedding apart (P = 4), fp32 on the wire, outer settings of "
            "DiLoCo. The rule: each within 0.02 of DiLoCo."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
