"""Leased groups as trainers and reward workers read them: those that are close to each other in one object with one
read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from diloco.errors import CorruptPayloadError, DilocoError, PayloadError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup, hash_of
from diloco.protocol.leases import GroupRules
from diloco.store.reading import NOT_WHOLE

Groups = Mapping[int, CompletionGroup | DilocoError]
"""By their numbers, or what is wrong with each."""

GAP_BYTES = 64 << 10
"""Bytes between two groups that are read with them, rather than asking twice."""


def spans(places: Sequence[pb.GroupPlace]) -> Iterator[list[pb.GroupPlace]]:
    """Groups that are close to each other, so that one read gets them."""
    span: list[pb.GroupPlace] = []
    for place in sorted(places, key=lambda each: (each.object, each.start)):
        if span and (place.object != span[-1].object or place.start - _stop(span[-1]) > GAP_BYTES):
            yield span
            span = []
        span.append(place)
    if span:
        yield span


def read_span(
    span: Sequence[pb.GroupPlace], get: Callable[[str, int, int], bytes | memoryview], rules: GroupRules
) -> Groups:
    """The groups of a span. `get`: as of `Readable`, whose errors but `NOT_WHOLE` are raised."""
    name, start = span[0].object, span[0].start
    found = dict[int, CompletionGroup | DilocoError]()
    try:
        data = memoryview(get(name, start, _stop(span[-1])))
    except NOT_WHOLE as error:
        return {place.number: error for place in span}
    for place in span:
        try:
            found[place.number] = _checked(data[place.start - start : _stop(place) - start], place, rules)
        except PayloadError as error:
            found[place.number] = error
    return found


def _checked(data: memoryview, place: pb.GroupPlace, rules: GroupRules) -> CompletionGroup:
    if hash_of(data) != place.digest:
        raise CorruptPayloadError(f"its bytes in {place.object} are not those that were written; it is dropped.")
    group = CompletionGroup.from_bytes(data)
    group.check(rules)
    return group


def _stop(place: pb.GroupPlace) -> int:
    return place.start + place.num_bytes
