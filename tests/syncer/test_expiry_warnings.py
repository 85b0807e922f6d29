"""Warnings of certificates that expire soon: in time, and not in every call."""

import datetime as dt

import pytest

from diloco.syncer.keys.certificates import ExpiryWarnings

START = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


def test_what_ends_is_named_once_a_day_from_fourteen_days_before(caplog: pytest.LogCaptureFixture) -> None:
    warnings, expires = ExpiryWarnings(), START + dt.timedelta(days=20)
    named = []
    for hour in range(0, 21 * 24, 6):
        caplog.clear()
        warnings.warn(START + dt.timedelta(hours=hour), "the token of 'a'", expires)
        warnings.warn(START + dt.timedelta(hours=hour), "the token of 'b'", None)
        named += [(hour / 24, each.getMessage()) for each in caplog.records]
    assert [day for day, _ in named] == list(range(6, 21))
    words = "at 2030-01-21 00:00 UTC; `diloco keys rotate` makes a new one"
    assert named[0][1] == f"the token of 'a' ends in 14 days, {words}"
    assert named[13][1] == f"the token of 'a' ends in 24 hours, {words}"
    assert named[14][1] == f"the token of 'a' ended {words}"


def test_each_is_named(caplog: pytest.LogCaptureFixture) -> None:
    warnings, expires = ExpiryWarnings(), START + dt.timedelta(days=1)
    for what in ("the token of 'a'", "the token of 'b'"):
        warnings.warn(START, what, expires)
    assert len(caplog.records) == 2
