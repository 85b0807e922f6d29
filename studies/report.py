"""A study: its arms, the pairs that they are compared in, the table, the plot and the verdict."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diloco
from diloco.core.method import Method
from diloco.core.outer import Nesterov
from studies.arms import DIVERGED, Arm, Outcome, cached, outcomes
from studies.gaps import TIE, Gap, Gaps, Holds, with_error

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
SELECTION_SEED = 100
MACHINE = "2 CPU cores (x86-64), one thread a run, fp32"


@dataclass(frozen=True)
class Row:
    """A line of a table: an arm without its seed. `detail`: what was chosen for it, beside its outer settings."""

    label: str
    arm: Arm
    detail: str = ""


Verdict = Callable[[Gaps], tuple[Holds, str]]


@dataclass(frozen=True)
class Study:
    """One claim.

    Attributes:
        name: of its files.
        claim: one sentence, with its source.
        rows: arms, in the table's order.
        verdict: from the gaps to data parallel (by label; "isolated" is one of them) whether their intervals carry the
            claim (False: they contradict it; None: neither), and a sentence. A missing label raises KeyError.
        published: whether a paper claims it. What none claims is not reproduced; it is found here, or not.
        equal: what is equal between the arms.
        control: the arm of data parallel and isolated where it is not the default one.
        notes: what a reader must know.
    """

    name: str
    claim: str
    rows: Callable[[], Sequence[Row]]
    verdict: Verdict
    published: bool = True
    equal: str = "tokens"
    control: Arm = field(default_factory=Arm)
    notes: Sequence[str] = ()

    def controls(self) -> list[Row]:
        """Data parallel and the isolated learner, always."""
        return [
            Row("data parallel", replace(self.control, kind="data parallel")),
            Row("isolated", replace(self.control, kind="isolated")),
        ]


# --- hyperparameters --------------------------------------------------------------------------------------------------

TRAINING: ContextVar[int] = ContextVar("TRAINING", default=0)
"""In how many processes what is missing may be trained now; 0: not at all."""


class NotChosenError(Exception):
    """Settings that rows need were not chosen yet, and this is not the time to train."""


OUTER_GRID = [(lr, momentum) for momentum in (0.8, 0.9, 0.5) for lr in (0.5, 0.7, 1.0)]


def chosen_outer(
    learners: int, warm: float = 0.25, grid: Sequence[tuple[float, float]] = tuple(OUTER_GRID), **arm: Any
) -> Nesterov:
    """Outer lr and momentum for DiLoCo at H = 30, chosen on the selection split with a seed of its own."""
    outers = {f"{lr}/{momentum}": Nesterov(lr=lr, momentum=momentum) for lr, momentum in grid}
    methods = {name: diloco.DiLoCo(sync_every=30, outer=outer) for name, outer in outers.items()}
    return outers[choose(methods, learners=learners, warm=warm, **arm)]


def choose(methods: Mapping[str, Method], **arm: Any) -> str:
    """The name of the best of some methods on the selection split."""
    return best({name: Arm(method=method.to_dict(), **arm) for name, method in methods.items()})


def best(candidates: Mapping[str, Arm]) -> str:
    """The name of the best of some arms on the selection split, with a seed of its own.

    Raises NotChosenError where one of them was not run and nothing may be trained.
    """
    arms = {name: replace(arm, seed=SELECTION_SEED, split="select") for name, arm in candidates.items()}
    if jobs := TRAINING.get():
        outcomes(arms.values(), jobs, lambda arm, result: _say("choosing", arm, result))
    losses = {name: cached(arm) for name, arm in arms.items()}
    if None in losses.values():
        raise NotChosenError
    return min(losses, key=lambda name: losses[name].loss)  # type: ignore[union-attr]


# --- running and showing ----------------------------------------------------------------------------------------------


def run(study: Study, seeds: Sequence[int] = SEEDS, jobs: int = 1) -> None:
    """Train what is missing, row by row, and write the results after each seed."""
    token = TRAINING.set(jobs)
    try:
        rows = [*study.controls(), *study.rows()]
    finally:
        TRAINING.reset(token)
    arms = {seed: {replace(row.arm, seed=seed).key(): row for row in rows} for seed in seeds}
    left = sum(cached(replace(row.arm, seed=seed)) is None for seed in seeds for row in arms[seed].values())
    print(f"{study.name}: {left} of {sum(map(len, arms.values()))} runs to make", flush=True)

    def say(arm: Arm, result: Outcome) -> None:
        _say(f"{study.name}: {arms[arm.seed][arm.key()].label}", arm, result)

    for seed in seeds:
        outcomes([replace(row.arm, seed=seed) for row in rows], jobs, say)
        write(study, rows)


def _say(what: str, arm: Arm, result: Outcome) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {what}, seed {arm.seed}: {result.loss:.4f} in {result.seconds:.0f} s", flush=True
    )


def found_of(rows: Sequence[Row]) -> dict[str, dict[int, Outcome]]:
    """What is there, by label and seed."""
    found: dict[str, dict[int, Outcome]] = {}
    for row in rows:
        found[row.label] = {
            seed: result for seed in SEEDS if (result := cached(replace(row.arm, seed=seed))) is not None
        }
    return found


def gap(one: Mapping[int, Outcome], other: Mapping[int, Outcome]) -> Gap | None:
    """Of pairs with the same seed; None without any."""
    differences = {seed: one[seed].loss - other[seed].loss for seed in one if seed in other}
    return Gap(differences) if differences else None


def judge(study: Study, gaps: Gaps) -> tuple[str, str]:
    """The table's last line."""
    try:
        holds, sentence = study.verdict(gaps)
    except KeyError as missing:
        return "cannot be judged", f"the arm {missing} was not run"
    if any(each.num_seeds < len(SEEDS) for each in gaps.values()):
        sentence += f" (with fewer than {len(SEEDS)} seeds)"
    return _WORDS[study.published][holds], sentence


