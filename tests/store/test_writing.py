"""Files written past the system's cache: the bytes, where a file system cannot do it, and a full disk."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.store.writing import write_parts

LONG = 8 << 20


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("sizes", [(0,), (1, 2, 3), (777, LONG - 777), (8, LONG, 0, LONG + 1), (2 * LONG - 1, 4096, 5)])
def test_parts_are_written_one_after_the_other(
    tmp_path: Path, sizes: tuple[int, ...], past_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "the file system does not write like that")
        return opened(path, flags, mode)

    if not past_cache:
        monkeypatch.setattr(os, "open", without_direct)
    parts = [random.randbytes(size) for size in sizes]
    path = tmp_path / "file"
    path.write_bytes(b"longer" * LONG)
    write_parts(path, [parts[0], *map(memoryview, parts[1:])])
    assert path.read_bytes() == b"".join(parts)


def test_a_file_that_may_not_grow_is_told(tmp_path: Path) -> None:
    """The limit cuts a write in the middle of a page."""
    code = (
        "import resource, sys; from pathlib import Path; from diloco.store.writing import write_parts\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_001, 5_000_001))\n"
        "write_parts(Path(sys.argv[1]), [bytes(8 << 20)])"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "file"], check=False, capture_output=True, text=True)
    assert "File too large" in ended.stderr


def test_a_full_disk_is_told() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_parts(Path("/dev/full"), [bytes(LONG)])
