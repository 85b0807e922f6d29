"""The files of a driver's journal: parts `STATE/journal/00000001.jsonl.gz` and so on, and kept payloads.

A part is a gzip stream of lines. A line is the CRC-32 of all lines of its part up to it (8 hex digits), a space, and an
entry (`run.journal.recorder`) as JSON: `zcat PART | cut -c10-` shows them. The first entry of a part describes it:

    {"e": "#journal", "format": 9, "diloco": version, "part": 1, "follows": null, "wall_s": …, "t": …}

`follows` is the last CRC of the part before, if the same process wrote both. `wall_s` and `t` are the same moment, in
Unix time and on the clock of the entries. {"e": "#gap", "missing": n} replaces entries that the disk refused. Readers
refuse other formats.

    STATE/journal/payloads/contribution-<sha256>               payloads of contributions, as they were encoded
    STATE/journal/payloads/fragment-<index>-<version>-<digest>  fp32, of the run's initial model; with the suffix
                                                               .safetensors a fragment's whole state at a later version
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diloco.store.directory import TEMPORARY_PREFIX
from diloco.whole_files import sync_directory

log = logging.getLogger("diloco.syncer")

FORMAT = 9
DIRECTORY, PAYLOADS, SUFFIX = "journal", "payloads", ".jsonl.gz"

GZIP = 31
"""`wbits` of a gzip stream for zlib."""

FLUSHED = b"\0\0\xff\xff"
"""The last bytes of a flush of zlib."""

LEVEL = 6
"""The compression level."""

PART_BYTES = 64 << 20
"""At this size a part ends and the next begins."""

WAITING_BYTES = 256 << 10
"""Entries wait in memory up to this size, or until the next `sync`."""

MOST_WAITING_BYTES = 16 << 20
"""Entries wait in memory up to this size for a disk that refuses them; beyond it all waiting entries are dropped, and a
gap replaces them."""


class JournalFiles:
    """Writes a journal (`recorder.JournalPort`). Any thread may call any method; no method raises.

    Arguments:
        state_dir: the syncer's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY
        self._adding = threading.Lock()
        self._writing = threading.Lock()
        self._pending: list[str] = []
        self._pending_bytes = 0
        self._waiting = bytearray()  # compressed
        self._num_waiting = self._num_missing = 0
        self._descriptor: int | None = None
        self._part = self._part_bytes = self._crc = 0
        self._follows: int | None = None
        self._is_refused = False
        self._is_ending = False  # the part is complete, and not yet all on disk

    def append(self, entry: str) -> None:
        """As `recorder.JournalPort`."""
        with self._adding:
            self._pending.append(entry)
            self._pending_bytes += len(entry)
            is_much = self._pending_bytes >= WAITING_BYTES
        if is_much and self._writing.acquire(blocking=False):  # otherwise another thread is writing
            try:
                self._flush()
            finally:
                self._writing.release()

    def sync(self) -> None:
        """As `recorder.JournalPort`."""
        with self._writing:
            self._flush(sync=True)

    def close(self) -> None:
        """Write the last entries, and end the journal."""
        with self._writing:
            self._flush(end=True, sync=True)
            if self._num_missing + self._num_waiting + len(self._pending):
                log.error("the last entries of the journal in %s are missing: its disk refuses them", self._directory)
            self._close_part()

    def _flush(self, *, end: bool = False, sync: bool = False) -> None:
        """Write all waiting entries; they keep waiting while the disk refuses."""
        try:
            if self._is_ending:
                self._end_part()
            if self._descriptor is None:
                self._begin_part()
            assert self._descriptor is not None
            self._compress(end=end)
            self._write()
            self._num_waiting = 0
            if sync:
                os.fsync(self._descriptor)
            if self._is_refused:
                log.warning("the journal in %s is written again", self._directory)
            self._is_refused = False
            if self._part_bytes >= PART_BYTES and not end:
                self._compress(end=True)
                self._is_ending = True
                self._end_part()
        except OSError as error:
            self._refused(error)

    def _compress(self, *, end: bool) -> None:
        with self._adding:
            entries, self._pending, self._pending_bytes = self._pending, [], 0
        self._num_waiting += len(entries)
        before = len(self._waiting)
        self._waiting += self._compressor.compress(b"".join(map(self._line, entries)))
        self._waiting += self._compressor.flush(zlib.Z_FINISH if end else zlib.Z_SYNC_FLUSH)
        self._part_bytes += len(self._waiting) - before

    def _line(self, entry: str) -> bytes:
        data = entry.encode()
        self._crc = zlib.crc32(data, self._crc)
        return b"%08x %s\n" % (self._crc, data)

    def _begin_part(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        part = max(self._part, *(number_of(path) for path in part_paths(self._directory)), 0) + 1
        path = self._directory / f"{part:08d}{SUFFIX}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._part, self._part_bytes, self._crc = part, 0, 0
        self._compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        head: dict[str, Any] = {
            "e": "#journal", "format": FORMAT, "diloco": version("diloco"), "part": part, "follows": self._follows,
            "wall_s": round(time.time(), 6), "t": time.monotonic(),
        }  # fmt: skip
        lines = [head]
        if self._num_missing:
            log.error("%d entries are missing from the journal in %s", self._num_missing, self._directory)
            lines.append({"e": "#gap", "missing": self._num_missing})
            self._num_missing = 0
        self._waiting += self._compressor.compress(b"".join(self._line(json.dumps(line)) for line in lines))
        sync_directory(self._directory)

    def _end_part(self) -> None:
        """End a part that this process continues in the next one."""
        self._write()
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        self._follows, self._num_waiting = self._crc, 0
        self._close_part()

    def _write(self) -> None:
        assert self._descriptor is not None
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def _close_part(self) -> None:
        self._is_ending = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _refused(self, error: OSError) -> None:
        if not self._is_refused:
            log.error("the journal cannot be written to %s (%s); the run continues without it", self._directory, error)
        self._is_refused = True
        with self._adding:
            if self._pending_bytes + len(self._waiting) < MOST_WAITING_BYTES:
                return
            self._num_missing += self._num_waiting + len(self._pending)
            self._pending, self._pending_bytes = [], 0
        self._waiting.clear()
        self._num_waiting, self._follows = 0, None
        self._close_part()


class PayloadFiles:
    """Keeps payloads beside a journal (`payloads.Keep`), durably. Any thread may call it, in the one process that holds
    the state directory's lock."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY / PAYLOADS
        self._is_refused = False
        for temporary in self._directory.glob(f"{TEMPORARY_PREFIX}*"):
            temporary.unlink(missing_ok=True)

    def __call__(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Keep a payload. Returns False if the disk refused it; the run continues without it."""
        path = self._directory / name
        temporary = self._directory / f"{TEMPORARY_PREFIX}{name}-{threading.get_ident()}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if path.exists():
                return True
            try:
                with temporary.open("wb") as file:
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(self._directory)
        except OSError as error:
            if not self._is_refused:
                log.error("payloads cannot be kept in %s (%s); the run continues without them", self._directory, error)
            self._is_refused = True
            return False
        self._is_refused = False
        return True

    def has_any(self, prefix: str) -> bool:
        """As `payloads.Keep`."""
        return next(self._directory.glob(f"{prefix}*"), None) is not None


def part_paths(directory: Path) -> list[Path]:
    """The parts of a journal, in order."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if path.name.removesuffix(SUFFIX).isdigit())


def number_of(path: Path) -> int:
    """The number of a part."""
    return int(path.name.removesuffix(SUFFIX))
