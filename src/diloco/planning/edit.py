"""A measurement into a site file, the rest of its text and comments left as they are."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.errors import ConfigError
from diloco.planning.site import Site, parse_site
from diloco.tables import read_toml, validate, write_toml

_SITE = re.compile(r"\s*\[\[\s*site\s*\]\]")
_ANY_TABLE = re.compile(r"\s*\[")


def with_measurement(
    text: str, source: str, learner: str, measured: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]
) -> str:
    """The text of a site file in which the site of `learner` has the `measured` values.

    A site that is not there is appended. Where a step time was measured, `speed` and `utilization` go. `defaults` are
    tables such as `model`, added where the file has none; an empty text gives a new file.

    Raises:
        ConfigError: the text is no site file, lacks what a site needs, or holds its sites in a form that is not
            understood here.
    """
    tables = read_toml(text, source)
    sites: list[dict[str, Any]] = tables.get("site", [])
    index = parse_site(text, source).site_of(learner) if sites else None
    missing = {name: table for name, table in defaults.items() if name not in tables}
    dropped = ("speed", "utilization") if "step_time" in measured else ()
    lines = text.splitlines()
    if index is None:
        new_site = {"name": learner, **measured}
        sites = [*sites, new_site]
        _append(lines, write_toml({"site": [new_site]}).splitlines())
    else:
        own = {key: value for key, value in sites[index].items() if key not in dropped}
        sites = [*sites[:index], {**own, **measured}, *sites[index + 1 :]]
        _replace(lines, index, measured, dropped)
    head = write_toml(missing)
    new = head + ("\n" if head and lines else "") + "\n".join(lines) + "\n"
    if not _reads_as(new, validate(Site, {**tables, **missing, "site": sites}, source)):
        raise ConfigError(
            f"{source} holds its sites in a form that cannot be extended; write each as a [[site]] table, one line for "
            "each key"
        )
    return new


def _append(lines: list[str], new_site: Sequence[str]) -> None:
    """Insert the new site after the last one, or at the end."""
    starts = [number for number, line in enumerate(lines) if _SITE.match(line)]
    end = _end_of(lines, starts[-1]) if starts else len(lines)
    lines[end:end] = [*([""] if end else []), *new_site]


def _replace(lines: list[str], index: int, values: Mapping[str, Any], dropped: Sequence[str]) -> None:
    """Write each value of a site in the line of its key and keep the comment; new keys go to the end of the site."""
    starts = [number for number, line in enumerate(lines) if _SITE.match(line)]
    if index >= len(starts):
        return
    start, end = starts[index], _end_of(lines, starts[index])
    block = [line for line in lines[start:end] if not any(_line_of(key).match(line) for key in dropped)]
    for key, value in values.items():
        [written] = write_toml({"": {key: value}}).splitlines()[1:]
        places = [number for number, line in enumerate(block) if _line_of(key).match(line)]
        if not places:
            block.append(written)
            continue
        found = _line_of(key).match(block[places[0]])
        assert found is not None
        block[places[0]] = found["indent"] + written + (found["comment"] or "")
    lines[start:end] = block


def _end_of(lines: Sequence[str], start: int) -> int:
    """The line after the last one of the table that starts here; what stands before the next table belongs to that."""
    end = next((number for number in range(start + 1, len(lines)) if _ANY_TABLE.match(lines[number])), len(lines))
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


def _line_of(key: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<indent>\s*){key}\s*=\s*(\"[^\"]*\"|'[^']*'|[^#\"']*?)(?P<comment>\s+#.*)?\s*$")


def _reads_as(text: str, expected: Site) -> bool:
    try:
        return parse_site(text) == expected
    except ConfigError:
        return False
