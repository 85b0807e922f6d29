"""The distributions that diloco declares: those it always needs, and its extras."""

import re
from collections.abc import Iterator
from importlib import metadata

from diloco.cli.doctor.findings import Finding

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^\]]*\])?(?P<bounds>[^;]*)(;(?P<marker>.*))?")
EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
BOUND = re.compile(r"(>=|<=|==|<|>|!=)\s*([\d.]+)")
FOR_DEVELOPERS = ("dev",)


def look_at_packages() -> Iterator[Finding]:
    """The declared dependencies as one finding, then every extra."""
    needed: dict[str, str] = {}
    extras: dict[str, dict[str, str]] = {}
    for line in metadata.requires("diloco") or ():
        if (declared := REQUIREMENT.match(line)) is not None:
            extra = EXTRA.search(declared["marker"] or "")
            into = needed if extra is None else extras.setdefault(extra[1], {})
            into[declared["name"]] = declared["bounds"]
    here, lacking = _versions(needed)
    if lacking:
        yield Finding("packages", "missing", f"without {lacking}", "install diloco anew, with its dependencies")
    else:
        yield Finding("packages", "ok", f"diloco {metadata.version('diloco')}; {here}")
    for name, packages in extras.items():
        if name not in FOR_DEVELOPERS:
            here, lacking = _versions(packages)
            advice = f"without {lacking}; pip install 'diloco[{name}]'" if lacking else ""
            yield Finding(f"extra {name}", "absent" if lacking else "ok", here or "not installed", advice)


def _versions(packages: dict[str, str]) -> tuple[str, str]:
    """The packages that are here with their versions, and those that are not or are out of bounds."""
    here, lacking = [], []
    for name, bounds in packages.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
            continue
        here.append(f"{name} {version}")
        if not within(version, bounds):
            lacking.append(f"{name}{bounds.strip()} (here {version})")
    return ", ".join(here), ", ".join(lacking)


def within(version: str, bounds: str) -> bool:
    """Whether a version's release number is within bounds such as ">=2.9,<3". Other bounds are not looked at."""
    number = _release(version)
    results = []
    for sign, bound in BOUND.findall(bounds):
        limit = _release(bound)
        length = max(len(number), len(limit))
        a, b = (part + (0,) * (length - len(part)) for part in (number, limit))
        results.append({">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b, "!=": a != b}[sign])
    return all(results)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return () if found is None else tuple(map(int, found[0].split(".")))
