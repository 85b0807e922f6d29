"""What `diloco doctor` says of one thing it looked at."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        state: "ok"; "absent": something optional is not here; "missing": something needed is not here or does not work.
        found: what is here.
        advice: what does not work without it, and what to do; empty where the state is "ok".
    """

    what: str
    state: State
    found: str
    advice: str = ""


def shown_bytes(number: float) -> str:
    """A size for people, in GB or MB."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"
