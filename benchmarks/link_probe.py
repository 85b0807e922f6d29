"""Does `diloco plan measure` find the rate of a link? Two network namespaces, a link of known rates, TLS, tokens, the
real commands.

Needs root, `ip` and `tc` (Linux). The link is shaped as Ethernet frames; of a full frame of 1514 bytes TCP with
timestamps carries 1448, so payload can reach 95.6 % of the shaped rate. Rates are of payload: compare with that limit.

    python -m benchmarks.link_probe --link 20mbit,100mbit --link 400mbit,400mbit
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.two_sites import RUN_FILE, SITES, _diloco, _start, _stop, two_sites

PAYLOAD = 1448 / 1514
"""Of the bits of full Ethernet frames."""
LINKS = ("5mbit,20mbit", "20mbit,100mbit", "100mbit,100mbit", "400mbit,400mbit")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def main() -> None:
    """Measure every link and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", action="append", help="up,down as tc writes rates; repeat for more")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("link_probe: network namespaces need root; run it as root")
    rows = [measure(*link.split(",")) for link in arguments.link or LINKS]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(
        "link up, down", "measured up", "of payload limit", "measured down", "of payload limit", "latency ms", "MB"
    )
    for row in rows:
        table.add_row(
            f"{row['up']}, {row['down']}",
            f"{row['up_bit_per_s'] / 1e6:.1f} Mbit/s",
            f"{100 * row['up_ratio']:.1f} %",
            f"{row['down_bit_per_s'] / 1e6:.1f} Mbit/s",
            f"{100 * row['down_ratio']:.1f} %",
            f"{1e3 * row['latency_s']:.2f}",
            f"{row['num_bytes'] / 1e6:.0f}",
        )
    Console().print(table)


def measure(up: str, down: str) -> dict[str, Any]:
    """One link: a syncer on site A, the command on site B."""
    with tempfile.TemporaryDirectory() as directory, two_sites(up, down), ExitStack() as stack:
        work = Path(directory)
        for keys in (["init", "--run", "two-sites", "--host", SITES["site-a"]], ["add", "learner", "site-b"]):
            subprocess.run([_diloco(), "keys", *keys], cwd=work, check=True, capture_output=True)
        settings = [f"syncer.address={SITES['site-a']}:7700"]
        stack.callback(
            _stop, _start(work, "site-a", ["syncer", str(RUN_FILE), "--address", "0.0.0.0:7700"], settings, "syncer")
        )
        command = ["plan", "measure", str(RUN_FILE), "--name", "site-b", "--only", "link", "--json"]
        measured = _once_it_answers(work, command, settings)
    return {
        "up": up,
        "down": down,
        **{key: measured[key] for key in ("up_bit_per_s", "down_bit_per_s", "latency_s", "num_bytes")},
        "up_ratio": measured["up_bit_per_s"] / (PAYLOAD * _bit_per_s(up)),
        "down_ratio": measured["down_bit_per_s"] / (PAYLOAD * _bit_per_s(down)),
    }


def _once_it_answers(work: Path, command: list[str], settings: list[str]) -> dict[str, float]:
    for _ in range(
        20
    ):  # the syncer takes a few seconds to start, and the command as many to say that it does not answer
        process = _start(work, "site-b", command, settings, "measure")
        if process.wait(timeout=300) == 0:
            values: dict[str, float] = json.loads((work / "measure.out").read_text())
            return values
    sys.exit(f"link_probe: nothing was measured:\n{(work / 'measure.log').read_text()[-2000:]}")


def _bit_per_s(rate: str) -> float:
    return float(rate[:-4]) * UNITS[rate[-4:]]


if __name__ == "__main__":
    main()
