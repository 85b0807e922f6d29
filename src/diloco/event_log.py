"""Event logs: files of events (`diloco.events`), and their readers.

A killed process leaves at most one torn line, the last one: readers skip it and the next writer removes it. If the disk
refuses events, only events are lost, and a `Gap` counts them.
"""

import errno
import functools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from diloco.closing import Closing
from diloco.errors import StoreError, translated
from diloco.events import Event, Gap, event_types
from diloco.whole_files import free_path

log = logging.getLogger("diloco")

MAX_LINE_BYTES = 1 << 24
"""Length limit of an event."""

_LINE = b'{"t":'
"""Prefix of every line."""

_KINDS: Any = functools.reduce(operator.or_, event_types().values())
_READER: TypeAdapter[Event] = TypeAdapter(cast("Any", Annotated)[_KINDS, Field(discriminator="kind")])

E = TypeVar("E", bound=Event)


class EventLog(Closing):
    """Appends events to a file, one line each, passed to the operating system before `append` returns. Thread-safe.

    A disk error never stops the caller: lost events are counted, logged once, and recorded by a `Gap` when the disk
    accepts events again. Before the first event, nothing in the file changes; with it, a torn line is removed, and a
    file that is not an event log is renamed.

    Raises StoreError if the file cannot be opened.

    Attributes:
        num_missing: events that could not be written since the file was opened.
    """

    def __init__(self, path: str | Path, who: str, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.who = who
        self.num_missing = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._gap = 0  # events lost since the last one that was written
        self._torn_at: int | None = None  # position of a line that was written in part
        self._has_whole_lines = False
        with translated(OSError, StoreError, f"cannot open the event log {self.path}", "choose a writable directory"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def append(self, event: E) -> E:
        """Add time and author to `event` if they are missing, write it, and return it."""
        stamped = self._stamped(event)
        with self._lock:
            try:
                self._write(stamped)
            except OSError as error:
                self._miss(error)
        return stamped

    def _stamped(self, event: E) -> E:
        return event.model_copy(update={"t": event.t or round(self._clock(), 6), "who": event.who or self.who})

    def _write(self, event: Event) -> None:
        """Write the event, after a `Gap` for lost ones; if the disk takes only a part, remove that part."""
        events = [self._stamped(Gap(missing=self._gap)), event] if self._gap else [event]
        data = b"".join(each.model_dump_json().encode() + b"\n" for each in events)
        self._check_file()
        self._remove_torn_line()
        written = self._file.write(data)
        if written != len(data):
            self._torn_at = os.fstat(self._file.fileno()).st_size - written
            self._remove_torn_line()
            raise OSError(errno.ENOSPC, f"the disk accepted {written} of {len(data)} bytes")
        if self._gap:
            log.warning("%s is written again; %d events are missing from it", self.path, self._gap)
            self._gap = 0

    def _check_file(self) -> None:
        """Before the first write, ensure that the file consists of whole lines."""
        if self._has_whole_lines:
            return
        if self.path.exists() and not _cut_torn_line(self.path):
            aside = free_path(lambda number: self.path.with_name(f"{self.path.name}.set-aside-{number}"))
            self.path.rename(aside)
            log.warning("%s does not end like an event log: renamed to %s, and a new one begins", self.path, aside)
        if not self.path.exists():  # renamed here or by another process
            file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._file.close()
            self._file = file
        self._has_whole_lines = True

    def _remove_torn_line(self) -> None:
        """Remove a partly written line, so that the next event starts a line."""
        if self._torn_at is not None:
            os.ftruncate(self._file.fileno(), self._torn_at)
            self._torn_at = None

    def _miss(self, error: OSError) -> None:
        if not self._gap:
            log.error(
                "events cannot be written to %s (%s); the run continues without them, free disk space", self.path, error
            )
        self._gap += 1
        self.num_missing += 1

    def close(self) -> None:
        """Close the file; appending afterwards is a programming error."""
        if self._gap:
            log.error("the last %d events are missing from %s", self._gap, self.path)
        self._file.close()


def read_events(path: str | Path) -> list[Event]:
    """Read all events of a file, in the order of writing; a torn last line is skipped.

    Raises StoreError if the file cannot be read, or if a complete line is not an event of the schema (with its number).
    """
    with translated(OSError, StoreError, f"cannot read the event log {path}", "check the path"):
        content = Path(path).read_bytes()
    return _parse(content, path, first_line=1)


def newest_event(path: Path, *kinds: str) -> Event | None:
    """The newest event of these kinds in a file, of whose other lines none is parsed; None: it has none.

    Raises StoreError as `read_events`.
    """
    marks, newest, number = [f'"kind":"{kind}"'.encode() for kind in kinds], b"", 1
    with translated(OSError, StoreError, f"cannot read the event log {path}", "check the path"), path.open("rb") as raw:
        for at, line in enumerate(raw, start=1):
            if line.endswith(b"\n") and any(mark in line for mark in marks):
                newest, number = line, at
    return next(iter(_parse(newest, path, first_line=number)), None)


class EventTail:
    """Follows a growing event log: each `read` returns the events completed since the last one.

    An absent file has no events. Raises StoreError as `read_events`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0
        self._next_line = 1

    def read(self, most_bytes: int = -1) -> list[Event]:
        """Read whole lines; an incomplete last line is left for the next call.

        Arguments:
            most_bytes: read up to the end of the line at this position; -1: read all.
        """
        with translated(OSError, StoreError, f"cannot read the event log {self.path}", "check the path"):
            try:
                with open(self.path, "rb") as file:
                    file.seek(self._offset)
                    content = file.read(most_bytes)
                    if len(content) == most_bytes:
                        content += file.readline()
            except FileNotFoundError:
                return []
        content = content[: content.rfind(b"\n") + 1]
        events = _parse(content, self.path, first_line=self._next_line)
        self._offset += len(content)
        self._next_line += len(events)
        return events


def _parse(content: bytes, path: str | Path, first_line: int) -> list[Event]:
    lines = content.split(b"\n")
    del lines[-1]  # empty, or a torn line
    events = []
    for number, line in enumerate(lines, start=first_line):
        try:
            events.append(_READER.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            wrong = f"{where}: {first['msg']}"
            if first["type"] == "union_tag_invalid":
                wrong = f"its kind is {first['ctx']['tag']!r}"
            raise StoreError(
                f"line {number} of {path} is not an event of this version of diloco ({wrong}); "
                "read it with the version that wrote it"
            ) from error
    return events


def _cut_torn_line(path: Path) -> bool:
    """Remove a line torn by a kill or a power failure, so that the next event starts a line. False: the file's end is
    not a torn line, and the file is unchanged."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - MAX_LINE_BYTES)
        file.seek(start)
        tail = file.read(end - start)
        keep = tail.rfind(b"\n") + 1
        torn = tail[keep:].rstrip(b"\0")
        if (keep == 0 and start > 0) or not (torn.startswith(_LINE) or _LINE.startswith(torn)):
            return False
        if start + keep < end:
            file.truncate(start + keep)
    return True
