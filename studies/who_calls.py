"""Rounds that the syncer calls against learners that push on their own schedule, scaled to their part and unscaled."""

from collections.abc import Sequence
from dataclasses import replace

import diloco
from diloco.core.quorum import Called, Pushed
from studies.decoupled import CONTROL
from studies.report import Gaps, Row, Study, chosen_outer, main


def rows() -> Sequence[Row]:
    outer = chosen_outer(4)
    fragments = diloco.ByLayer(layers=1, pattern="strided")
    base = diloco.DecoupledDiLoCo(
        sync_every=24, fragments=fragments, codec="fp32", outer=outer, merge=diloco.Mean(), weight="tokens"
    )
    push = replace(base, quorum=Pushed())
    methods = {
        "called, scaled": replace(base, quorum=Called(grace=0.8)),
        "called, unscaled": replace(base, quorum=Called(grace=0.8), partial="full"),
        "pushed, scaled": push,
        "pushed, unscaled": replace(push, partial="full"),
        "pushed, K = 2, scaled": replace(push, quorum=Pushed(at_least=2)),
        "pushed, K = 4": replace(push, quorum=Pushed(at_least=4)),
        "pushed, Delayed Nesterov": diloco.AsyncDiLoCo(
            learners=4, sync_every=24, dynamic_steps=False, fragments=fragments,
            outer=diloco.DelayedNesterov(lr=outer.lr, momentum=outer.momentum, buffer=4),
        ),
        "pushed, Delayed Nesterov, dynamic steps": diloco.AsyncDiLoCo(
            learners=4, sync_every=24, fragments=fragments,
            outer=diloco.DelayedNesterov(lr=outer.lr, momentum=outer.momentum, buffer=4),
        ),
    }  # fmt: skip
    return [Row(label, replace(CONTROL, method=method.to_dict())) for label, method in methods.items()]


def verdict(gaps: Gaps) -> tuple[bool | None, str]:
    called, scaled, unscaled = (gaps[each].mean for each in ("called, scaled", "pushed, scaled", "pushed, unscaled"))
    return called <= scaled + 0.01 and scaled < unscaled - 0.01, (
        f"called {called:+.3f}; pushed and scaled to its part {scaled:+.3f}, unscaled {unscaled:+.3f}; Delayed Nesterov "
        f"{gaps['pushed, Delayed Nesterov'].mean:+.3f}, with dynamic steps {gaps['pushed, Delayed Nesterov, dynamic steps'].mean:+.3f}"
    )


STUDY = Study(
    name="who_calls",
    claim="Rounds called by the syncer use nearly all work; lone pushes that each get a full outer step cost more than not communicating.",
    rows=rows,
    verdict=verdict,
    equal="virtual wall-clock: 450 s, in which the fastest take 450 steps (± 10 % jitter) and the slowest 180",
    control=CONTROL,
    notes=[
        (
            "Speeds 1 : 1 : 0.6 : 0.4, H = 24, P = 4, mean weighted by tokens. The rule: called no worse than pushed and scaled, and scaled "
            "better than unscaled."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
