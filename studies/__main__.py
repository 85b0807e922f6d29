"""`python -m studies` lists the studies and how they came out; with names (or `all`) it runs them, in this order.

python -m studies                      what there is
python -m studies learners wire        run these, then write studies/README.md
python -m studies all --jobs 2
python -m studies all --show           write tables and studies/README.md from what is in the cache, and train nothing
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.report import RESULTS, Study, add_options, markdown, run, show

NAMES = (
    "learners",
    "who_calls",
    "wire",
    "decoupled",
    "eager",
    "warm_start",
    "sync_interval",
    "streaming",
    "merge",
    "failures",
    "pool",
    "non_iid",
    "shared",
    "inner",
    "poison",
)
ENDED = ("healing",)
"""Studies of what the package no longer has: their results stay, and name the commit that made them."""

DOCS = Path(__file__).parents[1] / "studies" / "README.md"
INTRODUCTION = """# Studies

Each study tests a claim about DiLoCo and its relatives on real text, at a scale that two CPU cores can carry. Eleven
claims are from papers; five are our own. [Results](../docs/results.md) is the summary, [Methods](../docs/methods.md)
gives the resulting advice.

`python -m studies` lists the studies, and `python -m studies.learners` repeats the study `learners`, without the runs
that are in `studies/cache/`. The last study is of a feature that the package no longer has; it names the commit that
produced its results.

**Model and data.** A byte-level decoder of 165 thousand parameters is trained on the source of Python's standard
library, for 600 inner steps of 1,024 tokens over all learners. The inner optimizer is AdamW at 4e-3 with warm-up and a
cosine. Unless a study says otherwise, the first quarter of the steps is a warm start on one model. The learners are
`diloco.Learner`s in one process and in virtual time. The global model is evaluated.

**Controls.** Each study has two controls, which see the same data in the same order. **Data parallel** is one model on
the full batch. The **isolated** learner has a learner's share of every batch and never communicates.

**Gaps** are means of differences between runs of the same seed, with their standard error; less than 0.01 is a tie.
Outer settings are chosen on another part of the held-out text with another seed.

**Verdicts** follow the rule that each study names. The rule compares the 95 % interval of a paired difference
(Student's t; in brackets) with a limit. If the whole interval is on one side of the limit, the claim holds or fails;
otherwise the study is undecided. A paper's claim is "reproduced" or not; another claim is "found here" or not. All
verdicts are for this scale: the papers use larger models, more rounds and lower inner learning rates.

This page is written by `python -m studies all --show`.
"""


def study_of(name: str) -> Study:
    """The study in the module of this name."""
    found: Study = importlib.import_module(f"studies.{name}").STUDY
    return found


def docs() -> str:
    """studies/README.md, from the JSON files in `results/`."""
    values = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in (*NAMES, *ENDED)}
    lines = [INTRODUCTION, "| study | verdict | |", "|---|---|---|"]
    for name, each in values.items():
        title = name.replace("_", " ")
        lines.append(f"| [{title}](#{title.replace(' ', '-')}) | {each['verdict']} | {each['claim']} |")
    for name, each in values.items():
        lines += ["", markdown(each).rstrip()]
        if (RESULTS / f"{name}.png").exists():
            lines += ["", f"![{name.replace('_', ' ')}](results/{name}.png)"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=["all", *NAMES, []])
    add_options(parser)
    given = parser.parse_args(arguments)
    if not given.names:
        for name in NAMES:
            file = RESULTS / f"{name}.json"
            verdict = json.loads(file.read_text())["verdict"] if file.exists() else "not run"
            sys.stdout.write(f"{name:14} {verdict:33} {study_of(name).claim}\n")
        return
    for name in NAMES if "all" in given.names else given.names:
        if given.show:
            show(study_of(name))
        else:
            run(study_of(name), given.seeds, given.jobs)
    if all((RESULTS / f"{name}.json").exists() for name in NAMES):
        DOCS.write_text(docs())


if __name__ == "__main__":
    main()
