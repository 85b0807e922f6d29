"""Method names, and this package's errors as gRPC statuses and back."""

from __future__ import annotations

from typing import Any

import grpc

from diloco import errors
from diloco.errors import DilocoError, ExchangeError
from diloco.escaping import printable

SERVICE = "diloco.v1.Syncer"
ERROR_KEY = "diloco-error"
"""Trailing metadata of an aborted call with the class name of its error in `diloco.errors`; the text is the status
detail.
"""

MAX_TEXT = 1500
"""Maximum characters of an error on the wire: it is in a header, and may quote the other side's message."""

_CODES: dict[type[DilocoError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LayoutError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PayloadError: grpc.StatusCode.DATA_LOSS,
    errors.VersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownRunError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyInitialisedError: grpc.StatusCode.ALREADY_EXISTS,
    errors.RunError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AuthError: grpc.StatusCode.UNAUTHENTICATED,
    errors.StoreError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnreachableError: grpc.StatusCode.UNAVAILABLE,
}

RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""The other side may be restarting, or the link is down: try again."""

BROKEN = "Stream removed"
"""The beginning of gRPC's text for a call whose connection broke. If bytes under TLS were changed on the way, such a
call has the code UNKNOWN, which a defect of the syncer has too."""


OTHER_VERSION = "use the syncer's version of diloco"
"""The advice where an answer cannot be read."""


def path(method: str) -> str:
    """The full name of a method."""
    return f"/{SERVICE}/{method}"


def abort(context: grpc.ServicerContext, error: DilocoError) -> None:
    """End a call on the server with `error`; does not return."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    context.abort(code, printable(str(error), MAX_TEXT))


def from_rpc_error(error: grpc.RpcError, address: str) -> DilocoError:
    """The error of this package that the other side raised; ExchangeError if it raised none."""
    call: Any = error
    trailing = dict(call.trailing_metadata() or ())
    kind = getattr(errors, str(trailing.get(ERROR_KEY, "")), None)
    if isinstance(kind, type) and issubclass(kind, DilocoError):
        return kind(printable(call.details(), MAX_TEXT))
    details = printable(str(call.details()), MAX_TEXT)
    return ExchangeError(
        f"the call to the syncer at {address} failed ({call.code().name.lower()}: {details}); try again, and see "
        "`diloco doctor` for the way to it."
    )


def is_retryable(error: grpc.RpcError) -> bool:
    """Whether the call failed on the way, and not by the other side's decision."""
    call: Any = error
    is_broken = call.code() is grpc.StatusCode.UNKNOWN and str(call.details()).startswith(BROKEN)
    return (call.code() in RETRYABLE or is_broken) and ERROR_KEY not in dict(call.trailing_metadata() or ())


MAX_MESSAGE_BYTES = 6 << 20
"""Maximum size of one message at either end; the longest is the layout of a model with many tensors."""

MAX_CONTROL_BYTES = 256 << 10
"""Maximum size of a request that is not a transfer, apart from a Join, whose layout may be as long as any message,
and a Lease, which may claim many ranges. A heartbeat with three numbers for each of ten thousand fragments fits."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),  # one TCP connection per channel
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # two syncers on one port would share its learners
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a learner that was lost silently holds a thread and the memory of its push
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 128),  # of one connection; a proxy may put those of several learners on one
    ("grpc.max_metadata_size", 8 << 10),  # of one call
    ("grpc.absolute_max_metadata_size", 16 << 10),
]
