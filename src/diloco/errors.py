"""The one tree of errors.

Every error raised on purpose by this package is a `DilocoError`. Its text is one sentence that says what was wrong,
with the value, and what to do next. Foreign errors (gRPC, SQLite, the operating system) are mapped to this tree at the
edge where they enter; everything else propagates.

    DilocoError
    ├── ConfigError            wrong use: options or values that cannot work, or would be unsafe (exit code 2)
    ├── LayoutError            two parties do not hold the same model
    ├── PayloadError           bytes or numbers that cannot be what they claim to be
    │   ├── NonFiniteError     inf or NaN where only finite numbers can be used
    │   └── CorruptPayloadError  truncated, oversized or damaged bytes
    ├── VersionError           a contribution or update that does not fit the version held
    │   └── DigestError        the same version with different bits
    ├── RunError               the run cannot do what was asked in the state it is in
    │   ├── UnknownRunError    no such run at this address
    │   ├── LineageError       an older state of the run than one that was seen, or a second one
    │   ├── NotInitialisedError      the run has no model yet
    │   ├── AlreadyInitialisedError  the run has a model already
    │   ├── StaleIncarnationError    this learner was replaced or evicted
    │   ├── DrainedError       the run has no place for this learner any more
    │   └── RestartedError     the syncer was started again since; it may lack what it had acknowledged
    ├── AuthError              missing, wrong or insufficient token, or a certificate that cannot be read
    ├── ExchangeError          the other side is gone, or did not answer in time
    │   └── UnreachableError   the call failed on the way; the other side may be restarting
    │       └── StandbyError   this syncer follows another one, and does not serve the run now
    ├── StoreError             state could not be made durable or read back (a full disk, a damaged file)
    │   └── NoRoomError        there is no room now; the same call is taken once there is
    │       └── BusyError      an earlier connection has not ended; the same call is taken once it has
    ├── CheckpointError        a checkpoint is missing, damaged or belongs to something else
    └── StoppedError           this learner was told to stop while it waited for others
"""

import re
from collections import abc
from contextlib import contextmanager

MAX_FOREIGN = 500
"""Characters of a foreign error in a sentence."""


class DilocoError(Exception):
    """Root of the tree."""


class ConfigError(DilocoError, ValueError):
    """Wrong use: an option, a value or a combination that cannot work, or a port that would be open to all."""


class LayoutError(DilocoError):
    """Two parties do not hold the same model, or a tensor has the wrong shape or dtype."""


class PayloadError(DilocoError):
    """Bytes or numbers that cannot be what they claim to be."""


class NonFiniteError(PayloadError):
    """inf or NaN where only finite numbers can be used."""


class CorruptPayloadError(PayloadError):
    """Truncated, oversized or damaged bytes."""


class VersionError(DilocoError):
    """A contribution or an update that does not fit the version held."""


class DigestError(VersionError):
    """Two holders of one version have different bits."""


class RunError(DilocoError):
    """The run cannot do what was asked in the state it is in."""


class UnknownRunError(RunError):
    """No such run at this address."""


class LineageError(RunError):
    """The syncer serves an older state of the run than the learner has seen, or a second copy of the same one."""


class NotInitialisedError(RunError):
    """The run has no model yet."""


class AlreadyInitialisedError(RunError):
    """The run has a model already, and it is never overwritten."""


class StaleIncarnationError(RunError):
    """This learner was evicted, or replaced by a newer incarnation of itself."""


class StoppedError(DilocoError):
    """This learner was told to stop while it waited for others (`Learner.interrupt`)."""


class DrainedError(RunError):
    """The run has no place for this learner any more: its pool has shrunk, or an admin has taken the learner out."""


class RestartedError(RunError):
    """The syncer was started again since. What it acknowledged before and has no verdict on is sent again first."""


class AuthError(DilocoError):
    """A missing, wrong or insufficient token, or a certificate to trust that cannot be read."""


class ExchangeError(DilocoError):
    """The other side is gone, or did not answer in time."""


class UnreachableError(ExchangeError):
    """The call failed on the way; the other side may be restarting, and the same call may succeed later."""


class StandbyError(UnreachableError):
    """This syncer follows another one and does not serve the run now; it may take the run over."""


class StoreError(DilocoError):
    """State could not be made durable or read back."""


class NoRoomError(StoreError):
    """There is no room now; the same call is taken once there is."""


class BusyError(NoRoomError):
    """An earlier connection, which may be broken at its other end only, holds the room; the same call is taken once it
    has ended."""


class CheckpointError(DilocoError):
    """A checkpoint is missing, damaged, or belongs to another run or model."""


@contextmanager
def translated(
    causes: type[Exception] | tuple[type[Exception], ...], to: type[DilocoError], failed: str, advice: str
) -> abc.Iterator[None]:
    """Inside, foreign errors of the `causes` become a `to`: "<failed> (<the error's first line>); <advice>"."""
    try:
        yield
    except causes as error:
        raise to(f"{failed} ({first_line(error)}); {advice}") from error


def first_line(error: BaseException) -> str:
    """What a foreign error says, as a part of a sentence; a system's error without its number."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[Errno -?\d+\] ", "", text)[:MAX_FOREIGN]
