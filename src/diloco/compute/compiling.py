"""How loops are compiled: once a machine, with the arithmetic of torch.

Every multiplication and addition is rounded on its own: Numba fuses and reorders nothing unless it is told to.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, cast

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from llvmlite.ir import IRBuilder
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, register_jitable

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")

log = logging.getLogger("diloco")

_SLOW_S = 2.0
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

_compiling = Lock()

inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = register_jitable
"""A function of one element that loops may call. It stays what it is elsewhere."""


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_context: Any, address: Any) -> Any:
    """An address (int64) as a pointer, for `numba.carray`."""

    def generate(_context: Any, builder: IRBuilder, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def loop(signature: str, of: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop, or take it from this user's cache; it releases the interpreter's lock.

    Arguments:
        of: the name of what this loop is made for, where one function makes loops for several. Numba numbers the files
            of a function; each loop has a directory of its own, so that two processes never give one number twice.

    Raises:
        ImportError: it cannot be compiled here.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        began_s, directory, is_own = time.monotonic(), cache_directory(), _is_own(function)
        made = _made(function, signature, directory / of.replace(":", "-") if directory and is_own else None)
        if (took_s := time.monotonic() - began_s) > _SLOW_S:
            why = "there is no cache directory" if is_own else "not all of it is diloco's"
            kept = f"kept in {directory}" if directory and is_own else f"not kept, as {why}"
            log.info("compiled the loop %r for this processor in %.1f s; it is %s.", function.__name__, took_s, kept)
        return made

    return compiled


def _made(function: Callable[..., Any], signature: str, directory: Path | None) -> Callable[..., Any]:
    try:
        return _compiled(function, signature, directory)
    except Exception as error:  # a damaged file of Numba's cache raises anything
        if directory is None:
            raise ImportError(f"the loop {function.__name__!r} cannot be compiled ({error!r})") from error
        made = _made(function, signature, None)
        text = "the loop %r cannot be taken from or kept in %s (%r), and was compiled anew; free space, or delete that."
        log.warning(text, function.__name__, cache_directory(), error)
        return made


def _compiled(function: Callable[..., Any], signature: str, directory: Path | None) -> Callable[..., Any]:
    made: Any = njit(nogil=True, error_model="numpy")(function)
    with _compiling:  # Numba's directory of compiled functions is a setting of the process
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(directory or "")
        try:
            if directory is not None:
                made._cache = _Cache(function)
            made.compile(signature)
        finally:
            numba.config.CACHE_DIR = before
    made.disable_compile()
    return cast("Callable[..., Any]", made)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's key has a pickle of what a loop encloses. The pickle of a function that was made inside another differs
    in every process, so that no loop which encloses one would ever be found again."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), tuple(map(_told, _enclosed(self._py_func)))


def _enclosed(function: Any) -> Iterator[Any]:
    """What a function encloses, and what the functions among that do."""
    for cell in function.__closure__ or ():
        value = getattr(cell.cell_contents, "py_func", cell.cell_contents)
        yield value
        if isinstance(value, FunctionType):
            yield from _enclosed(value)


def _told(value: Any) -> str:
    """A value in words that are the same in every process: a function's place, since the sources are known."""
    if isinstance(value, FunctionType):
        return f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    return repr(value)


def _is_own(function: Any) -> bool:
    """Whether a loop is made of this package's sources and of plain numbers alone, so that its key tells all of it. The
    formula of a user's optimizer is compiled in every process: its source may change, and what it calls."""
    return all(
        value.__code__.co_filename.startswith(_PACKAGE)
        if isinstance(value, FunctionType)
        else isinstance(value, int | float | np.generic) or (isinstance(value, type) and issubclass(value, np.generic))
        for value in (function, *_enclosed(function))
    )


@cache
def cache_directory() -> Path | None:
    """The directory of what was compiled from these sources for this processor; None: none can be written to."""
    processor = numba.config.CPU_NAME or get_host_cpu_name(), numba.config.CPU_FEATURES or get_host_cpu_features()
    package, made_by = Path(__file__).parents[1], hashlib.sha256(f"{numba.__version__} {processor}".encode())
    for path in sorted([*package.glob("compute/*.py"), *package.glob("core/**/*.py")]):
        made_by.update(path.read_bytes())
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = root / "diloco" / f"loops-{made_by.hexdigest()[:16]}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # the latter of a user without a home directory
        return None
