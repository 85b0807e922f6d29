"""What the processes of a run hold, as Linux says it, and how large its files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Held:
    """By one process: resident memory, open files and sockets, threads."""

    pid: int
    name: str
    memory_bytes: int
    handles: int
    threads: int


def descendants(root: int) -> list[int]:
    """Every process below `root` that is there now."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        below.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = list[int](), [root]
    while waiting:
        children = below.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def held(pid: int) -> Held | None:
    """By a process of `diloco`; None: it has ended, or is another one."""
    directory = Path("/proc") / str(pid)
    try:
        arguments = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
        status = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines() if ":" in line)
        handles = len(list((directory / "fd").iterdir()))
    except OSError:
        return None
    if "syncer" in arguments and "--keys" in arguments:
        name = "syncer"
    elif "tests.soak.viewers" in arguments:
        name = "viewers"
    elif "--name" in arguments:
        name = arguments[arguments.index("--name") + 1]
    else:
        return None
    if "VmRSS" not in status:  # it is ending
        return None
    return Held(pid, name, 1024 * int(status["VmRSS"].split()[0]), handles, int(status["Threads"]))


def size_of(path: Path) -> int:
    """Bytes of all files below a path."""
    total = 0
    for each in path.rglob("*"):
        try:
            total += each.stat().st_size if each.is_file() else 0
        except OSError:  # it was removed meanwhile
            continue
    return total
