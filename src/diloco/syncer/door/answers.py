"""Answers that take a while: the caller hears now and then that it is not forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from diloco.errors import DilocoError
from diloco.syncer.hosting import HostedDriver, SyncerDriver

SAY_EVERY_S = 0.5
"""Between two words on an upload that is here and not answered yet."""


def while_waiting(answer: Future[Any]) -> Iterator[None]:
    """Gives at once, and now and then until there is an answer."""
    yield
    while not wait([answer], SAY_EVERY_S).done:
        yield


def until_done(
    hosted: HostedDriver, event: Callable[[SyncerDriver, Callable[[DilocoError | None], None]], None]
) -> Iterator[None]:  # fmt: skip
    """Gives now and then until an event is answered. Raises the answer, if it is a refusal."""
    with hosted.asking(event) as answer:
        yield from while_waiting(answer)
        refusal = answer.result()
    if refusal is not None:
        raise refusal
