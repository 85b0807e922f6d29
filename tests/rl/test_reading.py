"""Groups that are read together, and those whose bytes are not what was written."""

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from tests.rl.toy import config_of, group_of

from diloco.errors import DamagedObjectError, MissingObjectError, StoreError, UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup, hash_of
from diloco.rl.reading import GAP_BYTES, Groups, read_span, spans
from diloco.rl.reward import Rewarder
from diloco.rl.settings import rules_of, tokenizer_of
from diloco.rl.worker import make_scorer

CONFIG = config_of()
RULES = rules_of(CONFIG, tokenizer_of(CONFIG))


def pack_of(numbers: Sequence[int]) -> tuple[bytes, list[pb.GroupPlace]]:
    """An object with these groups, one after the other."""
    data, places = b"", list[pb.GroupPlace]()
    for number in numbers:
        own = group_of(number, (0,), "w", CONFIG).to_bytes()
        places.append(
            pb.GroupPlace(number=number, object="p", start=len(data), num_bytes=len(own), digest=hash_of(own))
        )
        data += own
    return data, places


def test_groups_that_are_close_are_read_with_one_read() -> None:
    data, places = pack_of(range(4))
    reads = list[tuple[str, int, int]]()

    def get(name: str, start: int, stop: int) -> bytes:
        reads.append((name, start, stop))
        return data[start:stop]

    [span] = spans([places[2], places[0], places[3]])
    found = read_span(span, get, RULES)
    assert reads == [("p", 0, len(data))]
    assert sorted(found) == [0, 2, 3]
    for number, group in found.items():
        assert isinstance(group, CompletionGroup)
        assert group.number == number


def test_groups_far_apart_or_in_other_objects_are_read_apart() -> None:
    def place(name: str, start: int) -> pb.GroupPlace:
        return pb.GroupPlace(object=name, start=start, num_bytes=10)

    first, near, far, other = place("p", 0), place("p", 10 + GAP_BYTES), place("p", 21 + 2 * GAP_BYTES), place("q", 0)
    assert list(spans([other, far, near, first])) == [[first, near], [far], [other]]


def test_a_damaged_group_costs_no_other() -> None:
    data, places = pack_of(range(3))
    damaged = bytearray(data)
    damaged[places[1].start + places[1].num_bytes - 1] ^= 1
    found = read_span(places, lambda _, start, stop: bytes(damaged[start:stop]), RULES)
    assert [isinstance(found[number], CompletionGroup) for number in range(3)] == [True, False, True]
    assert "are not those that were written" in str(found[1])


@pytest.mark.parametrize(
    "error",
    [MissingObjectError("it was deleted."), pytest.param(DamagedObjectError("it is cut."), marks=pytest.mark.slow)],
)
def test_a_reward_worker_reports_groups_of_an_object_that_is_not_whole(error: StoreError) -> None:
    _, places = pack_of(range(2))

    def get(*_: object) -> bytes:
        raise error

    groups: Future[Groups] = Future()
    groups.set_result(read_span(places, get, RULES))
    with make_scorer(CONFIG) as scorer:
        rewarder = Rewarder(tokenizer_of(CONFIG), scorer)
        assert [rewarder.score(number, groups).reason for number in range(2)] == [str(error)] * 2


def test_a_reward_worker_refuses_a_group_whose_prompt_cannot_be_sampled() -> None:
    groups: Future[Groups] = Future()
    groups.set_result({number: group_of(number, (0,), "w", CONFIG) for number in (10, 11)})
    with make_scorer(config_of('task.letters.source="tests.rl.letters:Faulty"')) as scorer:
        rewarder = Rewarder(tokenizer_of(CONFIG), scorer)
        assert "raised an error (no sample); correct" in rewarder.score(11, groups).reason
        assert rewarder.score(10, groups).reason == "its prompt is not the task's."


def test_other_errors_of_a_read_are_raised() -> None:
    def get(*_: object) -> bytes:
        raise UnreachableError("nobody answers.")

    with pytest.raises(UnreachableError):
        read_span(pack_of([0])[1], get, RULES)
