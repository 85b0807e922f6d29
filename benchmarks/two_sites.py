"""Two sites on one machine: network namespaces joined by a rate-limited link, TLS, tokens, the real commands.

Needs root, `ip` and `tc` (Linux). Site A holds the syncer and a learner, site B the other learner; only site B's
traffic crosses the link. Measured: utilisation = 1 − (seconds the training thread was blocked inside `learner.step`) /
(seconds in the training loop).

    python -m benchmarks.two_sites --rate 50mbit --rate 200mbit
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUN_FILE = Path(__file__).parent.parent / "examples" / "two-sites" / "run.toml"
SITES = {"site-a": "10.77.0.1", "site-b": "10.77.0.2"}
METHODS = {
    "DiLoCo, fp32": [
        'method={preset = "DiLoCo", sync_every = 30, outer = {type = "Nesterov", lr = 0.7, momentum = 0.9}}'
    ],
    "DiLoCo, E3M0": [
        (
            'method={preset = "DiLoCo", sync_every = 30, codec = "e3m0", outer = {type = "Nesterov", lr = 0.7, '
            "momentum = "
            "0.9}}"
        )
    ],
    "Streaming, E3M0, tau 5": [],  # as the example says
}


def main() -> None:
    """Run every method at every rate and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", help="of the link, as tc writes it; repeat for more")
    parser.add_argument("--steps", type=int, default=150, help="inner steps of each learner")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("two_sites: network namespaces need root; run it as root")
    rows = []
    for rate in arguments.rate or ["50mbit"]:
        for name, overrides in METHODS.items():
            print(f"{name} at {rate} …", file=sys.stderr)
            rows.append({"rate": rate, "method": name, **measure(rate, overrides, arguments.steps)})
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("link", "method", "utilisation A", "utilisation B", "step s", "MB over the link", "held-out loss")
    for row in rows:
        table.add_row(
            row["rate"],
            row["method"],
            f"{row['site-a']:.3f}",
            f"{row['site-b']:.3f}",
            f"{row['step_s']:.3f}",
            f"{row['link_bytes'] / 1e6:.1f}",
            f"{row['loss']:.3f}",
        )
    Console().print(table)


def measure(rate: str, overrides: list[str], steps: int) -> dict[str, float]:
    """One run: a syncer and two learners until the tokens are spent."""
    tokens = 2 * 128 * steps
    common = [
        f"run.tokens={tokens}",
        "train.global_batch=2",
        "evaluate.sequences=32",
        "train.log_every_s=600",
        *overrides,
    ]
    with tempfile.TemporaryDirectory() as directory, two_sites(rate), ExitStack() as stack:
        work = Path(directory)
        for keys in (["init", "--run", "two-sites", "--host", SITES["site-a"]], ["add", "learner", "site-a", "site-b"]):
            subprocess.run([_diloco(), "keys", *keys], cwd=work, check=True, capture_output=True)
        settings = [*common, f"syncer.address={SITES['site-a']}:7700", 'method.quorum={type = "AllLive", at_least = 2}']
        stack.callback(
            _stop, _start(work, "site-a", ["syncer", str(RUN_FILE), "--address", "0.0.0.0:7700"], settings, "syncer")
        )
        before = sum(counted_bytes())
        learners = {
            site: _start(
                work,
                site,
                [
                    "train",
                    str(RUN_FILE),
                    "--name",
                    site,
                    "--shard",
                    str(shard),
                    "--json",
                    "--initialise",
                    "if-empty",
                ],
                settings,
                site,
            )
            for shard, site in enumerate(SITES)
        }
        for learner in learners.values():
            stack.callback(_stop, learner)
        for site, learner in learners.items():
            if learner.wait(timeout=900) != 0:
                sys.exit(f"two_sites: {site} failed:\n{(work / f'{site}.log').read_text()[-2000:]}")
        link_bytes = sum(counted_bytes()) - before
        summaries = {site: json.loads((work / f"{site}.out").read_text()) for site in SITES}
    return {
        **{site: 1.0 - summary["metrics"]["blocked_s"] / summary["seconds"] for site, summary in summaries.items()},
        "step_s": summaries["site-b"]["metrics"]["step_s"],
        "seconds": summaries["site-b"]["seconds"],
        "link_bytes": link_bytes,
        "loss": summaries["site-a"]["held_out_loss"],
    }


@contextmanager
def two_sites(rate: str, back: str | None = None, *, queue_ms: int = 50) -> Iterator[None]:
    """Two namespaces and a link of this rate from site B to A, and `back` (default: the same), with a token bucket's
    queue of so many milliseconds."""
    try:
        for site in SITES:
            _run("ip", "netns", "add", site)
        _run(
            "ip",
            "link",
            "add",
            "link-a",
            "netns",
            "site-a",
            "type",
            "veth",
            "peer",
            "name",
            "link-b",
            "netns",
            "site-b",
        )
        for (site, ip), link in zip(SITES.items(), ("link-a", "link-b"), strict=True):
            _run("ip", "-n", site, "link", "set", "lo", "up")
            _run("ip", "-n", site, "addr", "add", f"{ip}/24", "dev", link)
            _run("ip", "-n", site, "link", "set", link, "up")
            _run(
                "tc",
                "-n",
                site,
                "qdisc",
                "add",
                "dev",
                link,
                "root",
                "tbf",
                "rate",
                rate if site == "site-b" else back or rate,
                "burst",
                "64kb",
                "latency",
                f"{queue_ms}ms",
            )
        yield
    finally:
        for site in SITES:
            subprocess.run(["ip", "netns", "del", site], check=False, capture_output=True)


def counted_bytes() -> tuple[int, int]:
    """Bytes that have crossed the link from site B to A, and back, Ethernet headers included."""
    listing = subprocess.run(
        ["ip", "-n", "site-b", "-s", "-j", "link", "show", "link-b"], check=True, capture_output=True, text=True
    )
    stats = json.loads(listing.stdout)[0]["stats64"]
    return int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])


def _start(work: Path, site: str, command: list[str], settings: list[str], name: str) -> subprocess.Popen[bytes]:
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    with open(work / f"{name}.out", "wb") as out, open(work / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", site, _diloco(), *command, *overrides], cwd=work, stdout=out, stderr=log
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=30)


def _diloco() -> str:
    return str(Path(sys.executable).with_name("diloco"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
