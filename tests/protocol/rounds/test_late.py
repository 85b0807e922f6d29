"""Rounds that learners do not block on: when one is merged, and what it waits for."""

from __future__ import annotations

import pytest

from diloco.protocol.rounds.late_contributions import decide

# contributed, fresh, members, K, enough contributions at, grace -> merge, wait until, reason; now = 10
TABLE = [
    ("", "", "a", 1, None, 0.0, None, None, "no learner has contributed; 1 of 1 are needed"),
    ("", "", "", 3, None, 0.0, None, None, "no learner has contributed; 1 of 0 are needed"),
    ("", "", "abc", 2, None, 0.0, None, None, "no learner has contributed; 2 of 3 are needed"),
    ("ba", "ab", "ab", 1, 9.0, 5.0, "ab", None, "all 2 live learners have contributed"),  # grace or not
    ("ab", "ab", "ab", 9, 9.0, 5.0, "ab", None, "all 2 live learners have contributed"),  # fewer are live than K
    ("ab", "ab", "a", 1, 9.0, 5.0, "ab", None, "all 1 live learners have contributed"),  # b is gone, its work is not
    ("a", "a", "abc", 2, None, 0.0, None, None, "1 of 2 have contributed; b, c may still"),
    ("ab", "", "ab", 1, None, 0.0, None, None, "0 of 1 have contributed; a, b may still"),  # late work is no quorum
    ("a", "a", "ab", 1, None, 0.0, None, None, "1 of 1 have contributed; b may still"),
    ("a", "a", "ab", 1, 9.0, 2.5, None, 11.5, "1 have contributed; the grace window is open for b for 1.50 s"),
    ("a", "a", "ab", 1, 9.0, 1.0, "a", None, "1 have contributed, 1 were needed; after 1.00 s of grace without b"),
    ("ba", "a", "abc", 1, 10.0, 0.0, "ab", None, "1 have contributed, 1 were needed; after no grace without b, c"),
]


@pytest.mark.parametrize(
    ("contributed", "fresh", "members", "at_least", "enough_at", "grace_s", "merge", "wait_until", "reason"), TABLE
)
def test_decisions(
    contributed: str, fresh: str, members: str, at_least: int, enough_at: float | None, grace_s: float,
    merge: str | None,
    wait_until: float | None, reason: str,
) -> None:  # fmt: skip
    decision = decide(10.0, contributed, fresh, members, at_least, enough_at=enough_at, grace_s=grace_s)
    assert decision.merge == (None if merge is None else tuple(merge))
    assert decision.wait_until == wait_until
    assert decision.reason == reason
