"""The pictures of `studies.protocols`: a row for each learner, its link below, and the syncer's line at the bottom.

Text and lines have the colours of the run's page, light and dark, on a ground of their own. Fragments are shades: a hue
is a learner's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 420.0, 62.0, 20.0
ROW, TOP = 46.0, 34.0

STYLE = """
svg{color-scheme:light dark;--bg:#fff;--ink:#1f2937;--soft:#5b6472;--line:#dfe3e8;--card:#f6f8fa;
--f0:#1f2937;--f1:#7f8a99;--f2:#bcc4ce;--bad:#c21f30}
@media (prefers-color-scheme:dark){svg{--bg:#12161c;--ink:#e5e7eb;--soft:#a3adba;--line:#2c333d;--card:#1a2028;
--f0:#e5e7eb;--f1:#8f9aa8;--f2:#535e6c;--bad:#ff7b7b}}
.ground{fill:var(--bg)} text{fill:var(--ink);font:11px system-ui,sans-serif} .title{font-weight:600;font-size:12px}
.soft{fill:var(--soft);font-size:10px} .small{font-size:9.5px} .mid{text-anchor:middle} .end{text-anchor:end}
.axis{stroke:var(--line)} .step{fill:var(--card);stroke:var(--soft);stroke-width:.7}
.f0{--c:var(--f0)} .f1{--c:var(--f1)} .f2{--c:var(--f2)}
.up{fill:var(--c)} .down{fill:none;stroke:var(--c);stroke-width:1.5} .tick{stroke:var(--c);stroke-width:2}
.dot{fill:var(--c)} .adopted{fill:var(--c)} .grace{fill:var(--line)} .bad{stroke:var(--bad);stroke-width:2}
.head{fill:var(--soft)} .badtext{fill:var(--bad)} .line{stroke:var(--soft);stroke-width:1.2;fill:none} .box{fill:var(--card);stroke:var(--soft)}
"""


@dataclass
class Trace:
    """What happened. Learners and fragments by number, times in seconds.

    Attributes:
        spans: kind ("compute", "up", "down"), learner, from, to.
        arrived: contributions as the syncer had them: time, learner, fragment, whether late.
        merged: time, fragment, new version.
        graces: windows in which the syncer waited for more than the quorum: from, to.
        adopted: time, learner, fragment, version.
        joined: time, learner, incarnation.
        evicted, killed: time, learner.
    """

    num_learners: int
    until_s: float
    spans: list[tuple[str, int, float, float]] = field(default_factory=list)
    arrived: list[tuple[float, int, int, bool]] = field(default_factory=list)
    merged: list[tuple[float, int, int]] = field(default_factory=list)
    graces: list[tuple[float, float]] = field(default_factory=list)
    adopted: list[tuple[float, int, int, int]] = field(default_factory=list)
    joined: list[tuple[float, int, int]] = field(default_factory=list)
    evicted: list[tuple[float, int]] = field(default_factory=list)
    killed: list[tuple[float, int]] = field(default_factory=list)

    @property
    def began_s(self) -> float:
        """Of the first inner step."""
        return min(begin for kind, _, begin, _ in self.spans if kind == "compute")


def svg(height: float, title: str, parts: Iterator[str]) -> str:
    """A drawing with this title, which is read aloud too."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'width="{1.5 * WIDTH:g}" height="{1.5 * height:g}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
        f'<rect class="ground" width="{WIDTH:g}" height="{height:g}" rx="6"/>\n'
        f"{text(10, 18, title, 'title')}\n{body}\n</svg>\n"
    )


def text(x: float, y: float, what: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(what)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


def picture(title: str, trace: Trace) -> str:
    """The first `until_s` seconds of a trace, from the first inner step on."""
    return svg(TOP + ROW * trace.num_learners + 76, title, _Drawing(trace).parts())


class _Drawing:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.scale = (WIDTH - LEFT - RIGHT) / trace.until_s
        self.line_y = TOP + ROW * trace.num_learners + 16

    def x(self, at_s: float) -> float:
        return LEFT + (at_s - self.trace.began_s) * self.scale

    def is_drawn(self, at_s: float) -> bool:
        return -1e-9 <= at_s - self.trace.began_s <= self.trace.until_s

    def parts(self) -> Iterator[str]:
        for learner in range(self.trace.num_learners):
            yield text(8, TOP + ROW * learner + 10, f"learner {learner}")
            yield from self._learner(learner, TOP + ROW * learner)
        yield from self._syncer()
        yield from self._legend()

    def _learner(self, learner: int, y: float) -> Iterator[str]:
        yield line(LEFT, y + 6, WIDTH - RIGHT, y + 6, "axis")
        for kind, who, began_s, ended_s in self.trace.spans:
            if who == learner and kind == "compute" and self.is_drawn(ended_s):
                yield rect(self.x(began_s), y, (ended_s - began_s) * self.scale, 12, "step")
        for kind, began_s, ended_s, fragment in self._transfers(learner):
            arrow, place = ("↑", y + 24) if kind == "up" else ("↓", y + 33)
            yield rect(self.x(began_s), place - 7, (ended_s - began_s) * self.scale, 6, f"{kind} f{fragment}")
            yield text(self.x(began_s) - 6, place, arrow, "small")
        for at_s, who, fragment, version in self.trace.adopted:
            if who == learner and self.is_drawn(at_s):
                x = self.x(at_s)
                yield f'<path d="M{x:.1f} {y:.1f}l-4-7h8z" class="adopted f{fragment}"/>'
                yield text(x + 5, y - 2, f"v{version}", "small")
        for at_s, who in self.trace.killed:
            if who == learner:
                x = self.x(at_s)
                yield f'<path d="M{x - 5:.1f} {y + 1:.1f}l10 10m0-10l-10 10" class="bad" fill="none"/>'
                yield text(x + 9, y + 10, "killed", "small badtext")

    def _transfers(self, learner: int) -> Iterator[tuple[str, float, float, int]]:
        """Of fragments: what came as it was acknowledged, and what went down until it was adopted."""
        sent = {(round(at_s, 6)): fragment for at_s, who, fragment, _ in self.trace.arrived if who == learner}
        down = [span for span in self.trace.spans if span[:2] == ("down", learner)]
        for kind, who, began_s, ended_s in self.trace.spans:
            if (kind, who) == ("up", learner) and round(ended_s, 6) in sent and self.is_drawn(ended_s):
                yield "up", began_s, ended_s, sent[round(ended_s, 6)]
        for at_s, who, fragment, _ in self.trace.adopted:
            arrived = [span for span in down if span[3] <= at_s + 1e-9]
            if who == learner and self.is_drawn(at_s) and arrived:
                down.remove(arrived[-1])
                yield "down", arrived[-1][2], arrived[-1][3], fragment

    def _syncer(self) -> Iterator[str]:
        y = self.line_y
        yield text(8, y + 4, "syncer")
        for began_s, ended_s in self.trace.graces:
            if self.is_drawn(ended_s):
                yield rect(self.x(began_s), y - 5, (ended_s - began_s) * self.scale, 10, "grace")
        yield line(LEFT, y, WIDTH - RIGHT, y, "line")
        labels: list[tuple[float, str]] = []
        for at_s, learner, fragment, is_late in self.trace.arrived:
            if self.is_drawn(at_s):
                x = self.x(at_s)
                yield line(x, y - 7, x, y, f"tick f{fragment}")
                label = f"{learner}, late" if is_late else str(learner)
                if labels and x - labels[-1][0] < 11:
                    label = f"{labels.pop()[1]} {label}"
                labels.append((x, label))
        for x, label in labels:
            yield text(x, y - 9, label, "small mid")
        for at_s, fragment, version in self.trace.merged:
            if self.is_drawn(at_s):
                yield f'<circle cx="{self.x(at_s):.1f}" cy="{y:.1f}" r="4.5" class="dot f{fragment}"/>'
                yield text(self.x(at_s), y + 15, f"v{version}", "small mid")
        for at_s, learner, incarnation in self.trace.joined:
            if self.is_drawn(at_s) and at_s > self.trace.began_s:
                yield text(
                    self.x(at_s), y + 26, f"{learner} joins" + f" ({incarnation})" * (incarnation > 1), "small mid"
                )
        for at_s, learner in self.trace.evicted:
            if self.is_drawn(at_s):
                yield line(self.x(at_s), y - 7, self.x(at_s), y + 7, "bad")
                yield text(self.x(at_s), y + 26, f"{learner} evicted", "small mid badtext")

    def _legend(self) -> Iterator[str]:
        y = self.line_y + 42
        fragments = sorted({fragment for _, _, fragment, _ in self.trace.arrived})
        yield text(8, y, "▭ inner step  ↑ sent  ↓ answer  ▾ adopted  | arrived, of learner  ● merged, version", "soft")
        x = 8.0
        if self.trace.graces:
            yield rect(x, y + 5, 14, 8, "grace")
            yield text(x + 18, y + 13, "grace window, after the quorum", "soft")
        for fragment in fragments if len(fragments) > 1 else ():
            yield rect(x, y + 6, 9, 7, f"up f{fragment}")
            yield text(x + 13, y + 13, f"fragment {fragment}", "soft")
            x += 80
