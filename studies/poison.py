"""One learner of eight that sends noise, its negative, or a hundred times itself, and what each merge makes of it."""

from collections.abc import Sequence
from dataclasses import replace

import diloco
from diloco.core.merges import Merge, Screen
from studies.arms import Arm
from studies.gaps import Gaps, Holds, below, every, opposite
from studies.report import Row, Study, chosen_outer, main

LEARNERS = 8
LIMIT, ROBUST = 0.05, 3
ATTACKS = {"": "honest", "noise": "noise", "flipped": "sign flipped", "scaled": "scaled by 100"}
MERGES: dict[str, tuple[Merge, Screen | None]] = {
    "mean": (diloco.Mean(), None),
    "mean, norm outliers refused": (diloco.Mean(), diloco.NormOutliers()),
    "clipped to the median norm": (diloco.MedianNormClip(), None),
    "trimmed mean": (diloco.TrimmedMean(trim=0.125), None),
    "coordinate median": (diloco.CoordinateMedian(), None),
    "geometric median": (diloco.GeometricMedian(), None),
    "multi-Krum": (diloco.MultiKrum(num_byzantine=1), None),
    "radial-directional": (diloco.RadialDirectional(averaged=("embed*", "position*")), None),
}


def rows() -> Sequence[Row]:
    outer = chosen_outer(LEARNERS)
    found = []
    for merge_name, (merge, screen) in MERGES.items():
        for attack, attack_name in ATTACKS.items():
            method = replace(diloco.DiLoCo(sync_every=30, outer=outer), merge=merge, screen=screen)
            found.append(
                Row(f"{merge_name}: {attack_name}", Arm(method=method.to_dict(), learners=LEARNERS, attack=attack))
            )
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    honest = gaps["mean: honest"]
    cost = {name: [gaps[f"{name}: {attack}"] - honest for key, attack in ATTACKS.items() if key] for name in MERGES}
    worst = {name: max(each.mean for each in costs) for name, costs in cost.items()}
    price = {name: (gaps[f"{name}: honest"] - honest).mean for name in MERGES}
    robust = {name: every(below(each, LIMIT) for each in costs) for name, costs in cost.items()}
    surely, perhaps = list(robust.values()).count(True), len(MERGES) - list(robust.values()).count(False)
    three = True if surely >= ROBUST else None if perhaps >= ROBUST else False
    sure = ", ".join(name for name in MERGES if robust[name])
    shown = ", ".join(f"{name} {worst[name]:+.3f} (honest {price[name]:+.3f})" for name in MERGES if worst[name] < 1.0)
    lost = ", ".join(name for name in MERGES if worst[name] >= 1.0)
    return every([opposite(robust["mean"]), three]), (
        f"the worst of three attacks costs, against the mean of honest learners: {shown}; more than 1 nat: {lost}; all "
        f"of the interval is within {LIMIT} with {sure}"
    )


STUDY = Study(
    name="poison",
    claim="A mean is ruined by one bad learner in eight; robust merges are not.",
    rows=rows,
    verdict=verdict,
    published=False,
    control=Arm(learners=LEARNERS),
    notes=[
        (
            "M = 8, H = 30, outer settings of the mean. Noise has ten times the norm of the learner's own outer "
            "gradient. The learner that sends it trains honestly. The rule: three robust merges stay within 0.05 of "
            "the mean of honest learners under every attack, and the mean does not."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
