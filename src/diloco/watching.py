"""Watchers of a run (a log, metrics, an observer) never stop it: their failures are logged, and the run goes on."""

from __future__ import annotations

import logging
from typing import Any, TypeVar, cast

log = logging.getLogger("diloco")

W = TypeVar("W")


def only_watching(watcher: W) -> W:
    """The watcher, whose methods never raise: what one fails with is logged with its traceback, once for each
    method."""
    return cast("W", _Guarded(watcher))


class _Guarded:
    def __init__(self, watcher: object) -> None:
        self._watcher = watcher
        self._failed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watcher, name)
        if not callable(found):
            return found

        def told(*values: Any, **named: Any) -> None:
            try:
                found(*values, **named)
            except Exception:  # whatever it is: what decides must not fail with it
                if name not in self._failed:
                    self._failed.add(name)
                    watcher = type(self._watcher).__name__
                    log.exception("%s.%s failed; the run goes on without it, and this is said once", watcher, name)

        return told
