"""A study: its arms, the pairs that they are compared in, the table, the plot and the verdict."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diloco
from diloco.core.method import Method
from diloco.core.outer import Nesterov
from studies.arms import Arm, Outcome, cached, outcome

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
SELECTION_SEED = 100
TIE = 0.01
"""Nats per byte: pairs scatter by about half of it at this scale."""

MACHINE = "2 CPU cores (x86-64), one thread a run, fp32"


@dataclass(frozen=True)
class Row:
    """A line of a table: an arm without its seed."""

    label: str
    arm: Arm


@dataclass(frozen=True)
class Gap:
    """Paired difference to a control over seeds: mean, standard error, and over how many."""

    mean: float
    error: float
    num_seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}" if self.num_seeds > 1 else f"{self.mean:+.3f}"


Gaps = Mapping[str, Gap]
Verdict = Callable[[Gaps], tuple[bool | None, str]]


@dataclass(frozen=True)
class Study:
    """One claim.

    Attributes:
        name: of its files.
        claim: one sentence, with its source.
        rows: arms, in the table's order.
        verdict: from the gaps to data parallel (by label; "isolated" is one of them) whether the claim holds here (None: cannot be
            judged), and a sentence. Called only when every row it needs is there; a missing label raises KeyError.
        equal: what is equal between the arms.
        control: the arm of data parallel and isolated where it is not the default one.
        notes: what a reader must know.
    """

    name: str
    claim: str
    rows: Callable[[], Sequence[Row]]
    verdict: Verdict
    equal: str = "tokens"
    control: Arm = field(default_factory=Arm)
    notes: Sequence[str] = ()

    def controls(self) -> list[Row]:
        """Data parallel and the isolated learner, always."""
        return [
            Row("data parallel", replace(self.control, kind="data parallel")),
            Row("isolated", replace(self.control, kind="isolated")),
        ]


# --- hyperparameters --------------------------------------------------------------------------------------------------------

OUTER_GRID = [(lr, momentum) for momentum in (0.8, 0.9, 0.5) for lr in (0.5, 0.7, 1.0)]


def chosen_outer(learners: int, warm: float = 0.25) -> Nesterov:
    """Outer lr and momentum for DiLoCo at H = 30, chosen on the selection split with a seed of its own."""
    losses = {}
    for lr, momentum in OUTER_GRID:
        method = diloco.DiLoCo(sync_every=30, outer=Nesterov(lr=lr, momentum=momentum))
        arm = Arm(method=method.to_dict(), learners=learners, warm=warm, seed=SELECTION_SEED, split="select")
        losses[lr, momentum] = outcome(arm).loss
    lr, momentum = min(losses, key=lambda each: losses[each])
    return Nesterov(lr=lr, momentum=momentum)


def choose(methods: Mapping[str, Method], **arm: Any) -> str:
    """The name of the best of some methods on the selection split."""
    losses = {
        name: outcome(Arm(method=method.to_dict(), seed=SELECTION_SEED, split="select", **arm)).loss
        for name, method in methods.items()
    }
    return min(losses, key=lambda each: losses[each])


# --- running and showing ------------------------------------------------------------------------------------------------


def run(study: Study, seeds: Sequence[int] = SEEDS) -> None:
    """Train what is missing, row by row, and write the results after each seed."""
    rows = [*study.controls(), *study.rows()]
    total, done = len(rows) * len(seeds), 0
    for seed in seeds:
        for row in rows:
            arm = replace(row.arm, seed=seed)
            known = cached(arm) is not None
            result = outcome(arm)
            done += 1
            if not known:
                print(
                    f"{study.name} {done}/{total}: {row.label}, seed {seed}: {result.loss:.4f} in {result.seconds:.0f} s",
                    flush=True,
                )
        write(study, rows)


def outcomes(rows: Sequence[Row]) -> dict[str, dict[int, Outcome]]:
    """What is there, by label and seed."""
    found: dict[str, dict[int, Outcome]] = {}
    for row in rows:
        found[row.label] = {
            seed: result for seed in SEEDS if (result := cached(replace(row.arm, seed=seed))) is not None
        }
    return found


def gap(one: Mapping[int, Outcome], other: Mapping[int, Outcome]) -> Gap | None:
    """Of pairs with the same seed; None without any."""
    differences = [one[seed].loss - other[seed].loss for seed in one if seed in other]
    if not differences:
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return Gap(statistics.mean(differences), error, len(differences))


def judge(study: Study, gaps: Gaps) -> tuple[str, str]:
    """The table's last line."""
    try:
        holds, sentence = study.verdict(gaps)
    except KeyError as missing:
        return "cannot be judged", f"the arm {missing} was not run"
    if any(each.num_seeds < len(SEEDS) for each in gaps.values()):
        sentence += f" (with fewer than {len(SEEDS)} seeds)"
    name = {True: "reproduced", False: "not reproduced at this scale", None: "cannot be judged"}[holds]
    return name, sentence


