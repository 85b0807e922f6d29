"""Hostile senders beside a real run: what each flood takes from it, and from the syncer's memory.

    python -m benchmarks.floods [--only FLOOD] [--proxy yes|no] [--seconds S] [--tenth] [--same-address] [--json]

A syncer with mutual TLS and two learners that wait for each other train without a pause. Each flood runs beside them,
from a sender without a certificate and from one with a learner's, without a proxy and with HAProxy in front as
templates/haproxy has it; before and after it the run is measured alone. A row says how many inner steps the learners
took under the flood, for each that they take alone; by how much the syncer's memory rose, the threads and open files
that it had; and what the flood itself came to. Goals with the proxy: 2 % and 200 MB.

The sender dials from an address of its own, or, with --same-address, from that of the learners, as behind one router.
Learners and senders are on machines of their own in life. Here the learners have half of the processors, and the
syncer, the proxy and the sender, a process of lower priority, the other half: a sender's own work is still taken from
the syncer.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import diloco
from benchmarks.haproxy import Proxy
from benchmarks.hostile import FLOODS, RUN, VILLAIN
from benchmarks.processes import SyncerProcess, run_file, until
from diloco.syncer.keys.keyring import Keyring

SIZES = {
    "idle streams": 6_000,
    "idle sockets": 15_000,
    "continuations": 1_000,
    "initialisations": 100,
    "undecodable requests": 100_000,
}
"""Ten times what brought a syncer down or to gigabytes once: calls, connections, MB a second, calls, calls."""

MOST_LOST, MOST_MB = 0.02, 200.0
SOURCE, LEARNERS_SOURCE = "127.0.0.2", "127.0.0.1"
LEARNERS = ("first", "second")
H, STEP_S = 5, 0.02


@dataclass(frozen=True)
class Row:
    """What one flood did.

    Attributes:
        proxy: HAProxy is in front.
        goodput: inner steps a second under it ÷ without it, before and after.
        noise: by how much those without it differ: |before − after| ÷ their mean. No loss below that is seen.
        processor: seconds of the syncer's processor time a second under it, and without it.
        proxy_processor: and of the proxy's under it.
        memory_mb: by how much the syncer's resident size rose at most. num_threads, num_files: what it had at most.
        outcome: `hostile.Outcome` of the sender.
        survived: the syncer did not end, and the run went on afterwards.
    """

    flood: str
    proxy: bool
    certificate: bool
    size: int
    goodput: float
    noise: float
    processor: tuple[float, float]
    proxy_processor: float
    memory_mb: float
    num_threads: int
    num_files: int
    outcome: dict[str, int]
    survived: bool


def run(
    directory: Path, floods: Sequence[str], sizes: dict[str, int], seconds: float, source: str = SOURCE,
    proxies: Sequence[bool] = (False, True),
) -> list[Row]:  # fmt: skip
    """A row for each flood, without and with a proxy and a certificate, from `source`. Each has a syncer of its own."""
    rows = []
    for flood, proxy, certificate in product(floods, proxies, (False, True)):
        what = {"proxy": proxy, "certificate": certificate}
        said = (f"{'with' if it else 'without'} a {name}" for name, it in what.items())
        print(f"{flood}, {', '.join(said)} …", file=sys.stderr)
        where = Path(tempfile.mkdtemp(dir=directory))
        with _besieged(where, with_proxy=proxy) as besieged:
            rows.append(_measure(besieged, flood, sizes[flood], seconds, source, certificate=certificate))
    return rows


@dataclass(frozen=True)
class _Besieged:
    """A run, and what is dialled: the syncer, or the proxy in front of it."""

    where: Path
    syncer: SyncerProcess
    proxy: Proxy | None
    address: str


@contextmanager
def _besieged(where: Path, *, with_proxy: bool) -> Iterator[_Besieged]:
    """A syncer and two learners that have begun."""
    names = [(name, "learner") for name in (*LEARNERS, VILLAIN)]
    Keyring.new(where / "keys", RUN, ["127.0.0.1"], names, dt.timedelta(days=1))  # type: ignore[arg-type]
    with ExitStack() as stack:
        quorum = {"type": "AllLive", "at_least": 2}
        its = run_file(
            RUN, syncer={"keys": str(where / "keys" / "syncer")}, preset="DiLoCo", sync_every=H, quorum=quorum
        )
        syncer = SyncerProcess(where, its)
        stack.callback(syncer.kill)
        _pin(syncer.pid, learner=False)
        proxy, address = None, syncer.address
        if with_proxy:
            proxy = stack.enter_context(Proxy(where / "proxy", syncer.address))
            address = proxy.address
            _pin(proxy.process.pid, learner=False)
        for name in LEARNERS:
            command = [sys.executable, "-m", "benchmarks.floods", "--learner", address, name, str(where)]
            log = stack.enter_context((where / f"{name}.log").open("wb"))
            learner = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(learner.wait)
            stack.callback(learner.kill)
            _pin(learner.pid, learner=True)
        until(lambda: _steps(where) > 2 * 4 * H, "the learners do not train")
        yield _Besieged(where, syncer, proxy, address)


def _pin(process: int, *, learner: bool) -> None:
    """Give a process and its threads half of the processors, where there are two."""
    processors = sorted(os.sched_getaffinity(0))
    half = len(processors) // 2
    if half:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), processors[:half] if learner else processors[half:])


def _steps(where: Path) -> int:
    """Inner steps of both learners so far."""
    files = [where / f"{name}.steps" for name in LEARNERS]
    return sum(int.from_bytes(file.read_bytes(), "little") if file.exists() else 0 for file in files)


def _measure(besieged: _Besieged, flood: str, size: int, seconds: float, source: str, *, certificate: bool) -> Row:
    where, syncer = besieged.where, besieged.syncer
    process = Path(f"/proc/{syncer.pid}")
    proxy = None if besieged.proxy is None else Path(f"/proc/{besieged.proxy.process.pid}")
    before = _rate(where, process, seconds)
    shown = ["--keys", str(where / "keys" / VILLAIN)] if certificate else []
    command = [
        sys.executable, "-m", "benchmarks.hostile", besieged.address, flood, str(size), "--tls",
        "--seconds", str(seconds), "--source", source, *shown,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
        os.setpriority(os.PRIO_PROCESS, sender.pid, 10)
        _pin(sender.pid, learner=False)
        assert sender.stdout is not None
        sender.stdout.readline()  # it begins
        used_s = 0.0 if proxy is None else _processor_s(proxy)
        during = _rate(where, process, seconds)
        used_s = 0.0 if proxy is None else _processor_s(proxy) - used_s
        outcome = json.loads(sender.stdout.read() or b"{}")
    after = _rate(where, process, seconds)
    alone = (before.per_s + after.per_s) / 2
    return Row(
        flood, proxy is not None, certificate, size, during.per_s / alone if after.per_s else 0.0,
        abs(before.per_s - after.per_s) / alone, (during.processor, (before.processor + after.processor) / 2),
        used_s / seconds,
        max(during.memory_mb, after.memory_mb) - before.memory_mb, during.num_threads, during.num_files, outcome,
        survived=not syncer.has_ended() and after.per_s > 0.5 * before.per_s,
    )  # fmt: skip


@dataclass
class _Rate:
    per_s: float = 0.0
    processor: float = 0.0
    memory_mb: float = 0.0
    num_threads: int = 0
    num_files: int = 0


def _rate(where: Path, process: Path, seconds: float) -> _Rate:
    """Steps a second over `seconds`, and the most that the syncer had meanwhile."""
    rate, began, steps, used_s = _Rate(), time.monotonic(), _steps(where), _processor_s(process)
    while time.monotonic() - began < seconds:
        with suppress(OSError):  # it has ended
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            rate.memory_mb = max(rate.memory_mb, int(status["VmRSS"].split()[0]) * 1024 / 1e6)
            rate.num_threads = max(rate.num_threads, int(status["Threads"]))
            rate.num_files = max(rate.num_files, sum(1 for _ in (process / "fd").iterdir()))
        threading.Event().wait(0.05)
    seconds = time.monotonic() - began
    rate.per_s, rate.processor = (_steps(where) - steps) / seconds, (_processor_s(process) - used_s) / seconds
    return rate


def _processor_s(process: Path) -> float:
    """Seconds of processor time that a process has used; 0 once it has ended."""
    with suppress(OSError):
        user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


# - a learner --------------------------------------------------------------------------------------------------------


def learn(address: str, name: str, where: Path) -> None:
    """Train until killed, and keep the number of inner steps in a file."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exchange = diloco.connect(
        address, run=RUN, learner=name, keys=where / "keys" / name, initialise=name == LEARNERS[0]
    )
    steps = os.open(where / f"{name}.steps", os.O_CREAT | os.O_WRONLY)
    ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ends.set())
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        step = 0
        while not ends.is_set():
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.wait(STEP_S)
            learner.step(tokens=8)
            step += 1
            os.pwrite(steps, step.to_bytes(8, "little"), 0)


