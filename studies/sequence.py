"""A sequence diagram drawn by hand: a standby takes a run over."""

from __future__ import annotations

from collections.abc import Iterator

from studies.drawing import WIDTH, line, rect, svg, text

LANES = {"first": 46.0, "bucket": 158.0, "standby": 270.0, "learners": 378.0}
MESSAGES = (
    ("learners", "first", "contributions"),
    ("first", "bucket", "version 7"),
    ("first", "bucket", "manifest 41, if 40"),
    ("first", "learners", "version 7, published"),
    ("first", "", "is frozen"),
    ("standby", "bucket", "manifest 41 still?"),
    ("standby", "", "for a lease: it claims"),
    ("standby", "bucket", "manifest 42, if 41"),
    ("learners", "standby", "join; send again"),
    ("standby", "bucket", "version 8"),
    ("standby", "bucket", "manifest 43, if 42"),
    ("standby", "learners", "version 8, published"),
    ("first", "", "wakes"),
    ("first", "bucket", "manifest 42, if 41"),
    ("bucket", "first", "refused: it is fenced"),
)


def takeover() -> str:
    """The drawing."""
    return svg(64 + 25 * len(MESSAGES), "Two syncers: the standby takes the run over", _parts())


def _parts() -> Iterator[str]:
    bottom = 54 + 25 * len(MESSAGES)
    for name, x in LANES.items():
        yield rect(x - 36, 28, 72, 18, "box")
        yield text(x, 41, name, "mid")
        yield line(x, 46, x, bottom, "axis")
    for number, (sender, receiver, said) in enumerate(MESSAGES):
        y = 66 + 25 * number
        x = LANES[sender]
        if not receiver:
            if said == "is frozen":
                yield f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10" class="bad" fill="none"/>'
            else:
                yield rect(x - 4, y - 5, 8, 10, "dot f0")
            yield text(x + 10, y + 4, said, "small badtext" if said == "is frozen" else "small")
            continue
        to_x = LANES[receiver]
        way = 1 if to_x > x else -1
        yield line(x, y, to_x, y, "line")
        yield f'<path d="M{to_x:.1f} {y:.1f}l{-6 * way} -3.5v7z" class="head"/>'
        yield text(min(max((x + to_x) / 2, 84), WIDTH - 84), y - 4, said, "small mid")
