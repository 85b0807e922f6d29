"""The long description of the distribution: README.md with links that lead somewhere from outside the repository.

A relative link becomes absolute below `[project.urls] Repository`, at the tag of this version, and a picture likewise.
While pyproject.toml names no repository, a link becomes its text, and a picture is left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def long_description() -> str:
    """README.md for a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")

    def absolute(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if repository is None:
            return "" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{project['version']}/{path})"

    return RELATIVE.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
