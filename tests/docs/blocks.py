"""The code blocks of the pages: fenced ones, and indented ones, which are commands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]

_FOLDED = re.compile(r"^( *)(?:!!!|\?\?\?\+?|===) .*$")
"""Opens an admonition or a tab of MkDocs, whose indented lines are text and not code."""


@dataclass(frozen=True)
class Block:
    """A block of a page. `page` is relative to the root; `language` is "commands" where it is indented."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.strip().splitlines()[0][:60]}"


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found += [
        *sorted((ROOT / "studies").glob("*.md")),
        *(path for path in sorted((ROOT / "dev").glob("*.md")) if path.name != "LOG.md"),
    ]
    for folder in ("docs", "examples", "templates"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return found


def blocks_of(text: str, page: str) -> Iterator[Block]:
    for token in MarkdownIt("commonmark").parse(_unfolded(text)):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language = "commands" if token.type == "code_block" else token.info.split(" ")[0]
            yield Block(page, token.map[0] + 1, language, token.content)


def blocks_of_pages() -> list[Block]:
    return [
        block
        for path in pages()
        for block in blocks_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]


def _unfolded(text: str) -> str:
    """With what is inside of admonitions and tabs moved to the left; as many lines as before."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        if opened := _FOLDED.match(lines[number]):
            inside = len(opened[1]) + 4
            end = number + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" " * inside)):
                end += 1
            lines[number] = ""
            lines[number + 1 : end] = textwrap.dedent("\n".join(lines[number + 1 : end])).split("\n")
        number += 1
    return "\n".join(lines)
