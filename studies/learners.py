"""How the gap to data parallel grows with the number of learners, and what the outer learning rate recovers."""

from collections.abc import Sequence
from itertools import pairwise

import diloco
from diloco.core.outer import Nesterov
from studies.arms import Arm
from studies.gaps import TIE, Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main

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


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    chosen = {learners: gaps[f"M={learners}, chosen outer"] for learners in COUNTS}
    within = every(below(chosen[learners], limit) for learners, limit in LIMITS.items())
    better = chosen[4] - gaps["isolated"]
    grows = every(below(chosen[few] - chosen[many], TIE) for few, many in pairwise(COUNTS))
    recovered = every(below(chosen[m] - gaps[f"M={m}, published outer 0.7/0.9"], TIE) for m in COUNTS)
    shown = ", ".join(f"{gap.mean:+.3f} at M={learners}" for learners, gap in chosen.items())
    limits = "within" if within else "not all within"
    return every([within, grows, recovered, below(better, -0.03)]), (
        f"with the outer settings chosen the gap is {shown}, {limits} 0.02, 0.04 and 0.09 at M = 1, 2, 4; M = 4 beats "
        f"the isolated learner by {-better.mean:.3f}"
    )


STUDY = Study(
    name="learners",
    claim="M = 1 matches or beats data parallel; the gap grows with M and the outer learning rate recovers part of it "
    "(arXiv 2503.09799).",
    rows=rows,
    verdict=verdict,
    notes=[
        (
            "After a warm start of a quarter of the steps, H = 30. Outer lr and momentum are chosen from nine pairs on "
            "another split with another seed."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
