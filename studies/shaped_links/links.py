"""Network namespaces: one for a syncer, one for each learner, which has a link of its own that is shaped in both
directions. Linux, root.

A token bucket shapes what leaves each end of a learner's link: up on the learner's side, down on the syncer's. All meet
on a bridge, so that learners reach each other too (torchft's do), over the links of both.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

LEARNERS = 2
PREFIX = "10.78.0"
HUB_IP = f"{PREFIX}.1"
DEVICE = "uplink"
"""What a learner calls its end."""

BURST_S, MIN_BURST_BYTES, QUEUE = 0.002, 10_000, "50ms"
"""What a link that was idle gives away at once, and how much it holds back before it drops: both little beside a
fragment."""

PAYLOAD = 1448 / 1514
"""Of the bits of full Ethernet frames, which are what is shaped: the rest is Ethernet's, IP's and TCP's, with
timestamps."""

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Sites:
    """Names of the namespaces."""

    hub: str
    learners: tuple[str, ...]

    @staticmethod
    def inside(site: str, *command: str) -> list[str]:
        """A command line that runs another one there."""
        return ["ip", "netns", "exec", site, *command]


def bit_per_s(rate: str) -> float:
    """A rate as tc writes it: "20mbit".

    Raises:
        ValueError: anything but a number above 0 and kbit, mbit or gbit.
    """
    number, unit = rate[:-4], rate[-4:]
    try:
        value = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"a rate of {rate!r} is not one; write 20mbit, 500kbit or 1gbit.")
    return value


def payload_bit_per_s(rate: str) -> float:
    """What TCP carries of it."""
    return PAYLOAD * bit_per_s(rate)


def learner_ip(index: int) -> str:
    """The address of a learner."""
    return f"{PREFIX}.{11 + index}"


@contextmanager
def shaped(rate: str | None) -> Iterator[Sites]:
    """All namespaces, with links of this rate; None: not shaped. They are gone afterwards."""
    mine = f"links-{os.getpid()}"
    sites = Sites(f"{mine}-hub", tuple(f"{mine}-{i}" for i in range(LEARNERS)))
    try:
        for site in (sites.hub, *sites.learners):
            _ip("netns", "add", site)
            _ip("-n", site, "link", "set", "lo", "up")
        _ip("-n", sites.hub, "link", "add", "hub", "type", "bridge")
        _ip("-n", sites.hub, "addr", "add", f"{HUB_IP}/24", "dev", "hub")
        _ip("-n", sites.hub, "link", "set", "hub", "up")
        for index, site in enumerate(sites.learners):
            far = f"to-{index}"
            _ip("-n", sites.hub, "link", "add", far, "type", "veth", "peer", "name", DEVICE, "netns", site)
            _ip("-n", sites.hub, "link", "set", far, "master", "hub", "up")
            _ip("-n", site, "addr", "add", f"{learner_ip(index)}/24", "dev", DEVICE)
            _ip("-n", site, "link", "set", DEVICE, "up")
            if rate is not None:
                _shape(site, DEVICE, rate)
                _shape(sites.hub, far, rate)
        yield sites
    finally:
        for site in (sites.hub, *sites.learners):
            subprocess.run(["ip", "netns", "del", site], check=False, capture_output=True)


def _shape(site: str, device: str, rate: str) -> None:
    burst_bytes = max(MIN_BURST_BYTES, round(BURST_S * bit_per_s(rate) / 8))
    bucket = ["tbf", "rate", rate, "burst", str(burst_bytes), "latency", QUEUE]
    _run(["tc", "-n", site, "qdisc", "add", "dev", device, "root", *bucket])


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
