"""`event` marks the methods of a driver that change it: a recorder journals their calls with time and arguments.

Every public method of `Driver` is marked, or changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

D = TypeVar("D")
Q = ParamSpec("Q")
R = TypeVar("R")

_MARK = "is_event"


def event(method: Callable[Concatenate[D, Q], R]) -> Callable[Concatenate[D, Q], R]:
    """An event of a driver, which knows its recorder as `_recorder`, and is given it with its ports."""
    signature = inspect.signature(method)
    gives_ports = "ports" in signature.parameters

    @functools.wraps(method)
    def happens(self: D, *args: Q.args, **kwargs: Q.kwargs) -> R:
        recorder = None if gives_ports else getattr(self, "_recorder")  # noqa: B009
        if recorder is None and not gives_ports:
            return method(self, *args, **kwargs)
        arguments: dict[str, Any] = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        recorder = arguments["ports"].recorder if gives_ports else recorder
        if recorder is None:
            return method(self, *args, **kwargs)
        answer: R = recorder.event(method.__name__, functools.partial(method, self), arguments)
        return answer

    setattr(happens, _MARK, True)
    return cast("Callable[Concatenate[D, Q], R]", happens)


def is_event(method: object) -> bool:
    """Whether a method is marked."""
    return getattr(method, _MARK, False) is True