_UNDECIDED = "undecided at this scale"
_WORDS: dict[bool, dict[Holds, str]] = {
    True: {True: "reproduced", False: "not reproduced at this scale", None: _UNDECIDED},
    False: {True: "found here", False: "not found here", None: _UNDECIDED},
}
"""By whether the claim is published, and whether it holds."""


def show(study: Study) -> None:
    """Write the tables of what is in the cache."""
    try:
        rows = list(study.rows())
    except NotChosenError:
        rows = []
    write(study, [*study.controls(), *rows])


def write(study: Study, rows: Sequence[Row]) -> None:
    """JSON, Markdown and a plot of the finished runs."""
    RESULTS.mkdir(exist_ok=True)
    found = found_of(rows)
    gaps = {label: each for label in found if (each := gap(found[label], found["data parallel"])) is not None}
    values = _values(study, rows, found, gaps)
    (RESULTS / f"{study.name}.json").write_text(json.dumps(values, indent=1) + "\n")
    (RESULTS / f"{study.name}.md").write_text(markdown(values))
    if len(gaps) > 2:
        _plot(study, gaps)


def _values(
    study: Study, rows: Sequence[Row], found: Mapping[str, Mapping[int, Outcome]], gaps: Gaps
) -> dict[str, Any]:
    """All that the table shows, in plain values."""
    verdict, sentence = judge(study, gaps)
    table = []
    for row in rows:
        results = found[row.label]
        to_isolated = gap(results, found["isolated"])
        method = None if row.arm.method is None else Method.from_dict(row.arm.method)
        table.append({
            "arm": row.label,
            "detail": row.detail,
            "outer": "" if method is None else outer_in_words(method),
            "loss": statistics.mean(each.loss for each in results.values()) if results else None,
            "losses": {seed: each.loss for seed, each in results.items()},
            "gap_to_data_parallel": None if row.label not in gaps else [gaps[row.label].mean, gaps[row.label].error],
            "gap_to_isolated": None if to_isolated is None else [to_isolated.mean, to_isolated.error],
            "seconds": round(sum(each.seconds for each in results.values())),
            "configuration": row.arm.method,
        })  # fmt: skip
    seeds = sorted({seed for results in found.values() for seed in results})
    return {
        "study": study.name,
        "claim": study.claim,
        "verdict": verdict,
        "why": sentence,
        "notes": list(study.notes),
        "seeds": seeds,
        "equal": study.equal,
        "machine": MACHINE,
        "seconds": sum(entry["seconds"] for entry in table),
        "date": max((each.date for results in found.values() for each in results.values()), default=""),
        "table": table,
    }


