"""The last claim of a state directory: a manifest with its boot is that of a process that has ended, so that a restart
need not wait for a lease."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from diloco.escaping import MALFORMED
from diloco.protocol.manifest import Manifest
from diloco.whole_files import write_whole

log = logging.getLogger("diloco.syncer")

FILE = "boot"
"""In the state directory, which one process has locked."""


class FormerClaim:
    """Attributes:
    boot: of the last process that claimed the run from this directory; None: not known.
    epoch: that it claimed; 0: not known.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self.boot: int | None = None
        self.epoch = 0
        try:
            plain = json.loads(self._path.read_bytes())
            self.boot, self.epoch = int(plain["boot"]), int(plain["epoch"])
        except (OSError, *MALFORMED):  # absent, or of a disk that lost it: the next start waits for the lease
            self.boot, self.epoch = None, 0

    def write(self, manifest: Manifest) -> None:
        """Remember the claim of a manifest. A disk that refuses it costs the next start a lease."""
        self.boot, self.epoch = manifest.boot, manifest.epoch
        try:
            write_whole(self._path, json.dumps({"boot": manifest.boot, "epoch": manifest.epoch}))
        except OSError as error:
            log.warning("cannot write %s (%s): the next start waits until the lease is over", self._path, error)
