"""The long description of the distribution: README.md with links that lead somewhere from outside the repository.

A relative link becomes absolute below `[project.urls] Repository`, at the tag of this version. While pyproject.toml
names no repository, it becomes its text.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def long_description() -> str:
    """README.md for a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    link = r"\1" if repository is None else rf"[\1]({repository}/blob/v{project['version']}/\2)"
    return RELATIVE.sub(link, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
