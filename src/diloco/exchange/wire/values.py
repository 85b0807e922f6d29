"""Values of the state machines as messages, and back, by the names of their fields."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Evaluation
from diloco.protocol.workers import Score

M = TypeVar("M", bound=Message)
V = TypeVar("V")
_KINDS: dict[type[Message], type[Any]] = {
    pb.Lineage: Lineage, pb.Evaluation: Evaluation, pb.GroupScore: Score,
}  # fmt: skip
"""The values of messages inside others; that of another message is the tuple of its fields."""


def message_of(kind: type[M], *values: object, **more: Any) -> M:
    """A message whose fields are the attributes of these values (of the last one that has it), and `more`. None leaves
    a field unset."""
    found = dict[str, Any]()
    for field in kind.DESCRIPTOR.fields:
        for value in values:
            if hasattr(value, field.name):
                found[field.name] = getattr(value, field.name)
    found |= more
    names = {field.name: field.message_type for field in kind.DESCRIPTOR.fields if field.message_type is not None}
    return kind(**{name: _written(value, names[name]) if name in names else value for name, value in found.items()})


def _written(value: Any, kind: Any) -> Any:
    """A value as an argument for a field of this kind of messages."""
    return [_nested(each, kind) for each in value] if isinstance(value, tuple) else _nested(value, kind)


def _nested(value: Any, kind: Any) -> Any:
    if isinstance(value, tuple):
        return {field.name: each for field, each in zip(kind.fields, value, strict=True)}
    return vars(value) if is_dataclass(value) else value


def value_of(kind: type[V], message: Message, **more: Any) -> V:
    """A dataclass with the fields of a message that have the names of its own, and `more`. What the message does not
    have is left to its default; an optional field that is not set is None."""
    known = message.DESCRIPTOR.fields_by_name
    own: Any = kind  # a dataclass
    names = [field.name for field in fields(own) if field.name in known and field.name not in more]
    return kind(**{name: _read(message, known[name]) for name in names}, **more)


def _read(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    return tuple(map(_element, value)) if isinstance(value, MutableSequence) else _element(value)


def _element(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    if (kind := _KINDS.get(type(value))) is not None:
        return value_of(kind, value)
    return tuple(_read(value, field) for field in value.DESCRIPTOR.fields)
