"""python -m tests.fuzz.engine TARGET SECONDS FOLDER: one reader in one process, its inputs guided by what they cover.

Atheris (libFuzzer) keeps inputs that reach new lines of `diloco` and changes those further; half of the changes are
its own, and half are `Target.mutate`. An input that breaks the reader is kept and does not end the process: the first
of each place is told. FOLDER/corpus holds the inputs that cover something, FOLDER/found those that broke the reader,
and FOLDER/result.json what came of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import atheris

with atheris.instrument_imports(include=["diloco"]):
    from tests.fuzz.examining import BrokenReaderError, examine
    from tests.fuzz.targets import TARGETS

MOST_BYTES = 1 << 18
"""Of an input."""

REGRESSIONS = Path(__file__).parent / "corpus"


class Engine:
    """Counts what is tried."""

    def __init__(self, name: str, seconds: float, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._began_s = time.monotonic()
        self._seconds = seconds
        self._num_tried = self._num_read = 0
        self._found: dict[str, str] = {}
        self.target = TARGETS[name]()

    def one(self, data: bytes) -> None:
        """Try an input; ends the process when the time is over."""
        self._num_tried += 1
        try:
            self._num_read += examine(self.target, data)
        except BrokenReaderError as violation:
            self._keep(violation, data)
        if time.monotonic() - self._began_s >= self._seconds:
            self._end()

    def mutate(self, data: bytes, max_bytes: int, seed: int) -> bytes:
        """A changed input."""
        random = Random(seed)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(data, max_bytes))
        return self.target.mutate(data, random)[:max_bytes]

    def corpus(self) -> Path:
        """The folder of inputs to begin with, filled."""
        corpus = self._folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for seed in [*self.target.beginnings, *(path.read_bytes() for path in (REGRESSIONS / self._name).glob("*"))]:
            (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
        return corpus

    def _keep(self, violation: BrokenReaderError, data: bytes) -> None:
        cause = violation.__cause__ or violation
        frames = traceback.extract_tb(cause.__traceback__)
        ours = [frame for frame in frames if "/diloco/" in frame.filename] or frames[-1:]
        place = f"{type(cause).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        if place in self._found:
            return
        found = self._folder / "found"
        found.mkdir(parents=True, exist_ok=True)
        path = found / hashlib.sha256(data).hexdigest()[:16]
        path.write_bytes(data)
        self._found[place] = str(violation)
        print(f"\n{place}: {violation}\n  {path}", file=sys.stderr, flush=True)
        traceback.print_exception(cause, limit=-6, file=sys.stderr)

    def _end(self) -> NoReturn:
        result: dict[str, Any] = {
            "target": self._name, "seconds": round(time.monotonic() - self._began_s, 1), "tried": self._num_tried,
            "read": self._num_read, "refused": self._num_tried - self._num_read - len(self._found),
            "most_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "found": self._found,
        }  # fmt: skip
        (self._folder / "result.json").write_text(json.dumps(result, indent=1))
        self.target.close()
        sys.stderr.flush()
        os._exit(0)  # libFuzzer would take anything else for a crash


def main() -> None:
    """Fuzz until the time is over."""
    name, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    logging.disable()
    engine = Engine(name, seconds, folder)
    flags = [f"-max_len={MOST_BYTES}", "-rss_limit_mb=4096", "-timeout=60", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *flags, str(engine.corpus())], engine.one, custom_mutator=engine.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
