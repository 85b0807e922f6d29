"""The figures that README, the site and the demo's pages quote: `diloco demo --quick` with several seeds.

    python -m studies.headline            the figures, from results/headline.json, written into the pages
    python -m studies.headline --run 5    run the demo with seeds 0 to 4 first; about a minute each on two cores

A demo is a syncer and three learners, one of them killed, and data parallel on as many tokens from the same start. Its
bytes are counted by the syncer, both directions; data parallel's are computed (a ring all-reduce of bf16 gradients in
every step).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.event_log import read_events
from diloco.events import Initialised
from studies.gaps import Gap
from studies.pages import filled

ROOT = Path(__file__).parents[1]
FILE = ROOT / "studies" / "results" / "headline.json"
LEARNERS = ROOT / "studies" / "results" / "learners.json"
SENTENCES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "start.md"]
TABLE = ROOT / "docs" / "results.md"
KEPT = ("bytes_ratio", "loss_gap_percent", "global_loss", "baseline_loss", "seconds", "versions_lost", "headline")


def run(seed: int) -> dict[str, Any]:
    """The figures of one demo."""
    with tempfile.TemporaryDirectory() as made:
        command = ["-m", "diloco", "demo", "--quick", "--no-open", "--seed", str(seed), "--dir", made, "--json"]
        done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout)
        [start] = [each for each in read_events(Path(made, "syncer", "events.jsonl")) if isinstance(each, Initialised)]
    kept = {name: found[name] for name in KEPT}
    return {"seed": seed, "parameters": start.num_parameters, "recovery_s": found["kills"][0]["back_s"], **kept}


def figures(kept: Mapping[str, Any]) -> dict[str, str]:
    """The figures in words, by the names that `sentence` and `table` use."""
    runs = kept["runs"]
    gap = Gap({each["seed"]: each["loss_gap_percent"] for each in runs})
    low, high = gap.interval

    def spread(name: str, digits: int) -> str:
        values = sorted(each[name] for each in runs)
        return f"{statistics.median(values):.{digits}f} [{values[0]:.{digits}f}, {values[-1]:.{digits}f}]"

    return {
        "parameters": f"{runs[0]['parameters']:,}",
        "seeds": str(len(runs)),
        "ratio": f"{statistics.median(each['bytes_ratio'] for each in runs):.0f}",
        "gap": f"{abs(gap.mean):.1f} % {'higher' if gap.mean > 0 else 'lower'} [{low:+.1f}, {high:+.1f}]",
        "recovery_s": spread("recovery_s", 1),
        "seconds": spread("seconds", 0),
    }


def sentence(kept: Mapping[str, Any]) -> str:
    """What `diloco demo --quick` measures, for pages."""
    it = figures(kept)
    text = (
        f"Measured on two CPU cores with a language model of {it['parameters']} parameters, {it['seeds']} seeds (`python -m "
        f"studies.headline`): a syncer and three learners send {it['ratio']} times fewer bytes than data parallel "
        f"(computed), the loss is {it['gap']}, and a killed learner is back in the merges after {it['recovery_s']} s, "
        "forked with its imports loaded. A process that starts Python and torch anew takes 15.8 s "
        "(`dev/reliability.md`). In brackets: 95 % interval of the loss, range of the seconds."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def table(kept: Mapping[str, Any]) -> str:
    """The same and, from the study of learners, the gap by the number of learners."""
    it = figures(kept)
    rows = {each["arm"]: each for each in json.loads(LEARNERS.read_text(encoding="utf-8"))["table"]}
    parallel = rows["data parallel"]["loss"]
    lines = [
        "| `diloco demo --quick`: 3 learners, one killed | |",
        "|---|---|",
        f"| model, hardware, seeds | {it['parameters']} parameters; {kept['machine']}; {it['seeds']} |",
        f"| bytes, both directions | {it['ratio']} times fewer than data parallel's, which are computed |",
        f"| held-out loss against data parallel | {it['gap']}, 95 % interval in percent |",
        f"| killed learner, until it is in a merge again | {it['recovery_s']} s; forked with its imports loaded |",
        f"| the whole demo | {it['seconds']} s |",
        "",
        "| learners, `DiLoCo`, H = 30 | loss against data parallel, nats per byte ± standard error |",
        "|---|---|",
    ]
    for num in (1, 2, 4, 8):
        mean, error = rows[f"M={num}, chosen outer"]["gap_to_data_parallel"]
        lines.append(f"| {num} | {mean:+.3f} ± {error:.3f} ({100 * mean / parallel:+.1f} %) |")
    return "\n".join(lines)


def pages(kept: Mapping[str, Any]) -> dict[Path, str]:
    """Each page that quotes the figures, with the figures of the file."""
    blocks = {**dict.fromkeys(SENTENCES, sentence(kept)), TABLE: table(kept)}
    return {page: filled(page.read_text(encoding="utf-8"), {"headline": text}) for page, text in blocks.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.headline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=int, metavar="SEEDS", help="run the demo with so many seeds (3 to 5) first")
    given = parser.parse_args(arguments)
    if given.run is not None:
        runs = []
        for seed in range(given.run):
            runs.append(run(seed))
            sys.stdout.write(f"seed {seed}: {runs[-1]['headline']}, {runs[-1]['seconds']:.0f} s\n")
            sys.stdout.flush()
        kept = {"date": datetime.now(UTC).date().isoformat(), "machine": "2 CPU cores (x86-64)", "runs": runs}
        FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    for page, text in pages(kept).items():
        page.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{table(kept)}\n")


if __name__ == "__main__":
    main()
