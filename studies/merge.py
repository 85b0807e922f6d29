"""The mean against radial-directional averaging, as learners are added and the outer learning rate stays."""

from collections.abc import Sequence
from dataclasses import replace

import diloco
from diloco.core.merges import Merge
from diloco.core.outer import Nesterov
from studies.arms import Arm
from studies.gaps import TIE, Gap, Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main

COUNTS = (4, 8, 16)
MERGES: dict[str, Merge] = {
    "mean": diloco.Mean(),
    "radial-directional": diloco.RadialDirectional(averaged=("embed*", "position*")),
    "radial-directional, embeddings too": diloco.RadialDirectional(averaged=()),
}


def rows() -> Sequence[Row]:
    tuned = chosen_outer(4)
    low = Nesterov(lr=tuned.lr / 2, momentum=tuned.momentum)
    found = []
    for learners in COUNTS:
        for setting, outer in (("", tuned), (", half the lr", low)):
            for name, merge in MERGES.items():
                if setting and "too" in name:
                    continue
                method = replace(diloco.DiLoCo(sync_every=30, outer=outer), merge=merge)
                found.append(Row(f"M={learners}, {name}{setting}", Arm(method=method.to_dict(), learners=learners)))
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    def against(learners: int, setting: str = "") -> Gap:
        return gaps[f"M={learners}, radial-directional{setting}"] - gaps[f"M={learners}, mean{setting}"]

    shown = ", ".join(f"{against(m).mean:+.3f} at M={m}" for m in COUNTS)
    low = ", ".join(f"{against(m, ', half the lr').mean:+.3f}" for m in COUNTS)
    return every(below(against(m), -TIE) for m in (8, 16)), (
        f"against the mean, radial-directional is {shown} with the lr chosen for the mean at M = 4 (below 0 is "
        f"better), and {low} with half of it"
    )


STUDY = Study(
    name="merge",
    claim="Radial-directional averaging keeps the merged norm independent of M and beats the mean at M = 8 and 16 "
    "(arXiv 2604.21428).",
    rows=rows,
    verdict=verdict,
    notes=[
        (
            "H = 30. Outer lr and momentum are those chosen for the mean at M = 4, for every M and merge, and half "
            "that lr; embeddings are averaged unless named. The isolated control is that of M = 4. The rule: better "
            "than the mean by 0.01 at M = 8 and at M = 16."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
