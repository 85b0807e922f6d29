"""Inputs that are almost right: a valid one with one to four changes, in its bytes or in what they say.

A `Form` says how the bytes of an input are read as plain values and written again, so that a change in a value still
has the braces, lengths and checksums around it that a reader asks for first.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from diloco.errors import ConfigError
from diloco.escaping import MALFORMED
from diloco.tables import write_toml

INTERESTING = (
    0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**18, 10**30, 10**400, 0.5, -0.0,
    1e308, 1e-320, math.inf, -math.inf, math.nan, True, False, None, "", "a", "\x00", "\x1b[31m", "[/x]", "../../x",
    "\udc80", "é" * 40, "x" * 5000, [], {}, [[]], [[[]]], {"": ""}, {"type": "Nesterov"}, {"$": "set"}, ["a", 1, None],
)  # fmt: skip
"""Values that stand in the place of another."""

PIECES = (
    b"\x00", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80" * 12, b"\xff\xfe", b"\xed\xa0\x80", b"\n", b'"', b"{}", b"[]",
    b"null", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b"[" * 3000, b'{"a":' * 3000, b"a." * 3000,
    b"'''", b"[[a]]\n", b"2027-99-99T00:00:00Z", b"-----BEGIN CERTIFICATE-----\n",
)  # fmt: skip
"""What is put between bytes."""

MOST_VALUES = 400
"""Places of a value among which one is chosen."""


@dataclass(frozen=True)
class Form:
    """How the bytes of an input are read as plain values, and written again with the checksums that belong to them.
    Either may raise: then the bytes themselves are changed."""

    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]


def mutated(data: bytes, form: Form | None, random: Random) -> bytes:
    """The same bytes with one to four changes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        if form is not None and random.random() < 0.6:
            try:
                data = form.dump(changed(form.load(data), random))
                continue
            except UNREADABLE:
                pass
        data = cut(data, random)
    return data


UNREADABLE = (*MALFORMED, ConfigError, DecodeError, zlib.error, SystemError)
"""What a form may raise."""


def cut(data: bytes, random: Random) -> bytes:
    """Bytes with one change."""
    if not data:
        return random.choice(PIECES)
    at, other = sorted(random.randrange(len(data) + 1) for _ in range(2))
    match random.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[other:]
        case 2:
            return data[:other] + data[at:]
        case 3:
            return data[:at] + random.choice(PIECES) + data[at:]
        case 4:
            return data[:at] + random.choice(PIECES) + data[other:]
        case 5:
            return data[:at] + bytes(random.randrange(256) for _ in range(random.choice((1, 4, 8)))) + data[at + 1 :]
        case _:
            flipped = bytearray(data)
            flipped[min(at, len(data) - 1)] ^= 1 << random.randrange(8)
            return bytes(flipped)


def changed(value: Any, random: Random) -> Any:
    """Plain values with one change: another value, or one of their own in the wrong place, once too often, not at all
    or deep within itself."""
    whole = [copy.deepcopy(value)]
    places = list(_places(whole))
    holder, key = random.choice(places)
    other_holder, other_key = random.choice(places)
    other = copy.deepcopy(other_holder[other_key])
    match random.randrange(7):
        case 0:
            if len(holder) > 1 or holder is not whole:
                del holder[key]
        case 1:
            holder[key], other_holder[other_key] = other, copy.deepcopy(holder[key])
        case 2:
            holder[key] = other
        case 3 if isinstance(holder, list) and holder is not whole:
            holder.insert(key, other)
        case 4:
            for _ in range(random.choice((1, 50, 900))):
                holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}
        case 5 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = random.choice((holder[key] + 1, holder[key] - 1, -holder[key], 2 * holder[key]))
        case _:
            holder[key] = copy.deepcopy(random.choice(INTERESTING))
    return whole[0]


def _places(value: Any) -> Any:
    """Every (container, key) below a value, at most `MOST_VALUES`."""
    waiting, num = [value], 0
    while waiting and num < MOST_VALUES:
        holder = waiting.pop(0)
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            num += 1
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])


# --- forms ------------------------------------------------------------------------------------------------------------

JSON = Form(json.loads, lambda value: json.dumps(value).encode())
TOML = Form(
    lambda data: tomllib.loads(data.decode()),
    lambda value: write_toml(value).encode("utf-8", "surrogatepass"),
)