def outer_in_words(method: Method) -> str:
    """Learning rate and momentum of the outer optimizer."""
    values = method.outer.to_dict()
    lr, momentum = values.get("lr"), values.get("momentum")
    return f"{lr:g} / {momentum:g}" if momentum is not None else f"{lr:g}"


def markdown(values: Mapping[str, Any]) -> str:
    """A study's table, from what its JSON file holds."""
    lines = [
        f"## {values['study'].replace('_', ' ')}",
        "",
        f"**Claim.** {values['claim']}",
        "",
        "| arm | outer lr / momentum | loss | gap to data parallel | gap to isolated |",
        "|---|---|---|---|---|",
    ]
    for entry in values["table"]:
        num_seeds = len(entry["losses"])
        name = entry["arm"] + (f" ({entry['detail']})" if entry["detail"] else "")
        if not num_seeds:
            lines.append(f"| {name} | {entry['outer']} | not run | | |")
            continue
        if entry["loss"] >= DIVERGED:
            lines.append(f"| {name} | {entry['outer']} | diverged | | |")
            continue
        shown = [
            "" if each is None else with_error(each[0], each[1], num_seeds)
            for each in (entry["gap_to_data_parallel"], entry["gap_to_isolated"])
        ]
        partly = "" if num_seeds == len(values["seeds"]) else f" ({num_seeds} of {len(values['seeds'])} seeds)"
        lines.append(f"| {name} | {entry['outer']} | {entry['loss']:.4f}{partly} | {shown[0]} | {shown[1]} |")
    verdict, seeds = values["verdict"], values["seeds"]
    lines += [
        "",
        f"**{verdict[0].upper()}{verdict[1:]}**: {values['why']}.",
        "",
        (
            f"Held-out nats per byte of the global model; seeds {', '.join(map(str, seeds)) or 'none'}, compared in "
            f"pairs (± standard error); below {TIE} is a tie. Equal {values['equal']}. {values['machine']}; "
            f"{values['seconds']} s in all; {values['date']}."
        ),
    ]
    for note in values["notes"]:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def _plot(study: Study, gaps: Gaps) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    labels = [label for label in gaps if label != "data parallel"]
    means = [gaps[each].mean for each in labels]
    end = min(max(means), 3 * max(gaps["isolated"].mean, 0.1)) * 1.08  # what is far out would flatten the rest
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.3 * len(labels)), layout="constrained")
    places = range(len(labels))
    colours = ["#9ca3af" if label.startswith("isolated") else "#2a6f97" for label in labels]
    errors = [gaps[each].error if gaps[each].mean < end else 0.0 for each in labels]
    axes.barh(places, [min(mean, end) for mean in means], xerr=errors, color=colours, height=0.6)
    for place, mean in zip(places, means, strict=True):
        if mean > end:
            axes.text(end, place, f"+{mean:.2f} → ", ha="right", va="center", color="white", fontsize=8)
    axes.set_xlim(min(0.0, *means) * 1.1, end)
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
    add_options(parser)
    given = parser.parse_args()
    if given.show:
        show(study)
    else:
        run(study, given.seeds, given.jobs)
    sys.stdout.write((RESULTS / f"{study.name}.md").read_text())


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a run of studies can be told."""
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train at the same time, one thread each")
    parser.add_argument(
        "--show", action="store_true", help="write the tables of what is in the cache, and train nothing"
    )
