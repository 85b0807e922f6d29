"""What holds of every reader and every input: it is read, or refused in one sentence by an error of this package,
within bounded memory and time, and nothing else happens."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from diloco.errors import DilocoError

MOST_NEW_BYTES = 1 << 32
"""Address space that reading an input of a few kilobytes may take, that of threads and their heaps included: no reader
reserves what an input only declares."""

MOST_S = 10.0
"""Processor time that it may take."""

MOST_CHARACTERS = 20_000
"""Of a refusal, and besides ten for each byte of the input, which it may quote."""


class BrokenReaderError(AssertionError):
    """A reader did what none may do. Its cause says where."""


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        name: as `make fuzz TARGET=…` has it.
        seeds: valid inputs.
        read: reads an input; raises DilocoError to refuse it.
        mutate: makes an input that is almost right of a valid one.
        close: ends what `read` uses.
        others: whole inputs that are refused for what they ask.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    mutate: Callable[[bytes, Random], bytes]
    close: Callable[[], object] = lambda: None
    others: tuple[bytes, ...] = ()

    @property
    def beginnings(self) -> tuple[bytes, ...]:
        """What inputs are made of."""
        return self.seeds + self.others


def examine(target: Target, data: bytes) -> bool:
    """Give an input to a reader. Returns whether it was read.

    Raises:
        BrokenReaderError: it was neither read nor refused as it should be.
    """
    began_s = time.process_time()
    with _bounded():
        try:
            target.read(data)
            was_read = True
        except DilocoError as error:
            _check_sentence(target, error, MOST_CHARACTERS + 10 * len(data))
            was_read = False
        except (Exception, RecursionError) as error:
            raise BrokenReaderError(
                f"{target.name}: {type(error).__name__} is no refusal: {str(error)[:300]}"
            ) from error
    if time.process_time() - began_s > MOST_S:
        raise BrokenReaderError(f"{target.name} took {time.process_time() - began_s:.1f} s of processor time")
    return was_read


def _check_sentence(target: Target, error: DilocoError, most_characters: int) -> None:
    text = str(error)
    if not text.strip() or "\n" in text or len(text) > most_characters:
        raise BrokenReaderError(f"{target.name}: {text[:300]!r} is not one sentence of bounded length") from error


@contextmanager
def _bounded() -> Iterator[None]:
    """What is reserved inside, of address space, fails beyond a bound."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_NEW_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def unchanged(directory: Path) -> Iterator[None]:
    """Nothing is written or removed in a directory meanwhile, and no thread is left."""
    before, threads = contents(directory), set(threading.enumerate())
    try:
        yield
    finally:
        assert contents(directory) == before, f"files of {directory} were changed by reading them"
        assert set(threading.enumerate()) <= threads, f"a thread is left: {threading.enumerate()}"
