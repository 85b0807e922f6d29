"""Learners that are added and taken away by a plan: does the result follow the compute, or its schedule?"""

from collections.abc import Sequence
from itertools import pairwise

import diloco
from diloco.protocol.steering import Pool
from studies.arms import Arm
from studies.gaps import Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main

LEARNERS, BATCH, ROUNDS = 8, 2, 15


def _lives(pool: Pool) -> tuple[tuple[int, int], ...]:
    """For each learner the rounds of 30 steps that it is there for; a pool's steps are rounds here."""
    sizes = [pool.size(round_) for round_ in range(ROUNDS)]
    there = ([round_ for round_, size in enumerate(sizes) if size > index] for index in range(pool.learners))
    return tuple((rounds[0], rounds[-1] + 1) for rounds in there)


SCHEDULES = {
    "constant 1": _lives(Pool("constant", 1, ROUNDS)),
    "constant 8": _lives(Pool("constant", LEARNERS, ROUNDS)),
    "doubling 4 → 8": _lives(Pool("doubling", LEARNERS, ROUNDS)),
    "halving 8 → 4": _lives(Pool("halving", LEARNERS, ROUNDS)),
    "ramp 1 → 8": _lives(Pool("ramp up", LEARNERS, ROUNDS)),
    "ramp 8 → 1": _lives(Pool("ramp down", LEARNERS, ROUNDS)),
}


def compute(name: str) -> int:
    """Learner-rounds of a schedule."""
    return sum(end - start for start, end in SCHEDULES[name])


def _label(name: str) -> str:
    return f"{name}, compute {compute(name) / compute('constant 8'):.2f}"


def rows() -> Sequence[Row]:
    outer = chosen_outer(LEARNERS)
    method = diloco.DiLoCo(sync_every=30, outer=outer).to_dict()
    found = []
    for equal in (False, True):
        for name, lives in SCHEDULES.items():
            if equal and name == "constant 8":
                continue  # the same run
            # A longer run has the same shape: rounds are more, not longer, and every learner's life is rounded to whole
            # ones.
            stretch = compute("constant 8") / compute(name) if equal else 1.0
            rounds = round(ROUNDS * stretch)
            starts, ends = (
                tuple(round(each * rounds / ROUNDS) / rounds for each in times) for times in zip(*lives, strict=True)
            )
            label = f"{name}, as long as it takes" if equal else _label(name)
            arm = Arm(method=method, learners=len(lives), batch=BATCH, starts=starts, ends=ends, budget_s=30.0 * rounds)
            found.append(Row(label, arm))
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    by_name = {name: gaps[_label(name)] for name in SCHEDULES}
    doubling = by_name["doubling 4 → 8"] - by_name["halving 8 → 4"]
    ramp = by_name["ramp 1 → 8"] - by_name["ramp 8 → 1"]
    falling = ("constant 8", "halving 8 → 4", "ramp 8 → 1", "constant 1")
    order = every(below(by_name[more] - by_name[less], 0.0) for more, less in pairwise(falling))
    same = every(below(each, 0.02) for each in (doubling, -doubling, ramp, -ramp))
    longer = {name: gaps[f"{name}, as long as it takes"].mean for name in SCHEDULES if name != "constant 8"}
    shown = ", ".join(f"{name} {gap:+.3f}" for name, gap in longer.items())
    return every([order, same]), (
        f"in runs of one length doubling is {doubling.mean:+.3f} against halving and ramping up {ramp.mean:+.3f} "
        f"against ramping down; constant 8 {by_name['constant 8'].mean:+.3f}, constant 1 "
        f"{by_name['constant 1'].mean:+.3f}. With as much compute as constant 8, in more steps: {shown}"
    )


STUDY = Study(
    name="pool",
    claim="The result follows the total compute and not its schedule (arXiv 2311.08105).",
    rows=rows,
    verdict=verdict,
    equal=(
        "length of 450 steps and tokens by the compute that is named (1: constant 8); where it says 'as long as it "
        "takes', tokens"
    ),
    control=Arm(learners=LEARNERS),
    notes=[
        (
            "H = 30, two sequences a learner, 15 rounds. 'As long as it takes': more rounds, until the learners have "
            "taken as many steps together as eight do in 450 each (constant 1 takes 3,600). A learner that joins "
            "starts from the global model. The rule: in runs of one length the same compute in another order ends "
            "within 0.02, and more compute ends lower."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
