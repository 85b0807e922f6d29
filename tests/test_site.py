"""The site of docs/ is complete, and what the repository says of itself agrees. `make docs` builds it, strictly."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import diloco
from diloco.cli import COMMANDS

ROOT = Path(__file__).parents[1]
GENERATED = {"reference/commands.md"}


class Loader(yaml.SafeLoader):
    """mkdocs.yml without the objects that its tags make."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def test_the_navigation_has_every_page_once() -> None:
    listed = list(entries(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert len(set(listed)) == len(listed)
    for path in (ROOT / path.removeprefix("files/") for path in listed if path.startswith("files/")):
        assert path.is_file() or path.with_suffix("").is_file()  # Markdown, or a page that shows another file
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in listed if not path.startswith("files/")} == pages | GENERATED


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: diloco\.(\w+)$", pages, re.MULTILINE)
    assert sorted([*named, "DilocoError", "__version__"]) == sorted(diloco.__all__)  # the error is one of `errors`


def test_the_reference_of_the_command_line_has_every_command() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs installs it")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.commands_page()
    assert [f"diloco {name}" for name in COMMANDS] == re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert "\n### diloco keys rotate\n" in page
    assert (
        "| `--mode <data-parallel\\|elastic\\|decoupled>` | Method; which chips stop when one fails. \\[default" in page
    )


def test_the_citation_is_of_this_version_and_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == diloco.__version__ == project["version"]
    assert citation["license"] == project["license"].split(" AND ")[0]  # the others are of what the package holds


@pytest.mark.parametrize("name", ["bug", "feature", "question"])
def test_an_issue_form_is_one(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert all({"type", "id", "attributes"} <= set(field) and field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked)
    if name == "bug":
        assert "diloco doctor --json" in str(asked)
