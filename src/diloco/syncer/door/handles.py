"""File handles of a syncer: as many as the system grants, and a reserve that connections cannot take."""

from __future__ import annotations

import sys

MOST_FILES = 65_536
"""Asked for at most."""

RESERVE = 384
"""For the store, the spool, the event log, what Python opens, and the connections of the live page (`live_page`)."""

MOST_CONNECTIONS = 4096


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many that are."""
    if sys.platform == "win32":
        return MOST_FILES
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_for(num_files: int) -> int:
    """Connections that a process with this many files accepts at a time."""
    return max(16, min(MOST_CONNECTIONS, num_files - RESERVE))
