"""Who may watch a run's live page, and who may steer the run from it: links that work once, and browsers' sessions."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.errors import AuthError, UnreachableError
from diloco.syncer.keys.callers import UNKNOWN, Caller

LINK_S = 600.0
"""A link that was asked for ends after this."""

MAX_LINKS, MAX_SESSIONS = 64, 256
"""Of one caller; its oldest end where it has more."""

PRINTED = Caller("the printed link", "viewer")
"""Who opens the link that the syncer prints: logs are read by many, so it is a viewer's."""


@dataclass(frozen=True)
class Session:
    """One browser.

    Attributes:
        caller: whose link it has opened.
        token: that its orders carry, which pages of other sites cannot read.
    """

    caller: Caller
    token: str


class PageAccess:
    """Links and sessions. Any thread may call any method.

    Arguments:
        is_open: every caller that reaches the page may do everything.
        check: raises AuthError where a caller's credentials have ended.
        clock: monotonic seconds.

    Attributes:
        printed: the link that the syncer prints; empty where the page is open.
    """

    def __init__(
        self, *, is_open: bool, check: Callable[[Caller], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._check, self._clock, self._lock = check, clock, threading.Lock()
        self._open = Session(UNKNOWN, secrets.token_urlsafe(32)) if is_open else None
        self._links: dict[str, tuple[Caller, float | None]] = {}
        self._sessions: dict[str, Session] = {}
        self.printed = "" if is_open else self._link(PRINTED, None)

    def link_for(self, caller: Caller) -> str:
        """A link for this caller; empty where none is needed."""
        return "" if self._open is not None else self._link(caller, self._clock() + LINK_S)

    def _link(self, caller: Caller, ends_at: float | None) -> str:
        link = secrets.token_urlsafe(32)
        with self._lock:
            self._links[link] = caller, ends_at
            for each in [each for each, (asker, _) in self._links.items() if asker == caller][:-MAX_LINKS]:
                del self._links[each]
        return link

    def enter(self, given: str) -> str | None:
        """A link is opened; returns the session's secret. None: there is no such link any more."""
        with self._lock:
            link = next((each for each in self._links if hmac.compare_digest(each.encode(), given.encode())), None)
            if link is None:
                return None
            caller, ends_at = self._links.pop(link)
            if ends_at is not None and self._clock() >= ends_at:
                return None
            secret = secrets.token_urlsafe(32)
            self._sessions[secret] = Session(caller, secrets.token_urlsafe(32))
            for each in [each for each, it in self._sessions.items() if it.caller == caller][:-MAX_SESSIONS]:
                del self._sessions[each]
            return secret

    def session(self, secret: str) -> Session | None:
        """Of the browser with this secret; None: it has none, or its caller's credentials have ended."""
        if self._open is not None:
            return self._open
        with self._lock:
            kept = [(each, it) for each, it in self._sessions.items()]
        found = next((it for each, it in kept if hmac.compare_digest(each.encode(), secret.encode())), None)
        if found is None or found.caller is PRINTED:
            return found
        try:
            self._check(found.caller)
        except (AuthError, UnreachableError):
            return None
        return found
