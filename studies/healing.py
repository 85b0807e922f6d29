"""What a learner that has lost its inner optimizer's state costs a run when it comes back."""

from collections.abc import Sequence

import diloco
from diloco.core.healing import REWARM_STEPS
from studies.arms import Arm
from studies.gaps import TIE, Gap, Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main
from studies.world import BATCH

ROUND = 30 / 450  # of the common part
LEFT, BACK = 5 * ROUND, 6 * ROUND
WHEN = {"a round later": BACK + ROUND, "two rounds later": BACK + 2 * ROUND, "at the end": 1.0}
REWARMS = (0, 5, 20, 60)
LEARNERS = 4


def ways(num_lost: int) -> dict[str, tuple[str, int]]:
    afresh = {f"afresh, {steps} steps of re-warm-up": ("afresh", steps) for steps in REWARMS}
    if num_lost == 1:
        afresh = {label: way for label, way in afresh.items() if way[1] in (0, REWARM_STEPS)}
    return {"its checkpoint": ("checkpoint", 0), **afresh, "a peer's state": ("peer", 0)}


def rows() -> Sequence[Row]:
    method = diloco.DiLoCo(sync_every=30, outer=chosen_outer(LEARNERS)).to_dict()
    found = []
    for when, end in WHEN.items():
        starts, ends = (0.0,) * LEARNERS, (end,) * LEARNERS
        arm = Arm(method=method, learners=LEARNERS, starts=starts, ends=ends, batch=BATCH // LEARNERS)
        found.append(Row(f"{when}: none lost", arm))
        for num_lost in (3, 1):
            if num_lost == 1 and when != "two rounds later":
                continue
            for label, (heal, rewarm) in ways(num_lost).items():
                arm = Arm(
                    method=method, learners=LEARNERS + num_lost, starts=(*starts, *(BACK,) * num_lost),
                    ends=(*ends[num_lost:], *(LEFT,) * num_lost, *ends[:num_lost]), batch=BATCH // LEARNERS,
                    heal=heal, rewarm=rewarm,
                )  # fmt: skip
                found.append(Row(f"{when}: {num_lost} lost, {label}", arm))
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    def cost(when: str, label: str) -> Gap:
        return gaps[f"{when}: 3 lost, {label}"] - gaps[f"{when}: 3 lost, its checkpoint"]

    default, none = (f"afresh, {steps} steps of re-warm-up" for steps in (REWARM_STEPS, 0))
    holds = every(below(cost(when, label), TIE) for when in WHEN for label in (default, none, "a peer's state"))
    said = "; ".join(
        f"{label} {', '.join(f'{cost(when, label).mean:+.3f}' for when in WHEN)}"
        for label in ways(3)
        if label != "its checkpoint"
    )
    return holds, f"against its checkpoint, {', '.join(WHEN)}: {said}"


STUDY = Study(
    name="healing",
    claim="A learner that has lost its inner optimizer's state costs a run next to nothing (no paper says so).",
    rows=rows,
    verdict=verdict,
    published=False,
    notes=[
        (
            "M = 4, H = 30. Three of four learners, or one, die after five rounds and are back a round later, from the "
            "global model, at the run's place in the lr schedule, with the data they had. Its checkpoint: the inner "
            "optimizer's state when it died. A peer's state: that of a learner that went on, when it comes back. "
            "Afresh: no state; the learning rate grows to the schedule's over so many steps. Runs are stopped one or "
            "two rounds after the return, or go on to the end; the gap to data parallel of the former means nothing by "
            "itself. The rule: with three lost, a fresh optimizer without and with the default re-warm-up, and a "
            "peer's state, cost less than 0.01 against its checkpoint at each of the three times."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
