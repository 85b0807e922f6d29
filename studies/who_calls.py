"""Rounds that the syncer calls against learners that push on their own schedule, scaled to their part and unscaled."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import diloco
from diloco.core.method import Method
from diloco.core.outer import Nesterov
from diloco.core.quorum import Called, Pushed
from studies.decoupled import BUDGET_S, CONTROL, SPEEDS
from studies.gaps import TIE, Gaps, Holds, below, every
from studies.report import Row, Study, choose, chosen_outer, main

OUTERS = ((0.7, 0.8), (0.7, 0.5), (0.7, 0.0), (0.35, 0.5), (0.35, 0.0))


def rows() -> Sequence[Row]:
    outer = chosen_outer(4)
    fragments = diloco.ByLayer(layers=1, pattern="strided")
    base = diloco.DecoupledDiLoCo(
        sync_every=24, fragments=fragments, codec="fp32", outer=outer, merge=diloco.Mean(), weight="tokens"
    )
    push = replace(base, quorum=Pushed(), overlap=0)

    def delayed(outer: Nesterov, *, dynamic: bool = False) -> Method:
        buffered = diloco.DelayedNesterov(lr=outer.lr, momentum=outer.momentum, buffer=4)
        return diloco.AsyncDiLoCo(learners=4, sync_every=24, dynamic_steps=dynamic, fragments=fragments, outer=buffered)

    def chosen(method: Callable[[Nesterov], Method]) -> Method:
        outers = {f"{lr}/{momentum}": Nesterov(lr=lr, momentum=momentum) for lr, momentum in OUTERS}
        methods = {name: method(outer) for name, outer in outers.items()}
        return methods[choose(methods, speeds=SPEEDS, budget_s=BUDGET_S)]

    methods = {
        "called, scaled": replace(base, quorum=Called(grace=0.8)),
        "called, unscaled": replace(base, quorum=Called(grace=0.8), partial="full"),
        "pushed, scaled": push,
        "pushed, unscaled": replace(push, partial="full"),
        "pushed, K = 2, scaled": replace(push, quorum=Pushed(at_least=2)),
        "pushed, K = 4": replace(push, quorum=Pushed(at_least=4)),
        "pushed, Delayed Nesterov": delayed(outer),
        "pushed, Delayed Nesterov, dynamic steps": delayed(outer, dynamic=True),
        "called, scaled, chosen outer": chosen(lambda outer: replace(base, quorum=Called(grace=0.8), outer=outer)),
        "pushed, scaled, chosen outer": chosen(lambda outer: replace(push, outer=outer)),
        "pushed, unscaled, chosen outer": chosen(lambda outer: replace(push, outer=outer, partial="full")),
        "pushed, Delayed Nesterov, chosen outer": chosen(delayed),
    }
    return [Row(label, replace(CONTROL, method=method.to_dict())) for label, method in methods.items()]


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    ways = ("called, scaled", "pushed, scaled", "pushed, unscaled")
    same = {way: gaps[way] for way in ways}
    best = {way: min(same[way], gaps[f"{way}, chosen outer"], key=lambda gap: gap.mean) for way in ways}
    delayed, isolated = gaps["pushed, Delayed Nesterov, chosen outer"], gaps["isolated"]
    called, scaled, unscaled = (best[way] for way in ways)
    dearer = same["pushed, scaled"] - same["pushed, unscaled"]
    holds = every([
        *(below(called - each, -TIE) for each in (scaled, unscaled, delayed)),
        below(isolated - same["pushed, unscaled"], 0.0),
        below(dearer, -TIE),
    ])  # fmt: skip
    return holds, (
        f"with DiLoCo's outer settings called {same['called, scaled'].mean:+.3f}, pushed and scaled "
        f"{same['pushed, scaled'].mean:+.3f}, unscaled {same['pushed, unscaled'].mean:+.3f}, isolated "
        f"{isolated.mean:+.3f}; scaled against unscaled is {dearer.in_words()}; each with outer settings of its own "
        f"called {called.mean:+.3f}, pushed and scaled {scaled.mean:+.3f}, unscaled {unscaled.mean:+.3f}, Delayed "
        f"Nesterov {delayed.mean:+.3f}"
    )


STUDY = Study(
    name="who_calls",
    claim="Rounds called by the syncer end lower than lone pushes; lone pushes that each get a full outer step cost "
    "more than not communicating, and than "
    "those that are scaled to their part.",
    rows=rows,
    verdict=verdict,
    published=False,
    equal="virtual wall-clock: 450 s, in which the fastest take 450 steps (± 10 % jitter) and the slowest 180",
    control=CONTROL,
    notes=[
        (
            "Speeds 1 : 1 : 0.6 : 0.4, H = 24, P = 4, mean weighted by tokens. Outer settings of DiLoCo with equal "
            "learners, or chosen for the row on the other split. The rule: called is better by 0.01 than every pushed "
            "row, each at its best; with the same outer settings unscaled pushes are worse than isolated and scaled "
            "ones better than unscaled."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
