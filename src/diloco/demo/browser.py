"""Opening the demo's pages in a browser, where a person sits in front of it."""

from __future__ import annotations

import contextlib
import socket
import sys
import webbrowser
from collections.abc import Mapping
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 0.2


def is_wanted(environ: Mapping[str, str], *, is_terminal: bool, platform: str = sys.platform) -> bool:
    """Whether to open a browser where nothing was said: at a terminal with a display, and not in CI."""
    has_display = platform in ("darwin", "win32") or any(environ.get(it) for it in ("DISPLAY", "WAYLAND_DISPLAY"))
    return is_terminal and has_display and environ.get("CI", "false") in ("", "0", "false")


def is_served(url: str) -> bool:
    """Whether something listens at the address."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), CONNECT_TIMEOUT_S):
        return True
    return False


def show(url: str) -> bool:
    """Open the page, beside what this process does. Returns whether there is a browser that can.

    One that would draw in this very terminal is passed over.
    """
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    is_textual = type(browser) in (webbrowser.GenericBrowser, webbrowser.Elinks)
    return not is_textual and browser.open(url)
