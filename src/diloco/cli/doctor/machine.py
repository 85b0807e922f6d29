"""The machine by itself: Python, cores, memory, the loopback interface, the clock and the disk."""

import ctypes
import fcntl
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diloco.cli.doctor.findings import Finding, shown_bytes

LOW_SHARED_BYTES, LOW_DISK_BYTES, NO_DISK_BYTES = 1 << 30, 10 * 10**9, 10**8
SLOW_SYNC_S = 0.05
"""A version is durable after about four of them; a round of a small model takes a second."""

NUM_SYNCS, SYNC_BYTES = 9, 1 << 20
STA_UNSYNC = 0x0040
"""The bit of the kernel's clock status that says that nothing keeps the clock right."""


def look_at_machine(store: Path) -> Iterator[Finding]:
    """What this machine has; `store` is where a run would be written."""
    yield Finding("python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield _processor()
    yield _memory()
    yield _shared_memory()
    yield _loopback()
    yield _clock()
    yield from _disk(store)


def _processor() -> Finding:
    usable = len(os.sched_getaffinity(0))
    quota = _cgroup_number("cpu.max")
    limit = "" if quota is None else f", limited to the time of {quota:.1f}"
    return Finding("processor", "ok", f"{usable} of {os.cpu_count()} cores{limit}, {platform.machine()}")


def _cgroup_number(name: str) -> float | None:
    """A limit of this process's control group (version 2): cores, or bytes; None where there is none."""
    with suppress(OSError, ValueError):
        words = Path("/sys/fs/cgroup", name).read_text(encoding="utf-8").split()
        if words[0] != "max":
            return int(words[0]) / (int(words[1]) if len(words) > 1 else 1)
    return None


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max")
    capped = "" if limit is None or limit >= total else f", limited to {shown_bytes(limit)}"
    return Finding("memory", "ok", f"{shown_bytes(total)}{capped}")


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total  # noqa: S108 - where the system has it
    except OSError:
        size = 0
    if size >= LOW_SHARED_BYTES:
        return Finding("shared memory", "ok", shown_bytes(size))
    return Finding(
        "shared memory", "absent", f"{shown_bytes(size)} in /dev/shm",
        "data loaders with workers fail when it is full; start the container with a larger one (docker run --shm-size)",
    )  # fmt: skip


def _loopback() -> Finding:
    """Listen on a free port of 127.0.0.1 and connect to it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5):
                server.accept()[0].close()
    except OSError as error:
        return Finding("loopback", "missing", str(error), "bring the interface lo up; torchrun and the demo use it")
    return Finding("loopback", "ok", f"127.0.0.1 listens and answers (port {address[1]} was free)")


def _clock() -> Finding:
    """Whether the kernel's clock is kept by NTP or something like it."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    timex = (ctypes.c_int * 64)()  # struct timex; all zero asks and changes nothing
    if ctypes.CDLL(None).adjtimex(timex) < 0:
        return Finding("clock", "ok", f"{now}; the kernel does not say whether it is kept")
    status = _timex_status(timex)
    if not status & STA_UNSYNC:
        return Finding("clock", "ok", f"{now}, kept by the network's time")
    return Finding(
        "clock", "absent", f"{now}, not kept by the network's time as far as the kernel knows",
        "certificates and the times in reports need clocks that agree; run an NTP client on this machine or its host",
    )  # fmt: skip


def _timex_status(timex: "ctypes.Array[ctypes.c_int]") -> int:
    """The field `status`: after `modes` and four longs."""
    offset = 5 * ctypes.sizeof(ctypes.c_long)  # `modes` is padded to a long
    return ctypes.c_int.from_buffer(timex, offset).value


def _disk(store: Path) -> Iterator[Finding]:
    """Room below `store`, and what it takes to make a megabyte durable there."""
    place = next(path for path in (store, *store.absolute().parents) if path.exists())
    if not place.is_dir():
        yield Finding("disk", "missing", f"{place.absolute()} is no directory", "remove it, or set run.dir elsewhere")
        return
    free = shutil.disk_usage(place).free
    found = f"{shown_bytes(free)} free at {place.absolute()}"
    if free < NO_DISK_BYTES:
        yield Finding("disk", "missing", found, "no run fits; free space, or set run.dir elsewhere")
        return
    low = "a checkpoint is three models and two are kept; free space, or set run.dir elsewhere"
    yield Finding("disk", "ok", found) if free >= LOW_DISK_BYTES else Finding("disk", "absent", found, low)
    try:
        sync_s = _sync_s(place)
    except OSError as error:
        yield Finding(
            "store", "missing", str(error), "a syncer and a learner need a directory that they can write and lock"
        )
        return
    found = f"1 MB is durable after {1000 * sync_s:.1f} ms; locks work"
    slow = "rounds wait for it; keep the syncer's state on a local disk"
    yield Finding("store", "ok", found) if sync_s <= SLOW_SYNC_S else Finding("store", "absent", found, slow)


def _sync_s(directory: Path) -> float:
    """The median time of a write and fsync. Raises OSError where writing, syncing or locking fails."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _ in range(NUM_SYNCS):
            started = time.monotonic()
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.monotonic() - started)
    return statistics.median(times)
