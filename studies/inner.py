"""AdamW against Muon inside DiLoCo."""

from collections.abc import Sequence

import diloco
from diloco.core.outer import Nesterov
from studies.arms import Arm
from studies.gaps import TIE, Gaps, Holds, below, every
from studies.report import Row, Study, best, chosen_outer, main

RATES = (2e-3, 4e-3, 8e-3)
GRID = tuple((lr, momentum) for momentum in (0.5, 0.7, 0.8, 0.9) for lr in (0.7, 1.0))


def rows() -> Sequence[Row]:
    found = []
    for name, inner in (("AdamW", "adamw"), ("Muon", "muon")):
        rates = {f"{lr:g}": lr for lr in RATES}
        lr = rates[best({key: Arm(kind="data parallel", inner=inner, lr=lr) for key, lr in rates.items()})]
        found.append(Row(f"{name}, data parallel", Arm(kind="data parallel", inner=inner, lr=lr), f"lr {lr:g}"))
        found.append(Row(f"isolated, {name}", Arm(kind="isolated", inner=inner, lr=lr)))
        for learners in (2, 4, 8):
            outer = chosen_outer(learners, grid=GRID, inner=inner, lr=lr)
            method = diloco.DiLoCo(sync_every=30, outer=outer)
            found.append(
                Row(
                    f"{name}, DiLoCo, M={learners}", Arm(method=method.to_dict(), learners=learners, inner=inner, lr=lr)
                )
            )
        outer = chosen_outer(4, grid=GRID, inner=inner, lr=lr)
        published = (
            diloco.DiLoCo(sync_every=30, outer=Nesterov(lr=0.7, momentum=0.9)) if inner == "adamw" else diloco.MuLoCo()
        )
        found.append(Row(f"{name}, published outer, M=4", Arm(method=published.to_dict(), inner=inner, lr=lr)))
        for codec in ("int4", "2bit"):
            method = diloco.DiLoCo(sync_every=30, outer=outer, codec=codec)
            found.append(Row(f"{name}, {codec}, M=4", Arm(method=method.to_dict(), inner=inner, lr=lr)))
    return found


def verdict(gaps: Gaps) -> tuple[Holds, str]:
    own = {name: gaps[f"{name}, data parallel"] for name in ("AdamW", "Muon")}
    cost = {
        (name, label): gaps[f"{name}, {label}"] - own[name]
        for name in own
        for label in ("DiLoCo, M=2", "DiLoCo, M=4", "DiLoCo, M=8", "2bit, M=4", "int4, M=4")
    }
    shown = ", ".join(
        f"{cost['Muon', f'DiLoCo, M={m}'].mean:+.3f} against {cost['AdamW', f'DiLoCo, M={m}'].mean:+.3f} at M={m}"
        for m in (2, 4, 8)
    )
    better = below(gaps["Muon, DiLoCo, M=4"] - gaps["AdamW, DiLoCo, M=4"], -TIE)
    smaller = every(below(cost["Muon", f"DiLoCo, M={m}"] - cost["AdamW", f"DiLoCo, M={m}"], -TIE) for m in (4, 8))
    bits = {name: cost[name, "2bit, M=4"] - cost[name, "DiLoCo, M=4"] for name in own}
    return every([better, smaller]), (
        f"Muon in data parallel is {(own['Muon'] - own['AdamW']).mean:+.3f} against AdamW; the gap of DiLoCo to data "
        f"parallel with the same inner optimizer is {shown} (Muon against AdamW); 2 bits cost {bits['Muon'].mean:+.3f} "
        f"with Muon and {bits['AdamW'].mean:+.3f} with AdamW"
    )


STUDY = Study(
    name="inner",
    claim=(
        "With Muon inside, DiLoCo ends lower, loses less as learners are added, and tolerates 2 bits (MuLoCo, arXiv "
        "2505.23725)."
    ),
    rows=rows,
    verdict=verdict,
    notes=[
        (
            "H = 30. Both inner optimizers have their lr (of 2e-3, 4e-3, 8e-3; Muon's own is twice that) chosen in "
            "data parallel, and the outer settings for every M among lr 0.7, 1.0 and momentum 0.5 … 0.9, all on the "
            "other split. The first two rows are the controls of the other studies, at lr 4e-3. The rule: Muon ends "
            "lower at M = 4, and its gap to its own data parallel is smaller by 0.01 at M = 4 and 8."
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
