"""The errors of this package, one tree.

Every error that this package raises on purpose is a `DilocoError`. Its text is one sentence: what was wrong, the value,
and what to do next. Foreign errors (gRPC, buckets, the operating system) are translated where they enter; all other
errors propagate.

    DilocoError
    ├── ConfigError            wrong use: options or values that cannot work, or would be unsafe (exit code 2)
    ├── LayoutError            two parties hold different models
    ├── PayloadError           malformed or unusable bytes or numbers
    │   ├── NonFiniteError     inf or NaN instead of finite numbers
    │   ├── CorruptPayloadError  truncated, oversized or damaged bytes
    │   └── ScoringError       a task gave no score for a completion
    ├── VersionError           a contribution or update does not fit the version held
    │   └── DigestError        the same version with different bits
    ├── RunError               the state of the run does not allow the request
    │   ├── UnknownRunError    no such run at this address
    │   ├── LineageError       an older or a second state of the run
    │   ├── FencedError        another syncer serves the run now
    │   ├── NotInitialisedError      the run has no model yet
    │   ├── AlreadyInitialisedError  the run already has a model
    │   ├── StaleIncarnationError    this incarnation of the learner was replaced or evicted
    │   ├── DrainedError       the run told this learner to leave
    │   └── RestartedError     the syncer restarted; it may have lost acknowledged contributions
    ├── AuthError              missing, invalid or insufficient certificate
    ├── ExchangeError          the peer failed, or did not answer in time
    │   ├── EngineError        the server of an engine failed
    │   └── UnreachableError   the call failed in transit; the peer may be restarting
    │       └── StandbyError   this syncer does not serve the run now
    ├── StoreError             state could not be made durable or read back (a full disk, a damaged file)
    │   ├── MissingObjectError a store has no object of this name
    │   ├── DamagedObjectError an object of a store, or its manifest, is not what was written
    │   ├── SwapRefusedError   another manifest is in the store than the one to be replaced
    │   └── NoRoomError        no space now; the call may be repeated
    │       └── BusyError      an earlier connection occupies the space; the call may be repeated
    ├── CheckpointError        a checkpoint is missing, damaged or of another run or model
    └── StoppedError           this learner was stopped while it waited for others
"""

import re
from collections import abc
from contextlib import contextmanager

MAX_FOREIGN = 500
"""Length limit of a quoted foreign error, in characters."""

KEY_LINE = "diloco1."
"""Prefix of a line of keys (`exchange.key_pair`)."""

_KEY_LINE = re.compile(re.escape(KEY_LINE) + r"[\w-]{20,}(?:(?:\s|\\+[nrt])+[\w-]{20,})*")


def without_key_lines(text: str) -> str:
    """The text with each line of keys cut to its prefix."""
    return _KEY_LINE.sub(f"{KEY_LINE}…", text)


class DilocoError(Exception):
    """Base class of all errors that this package raises on purpose. Its text contains no line of keys."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_key_lines(each) if isinstance(each, str) else each for each in args))


class ConfigError(DilocoError, ValueError):
    """Wrong use: an option, value or combination that cannot work, or would be unsafe."""


class LayoutError(DilocoError):
    """Two parties hold different models, or a tensor has the wrong shape or dtype."""


class PayloadError(DilocoError):
    """Malformed or unusable bytes or numbers."""


class ScoringError(PayloadError):
    """A task gave no prompt, or no score for a completion."""


class NonFiniteError(PayloadError):
    """inf or NaN instead of finite numbers."""


class CorruptPayloadError(PayloadError):
    """Truncated, oversized or damaged bytes."""


class VersionError(DilocoError):
    """A contribution or an update does not fit the version held."""


class DigestError(VersionError):
    """Two holders of one version have different bits."""


class RunError(DilocoError):
    """The state of the run does not allow the request."""


class UnknownRunError(RunError):
    """No such run at this address."""


class LineageError(RunError):
    """The syncer serves an older state of the run than the learner has seen, or a second copy of that state."""


class FencedError(RunError):
    """Another syncer has claimed the run, so this one must not serve it any more."""


class NotInitialisedError(RunError):
    """The run has no model yet."""


class AlreadyInitialisedError(RunError):
    """The run already has a model, which is never overwritten."""


class StaleIncarnationError(RunError):
    """This learner was evicted, or replaced by a newer incarnation of itself."""


class StoppedError(DilocoError):
    """This learner was stopped while it waited for others (`Learner.interrupt`)."""


class DrainedError(RunError):
    """The run told this learner to leave: its pool has shrunk, or an admin drained or banned the learner."""


class RestartedError(RunError):
    """The syncer restarted. Contributions that it acknowledged before and has no verdict on are sent again first."""


class AuthError(DilocoError):
    """A missing, invalid or insufficient certificate."""


class ExchangeError(DilocoError):
    """The peer failed, or did not answer in time."""


class EngineError(ExchangeError):
    """The server of an engine failed, did not answer in time, or gave an answer that cannot be used."""


class UnreachableError(ExchangeError):
    """The call failed in transit; the peer may be restarting, and the same call may succeed later."""


class StandbyError(UnreachableError):
    """This syncer does not serve the run now: it is a standby, or does not reach its store. It may serve it later."""


class StoreError(DilocoError):
    """State could not be made durable or read back."""


class MissingObjectError(StoreError):
    """A store has no object of this name."""


class DamagedObjectError(StoreError):
    """An object of a store, or its manifest, is not what was written."""


class SwapRefusedError(StoreError):
    """Another manifest is in the store than the one to be replaced."""


class NoRoomError(StoreError):
    """There is no space now; the same call may succeed later."""


class BusyError(NoRoomError):
    """An earlier connection, possibly broken at the peer's end, occupies the space; the same call may succeed after it
    ends."""


class CheckpointError(DilocoError):
    """A checkpoint is missing, damaged, or of another run or model."""


@contextmanager
def translated(
    causes: type[BaseException] | tuple[type[BaseException], ...], to: type[DilocoError], failed: str, advice: str
) -> abc.Iterator[None]:
    """Translate foreign errors of the `causes` to a `to`: "<failed> (<the error's first line>); <advice>"."""
    try:
        yield
    except causes as error:
        raise to(f"{failed} ({first_line(error)}); {advice}") from error


@contextmanager
def required_library(library: str, *, extra: str = "", by: str = "this integration needs") -> abc.Iterator[None]:
    """A context that imports `library`.

    Arguments:
        extra: extra of this package that installs the library; "": the extra has the library's name.
        by: what needs it, in the error.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        message = f"{by} {library}, which is not installed; pip install 'diloco[{extra or library}]'"
        raise ConfigError(message) from error


def first_line(error: BaseException) -> str:
    """The first line of a foreign error, without the number of a system error."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[Errno -?\d+\] ", "", text)[:MAX_FOREIGN]
