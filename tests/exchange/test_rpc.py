"""Which failed calls are tried again."""

from __future__ import annotations

import grpc
import pytest

from diloco.exchange.wire.rpc import ERROR_KEY, is_retryable


class Failed(grpc.RpcError):
    """A call that ended like this."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._all = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._all[0]

    def details(self) -> str:
        return self._all[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._all[2]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), True),
        (Failed(grpc.StatusCode.UNAVAILABLE, "full", ((ERROR_KEY, "StoreError"),)), False),
        # bytes that were changed on the way, under TLS
        (Failed(grpc.StatusCode.UNKNOWN, "Stream removed (Unwrap failed (TSI_DATA_CORRUPTED))"), True),
        # an exception in the syncer
        (Failed(grpc.StatusCode.UNKNOWN, "Exception calling application: x"), False),
        (Failed(grpc.StatusCode.UNAUTHENTICATED, "who are you?"), False),
    ],
)
def test_a_call_that_broke_on_the_way_is_tried_again(error: Failed, again: bool) -> None:
    assert is_retryable(error) is again
