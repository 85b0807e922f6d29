"""How loops are compiled: once a machine, with the arithmetic of torch.

Every multiplication and addition is rounded on its own: Numba fuses and reorders nothing unless it is told to.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numba
from llvmlite.ir import IRBuilder
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")

log = logging.getLogger("diloco")

T = TypeVar("T")

_SLOW_S = 2.0

_compiling = RLock()


def once(make: Callable[..., T]) -> Callable[..., T]:
    """As `functools.cache`; of several threads that need a result at the same time, one makes it."""
    made = dict[tuple[Any, ...], T]()

    @wraps(make)
    def found(*arguments: Any) -> T:
        if arguments not in made:
            with _compiling:
                if arguments not in made:
                    made[arguments] = make(*arguments)
        return made[arguments]

    return found


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one element that loops may call. It stays what it is elsewhere."""
    jitable: Callable[..., Any] = register_jitable(function)
    return jitable


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_context: Any, address: Any) -> Any:
    """An address (int64) as a pointer, for `numba.carray`."""

    def generate(_context: Any, builder: IRBuilder, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def loop(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop, or take it from this user's cache; it releases the interpreter's lock."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        began_s = time.monotonic()
        with _compiling:  # Numba's directory of compiled functions is a setting of the process
            try:
                made = _compiled(function, signature, cache_directory())
            except Exception as error:  # noqa: BLE001 - a damaged file of Numba's cache raises anything
                text = "the loop %r cannot be taken from %s (%r), and is compiled anew; delete that directory."
                log.warning(text, function.__name__, cache_directory(), error)
                made = _compiled(function, signature, None)
        if (took_s := time.monotonic() - began_s) > _SLOW_S:
            kept = f"kept in {cache_directory()}" if cache_directory() else "not kept, for want of a cache directory"
            log.info("compiled the loop %r for this processor in %.1f s; it is %s.", function.__name__, took_s, kept)
        return made

    return compiled


def _compiled(function: Callable[..., Any], signature: str, directory: Path | None) -> Callable[..., Any]:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory or "")
    try:
        made: Callable[..., Any] = njit(signature, nogil=True, error_model="numpy", cache=directory is not None)(
            function
        )
    finally:
        numba.config.CACHE_DIR = before
    return made


@cache
def cache_directory() -> Path | None:
    """The directory of compiled loops, one for each state of the sources; None: no directory can be written to."""
    package, sources = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*package.glob("compute/*.py"), *package.glob("core/*.py"), *package.glob("core/codecs/*.py")]):
        sources.update(path.read_bytes())
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = root / "diloco" / f"loops-{sources.hexdigest()[:16]}"
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # the latter of a user without a home directory
        return None
