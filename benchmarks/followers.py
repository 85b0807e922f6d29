"""What followers cost a syncer and its learner.

    python -m benchmarks.followers [--quick] [--only 4M|100M] [--json]

A real syncer is in one network namespace, a learner and followers are in another, with mutual TLS and a link of fixed
rate between them (`tc … tbf`). The learner's steps have a fixed length, and it waits for each update. Two models: one
of 4M parameters, whose followers are processes with `diloco.follow`, and one of 100M, whose followers read the update
of each version and drop it. For each: no follower, 1 and 32. All have the newest version before a stretch begins.

Goal: the learner's rounds are at most 2 % longer, as far as the processors are free. The syncer's processor time and
the bytes over the link mean something on a busy machine too.

Needs root, `ip` and `tc` (Linux), and leave to make network namespaces; without those it ends with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import machine
from benchmarks.control import ADDRESS, at_site, require_namespaces, syncer
from benchmarks.follower_processes import NUM_VIEWERS, RUN, SYNC_EVERY
from benchmarks.processes import until
from benchmarks.two_sites import counted_bytes, two_sites
from diloco import events
from diloco.event_log import newest_event


@dataclass(frozen=True)
class Case:
    """Attributes: width: of the model's one matrix. rate: of the link, as tc writes it. rounds: of a stretch."""

    name: str
    width: int
    drains: bool
    rate: str
    step_s: float
    rounds: int
    followers: tuple[int, ...] = (0, 1, 32)


CASES = (
    Case("4M, follow", 2000, False, "500mbit", 0.2, 6),
    Case("100M, drains", 10_000, True, "400mbit", 0.1, 1),
)
QUICK = (
    Case("1M, follow", 1000, False, "200mbit", 0.02, 3, (0, 1, 2)),
    Case("4M, drains", 2000, True, "200mbit", 0.02, 3, (0, 1, 4)),
)


@dataclass(frozen=True)
class Row:
    """One stretch.

    Attributes:
        seconds: that it took. round_s: of these, for each of the learner's rounds.
        cpu_s: processor time of the syncer's process in it.
        sent_bytes: from the syncer over the link, with all headers; `update_bytes`: of one update for one learner.
        versions: that were published in it. seen: by each follower, in the mean.
    """

    case: str
    followers: int
    seconds: float
    round_s: float
    cpu_s: float
    sent_bytes: int
    update_bytes: int
    versions: int
    seen: float


def run(cases: Sequence[Case]) -> list[Row]:
    """A row for each case and number of followers."""
    rows = []
    for case in cases:
        print(f"{case.name} …", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="diloco-followers-") as name, two_sites(case.rate):
            rows += _measure(Path(name), case)
    return rows


def _measure(directory: Path, case: Case) -> list[Row]:
    viewers = [f"viewer-{number}" for number in range(NUM_VIEWERS)]
    stop = directory / "stop"
    learner = ["learner", ADDRESS, "--width", str(case.width), "--step-s", str(case.step_s), "--stop", str(stop)]
    with ExitStack() as stack:
        served = stack.enter_context(
            syncer(
                directory, RUN, learners=["learner"], viewers=viewers, preset="DiLoCo", sync_every=SYNC_EVERY,
                codec="int4",
            )
        )  # fmt: skip
        trains = stack.enter_context(at_site(directory, "site-b", "learner", "benchmarks.follower_processes", *learner))
        published = Published(directory, trains)
        rows = []
        for number in case.followers:
            rows.append(_stretch(directory, case, number, served.pid, published))
            print(rows[-1], file=sys.stderr)
        return rows


def _stretch(directory: Path, case: Case, number: int, pid: int, published: Published) -> Row:
    with _followers(directory, case, number) as out:
        first = published.wait(1)
        began_s, cpu_s, sent_bytes, seen = time.monotonic(), _cpu_s(pid), counted_bytes()[1], _lines(out)
        last = published.wait(case.rounds)
        seconds, num_versions = time.monotonic() - began_s, last.version - first.version
        return Row(
            case.name, number, seconds, seconds / num_versions, _cpu_s(pid) - cpu_s, counted_bytes()[1] - sent_bytes,
            last.num_bytes, num_versions, (_lines(out) - seen) / max(1, number),
        )  # fmt: skip


class Published:
    """The versions of a run, from the syncer's events; raises RuntimeError if the learner has ended."""

    def __init__(self, directory: Path, learner: subprocess.Popen[bytes]) -> None:
        self._directory, self._learner = directory, learner

    def wait(self, number: int) -> events.Published:
        """The version that is so many later than now, once it is published."""
        newest = self._newest()
        wanted = number + (0 if newest is None else newest.version)
        until(lambda: self._version() >= wanted or self._learner.poll() is not None, "no version is published")
        if self._learner.poll() is not None:
            raise RuntimeError((self._directory / "learner.log").read_text()[-2000:])
        found = self._newest()
        assert found is not None
        return found

    def _version(self) -> int:
        newest = self._newest()
        return 0 if newest is None else newest.version

    def _newest(self) -> events.Published | None:
        log = self._directory / "state" / "events.jsonl"
        found = newest_event(log, "published") if log.exists() else None
        assert found is None or isinstance(found, events.Published)
        return found


@contextmanager
def _followers(directory: Path, case: Case, number: int) -> Iterator[Path]:
    """So many of them, with the newest version; yields the file to which they print."""
    name, stop = f"followers-{number}", directory / f"stop-{number}"
    out = directory / f"{name}.out"
    options = ["--number", str(number), "--stop", str(stop), *["--drain"] * case.drains]
    command = ["benchmarks.follower_processes", "followers", ADDRESS, *options]
    with at_site(directory, "site-b", name, *command) as process:
        try:
            until(lambda: out.read_text().count("ready") == number, f"the followers do not read: {directory / name}")
            yield out
        finally:
            stop.touch()
            process.wait(60)


def _lines(out: Path) -> int:
    return out.read_text().count("\n")


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(rows: Sequence[Row], console: Console) -> None:
    """One line a stretch."""
    table = Table(box=None, pad_edge=False)
    titles = ("model", "followers", "versions", "seen", "round", "syncer CPU", "a version", "sent", "updates")
    for title in titles:
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        table.add_row(
            row.case, str(row.followers), str(row.versions), f"{row.seen:.1f}" if row.followers else "",
            f"{row.round_s:.2f} s", f"{row.cpu_s:.2f} s", f"{row.cpu_s / row.versions:.2f} s",
            f"{row.sent_bytes / 1e6:,.0f} MB", f"{row.sent_bytes / row.update_bytes:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few followers")
    parser.add_argument("--only", choices=("4M", "100M"), help="this model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    require_namespaces("benchmarks.followers")
    before = machine()
    rows = run(QUICK if chosen.quick else [case for case in CASES if case.name.startswith(chosen.only or "")])
    if chosen.json:
        print(json.dumps({"machine": before, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        show(rows, Console(width=120))


if __name__ == "__main__":
    main()
