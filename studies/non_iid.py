"""Learners that each see another part of the world."""

from collections.abc import Sequence

import diloco
from studies.arms import Arm
from studies.gaps import TIE, Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main

COUNTS = (4, 8)


def rows() -> Sequence[Row]:
    found = []
    for learners in COUNTS:
        outer = chosen_outer(learners)
        uniform = diloco.DiLoCo(sync_every=30, outer=outer).to_dict()
        by_examples = diloco.DiLoCo(sync_every=30, outer=outer, weight="tokens").to_dict()
        found += [
            Row(f"M={learners}, i.i.d. shards", Arm(method=uniform, learners=learners)),
            Row(f"M={learners}, topics, uniform weights", Arm(method=uniform, learners=learners, topics=True)),
            Row(
                f"M={learners}, topics, example weights",
                Arm(method=by_examples, learners=learners, topics=True, examples=True),
            ),
            Row(f"isolated, M={learners}, largest topic", Arm(kind="isolated", learners=learners, topics=True)),
        ]
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    cost = {
        (learners, weight): gaps[f"M={learners}, topics, {weight} weights"] - gaps[f"M={learners}, i.i.d. shards"]
        for learners in COUNTS
        for weight in ("uniform", "example")
    }
    shown = "; ".join(
        f"M = {m}: {cost[m, 'uniform'].mean:+.3f} uniform, {cost[m, 'example'].mean:+.3f} by examples" for m in COUNTS
    )
    least = [min(cost[m, "uniform"], cost[m, "example"], key=lambda gap: gap.mean) for m in COUNTS]
    close = every(below(each, 0.02) for each in least)
    helps = every(below(cost[m, "example"] - cost[m, "uniform"], TIE) for m in COUNTS)
    return every([close, helps]), f"against i.i.d. shards topics cost, {shown}"


STUDY = Study(
    name="non_iid",
    claim=(
        "Shards by topic end where i.i.d. shards do, with contributions weighted by their shard's examples (arXiv "
        "2311.08105)."
    ),
    rows=rows,
    verdict=verdict,
    notes=[
        (
            "H = 30. Topics are k-means clusters of 4 KiB stretches of the text by their byte frequencies: 43, 39, 16 "
            "and 3 % of it for M = 4, 24 to 1 % for M = 8; every learner takes equally many sequences a step from its "
            "own. Held-out text has the mixture of the whole. The rule: with one of the weights within 0.02 of i.i.d. "
            "shards, and examples no worse than uniform."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