# - what is printed --------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row], console: Console) -> None:
    """One line a flood."""
    table = Table("flood", "proxy", "certificate", box=None, pad_edge=False)
    numbers = (
        "size",
        "open",
        "dialled",
        "hung up on",
        "unanswered",
        "goodput",
        "noise",
        "processor",
        "proxy's",
        "memory",
        "threads",
        "files",
    )
    for title in (*numbers, "run"):
        table.add_column(title, justify="right")
    for row in rows:
        good, small = row.goodput >= 1 - MOST_LOST, row.memory_mb <= MOST_MB
        table.add_row(
            row.flood, *("yes" if it else "no" for it in (row.proxy, row.certificate)), f"{row.size:,}",
            *(f"{row.outcome.get(key, 0):,}" for key in ("most_open", "num_dialled", "num_ended", "num_unanswered")),
            f"[{'green' if good else 'red'}]{row.goodput:.1%}[/]",
            f"{row.noise:.1%}", "{:.2f} ({:.2f})".format(*row.processor),
            f"{row.proxy_processor:.2f}" if row.proxy else "",
            f"[{'green' if small else 'red'}]{row.memory_mb:+.0f} MB[/]",
            str(row.num_threads), str(row.num_files), "goes on" if row.survived else "[red]ended[/red]",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(FLOODS), action="append", help="this flood; repeat for more")
    parser.add_argument("--proxy", choices=("yes", "no"), help="only with HAProxy in front, or only without")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement; default %(default)g")
    parser.add_argument("--tenth", action="store_true", help="a tenth of each flood")
    parser.add_argument("--same-address", action="store_true", help="the sender has the learners' address")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--learner", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.learner:
        address, name, where = chosen.learner
        learn(address, name, Path(where))
        return
    sizes = {flood: size // 10 if chosen.tenth else size for flood, size in SIZES.items()}
    source = LEARNERS_SOURCE if chosen.same_address else SOURCE
    with tempfile.TemporaryDirectory() as directory:
        proxies = (False, True) if chosen.proxy is None else (chosen.proxy == "yes",)
        rows = run(Path(directory), chosen.only or tuple(FLOODS), sizes, chosen.seconds, source, proxies)
    if chosen.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()
