"""What a learner that has lost its inner optimizer's state costs a run when it comes back."""

from collections.abc import Sequence

import diloco
from diloco.core.healing import REWARM_STEPS
from studies.arms import Arm
from studies.gaps import Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main
from studies.world import BATCH

ROUND = 30 / 450  # of the common part
LEFT, BACK = 5 * ROUND, 6 * ROUND
NEXT, END = BACK + 2 * ROUND, 1.0
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
    for when, end in (("two rounds later", NEXT), ("at the end", END)):
        starts, ends = (0.0,) * LEARNERS, (end,) * LEARNERS
        arm = Arm(method=method, learners=LEARNERS, starts=starts, ends=ends, batch=BATCH // LEARNERS)
        found.append(Row(f"{when}: none lost", arm))
        for num_lost in (3, 1):
            if num_lost == 1 and end == END:
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
    def cost(when: str, label: str) -> str:
        return f"{(gaps[f'{when}: 3 lost, {label}'] - gaps[f'{when}: 3 lost, its checkpoint']).mean:+.3f}"

    default = f"afresh, {REWARM_STEPS} steps of re-warm-up"
    soon = gaps[f"two rounds later: 3 lost, {default}"]
    holds = every([
        below(soon - gaps["two rounds later: 3 lost, afresh, 0 steps of re-warm-up"], 0.0),
        below(soon - gaps["two rounds later: 3 lost, its checkpoint"], 0.02),
    ])  # fmt: skip
    labels = [label for label in ways(3) if label != "its checkpoint"]
    said = "; ".join(
        f"{label} {cost('two rounds later', label)} and {cost('at the end', label)}" for label in labels
    )
    return holds, f"against its checkpoint, two rounds later and at the end: {said}"


STUDY = Study(
    name="healing",
    claim=(
        f"A fresh inner optimizer with a re-warm-up of {REWARM_STEPS} steps heals a learner: better than without, and "
        "within 0.02 of its own checkpoint (no paper says so)."
    ),
    rows=rows,
    verdict=verdict,
    published=False,
    notes=[
        (
            "M = 4, H = 30. Three of four learners, or one, die after five rounds and are back a round later, from the "
            "global model, at the run's place in the lr schedule, with the data they had. \"Its checkpoint\": the "
            "inner optimizer's state when it died. \"A peer's state\": that of a learner that went on, when it comes "
            "back. \"Afresh\": no state; the learning rate grows to the schedule's over so many steps. Runs are "
            "stopped two rounds after the return, or at their end; the gap to data parallel of the former means "
            "nothing by itself."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