def lines(form: Form) -> Form:
    """One value a line."""
    return Form(
        lambda data: [form.load(line) for line in data.splitlines()],
        lambda values: b"".join(form.dump(value) + b"\n" for value in values),
    )


def _load_safetensors(data: bytes) -> list[Any]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    said = {name: json.loads(text) for name, text in header.get("__metadata__", {}).items()}
    return [header, said, data[8 + length :].hex()]


def _dump_safetensors(value: list[Any]) -> bytes:
    header, said, data = value
    if said:
        header = {**header, "__metadata__": {name: json.dumps(each) for name, each in said.items()}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes.fromhex(data)


SAFETENSORS = Form(_load_safetensors, _dump_safetensors)


def _dump_manifest(value: Any) -> bytes:
    def text(plain: Any) -> bytes:
        return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()

    if isinstance(value, dict) and "sha256" in value:
        rest = {key: each for key, each in value.items() if key != "sha256"}
        value = {**value, "sha256": hashlib.sha256(text(rest)).hexdigest()}
    return text(value)


MANIFEST = Form(json.loads, _dump_manifest)


def _load_journal(data: bytes) -> list[Any]:
    return [json.loads(line[9:]) for line in zlib.decompress(data, 31).splitlines()]


def _dump_journal(entries: list[Any]) -> bytes:
    crc, written = 0, b""
    for entry in entries:
        line = json.dumps(entry).encode()
        crc = zlib.crc32(line, crc)
        written += b"%08x %s\n" % (crc, line)
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(written) + packer.flush()


JOURNAL = Form(_load_journal, _dump_journal)


def protobuf(kind: type[Message]) -> Form:
    """A message, as [name of a field, its value or values] for each field that is set."""
    return Form(lambda data: _listed(kind.FromString(data)), lambda value: _message(kind, value).SerializeToString())


def _listed(message: Message) -> list[Any]:
    return [[field.name, _plain(value)] for field, value in message.ListFields()] + [
        [field.name, 0] for field in message.DESCRIPTOR.fields if not field.is_repeated and field.message_type is None
        and field.name not in {each.name for each, _ in message.ListFields()}
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return {"fields": _listed(value)}
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(each) for each in value] if hasattr(value, "__len__") and not isinstance(value, str) else value


def _message(kind: type[Message], value: Any) -> Message:
    """A message of what can be said in its fields; the rest is left out."""
    message = kind()
    for each in value:
        if isinstance(each, list) and len(each) == 2 and isinstance(each[0], str):
            _set(message, message.DESCRIPTOR.fields_by_name.get(each[0]), each[1])
    return message


def _set(message: Message, field: FieldDescriptor | None, value: Any) -> None:
    if field is None:
        return
    values = value if isinstance(value, list) else [value]
    for each in values[: None if field.is_repeated else 1]:
        try:
            if field.message_type is not None:
                below = getattr(message, field.name)
                inner = _message(field.message_type._concrete_class, each["fields"])
                (below.append if field.is_repeated else below.CopyFrom)(inner)
            elif field.is_repeated:
                getattr(message, field.name).append(each)
            else:
                setattr(message, field.name, each)
        except (TypeError, ValueError, LookupError):
            continue


# --- several parts in one input ---------------------------------------------------------------------------------------


def joined(parts: list[bytes]) -> bytes:
    """Several parts as one input: each after its length."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def parted(data: bytes) -> list[bytes]:
    """What `joined` was given; of other bytes, as many parts as there are."""
    parts = []
    while len(data) >= 4:
        length = int.from_bytes(data[:4], "little")
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return parts


def mutated_parts(data: bytes, form_of: Callable[[int], Form | None], random: Random) -> bytes:
    """A joined input with changes in one part, or with parts that are missing, twice there or in each other's place."""
    parts = parted(data)
    if not parts:
        return cut(data, random)
    index, other = random.randrange(len(parts)), random.randrange(len(parts))
    match random.randrange(12):
        case 0:
            del parts[index]
        case 1:
            parts[index], parts[other] = parts[other], parts[index]
        case 2:
            parts.insert(index, parts[other])
        case _:
            parts[index] = mutated(parts[index], form_of(index), random)
    return joined(parts)
