"""What the pages say can be copied and run, and the defaults that they state are the defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import diloco
from diloco.core.presets import method_from_table

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_about_decoupled_runs_states_the_defaults_and_its_example_runs() -> None:
    [table] = blocks("docs/decoupled.md", "toml")
    assert method_from_table(tomllib.loads(table)["method"]) == diloco.DecoupledDiLoCo()
    [example] = blocks("docs/decoupled.md", "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert [round(metrics["steps"] / 40) for metrics in names["metrics"]] == [5, 5, 3, 2]  # 1 : 1 : 0.6 : 0.4
    assert all(metrics["merges"] > 10 for metrics in names["metrics"])


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
