"""A sequence diagram drawn by hand: a standby takes a run over."""

from __future__ import annotations

from collections.abc import Iterator

from studies.drawing import WIDTH, line, rect, svg, text

LANES = {"first": 60.0, "standby": 210.0, "learners": 360.0}
MESSAGES = (
    ("learners", "first", "contributions"),
    ("first", "standby", "version 7: file, then record"),
    ("standby", "first", "durable here too"),
    ("first", "learners", "version 7, published"),
    ("first", "", "is gone"),
    ("standby", "learners", "silence; promise me epoch 2?"),
    ("learners", "standby", "promised, by most of them"),
    ("standby", "", "serves the run from version 7, in epoch 2"),
    ("learners", "standby", "join again; offer what is not published"),
    ("standby", "learners", "version 8"),
    ("first", "standby", "back, with --follow"),
    ("standby", "first", "epoch 2, versions since 7"),
)


def takeover() -> str:
    """The drawing."""
    return svg(64 + 25 * len(MESSAGES), "Two syncers: the standby takes the run over", _parts())


def _parts() -> Iterator[str]:
    bottom = 54 + 25 * len(MESSAGES)
    for name, x in LANES.items():
        yield rect(x - 40, 28, 80, 18, "box")
        yield text(x, 41, name, "mid")
        yield line(x, 46, x, bottom, "axis")
    for number, (sender, receiver, said) in enumerate(MESSAGES):
        y = 66 + 25 * number
        x = LANES[sender]
        if not receiver:
            if said == "is gone":
                yield f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10" class="bad" fill="none"/>'
            else:
                yield rect(x - 4, y - 5, 8, 10, "dot f0")
            yield text(x + 10, y + 4, said, "small badtext" if said == "is gone" else "small")
            continue
        to_x = LANES[receiver]
        way = 1 if to_x > x else -1
        yield line(x, y, to_x, y, "line")
        yield f'<path d="M{to_x:.1f} {y:.1f}l{-6 * way} -3.5v7z" class="head"/>'
        yield text(min(max((x + to_x) / 2, 96), WIDTH - 96), y - 4, said, "small mid")
