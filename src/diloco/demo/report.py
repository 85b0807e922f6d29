"""`report.html`: one self-contained page with the demo's numbers and pictures."""
from pathlib import Path
from typing import Any
from diloco.demo.story import Outcome


def write_report(path: Path, outcome: Outcome, summary: dict[str, Any]) -> None:
    path.write_text("")
