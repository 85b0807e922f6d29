"""How the gap to data parallel grows with the number of learners, and what the outer learning rate recovers."""

from collections.abc import Sequence

import diloco
from diloco.core.outer import Nesterov
from studies.arms import Arm
from studies.report import Gaps, Row, Study, chosen_outer, main

COUNTS = (1, 2, 4, 8)
LIMITS = {1: 0.02, 2: 0.04, 4: 0.09}


def rows() -> Sequence[Row]:
    found = []
    for learners in COUNTS:
        outer = chosen_outer(learners)
        for label, each in (("published outer 0.7/0.9", Nesterov(lr=0.7, momentum=0.9)), ("chosen outer", outer)):
            method = diloco.DiLoCo(sync_every=30, outer=each)
            name = f"M={learners}, {label}"
            found.append(Row(name, Arm(method=method.to_dict(), learners=learners)))
    return found


def verdict(gaps: Gaps) -> tuple[bool | None, str]:
    chosen = {learners: gaps[f"M={learners}, chosen outer"].mean for learners in COUNTS}
    within = all(chosen[learners] <= limit for learners, limit in LIMITS.items())
    better = gaps["isolated"].mean - chosen[4]
    grows = chosen[8] >= chosen[4] >= chosen[2] >= chosen[1] - 0.01
    recovered = all(chosen[m] <= gaps[f"M={m}, published outer 0.7/0.9"].mean + 0.01 for m in COUNTS)
    shown = ", ".join(f"{gap:+.3f} at M={learners}" for learners, gap in chosen.items())
    limits = "within" if within else "not all within"
    return within and grows and recovered and better >= 0.03, (
        f"with the outer settings chosen the gap is {shown}, {limits} 0.02, 0.04 and 0.09 at M = 1, 2, 4; M = 4 beats the isolated "
        f"learner by {better:.3f}"
    )


STUDY = Study(
    name="learners",
    claim="M = 1 matches or beats data parallel; the gap grows with M and the outer learning rate recovers part of it "
    "(arXiv 2503.09799).",
    rows=rows,
    verdict=verdict,
    notes=[
        "After a warm start of a quarter of the steps, H = 30. Outer lr and momentum are chosen from nine pairs on another split with another seed."
    ],
)

if __name__ == "__main__":
    main(STUDY)
