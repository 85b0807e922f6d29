"""Tables that a command writes into a page: what stands between `<!-- table NAME -->` and `<!-- end -->` is its."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BLOCK = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with its blocks of these names replaced; other blocks are left alone.

    Raises:
        KeyError: the page has no block for one of the tables.
    """
    found = {match[2] for match in _BLOCK.finditer(page)}
    if missing := sorted(tables.keys() - found):
        raise KeyError(f"the page has no <!-- table {missing[0]} -->")

    def block(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}{tables[name].strip()}\n{match[3]}" if name in tables else match[0]

    return _BLOCK.sub(block, page)
