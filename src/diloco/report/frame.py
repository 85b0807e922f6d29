"""The page of a run as text: served live, or frozen into one file."""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.events import RECENT_MERGES

NEEDS = "pip install 'diloco[dashboard]'"


def asset(name: str) -> str:
    """The text of one of the page's own files."""
    return (files("diloco.report") / "assets" / name).read_text(encoding="utf-8")


def plotly_file() -> Path:
    """The file of the library that draws the charts.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ConfigError(f"the page of a run needs plotly, which is not installed; {NEEDS}")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def part(name: str) -> str:
    """The text of a part of the live page."""
    return plotly_file().read_text(encoding="utf-8") if name == "plotly.js" else asset(name)


def live_page(token: str = "") -> str:
    """A page that follows the run at the address it came from; its parts are `page.css`, `page.js`, `plotly.js`.

    `token`: that its orders carry; empty: it gives none.
    """
    scripts = '<script src="plotly.js"></script>\n<script src="page.js"></script>'
    style = '<link rel="stylesheet" href="page.css">'
    return _page(f'<meta name="orders" content="{token}">\n{style}' if token else style, "", scripts)


def frozen_page(story: dict[str, Any]) -> str:
    """The same page of `Story.since(0)` with all its parts inside; nothing is loaded from elsewhere.

    Raises:
        ConfigError: the library that draws the charts is not installed.
    """
    library = plotly_file().read_text(encoding="utf-8")
    scripts = f"<script>{_script(library)}</script>\n<script>{_script(asset('page.js'))}</script>"
    # in a script element only "</" and "<!--" would be read as more than text
    return _page(f"<style>{asset('page.css')}</style>", json.dumps(story).replace("<", "\\u003c"), scripts)


def _script(text: str) -> str:
    return text.replace("</script", "<\\/script")


def _page(style: str, story: str, scripts: str) -> str:
    page = asset("page.html")
    marks = {"style": style, "recent": str(RECENT_MERGES), "story": story, "scripts": scripts}
    for mark, text in marks.items():
        page = page.replace(f"<!-- {mark} -->", text, 1)
    return page
