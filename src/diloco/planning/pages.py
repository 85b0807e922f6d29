"""One self-contained HTML page: its frame, tables, and figures as SVG text."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.escaping import printable
from diloco.planning.palette import themed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink,#1f2937);background:var(--bg,#fff)}
body{max-width:880px;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.8rem;margin-bottom:.2rem;overflow-wrap:anywhere} h2{font-size:1.15rem;margin:2.4rem 0 .3rem}
p{margin:.4rem 0} .lead{color:var(--soft,#4b5563)} .note{color:var(--soft,#6b7280);font-size:.9rem}
svg{width:100%;height:auto;margin-top:.4rem}
svg text{font-family:system-ui,sans-serif!important} table{border-collapse:collapse;font-size:.9rem;margin:.6rem 0}
td,th{border-bottom:1px solid var(--line,#e5e7eb);padding:.3rem 1.1rem .3rem 0;text-align:left;vertical-align:top}
th{font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums} code{font-size:.92em}
"""


def plain(text: str) -> str:
    """Text of any origin, for a place between tags."""
    return html.escape(printable(text))


def page(title: str, body: str, style: str = "") -> str:
    """A whole HTML page; nothing in it is loaded from elsewhere. `style` is added to the common one."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{plain(title)}</title><style>{STYLE}{style}</style></head><body>
{body}
</body></html>
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    lines = ["".join(map(_cell("th"), range(len(heads)), heads))]
    lines += ["".join(map(_cell("td"), range(len(row)), row)) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(tag: str) -> Callable[[int, str], str]:
    return lambda place, text: f"<{tag}{'' if place == 0 else ' class=n'}>{plain(text)}</{tag}>"


def values_table(values: Mapping[str, Any]) -> str:
    """Names and values, and values that are tables themselves in a line."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {text(inner)}" for key, inner in value.items())
        return "–" if value is None else str(value)

    rows = "".join(f"<tr><th>{plain(key)}</th><td>{plain(text(value))}</td></tr>" for key, value in values.items())
    return f"<table>{rows}</table>"


def svg(figure: Figure, salt: str = "diloco") -> str:
    """A figure as SVG text: text stays text, in the page's own font, and nothing refers to another file.

    `salt`: of the names inside it; figures of which a page shows only one at a time need their own.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": salt}):
        nameless = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nameless)
    text = buffer.getvalue()
    return themed(text[text.index("<svg") :])
