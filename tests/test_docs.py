"""What the pages link to is there. Their code blocks: tests/docs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_link_of_a_page_leads_somewhere() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
        *sorted((ROOT / "templates").rglob("*.md")),
    ]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
        for target, anchor in re.findall(r"\]\(([^)#\s]*\.md)?#([^)]+)\)", page.read_text()):
            other = (page.parent / target if target else page).read_text()
            headings = {
                re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", other, re.MULTILINE)
            }
            assert anchor in headings, f"{page.name}: {target}#{anchor}"
