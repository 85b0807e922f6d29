"""Certificates that end soon, in the syncer's log, so that nothing stops on the day."""

from __future__ import annotations

import datetime as dt
import logging

SOON, AGAIN = dt.timedelta(days=14), dt.timedelta(days=1)
"""How long before its end one is named, and how often."""

log = logging.getLogger("diloco.syncer")


class EndsSoon:
    """What was named, and when. Any thread may call it. No clock: the time is an argument."""

    def __init__(self) -> None:
        self._named_at: dict[str, dt.datetime] = {}

    def look(self, now: dt.datetime, what: str, expires: dt.datetime | None) -> None:
        """Name what ends within `SOON`, at most once in `AGAIN`. None: it does not end."""
        if expires is None or expires - now > SOON:
            return
        named_at = self._named_at.get(what)
        if named_at is None or now - named_at >= AGAIN:
            self._named_at[what] = now
            when = f"{expires.astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"
            said = f"ended at {when}" if expires <= now else f"ends in {left(now, expires)}, at {when}"
            log.warning("%s %s; `diloco keys rotate` makes a new one", what, said)


def left(now: dt.datetime, expires: dt.datetime) -> str:
    """The time until then, which is to come, in words: whole hours, or days to the nearest."""
    rest = expires - now
    hours = rest // dt.timedelta(hours=1)
    return f"{hours} hours" if hours < 48 else f"{round(rest / dt.timedelta(days=1))} days"
