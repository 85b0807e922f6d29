"""A store in a directory of this machine: files that are whole or absent, synced to the disk, and a lock.

manifest.json         names all objects of the run
objects/5/17-<hash>   objects that were written in epoch 5
set-aside/            files that a repair did not understand
store.lock            held while a process may write
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from diloco.closing import Closing
from diloco.core.buffers import new_buffer
from diloco.errors import MissingObjectError, StoreError, SwapRefusedError, first_line
from diloco.protocol.manifest import MOST_BYTES, is_object_name
from diloco.run.objects import Found
from diloco.store.writing import write_parts
from diloco.whole_files import sync_directory, sync_file

MANIFEST, OBJECTS, SET_ASIDE, LOCK = "manifest.json", "objects", "set-aside", "store.lock"

TEMPORARY_PREFIX = ".tmp-"

EARLIER = ("store.sqlite", "tensors", "run.json")
"""Files of the formats up to 10."""

MOUNTS = Path("/proc/self/mounts")

NETWORK_TYPES = frozenset({
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs",
    "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "pvfs2", "smb3", "smbfs",
})  # fmt: skip
"""Types of file systems that other machines can have mounted, too."""


def ignore_point(point: str) -> None:
    """The default callback for durable steps: do nothing."""


class Directory(Closing):
    """The `run.objects.Objects` of a directory. Any thread may call any method.

    Arguments:
        path: of the directory.
        lock: make it if there is none, and lock it until `close`; otherwise it is only read.
        at: called with the name of each durable step, so that tests can stop there.

    Raises:
        StoreError: the directory is in use, is on a network file system, has an earlier format, or cannot be used. It
            was not changed.
    """

    shortest_swap_s = 0.0

    def __init__(
        self, path: str | os.PathLike[str], *, lock: bool = True, at: Callable[[str], None] = ignore_point
    ) -> None:
        self.path, self.name = Path(path), str(path)
        self._objects, self._manifest = self.path / OBJECTS, self.path / MANIFEST
        self._at = at
        self._swapping = threading.Lock()
        self._making = threading.Lock()  # directories of epochs
        self._unsynced: set[Path] = set()  # directories with new names
        with self._mapped("opened"):
            _require_format(self.path)
            is_new = not self.path.exists()
        self._lock = lock_directory(self.path) if lock else None
        if lock:
            with self._mapped("opened"):
                self._objects.mkdir(exist_ok=True)
                self._unsynced |= {self._objects, self.path, *([self.path.parent] if is_new else [])}
                for leftover in (
                    *self.path.glob(f"{TEMPORARY_PREFIX}*"),
                    *self._objects.glob(f"*/{TEMPORARY_PREFIX}*"),
                ):
                    leftover.unlink()

    def close(self) -> None:
        """Release the directory. Nothing is lost by not calling it."""
        if self._lock is not None:
            self._lock.close()

    # --- objects ------------------------------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """As `Objects.put`. The file's content is durable then; its name is with the next `swap`."""
        path = self._objects / name
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{threading.get_ident()}")
        with self._mapped(f"written ({OBJECTS}/{name})"):
            try:
                self._make(temporary)
                write_parts(temporary, parts)
                self._at("written")
                sync_file(temporary)
                self._at("synced")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            with self._making:
                self._unsynced.add(path.parent)
        self._at("renamed")

    def _make(self, path: Path) -> None:
        with self._making:  # `delete` removes empty directories
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._unsynced.add(self._objects)
            path.touch()

    def get(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """As `Objects.get`, in memory of its own; fewer bytes where the object ends before `stop`."""
        with self._mapped("read"):
            try:
                descriptor = os.open(self._objects / name, os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                raise self._missing(name) from None
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise self._missing(name)
                end = status.st_size if stop is None else min(stop, status.st_size)
                buffer, done = new_buffer(max(0, end - start)), 0
                while done < len(buffer) and (num_bytes := os.preadv(descriptor, [buffer[done:]], start + done)):
                    done += num_bytes
                return buffer[:done]
            finally:
                os.close(descriptor)

    def _missing(self, name: str) -> MissingObjectError:
        return MissingObjectError(f"{self._objects / name} is missing.")

    def list(self) -> list[str]:
        """As `Objects.list`. Files with other names are ignored."""
        with self._mapped("listed"):
            names = (f"{path.parent.name}/{path.name}" for path in self._objects.glob("*/*"))
            return sorted(filter(is_object_name, names))

    def delete(self, names: Sequence[str]) -> None:
        """As `Objects.delete`."""
        with self._mapped("tidied up"), self._making:
            for name in names:
                (self._objects / name).unlink(missing_ok=True)
            for directory in {(self._objects / name).parent for name in names}:
                with suppress(OSError):  # other objects are in it
                    directory.rmdir()
                    self._unsynced.discard(directory)

    # --- the manifest -------------------------------------------------------------------------------------------------

    def manifest(self) -> Found | None:
        """As `Objects.manifest`. Its token is a hash of its bytes, which never come twice."""
        with self._mapped("read"):
            try:
                with self._manifest.open("rb") as file:
                    data = file.read(MOST_BYTES + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Found(data, _token(data))

    def swap(self, data: bytes, token: str | None) -> str:
        """As `Objects.swap`."""
        temporary = self.path / f"{TEMPORARY_PREFIX}{MANIFEST}"
        with self._swapping, self._mapped("published"):
            found = self.manifest()
            if (None if found is None else found.token) != token:
                self._sync_names()  # of a manifest that this process has swapped in
                raise SwapRefusedError(f"{self._manifest} is not the one that was read.")
            with ThreadPoolExecutor(1) as other:
                syncing = other.submit(self._sync_names)
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                syncing.result()
            self._at("names synced")
            temporary.replace(self._manifest)
            self._unsynced.add(self.path)
            self._at("swapped")
            self._sync_names()
        self._at("committed")
        return _token(data)

    def _sync_names(self) -> None:
        """Make all new names durable."""
        with self._making:
            waiting, self._unsynced = self._unsynced, set()
        try:
            for directory in sorted(waiting, reverse=True):
                with suppress(FileNotFoundError):  # the last of its objects was deleted
                    sync_directory(directory)
        except OSError:
            with self._making:
                self._unsynced |= waiting
            raise

    def set_aside(self, files: Sequence[str]) -> tuple[str, ...]:
        """Move files, by their paths in this directory, to `set-aside/`, those that exist; returns their new
        paths."""
        moved, aside = tuple[str, ...](), self.path / SET_ASIDE
        with self._mapped("repaired"):
            aside.mkdir(exist_ok=True)
            for path in (self.path / file for file in files):
                name, number = path.name if path.parent == self.path else f"{path.parent.name}-{path.name}", 0
                while os.path.lexists(target := aside / (f"{name}.{number}" if number else name)):
                    number += 1
                if os.path.lexists(path):
                    path.rename(target)
                    sync_directory(path.parent)
                    moved += (str(target),)
            sync_directory(aside)
        return moved

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"the state in {self.path} could not be {what} ({first_line(error)}); {_free(self.path)}free space or "
                "repair the disk and try again; versions published before are unharmed."
            ) from error


def _token(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _free(path: Path) -> str:
    try:
        return f"its disk has {shutil.disk_usage(path).free / 1e6:.0f} MB free; "
    except OSError:  # the directory itself is missing, as the caller's error says
        return ""


def _require_format(path: Path) -> None:
    if path.is_file():
        raise StoreError(f"{path} is a file; name a directory for the state.")
    earlier = next((name for name in EARLIER if (path / name).exists()), None)
    if earlier is not None and not (path / MANIFEST).exists():
        raise StoreError(
            f"{path} is the state of a version before the first release (it has {earlier}), which this one does not "
            "read. Nothing was changed; start a new run in another directory, from a checkpoint of this one."
        )


# --- the lock ---------------------------------------------------------------------------------------------------------


def lock_directory(path: Path) -> IO[str]:
    """Make a directory if there is none, and lock it for this process, until the returned file is closed; the kernel
    closes it when the process ends.

    Raises:
        StoreError: another process has locked it, as the message says; it is on a network file system, where a lock
            may not keep other machines out; or the disk refuses.
    """
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:  # no Linux
        mounts = ""
    if (kind := network_type(mounts, str(path.resolve()))) is not None:
        raise StoreError(
            f"{path} is on a network file system ({kind}), whose locks and writes may reach other machines late; use a "
            'directory on a disk of this machine, or a bucket (syncer.store = "s3://…").'
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / LOCK).open("a+")
    except OSError as error:
        raise StoreError(f"{path} could not be opened ({first_line(error)}); check the path and the disk.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise StoreError(
            f"{path} is in use by {holder}; stop that syncer, or give this one a directory of its own."
        ) from None
    with suppress(OSError):  # a full disk: the name only helps people
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file


def network_type(mounts: str, path: str) -> str | None:
    """The type of the network file system that a path is on; None: it is on another one.

    Arguments:
        mounts: as in /proc/self/mounts.
        path: absolute, without links; it need not exist.
    """
    found, longest = None, 0
    for device, place, kind in (line.split(" ")[:3] for line in mounts.splitlines() if line.count(" ") > 2):
        place = re.sub(r"\\([0-7]{3})", lambda it: chr(int(it[1], 8)), place)
        if f"{path}/".startswith(f"{place.rstrip('/')}/") and len(place) >= longest:  # later mounts cover earlier ones
            longest = len(place)
            is_remote = kind in NETWORK_TYPES or (kind.startswith("fuse") and ":" in device)
            found = kind if is_remote else None
    return found
