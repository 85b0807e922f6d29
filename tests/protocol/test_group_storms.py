"""Random events on the groups' machine, and that they find what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.protocol.group_storms import failure

from diloco.protocol.groups import Groups
from diloco.protocol.workers import Workers


def forgets_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "_score", lambda *_: None)


def leases_what_was_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "end", lambda *_: None)


def loses_what_a_worker_drops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "offer", lambda *_: None)


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_storm(seed: int) -> None:
    assert failure(seed) is None


@pytest.mark.parametrize("break_it", [forgets_scores, leases_what_was_answered, loses_what_a_worker_drops])
def test_a_defect_is_found(break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    assert any(failure(seed) is not None for seed in range(1, 9))
