"""How few bits the wire needs, in both directions."""

from collections.abc import Sequence

import diloco
from studies.arms import Arm
from studies.gaps import Gaps, Holds, below, every
from studies.report import Row, Study, chosen_outer, main

ARMS = {
    "fp32": ("fp32", "fp32", 0.0),
    "bf16": ("bf16", "bf16", 0.0),
    "int8": ("int8", "int8", 0.0),
    "int4": ("int4", "int4", 0.0),
    "E3M0": ("e3m0", "e3m0", 0.0),
    "E3M0 up only": ("e3m0", "fp32", 0.0),
    "E3M0, feedback": ("e3m0", "e3m0", 1.0),
    "2 bit up only": ("2bit", "fp32", 0.0),
    "2 bit": ("2bit", "2bit", 0.0),
    "2 bit, feedback": ("2bit", "2bit", 1.0),
    "top-k 128 up only": ("topk-128", "fp32", 0.0),
    "top-k 128 up only, feedback": ("topk-128", "fp32", 1.0),
}
FP32_LOSS_SHARE = 0.005


def rows() -> Sequence[Row]:
    outer = chosen_outer(4)
    return [
        Row(
            label,
            Arm(method=diloco.DiLoCo(sync_every=30, outer=outer, codec=(up, down), error_feedback=feedback).to_dict()),
        )
        for label, (up, down, feedback) in ARMS.items()
    ]


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    cost = {label: gaps[label] - gaps["fp32"] for label in ARMS}
    limit = FP32_LOSS_SHARE * 1.9
    return every(below(cost[label], limit) for label in ("int4", "E3M0")), (
        f"4 bits both ways cost {cost['int4'].in_words(4)} (int4) and {cost['E3M0'].in_words(4)} (E3M0) against fp32, "
        f"where 0.5 % is {limit:.4f}; "
        f"2 bits {cost['2 bit'].mean:+.3f}, with feedback {cost['2 bit, feedback'].mean:+.3f}; top-k 3 % "
        f"{cost['top-k 128 up only'].mean:+.3f}, with feedback {cost['top-k 128 up only, feedback'].mean:+.3f}"
    )


STUDY = Study(
    name="wire",
    claim="4-bit outer gradients lose nothing (arXiv 2501.18512).",
    rows=rows,
    verdict=verdict,
    notes=[
        (
            "M = 4, H = 30, both directions unless named; a lossy answer always keeps its error on the syncer. The "
            "rule: int4 and E3M0 both ways within 0.5 % of fp32's loss. Fewer bits stand beside them; 2 bits under "
            "Muon, of which arXiv 2505.23725 claims it, are in `inner`."
        ),
        (
            "Feedback makes coarse codecs worse here. What is left out of one of the 15 rounds is measured again in "
            "the next, since the learner's parameters went back without it, and feedback sends the earlier measurement "
            "on top; with an outer momentum of 0.8 the sum overshoots, and what is late comes from a higher inner "
            "learning rate. With outer SGD(1.0) and more rounds it helps 2 bits (a quadratic: dev/LOG.md)."
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
