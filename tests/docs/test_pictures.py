"""The drawings of docs/concepts.md are those of the runs in virtual time that they say they are of."""

from pathlib import Path

from studies import protocols


def test_the_pictures_are_those_of_the_runs() -> None:
    drawn = protocols.drawings()
    there = {path.name: path.read_text(encoding="utf-8") for path in protocols.PICTURES.glob("*.svg")}
    assert {name: there.get(name) for name in drawn} == drawn, "run python -m studies.protocols"
    page = (Path(protocols.PICTURES).parent / "concepts.md").read_text(encoding="utf-8")
    assert all(f"(pictures/{name})" in page for name in drawn)
