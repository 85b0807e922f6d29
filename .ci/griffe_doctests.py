"""Docstrings as the site needs them: lines with >>> are code, which Markdown takes for quotations of quotations."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?:>>>|\.\.\.|\S).*)*", re.MULTILINE)


class FencedDoctests(griffe.Extension):
    """Put fences around the interactive examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
