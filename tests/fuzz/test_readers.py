"""Every reader, given inputs that are almost right: each is read, or refused in one sentence (`examining`), and the
process goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz.examining import BrokenReaderError, Target, examine, unchanged
from tests.fuzz.mutations import MANIFEST, joined, parted
from tests.fuzz.targets import TARGETS

from diloco.errors import StoreError

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    it = TARGETS[request.param]()
    yield it
    it.close()


def test_valid_inputs_are_read(target: Target) -> None:
    assert all(examine(target, seed) for seed in target.seeds)


def test_inputs_that_once_broke_it(target: Target) -> None:
    for path in sorted((CORPUS / target.name).glob("*")):
        examine(target, path.read_bytes())


def test_what_is_looked_for_would_be_found(tmp_path: Path) -> None:
    """The property is not an empty one."""
    kept = tmp_path / "kept"
    kept.write_text("x")

    def writes(data: bytes) -> None:
        with unchanged(tmp_path):
            kept.write_bytes(data)

    def refuses(data: bytes) -> None:
        raise StoreError(data.decode())

    breaking: dict[str, Callable[[bytes], object]] = {
        "ValueError": int, "MemoryError": lambda data: bytearray(2**40), "files of": writes, "one sentence": refuses
    }  # fmt: skip
    for words, read in breaking.items():
        with pytest.raises(BrokenReaderError, match=words):
            examine(Target("bad", (), read, lambda data, _: data), b"two\nlines")


@pytest.mark.slow
def test_no_input_breaks_it(target: Target) -> None:
    @settings(max_examples=40, phases=[Phase.generate])  # a draw has nothing that could be made simpler
    @given(st.sampled_from(target.beginnings), st.integers(0, 2**32))
    def holds(seed: bytes, draw: int) -> None:
        examine(target, target.mutate(seed, Random(draw)))

    holds()


def test_a_manifest_names_no_file_outside_of_its_folder() -> None:
    target = TARGETS["copy"]()
    parts = parted(target.seeds[0])
    manifest = MANIFEST.load(parts[0])
    manifest["fragments"][0][0][1] = "../../written"
    parts[0] = MANIFEST.dump(manifest)
    with pytest.raises(StoreError, match=r"the manifest of \S+ is damaged .*a field has an invalid value"):
        target.read(joined(parts))
