"""Reads a syncer's journal, also while it is written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from diloco.errors import StoreError, translated
from diloco.run.journal.recorder import is_entry
from diloco.store.journal_files import DIRECTORY, FLUSHED, FORMAT, GZIP, PAYLOADS, number_of, part_paths

_CHUNK_BYTES, _MOST_BYTES = 64 << 10, 16 << 20
"""Bytes of a part that are read at once, and at most decompressed at once."""


class JournalReader:
    """All entries of a journal, in order, each as it was written.

    An altered line, or a missing part, gives an entry {"e": "#damage", "why": …}, after which the next part follows.
    Missing first parts give a gap. A torn last line, as a killed process leaves it, is skipped.

    Arguments:
        state_dir: the syncer's state directory.

    Attributes:
        num_bytes: of all parts.
        read_bytes: of the parts that were read so far.

    Raises:
        StoreError: there is no journal, or it cannot be read, or it has another format.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY
        self._parts = part_paths(self._directory)
        if not self._parts:
            raise StoreError(
                f"there is no journal in {self._directory.absolute()}; a syncer keeps one unless its run file has "
                "[syncer] journal = false."
            )
        with translated(OSError, StoreError, f"cannot read {self._directory}", "check the disk"):
            self.num_bytes = sum(path.stat().st_size for path in self._parts)
        self.read_bytes = 0

    def __iter__(self) -> Iterator[str]:
        number, crc = 0, 0
        for path in self._parts:
            if number_of(path) != number + 1:
                first, last = number + 1, number_of(path) - 1
                missing = f"part {first} is" if first == last else f"parts {first} to {last} are"
                why = f"{missing} missing from {self._directory}"
                if number:
                    yield _damage(why)
                else:  # an operator has removed old parts
                    yield json.dumps({"e": "#gap", "missing": "all", "why": why})
            number, follows, crc = number_of(path), crc, 0
            for position, (text, is_right) in enumerate(self._lines(path), start=1):
                crc = int(text[:8], 16) if is_right else 0
                if not is_right:
                    yield _damage(f"line {position} of {path} is not what was written")
                    break
                entry = text[9:]
                if position == 1:
                    if (head := _head_of(entry)) is None:
                        yield _damage(f"{path} does not begin as a part of a journal does")
                        break
                    self._require_format(path, head)
                    expected = head["follows"]
                    if expected not in (None, follows):
                        yield _damage(f"the end of the part before {path} is missing")
                yield entry
            self.read_bytes += path.stat().st_size

    def payload(self, name: str) -> bytearray | None:
        """The payload kept under this name; None: there is none."""
        path = self._directory / PAYLOADS / name
        with translated(OSError, StoreError, f"cannot read {path}", "check the disk"):
            return bytearray(path.read_bytes()) if path.exists() else None

    def _lines(self, path: Path) -> Iterator[tuple[str, bool]]:
        """The lines of a part, and whether each is as it was written.

        A kill tears at most one flush, whose end is missing. If the end of a flush is present but not the end of its
        last line, something before it was altered, even if it decompresses.
        """
        rest, crc, num_lines, is_swallowed = b"", 0, 0, False
        reader = zlib.decompressobj(GZIP)
        with translated(OSError, StoreError, f"cannot read {path}", "check the disk"), path.open("rb") as file:
            for data, is_flushed in _flushes(file):
                while data:
                    try:
                        rest += reader.decompress(data, _MOST_BYTES)
                    except zlib.error:
                        yield "", False
                        return
                    data = reader.unconsumed_tail
                    *lines, rest = rest.split(b"\n")
                    num_lines += len(lines)
                    for line in lines:
                        crc = zlib.crc32(line[9:], crc)
                        if line[:9] != b"%08x " % crc:
                            yield "", False
                            return
                        yield line.decode(errors="replace"), True
                is_swallowed = bool(rest or not num_lines) and (is_flushed or is_swallowed)
        if is_swallowed:
            yield "", False

    def _require_format(self, path: Path, head: Mapping[str, Any]) -> None:
        found = head["format"]
        if found != FORMAT:
            advice = "use the version of diloco that wrote it"
            for later in self._parts[self._parts.index(path) + 1 :]:
                text, is_right = next(self._lines(later), ("", False))
                if is_right and (_head_of(text[9:]) or {}).get("format") == FORMAT:
                    advice += f", or move the parts before {number_of(later)} elsewhere, and the replay begins there"
                    break
            raise StoreError(f"{path} has format {found} and this version replays {FORMAT}; {advice}.")


def _flushes(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The flushes of a part's writer, then the rest; with each, whether it is a complete flush."""
    rest = b""
    while data := file.read(_CHUNK_BYTES):
        *flushed, rest = (rest + data).split(FLUSHED)
        for each in flushed:
            yield each + FLUSHED, True
    yield rest, False


def _head_of(entry: str) -> dict[str, Any] | None:
    """The description of a part in its first entry; None: the entry is another one."""
    try:
        values: Any = json.loads(entry)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.get("e") == "#journal" and is_entry(values) else None


def _damage(why: str) -> str:
    return json.dumps({"e": "#damage", "why": why})
