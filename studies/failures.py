"""Contributions that get lost, and learners that leave and join."""

from collections.abc import Sequence

import diloco
from diloco.core.quorum import AllLive
from studies.arms import Arm
from studies.report import Gaps, Row, Study, chosen_outer, main
from studies.world import BATCH

DROPS = (0.0, 0.1, 0.3, 0.5)
ROUND = 30 / 450  # of the common part
LEFT, BACK = 5 * ROUND, 10 * ROUND


def rows() -> Sequence[Row]:
    outer = chosen_outer(4)
    found = []
    for drop in DROPS:
        method = diloco.DiLoCo(sync_every=30, outer=outer, quorum=AllLive(drop=drop))
        for topics in (False, True):
            label = f"{drop:.0%} lost" + (", topics" if topics else "")
            found.append(Row(label, Arm(method=method.to_dict(), topics=topics)))
    method = diloco.DiLoCo(sync_every=30, outer=outer)
    batch = BATCH // 4
    comings = {
        "one of four leaves after a third": ((0.0,) * 4, (1.0, 1.0, 1.0, LEFT)),
        "one of four joins after a third": ((0.0, 0.0, 0.0, LEFT), (1.0,) * 4),
        "one leaves after a third, another joins after two": ((0.0,) * 4 + (BACK,), (1.0, 1.0, 1.0, LEFT, 1.0)),
        "two leave after a third, two join after two": (
            (0.0,) * 4 + (BACK,) * 2,
            (1.0, 1.0, LEFT, LEFT, 1.0, 1.0),
        ),
    }
    for label, (starts, ends) in comings.items():
        arm = Arm(method=method.to_dict(), learners=len(starts), starts=starts, ends=ends, batch=batch)
        found.append(Row(label, arm))
    return found


def verdict(gaps: Gaps) -> tuple[bool | None, str]:
    base = gaps["0% lost"].mean
    cost = {drop: gaps[f"{drop:.0%} lost"].mean - base for drop in DROPS}
    topical = gaps["50% lost, topics"].mean - gaps["0% lost, topics"].mean
    slow = cost[0.3] < 0.05 and cost[0.5] < 0.08 and topical < 0.08
    moves = "; ".join(f"{label} {gaps[label].mean - base:+.3f}" for label in gaps if label.startswith(("one", "two")))
    return slow and gaps["50% lost"].mean < gaps["isolated"].mean - 0.03, (
        f"10, 30 and 50 % lost cost {cost[0.1]:+.3f}, {cost[0.3]:+.3f}, {cost[0.5]:+.3f}, and 50 % with topics {topical:+.3f}; {moves}"
    )


STUDY = Study(
    name="failures",
    claim="Half of the contributions may be lost: 2.1 % of perplexity with shards by topic (arXiv 2311.08105); learners may come and go.",
    rows=rows,
    verdict=verdict,
    equal="tokens; where learners are missing their tokens are",
    notes=[
        (
            "M = 4, H = 30. A learner whose contribution is lost goes on from its own parameters; what it sends next is measured from the new "
            "global model. Topics as in the study of non-i.i.d. shards. A learner that joins starts from the global model, with the inner "
            "optimizer's state of the warm start and the run's place in the lr schedule. The rule: 30 % within 0.05, 50 % within 0.08 of "
            "none lost, with i.i.d. shards and with topics, and 50 % better than isolated by 0.03."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
