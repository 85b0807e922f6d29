"""What the pages link to is there. Their code blocks: tests/docs."""

from __future__ import annotations

import re

from tests.docs.blocks import pages


def test_every_link_of_a_page_leads_somewhere() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            is_made = target.endswith("commands.md")  # by .ci/site_hooks.py
            assert is_made or target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
        for target, anchor in re.findall(r"\]\(([^)#\s]*\.md)?#([^)]+)\)", page.read_text()):
            if target.endswith("commands.md"):
                continue
            other = (page.parent / target if target else page).read_text()
            headings = {
                re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", other, re.MULTILINE)
            }
            assert anchor in headings, f"{page.name}: {target}#{anchor}"
