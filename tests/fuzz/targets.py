"""Every reader that is fuzzed, by name: hypothesis tries some inputs of each in the suite, `make fuzz` as many as there
is time for."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz import files, learners, states, wire
from tests.fuzz.examining import Target

TARGETS: dict[str, Callable[[], Target]] = {
    "run-file": files.run_file,
    "site-file": files.site_file,
    "keys": files.keys,
    "line-of-keys": files.line_of_keys,
    "events": files.event_log,
    "checkpoint": files.checkpoint,
    "resume": learners.resume,
    "manifest": states.manifest,
    "state": states.state,
    "follow": states.followed,
    "copy": states.copied,
    "journal": states.journal,
    "calls": wire.calls,
    "replies": wire.replies,
    "codecs": wire.codecs,
    "ranks": wire.ranks,
}
"""Makes each reader when it is needed."""
