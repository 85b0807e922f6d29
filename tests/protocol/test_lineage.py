"""`protocol.lineage`: which syncer a learner follows, and which versions are part of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import LineageError, UnknownRunError
from diloco.protocol.lineage import Epoch, Lineage, lost, refusal

SEEN = Lineage("a" * 32, epoch=5, boot=17)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, None),
        ({"epoch": 6, "boot": 18}, None),
        ({"epoch": 900, "boot": 18}, None),
        ({"boot": 18}, LineageError),
        ({"epoch": 4, "boot": 18}, LineageError),
        ({"epoch": 4}, LineageError),
        ({"run_id": ""}, LineageError),
        ({"run_id": "b" * 32}, UnknownRunError),
        ({"run_id": "b" * 32, "epoch": 6}, UnknownRunError),
    ],
)
def test_a_learner_follows_the_same_and_later_starts_of_its_run(
    changes: dict[str, object], kind: type[Exception] | None
) -> None:
    offered = replace(SEEN, **changes)  # type: ignore[arg-type]
    assert refusal(None, offered) is None
    if kind is None:
        assert refusal(SEEN, offered) is None
    else:
        assert isinstance(refusal(SEEN, offered), kind)


def test_a_version_that_the_run_went_back_from_is_lost_though_the_run_has_its_number_again() -> None:
    epochs = (Epoch(1, (0, 0)), Epoch(4, (10, 7)), Epoch(5, (8, 7)), Epoch(6, (12, 9)))
    assert lost(epochs, 4, (8, 7)) is None
    assert lost(epochs, 4, (9, 7)) == (0, 8)
    assert lost(epochs, 4, (8, 8)) == (1, 7)
    assert lost(epochs, 5, (12, 9)) is None
    assert lost(epochs, 5, (13, 9)) == (0, 12)
    assert lost(epochs, 6, (99, 99)) is None
    assert lost(epochs, 6, ()) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_lost_agrees_with_a_run_that_names_every_version(moves: list[tuple[int, int]]) -> None:
    """Each epoch goes back by some versions and publishes others; a version is known by the epoch that published it."""
    line: list[int] = []  # by which epoch versions 1, 2, 3, ... were published
    epochs: list[Epoch] = []
    adopted: list[tuple[int, int, tuple[int, ...]]] = []  # epoch, version, the versions up to it
    for number, (back, forward) in enumerate(moves, start=1):
        line = line[: max(0, len(line) - back)]
        epochs.append(Epoch(number, (len(line),)))
        adopted.append((number, len(line), tuple(line)))
        for _ in range(forward):
            line.append(number)
            adopted.append((number, len(line), tuple(line)))
    for epoch, version, published_by in adopted:
        is_part = tuple(line[:version]) == published_by
        assert (lost(epochs, epoch, (version,)) is None) == is_part
