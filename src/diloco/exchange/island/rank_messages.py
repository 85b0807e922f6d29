"""Messages of rank 0 to the other ranks: plain values as JSON, and tensors, of which each rank gets all or its
shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.core.global_fragment import AppliedUpdate, GlobalFragment
from diloco.core.shards import Shards
from diloco.core.update import Update
from diloco.errors import DilocoError, ExchangeError, translated
from diloco.escaping import MALFORMED, read_json
from diloco.exchange.base import Arrived, Interrupted, Rejoined, StartingState
from diloco.exchange.group import SAME_VERSION, Group, as_bytes, error_of, error_values, to_bytes, to_tensor
from diloco.protocol.contribution import CallForWork, Drained, Hold, Rejection, Settled
from diloco.protocol.leases import Grant

Fetched = Callable[[int, int, int | None], AppliedUpdate]
"""`ShardedExchange.fetched`."""


@dataclass(frozen=True)
class MessageTensor:
    """A tensor of a message. `fragment`: it is a vector of this fragment, of which each rank gets its shard; None: each
    rank gets all of it."""

    tensor: Tensor
    fragment: int | None


@dataclass(frozen=True)
class Message:
    """JSON with plain values, an error and the shapes of the tensors that follow it; empty: there is no message.

    Attributes:
        tensors: those that follow it.
        value: the value itself, if each rank has its shards of the versions in it.
    """

    raw: bytes = b""
    tensors: tuple[MessageTensor, ...] = ()
    value: Any = None

    @classmethod
    def of(cls, value: Any = None, error: DilocoError | None = None, *, fetched: bool = False) -> Message:
        """A message with a value of plain values and events, or with an error. `fetched`: each rank has its shards of
        the versions in it."""
        tensors: list[MessageTensor] = []
        plain = _out(value, tensors, None, fetched=fetched)
        specs = [
            [list(each.tensor.shape), str(each.tensor.dtype).removeprefix("torch."), each.fragment] for each in tensors
        ]
        raw = json.dumps({"said": plain, "error": error_values(error), "tensors": specs}).encode()
        return cls(raw, tuple(tensors), value if fetched else None)


def share(
    group: Group, message: Message, num_bytes: int, shards: Sequence[Shards], what: str, failure: DilocoError | None,
    fetched: Fetched | None = None,
) -> Any:  # fmt: skip
    """Broadcast rank 0's message, whose size all ranks know. Returns its value on every rank, or raises its error.

    Arguments:
        message: on rank 0; not read on other ranks.
        shards: of every fragment.
        failure: the error itself, on rank 0.
        fetched: returns this rank's shard of a version of a fragment; None: rank 0 sends it.
    """
    first = group.rank == 0
    raw = to_tensor(message.raw) if first else torch.empty(num_bytes, dtype=torch.uint8)
    group.broadcast(raw, what)
    try:
        plain, specs = read_message(to_bytes(raw))
    except DilocoError as error:
        raise failure or error from None
    tensors = []
    for index, (shape, dtype, fragment) in enumerate(specs):
        mine = message.tensors[index].tensor.contiguous() if first else None
        if fragment is None:
            tensor = torch.empty(shape, dtype=dtype) if mine is None else mine
            group.broadcast(tensor, what)
        else:
            sizes = [4 * (run.stop - run.start) for run in map(shards[fragment].elements, range(group.size))]
            part = None if mine is None else as_bytes(mine)
            tensor = group.scatter(part, sizes, what).view(torch.float32)
        tensors.append(tensor)
    if first and fetched is not None:
        return message.value
    return value_of(plain, tensors, fetched)


Spec = tuple[list[int], torch.dtype, int | None]
"""Shape and dtype of a tensor of a message, and `MessageTensor.fragment`."""


def read_message(raw: bytes) -> tuple[Any, list[Spec]]:
    """The plain value of a message, with indices in place of tensors, and the specs of the tensors that follow it.

    Raises:
        DilocoError: the error in it. ExchangeError: it is not a message.
    """
    values = read_json(raw, "the message of rank 0", ExchangeError, SAME_VERSION)
    match values:
        case {"error": [str(name), str(text)]}:
            raise error_of(name, text)
        case {"said": plain, "error": None, "tensors": list(specs)}:
            with translated(MALFORMED, ExchangeError, "the message of rank 0 has a malformed tensor", SAME_VERSION):
                return plain, [_spec(*each) for each in specs]
    raise ExchangeError(f"the message of rank 0 is malformed; {SAME_VERSION}.")


def _spec(shape: Any, name: Any, fragment: Any) -> Spec:
    dtype = getattr(torch, name)
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or not isinstance(dtype, torch.dtype) or not (fragment is None or type(fragment) is int):
        raise ValueError(f"{[shape, name, fragment]} does not describe a tensor")
    return shape, dtype, fragment


def value_of(plain: Any, tensors: Sequence[Tensor], fetched: Fetched | None = None) -> Any:
    """The value of a message, with its tensors and, where each rank has fetched its own, with this rank's shards.

    Raises:
        ExchangeError: this version does not know the value.
    """
    with translated(MALFORMED, ExchangeError, "the message of rank 0 has an unknown value", SAME_VERSION):
        return _in(plain, tensors, fetched)


@dataclass(frozen=True)
class _FetchedVersion:
    """In place of a version of which each rank has fetched its shard; `incarnation` starts from it."""

    fragment: int
    version: int
    incarnation: int


@dataclass(frozen=True)
class _FetchedArrival:
    """In place of the arrival of such a version."""

    update: Update
    merged: int


def _out(value: Any, into: list[MessageTensor], fragment: int | None, *, fetched: bool = False) -> Any:
    """A value as plain values of JSON. Its tensors are appended to `into`, and their indices replace them.

    Arguments:
        fragment: to which the tensors in the value belong; None: to none.
        fetched: as in `Message.of`.
    """
    match value:
        case Tensor():
            into.append(MessageTensor(value, fragment if value.dim() else None))
            return {"tensor": len(into) - 1}
        case Mapping():
            return {"mapping": {key: _out(each, into, fragment, fetched=fetched) for key, each in value.items()}}
        case tuple() | list():
            return [_out(each, into, fragment, fetched=fetched) for each in value]
        case None | bool() | int() | float() | str():
            return value
        case GlobalFragment():
            fragment = value.fragment
        case Arrived() if fetched:
            value = _FetchedArrival(value.update, value.merged)
        case Arrived():
            fragment = value.update.fragment
        case StartingState() if fetched:
            versions = [_FetchedVersion(it.fragment, it.version, value.incarnation) for it in value.fragments]
            return {"StartingState": _out({**vars(value), "fragments": versions}, into, None)["mapping"]}
    name = type(value).__name__
    assert name in _KINDS
    return {name: {key: _out(each, into, fragment, fetched=fetched) for key, each in vars(value).items()}}


def _in(plain: Any, tensors: Sequence[Tensor], fetched: Fetched | None = None) -> Any:
    """The value that `_out` was given."""
    match plain:
        case {"tensor": place}:
            return tensors[place]
        case {"mapping": values}:
            return {key: _in(each, tensors, fetched) for key, each in values.items()}
        case list():
            return tuple(_in(each, tensors, fetched) for each in plain)
        case dict():
            [(name, values)] = plain.items()
            value = _KINDS[name](**{key: _in(each, tensors, fetched) for key, each in values.items()})
            if fetched is not None and isinstance(value, _FetchedVersion):
                if value.version < 0:
                    return GlobalFragment.nothing(value.fragment)
                return fetched(value.fragment, value.version, value.incarnation).held
            if fetched is not None and isinstance(value, _FetchedArrival):
                update = value.update
                return Arrived.of(update, fetched(update.fragment, update.version, None), value.merged)
            return value
    return plain


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Arrived, CallForWork, Rejection, Rejoined, Grant, Drained, Hold, Settled, Interrupted),
        *(StartingState, GlobalFragment),
        *(Update, _FetchedVersion, _FetchedArrival),
    )
}
