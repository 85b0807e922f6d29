"""Pictures in files: each as a PNG file, and all of them with their tables in one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from diloco.errors import ConfigError, StoreError, translated
from diloco.escaping import shortened
from diloco.planning.pages import page, svg, table
from diloco.planning.palette import INK, theme
from diloco.planning.picture_axes import NARROW_IN, WIDTH_IN, plain_text
from diloco.planning.pictures import Picture

STYLE = """
.narrow{display:none;max-width:26rem} .scroll{overflow-x:auto}
.scroll td.n{white-space:nowrap} .scroll td:first-child{min-width:7rem}
@media(max-width:640px){body{margin:1rem auto} .wide{display:none} .narrow{display:block}}
"""
MOST_TITLE = 70


def require() -> None:
    """Raises ConfigError where there is no matplotlib to draw with."""
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed; pip install 'diloco[plot]'")


def write(directory: Path, name: str, title: str, text: str, pictures: Sequence[Picture]) -> list[Path]:
    """Write every picture as `directory`/<its name>.png, and all with their tables as `directory`/<name>.html.

    Returns the files. Raises StoreError where the directory cannot be written to.
    """
    body = "\n".join(map(section, pictures))
    lead = f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(text)}</p>\n'
    files = [directory / f"{each.name}.png" for each in pictures]
    page_file = directory / f"{name}.html"
    with translated(OSError, StoreError, f"cannot write pictures to {directory}", "name another directory with --out"):
        directory.mkdir(parents=True, exist_ok=True)
        for each, file in zip(pictures, files, strict=True):
            figure, heading = each.draw(WIDTH_IN), plain_text(shortened(each.title, MOST_TITLE))
            figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
            figure.savefig(file, dpi=150)
        page_file.write_text(page(title, lead + body, STYLE + theme()), encoding="utf-8")
    return [*files, page_file]


def section(picture: Picture) -> str:
    """A picture with its heading, its text and its table, as HTML: drawn for a wide page, and for a phone."""
    heading, text = html.escape(picture.title), html.escape(picture.text)
    wide, narrow = (svg(picture.draw(width_in), f"diloco {width_in}") for width_in in (WIDTH_IN, NARROW_IN))
    figures = f'<div class="wide">{wide}</div>\n<div class="narrow">{narrow}</div>'
    return (
        f'<h2>{heading}</h2>\n<p>{text}</p>\n{figures}\n<div class="scroll">{table(picture.heads, picture.rows)}</div>'
    )
