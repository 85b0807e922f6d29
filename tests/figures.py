"""What a figure of plotly shows: its key, and what is drawn."""

import html
import json
import re
from pathlib import Path
from typing import Any

from diloco.report.drawing import Figure


def figures_in(page: Path) -> list[Figure]:
    """The figures that lie in a page of drawings, in order."""
    text = page.read_text(encoding="utf-8")
    return [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)]


def text_of(label: str) -> str:
    """A label as it was before it was wrapped and escaped."""
    return html.unescape(re.sub(r"</?b>", "", label.replace("<br>", " ")))


def key_of(figure: Figure) -> list[str]:
    """What the key names, in its order; nothing where there is none."""
    if not figure["layout"]["showlegend"]:
        return []
    ranked = sorted(figure["data"], key=lambda trace: trace.get("legendrank", 1000))
    shaded = [shape for shape in figure["layout"].get("shapes", ()) if shape["showlegend"]]
    return [text_of(each["name"]) for each in (*ranked, *shaded)]


def labels_of(figure: Figure) -> list[str]:
    """The labels of the rows of bars, the first on top; those in bold end with an asterisk."""
    labels = [each["text"] for each in figure["layout"]["annotations"]]
    return [f"{text_of(label)}*" if label.startswith("<b>") else text_of(label) for label in labels]


def traces_of(figure: Figure) -> dict[str, dict[str, Any]]:
    """What is drawn, by name; curves that coincide are one, under each of their names."""
    named = ((name, trace) for trace in figure["data"] for name in names_of([text_of(trace["name"])]))
    return dict(named)


def names_of(key: list[str]) -> list[str]:
    """The curves that a key names, those that coincide each by itself."""
    return [name for entry in key for name in re.split(r" [=≈] (?=\D)", entry)]
