"""A folder that holds the newest version of a run's global model, for programs that read files.

The folder is a symbolic link to a directory beside it, `.FOLDER.EPOCH-NUMBER-N`, which is new, and is whole before the
link is swapped; a reader that resolves the link first never sees files of two versions. The directory before stays
until the next swap.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diloco.errors import ConfigError, StoreError, translated
from diloco.escaping import MALFORMED
from diloco.following.follower import FollowedModel
from diloco.whole_files import free_path, hidden_name, remove_leftovers, sync_directory, whole_file

DESCRIPTION = "followed.json"
"""In each copy: `FollowedModel.describe`, and its form. It marks a directory as one that may be replaced."""

Writer = Callable[[dict[str, Tensor], Path], object]
"""Writes a model into a directory that does not exist."""


class FollowedFolder:
    """Keeps the newest model of a run in a folder.

    Arguments:
        folder: absent, empty, or such a folder of the same run and form.
        form: a name of what `write` writes.
        write: writes a model.

    Raises:
        ConfigError: the folder holds something else. StoreError: it cannot be read.
    """

    def __init__(self, folder: Path, run: str, form: str, write: Writer) -> None:
        self._folder, self._run, self._form, self._write = folder.absolute(), run, form, write
        with self._mapped():
            self._description = self._read()
            if self._folder.parent.is_dir():
                remove_leftovers(self._folder.parent, glob.escape(self._folder.name))

    def _read(self) -> dict[str, Any]:
        """The description of the copy in the folder; empty: there is none."""
        is_absent = not self._folder.exists() or (self._folder.is_dir() and not any(self._folder.iterdir()))
        if is_absent and not self._folder.is_symlink():
            return {}
        with suppress(OSError, *MALFORMED):
            found: dict[str, Any] = json.loads((self._folder / DESCRIPTION).read_bytes())
            if self._folder.is_symlink() and (found["run"], found["form"]) == (self._run, self._form):
                return found
        raise ConfigError(
            f"{self._folder} is not empty, and not a copy of the run {self._run} that `diloco follow` keeps as "
            f"{self._form}; choose another folder."
        )

    def update(self, model: FollowedModel) -> bool:
        """Replace the copy by this model; False: it is the one in the folder.

        Raises:
            StoreError: the disk refuses; the copy before is unchanged.
        """
        description = {**model.describe(), "form": self._form}
        if all(self._description.get(key) == description[key] for key in ("run_id", "digests")):
            return False
        parent, name = self._folder.parent, self._folder.name
        new = free_path(lambda number: parent / f".{name}.{model.epoch}-{model.number}-{number}")
        partial = parent / hidden_name(name)  # with all that is left of a process that is killed
        whole, link = partial / "whole", partial / "link"
        with self._mapped():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                self._write(model.state_dict(), whole)
                (whole / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
                _sync(whole)
                before = self._folder.resolve()
                if self._folder.is_dir() and not self._folder.is_symlink():
                    self._folder.rmdir()
                whole.replace(new)
                link.symlink_to(new.name)
                link.replace(self._folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            sync_directory(parent)
            self._tidy({new.name, before.name})
        self._description = description
        return True

    def _tidy(self, kept: set[str]) -> None:
        """Remove copies from before the last one."""
        for path in self._folder.parent.iterdir():
            is_copy = re.fullmatch(rf"\.{re.escape(self._folder.name)}\.\d+-\d+(-\d+)?", path.name)
            if is_copy and path.name not in kept and (path / DESCRIPTION).is_file():
                shutil.rmtree(path)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        failed, advice = f"cannot keep a copy in {self._folder}", "free disk space or choose another folder"
        with translated((OSError, SafetensorError), StoreError, failed, advice):
            yield


def write_tensors(state: dict[str, Tensor], run: str, out: Path) -> None:
    """Write tensors as one safetensors file, under their own names and dtypes; a file that exists is replaced by the
    whole new one.

    Raises:
        StoreError: the disk refuses.
    """
    failed, advice = f"cannot write the model to {out}", "free disk space or choose another file"
    with translated((OSError, SafetensorError), StoreError, failed, advice):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as partial:
            partial.touch()
            mode = partial.stat().st_mode
            save_file(state, partial, metadata={"format": "pt", "run": run})
            partial.chmod(mode)  # the library writes for this user alone


def _sync(directory: Path) -> None:
    """Make the files of a directory, and their names, durable."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)