def write(study: Study, rows: Sequence[Row]) -> None:
    """JSON, Markdown and a plot of what is there."""
    RESULTS.mkdir(exist_ok=True)
    found = outcomes(rows)
    gaps = {label: each for label in found if (each := gap(found[label], found["data parallel"])) is not None}
    verdict, sentence = judge(study, gaps)
    table = []
    for row in rows:
        results = found[row.label]
        to_isolated = gap(results, found["isolated"])
        table.append({
            "arm": row.label,
            "loss": statistics.mean(each.loss for each in results.values()) if results else None,
            "losses": {seed: each.loss for seed, each in results.items()},
            "gap_to_data_parallel": None if row.label not in gaps else [gaps[row.label].mean, gaps[row.label].error],
            "gap_to_isolated": None if to_isolated is None else [to_isolated.mean, to_isolated.error],
            "seconds": sum(each.seconds for each in results.values()),
            "configuration": row.arm.method,
        })  # fmt: skip
    lines = [f"## {study.name.replace('_', ' ')}", "", f"**Claim.** {study.claim}", "",
             "| arm | loss | gap to data parallel | gap to isolated |", "|---|---|---|---|"]  # fmt: skip
    for entry, row in zip(table, rows, strict=True):
        if entry["loss"] is None:
            lines.append(f"| {row.label} | not run | | |")
            continue
        shown = gaps.get(row.label)
        isolated = gap(found[row.label], found["isolated"])
        lines.append(f"| {row.label} | {entry['loss']:.4f} | {shown or ''} | {isolated or ''} |")
    seeds = sorted({seed for results in found.values() for seed in results})
    took_s = sum(entry["seconds"] for entry in table)
    lines += ["", f"**{verdict[0].upper()}{verdict[1:]}**: {sentence}.", "",
              (f"Held-out nats per byte of the global model; seeds {', '.join(map(str, seeds)) or 'none'}, compared in pairs (± standard"
              f" error); below {TIE} is a tie. Equal {study.equal}. {MACHINE}; {took_s:.0f} s in all; {time.strftime('%Y-%m-%d')}.")]  # fmt: skip
    lines += [f"{note}" for note in study.notes]
    (RESULTS / f"{study.name}.md").write_text("\n".join(lines) + "\n")
    values = {"study": study.name, "claim": study.claim, "verdict": verdict, "why": sentence, "seeds": seeds, "equal": study.equal,
              "machine": MACHINE, "seconds": took_s, "date": time.strftime("%Y-%m-%d"), "table": table}  # fmt: skip
    (RESULTS / f"{study.name}.json").write_text(json.dumps(values, indent=1) + "\n")
    if len(gaps) > 1:
        _plot(study, gaps)


def _plot(study: Study, gaps: Gaps) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    labels = [label for label in gaps if label != "data parallel"]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.34 * len(labels)), layout="constrained")
    places = range(len(labels))
    colours = ["#999999" if label == "isolated" else "#2a6f97" for label in labels]
    axes.barh(
        places,
        [gaps[each].mean for each in labels],
        xerr=[gaps[each].error for each in labels],
        color=colours,
        height=0.6,
    )
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("held-out loss above data parallel, nats per byte")
    axes.set_title(study.name.replace("_", " "), loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(RESULTS / f"{study.name}.png", dpi=110)
    plt.close(figure)


def main(study: Study) -> None:
    """The command line of one study."""
    parser = argparse.ArgumentParser(description=study.claim)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--show", action="store_true", help="write the tables of what is in the cache, and train nothing"
    )
    given = parser.parse_args()
    if given.show:
        write(study, [*study.controls(), *study.rows()])
    else:
        run(study, given.seeds)
    sys.stdout.write((RESULTS / f"{study.name}.md").read_text())
