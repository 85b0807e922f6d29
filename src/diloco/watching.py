"""Watchers of a run (a log, metrics, an observer) never stop it: their failures are logged, and the run continues."""

from __future__ import annotations

import logging
from typing import Any, TypeVar, cast

log = logging.getLogger("diloco")

W = TypeVar("W")


def only_watching(watcher: W) -> W:
    """The watcher with methods that never raise: the first failure of each method is logged with its traceback."""
    return cast("W", _Guarded(watcher))


class _Guarded:
    def __init__(self, watcher: object) -> None:
        self._watcher = watcher
        self._failed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watcher, name)
        if not callable(found):
            return found

        def guarded(*values: Any, **named: Any) -> None:
            try:
                found(*values, **named)
            except Exception:  # a failing watcher must not stop the state machine
                if name not in self._failed:
                    self._failed.add(name)
                    watcher = type(self._watcher).__name__
                    log.exception("%s.%s failed; the run continues, and this is logged only once", watcher, name)

        return guarded
