"""Colours of pictures: one for each thing, told apart by colour-blind readers, and for each its like on a dark page.

They are those of the live page (`diloco/report/assets`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

BLUE, RED, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
AMBER, SKY, VIOLET, OLIVE = "#e69f00", "#56b4e9", "#7f3c8d", "#6b7c3a"
COLOURS = (BLUE, RED, GREEN, PINK, AMBER, SKY, VIOLET, OLIVE)
COMPUTING, WAITING, STOPPED = BLUE, AMBER, RED
INK, TEXT, GREY, GRID, PAPER = "#1f2937", "#475569", "#94a3b8", "#e5e7eb", "#ffffff"

ON_DARK: Mapping[str, str] = {
    BLUE: "#3d9ee0", RED: "#ff8433", GREEN: "#2ecc9f", PINK: "#e4a0c6", AMBER: "#f2b632", SKY: "#8fd3ff",
    VIOLET: "#b57cc4", OLIVE: "#a3b86c", INK: "#e5e7eb", TEXT: "#a3adba", GREY: "#7d8590", GRID: "#2c333d",
    PAPER: "#12161c",
}  # fmt: skip
"""By colour: what stands for it on a dark page."""

METHODS: Mapping[str, str] = {
    "data-parallel": RED, "elastic": PINK, "diloco": BLUE, "streaming": GREEN, "eager": AMBER, "decoupled": SKY
}  # fmt: skip
"""By method, as `Setting` and `Fleet` name it."""
_LEARNERS: Mapping[int, str] = {1: SKY, 2: BLUE, 4: GREEN, 8: VIOLET}


def of_learners(numbers: Sequence[int]) -> dict[int, str]:
    """A colour for DiLoCo with each of these numbers of learners: the same for the usual ones in every picture."""
    others = iter((PINK, OLIVE, AMBER, GREY) * len(numbers))
    return {number: _LEARNERS.get(number) or next(others) for number in numbers}


def themed(svg: str) -> str:
    """Have the page say what each colour of a figure is; a page that does not say it shows them as they are."""
    return re.sub(rf"(?<=: )(?:{'|'.join(ON_DARK)})", lambda found: f"var(--c{found[0][1:]},{found[0]})", svg)


def theme() -> str:
    """The style of a page that is dark where its reader's system is: the colours of its figures and its own."""

    def variables(values: Mapping[str, str]) -> str:
        named = {"ink": INK, "soft": TEXT, "line": GRID, "bg": PAPER}
        both = {**{key: values[colour] for key, colour in named.items()}, **{f"c{k[1:]}": v for k, v in values.items()}}
        return ":root{" + "".join(f"--{name}:{value};" for name, value in both.items()) + "}"

    light = variables({colour: colour for colour in ON_DARK})
    return f":root{{color-scheme:light dark}}\n{light}\n@media(prefers-color-scheme:dark){{{variables(ON_DARK)}}}\n"
