"""HTML pages: the page of a run, live or as one file, and pages of drawings with their tables."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, StoreError, translated
from diloco.escaping import printable
from diloco.events import RECENT_MERGES
from diloco.report.drawing import Picture

DRAWN_BY = ("plotly.min.js", "drawing.js")
"""Scripts of every page with drawings."""
MAX_STORY_BYTES = 260_000
"""Most bytes of a frozen page's story. The scripts and the style have 1.23 MB, almost all of it plotly."""


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (files("diloco.report") / "assets" / name).read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------- a run's page


def live_page(token: str = "") -> str:
    """A page that follows the run of the server it was loaded from, and loads its assets there.

    `token`: sent with its orders; empty: the page gives no orders.
    """
    scripts = "\n".join(f'<script src="{name}"></script>' for name in (*DRAWN_BY, "page.js"))
    style = '<link rel="stylesheet" href="page.css">'
    return _page(f'<meta name="orders" content="{token}">\n{style}' if token else style, "", scripts)


def frozen_page(story: dict[str, Any]) -> str:
    """The page of `Story.since(0)` as one self-contained file, of at most 1.5 MB for up to some hundred learners.

    Of the lists and curves of a long run of many learners, the longest are halved until they fit.
    """
    text = _json(story)
    for _ in range(64):  # then every list has one element at most
        if len(text) <= MAX_STORY_BYTES:
            break
        part = max(("merges", "events", "loss", "training", "rewards"), key=lambda part: len(_json(story[part])))
        story = story | {part: _halved(story[part])}
        text = _json(story)
    return _page(f"<style>{asset('page.css')}</style>", text, _scripts("page.js"))


def _halved(part: Any) -> Any:
    """The newer half of a list; of curves, every second point and the last."""
    if isinstance(part, list):
        return part[len(part) // 2 :]
    return {name: points[::-2][::-1] for name, points in part.items()}


def _page(style: str, story: str, scripts: str) -> str:
    page = asset("page.html")
    marks = {"style": style, "recent": str(RECENT_MERGES), "story": story, "scripts": scripts}
    for mark, text in marks.items():
        page = page.replace(f"<!-- {mark} -->", text, 1)
    return page


def _json(values: Any) -> str:
    """JSON for a script element, where "</" and "<!--" must not occur."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _scripts(*more: str) -> str:
    texts = (asset(name).replace("</script", "<\\/script") for name in (*DRAWN_BY, *more))
    return "\n".join(f"<script>{text}</script>" for text in texts)


# --------------------------------------------------------------------------------------------------------- drawings


def require_html(path: Path | None) -> None:
    """Raise ConfigError unless `--out` names an HTML file."""
    if path is not None and path.suffix != ".html":
        raise ConfigError(f'--out writes one HTML page, not {path}; name it "{path.with_suffix(".html")}".')


def write_drawings(path: Path, title: str, text: str, pictures: Iterable[Picture]) -> None:
    """Write pictures with their tables as one self-contained page.

    Raises:
        StoreError: the file cannot be written.
    """
    sections = "\n".join(map(_section, pictures))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_plain(title)}</title><link rel="icon" href="data:,"><style>{asset("page.css")}</style></head><body><main>
<h1>{_plain(title)}</h1>
<p class="lead">{_plain(text)}</p>
{sections}
</main>
{_scripts()}
</body></html>
"""
    with translated(OSError, StoreError, f"cannot write {path}", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")


def _section(picture: Picture) -> str:
    title = _plain(picture.title)
    return f"""<section>
<h2>{title}</h2>
<p>{_plain(picture.text)}</p>
<div class="drawing" role="img" aria-label="{title}; its numbers are in the table"></div>
<script type="application/json">{_json(picture.figure)}</script>
<div class="scroll" tabindex="0" role="region" aria-label="{title}: numbers">{_table(picture.heads, picture.rows)}</div>
</section>"""


def _plain(text: str) -> str:
    """Untrusted text, escaped for HTML."""
    return html.escape(printable(text))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table whose first column is text and whose others are numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (f"<{tag}{' class=n' * (place > 0)}>{_plain(text)}</{tag}>" for place, text in enumerate(cells))
        return f"<tr>{''.join(marked)}</tr>"

    return f"<table>{line('th', heads)}{''.join(line('td', row) for row in rows)}</table>"
