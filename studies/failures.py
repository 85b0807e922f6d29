"""Contributions that get lost, and learners that leave and join."""

import math
from collections.abc import Sequence

import diloco
from diloco.core.quorum import AllLive
from studies.arms import Arm
from studies.gaps import Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main
from studies.world import BATCH

DROPS = (0.0, 0.1, 0.3, 0.5)
ROUND = 30 / 450  # of the common part
LEFT, BACK = 5 * ROUND, 10 * ROUND
PUBLISHED = math.log(1.021)
"""2.1 % of perplexity, in nats."""


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


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    base = gaps["0% lost"]
    cost = {drop: gaps[f"{drop:.0%} lost"] - base for drop in DROPS}
    topical = gaps["50% lost, topics"] - gaps["0% lost, topics"]
    moves = "; ".join(f"{label} {(gaps[label] - base).mean:+.3f}" for label in gaps if label.startswith(("one", "two")))
    holds = every([
        below(topical, PUBLISHED), below(cost[0.3], 0.05), below(cost[0.5], 0.08),
        below(gaps["50% lost"] - gaps["isolated"], -0.03),
    ])  # fmt: skip
    return holds, (
        f"10, 30 and 50 % lost cost {cost[0.1].mean:+.3f}, {cost[0.3].mean:+.3f} and {cost[0.5].in_words()}, and 50 % "
        f"with topics {topical.in_words()}, where 2.1 % is {PUBLISHED:.3f}; {moves}"
    )


STUDY = Study(
    name="failures",
    claim="Half of the contributions may be lost for 2.1 % of perplexity, with shards by topic (arXiv 2311.08105).",
    rows=rows,
    verdict=verdict,
    equal="tokens; where learners are missing their tokens are",
    notes=[
        (
            "M = 4, H = 30. A learner whose contribution is lost goes on from its own parameters; what it sends next "
            "is measured from the new global model. Topics as in the study of non-i.i.d. shards. A learner that joins "
            "starts from the global model, with the inner optimizer's state of the warm start and the run's place in "
            "the lr schedule. The rule: half lost with topics within 2.1 % of perplexity of none lost (here of a byte, "
            "which allows more than of a token), with i.i.d. shards 30 % within 0.05 and 50 % within 0.08, and 50 % "
            "better than isolated by 0.03. That learners leave and join stands beside it."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
