"""What rank 0 tells the other ranks: JSON of plain values, and tensors, of which each rank gets all or its shard."""

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
from diloco.exchange.group import SAME_VERSION, Group, as_bytes, error_of, to_bytes, to_tensor
from diloco.protocol.contribution import CallForWork, Drained, Hold, Rejection
from diloco.protocol.leases import Grant

Fetched = Callable[[int, int, int | None], AppliedUpdate]
"""`ShardedExchange.fetched`."""


@dataclass(frozen=True)
class MessageTensor:
    """A tensor of a message. `fragment`: each rank gets its shard of it, which is a vector of this fragment; None: each
    rank gets all of it."""

    tensor: Tensor
    fragment: int | None


@dataclass(frozen=True)
class Message:
    """JSON with plain values, an error or the shapes of the tensors that follow it; empty: there is nothing to say.

    Attributes:
        value: what it says, where each rank has its shards of the versions in it.
    """

    raw: bytes = b""
    told: tuple[MessageTensor, ...] = ()
    value: Any = None

    @classmethod
    def of(cls, value: Any = None, error: DilocoError | None = None, *, fetched: bool = False) -> Message:
        """Of plain values, events, and what is in them. `fetched`: each rank has its shards of the versions."""
        told: list[MessageTensor] = []
        said = _out(value, told, None, fetched=fetched)
        specs = [
            [list(each.tensor.shape), str(each.tensor.dtype).removeprefix("torch."), each.fragment] for each in told
        ]
        named = None if error is None else [type(error).__name__, str(error)]
        return cls(
            json.dumps({"said": said, "error": named, "tensors": specs}).encode(),
            tuple(told),
            value if fetched else None,
        )


def share(
    group: Group, message: Message, num_bytes: int, shards: Sequence[Shards], what: str, failure: DilocoError | None,
    fetched: Fetched | None = None,
) -> Any:  # fmt: skip
    """Rank 0's message, of a size that all ranks know, on every rank: the value, or the error in it, raised.

    Arguments:
        message: on rank 0; not read elsewhere.
        shards: of every fragment.
        failure: the error itself, on rank 0.
        fetched: gives this rank's shard of a version of a fragment; None: rank 0 sends it.
    """
    first = group.rank == 0
    raw = to_tensor(message.raw) if first else torch.empty(num_bytes, dtype=torch.uint8)
    group.broadcast(raw, what)
    try:
        said, specs = read_message(to_bytes(raw))
    except DilocoError as error:
        raise failure or error from None
    tensors = []
    for index, (shape, dtype, fragment) in enumerate(specs):
        mine = message.told[index].tensor.contiguous() if first else None
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
    return value_of(said, tensors, fetched)


Spec = tuple[list[int], torch.dtype, int | None]
"""Shape and dtype of a tensor of a message, and `MessageTensor.fragment`."""


def read_message(raw: bytes) -> tuple[Any, list[Spec]]:
    """What a message says, with places instead of tensors, and the tensors that follow it.

    Raises:
        DilocoError: the error in it. ExchangeError: it is no message.
    """
    values = read_json(raw, "what rank 0 tells", ExchangeError, SAME_VERSION)
    match values:
        case {"error": [str(name), str(text)]}:
            raise error_of(name, text)
        case {"said": said, "error": None, "tensors": list(told)}:
            with translated(MALFORMED, ExchangeError, "rank 0 tells of tensors that there are not", SAME_VERSION):
                return said, [_spec(*each) for each in told]
    raise ExchangeError(f"what rank 0 tells is no message; {SAME_VERSION}.")


def _spec(shape: Any, name: Any, fragment: Any) -> Spec:
    dtype = getattr(torch, name)
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or not isinstance(dtype, torch.dtype) or not (fragment is None or type(fragment) is int):
        raise ValueError(f"{[shape, name, fragment]} is no tensor")
    return shape, dtype, fragment


def value_of(said: Any, tensors: Sequence[Tensor], fetched: Fetched | None = None) -> Any:
    """The value of a message, with its tensors and, where each rank has fetched its own, with this rank's shards.

    Raises:
        ExchangeError: it is none that this version knows.
    """
    with translated(MALFORMED, ExchangeError, "rank 0 tells what is not understood here", SAME_VERSION):
        return _in(said, tensors, fetched)


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


def _out(value: Any, told: list[MessageTensor], fragment: int | None, *, fetched: bool = False) -> Any:
    """A value as plain values of JSON. Its tensors are appended to `told`, and their indices replace them.

    Arguments:
        fragment: to which the tensors in the value belong; None: to none.
        fetched: as in `Message.of`.
    """
    match value:
        case Tensor():
            told.append(MessageTensor(value, fragment if value.dim() else None))
            return {"tensor": len(told) - 1}
        case Mapping():
            return {"mapping": {key: _out(each, told, fragment, fetched=fetched) for key, each in value.items()}}
        case tuple() | list():
            return [_out(each, told, fragment, fetched=fetched) for each in value]
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
            return {"StartingState": _out({**vars(value), "fragments": versions}, told, None)["mapping"]}
    name = type(value).__name__
    assert name in _KINDS
    return {name: {key: _out(each, told, fragment, fetched=fetched) for key, each in vars(value).items()}}


def _in(said: Any, tensors: Sequence[Tensor], fetched: Fetched | None = None) -> Any:
    """The value that `_out` was given."""
    match said:
        case {"tensor": place}:
            return tensors[place]
        case {"mapping": values}:
            return {key: _in(each, tensors, fetched) for key, each in values.items()}
        case list():
            return tuple(_in(each, tensors, fetched) for each in said)
        case dict():
            [(name, values)] = said.items()
            value = _KINDS[name](**{key: _in(each, tensors, fetched) for key, each in values.items()})
            if fetched is not None and isinstance(value, _FetchedVersion):
                return fetched(value.fragment, value.version, value.incarnation).held
            if fetched is not None and isinstance(value, _FetchedArrival):
                update = value.update
                return Arrived.of(update, fetched(update.fragment, update.version, None), value.merged)
            return value
    return said


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Arrived, CallForWork, Rejection, Rejoined, Grant, Drained, Hold, Interrupted, StartingState, GlobalFragment),
        *(Update, _FetchedVersion, _FetchedArrival),
    )
}
