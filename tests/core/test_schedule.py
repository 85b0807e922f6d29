"""The communication pattern against printed tables, peers' conventions and its defining properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.schedule import Schedule
from diloco.errors import ConfigError


def applied(schedule: Schedule, step: int) -> tuple[int, ...]:
    """The fragments whose answers are due after inner step `step`: those sent τ steps earlier."""
    return schedule.sends(step - schedule.overlap)


def table(schedule: Schedule, last_step: int) -> str:
    """One line per inner step in which something is due: `4: send 1, apply 0`."""
    lines = []
    for step in range(1, last_step + 1):
        due = [("send", schedule.sends(step)), ("apply", applied(schedule, step))]
        words = [f"{verb} {' '.join(map(str, which))}" for verb, which in due if which]
        if words:
            lines.append(f"{step}: {', '.join(words)}")
    return "\n".join(lines)


TABLES = {
    "DiLoCo": (
        Schedule(sync_every=3, num_fragments=1),
        9,
        """
        3: send 0, apply 0
        6: send 0, apply 0
        9: send 0, apply 0
        """,
    ),
    "every step": (
        Schedule(sync_every=1, num_fragments=1, overlap=1),
        3,
        """
        1: send 0
        2: send 0, apply 0
        3: send 0, apply 0
        """,
    ),
    "streaming": (
        Schedule(sync_every=6, num_fragments=3, overlap=1),
        9,
        """
        2: send 0
        3: apply 0
        4: send 1
        5: apply 1
        6: send 2
        7: apply 2
        8: send 0
        9: apply 0
        """,
    ),
    "uneven: offsets are floors": (
        Schedule(sync_every=5, num_fragments=3),
        6,
        """
        1: send 0, apply 0
        3: send 1, apply 1
        5: send 2, apply 2
        6: send 0, apply 0
        """,
    ),
    "several in flight": (
        Schedule(sync_every=6, num_fragments=3, overlap=5),
        12,
        """
        2: send 0
        4: send 1
        6: send 2
        7: apply 0
        8: send 0
        9: apply 1
        10: send 1
        11: apply 2
        12: send 2
        """,
    ),
    "a whole round of overlap: the next is sent before the last is applied": (
        Schedule(sync_every=4, num_fragments=2, overlap=4),
        8,
        """
        2: send 0
        4: send 1
        6: send 0, apply 0
        8: send 1, apply 1
        """,
    ),
    "torchft: applied at (p + 1)·H/P": (
        Schedule(sync_every=6, num_fragments=2, overlap=2, offsets=(1, 4)),
        12,
        """
        1: send 0
        3: apply 0
        4: send 1
        6: apply 1
        7: send 0
        9: apply 0
        10: send 1
        12: apply 1
        """,
    ),
    "MaxText: sent at k·H/P, fragment 1 first": (
        Schedule(sync_every=6, num_fragments=2, overlap=1, offsets=(0, 3)),
        10,
        """
        3: send 1
        4: apply 1
        6: send 0
        7: apply 0
        9: send 1
        10: apply 1
        """,
    ),
    "more fragments than steps: what rounds down to 0 is sent after H": (
        Schedule(sync_every=2, num_fragments=5, overlap=1),
        5,
        """
        1: send 2 3
        2: send 0 1 4, apply 2 3
        3: send 2 3, apply 0 1 4
        4: send 0 1 4, apply 2 3
        5: send 2 3, apply 0 1 4
        """,
    ),
    "together": (
        Schedule(sync_every=3, num_fragments=2, overlap=1, offsets=(2, 2)),
        6,
        """
        2: send 0 1
        3: apply 0 1
        5: send 0 1
        6: apply 0 1
        """,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_due_against_printed_tables(name: str) -> None:
    schedule, last_step, expected = TABLES[name]
    assert table(schedule, last_step).split("\n") == [line.strip() for line in expected.strip().split("\n")]


def test_offsets_are_resolved() -> None:
    assert Schedule(100, 4).offsets == (25, 50, 75, 100)
    assert Schedule(30, 9).offsets == (3, 6, 10, 13, 16, 20, 23, 26, 30)
    assert Schedule(4, 2, offsets=[0, 1]).offsets == (4, 1)
    assert Schedule(6, 2) == Schedule(6, 2, offsets=(3, 0))
    assert hash(Schedule(6, 2)) == hash(Schedule(6, 2, offsets=[3, 6]))


def test_nothing_is_due_before_the_first_step() -> None:
    schedule = Schedule(sync_every=1, num_fragments=1, overlap=1)
    assert schedule.sends(0) == schedule.sends(-1) == ()
    assert applied(schedule, 1) == ()


# torchft's fixture: fragment 0 in fp numbers, see the docstring of test_torchft_trajectory
TORCHFT = {
    0: [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
    1: [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
}


@pytest.mark.parametrize("overlap", TORCHFT)
def test_torchft_trajectory(overlap: int) -> None:
    """torchft's own regression fixture: every parameter after every step.

    Inner SGD with lr 1 and gradient 2, outer SGD with lr 2, weights start at 1, H = 6, P = 2, α = 0; layer 1 does what
    layer 0 does, three steps later.
    """
    schedule = Schedule(6, 2, overlap, offsets=(3 - overlap, 6 - overlap))
    local, anchor, in_flight = [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    seen: list[list[float]] = [[1.0], [1.0]]
    for step in range(1, 19):
        local = [value - 2.0 for value in local]
        for p in schedule.sends(step):
            in_flight[p] = anchor[p] - local[p]
        for p in applied(schedule, step):
            anchor[p] -= 2.0 * in_flight[p]
            local[p] = anchor[p]
        for p in (0, 1):
            seen[p].append(local[p])
    assert seen[0][:16] == TORCHFT[overlap]
    # Layer 1's first synchronisation comes after six inner steps, the later ones every six as in layer 0.
    first = 1 - 2.0 * (2 * (6 - overlap))
    assert seen[1][:7] == [1, -1, -3, -5, -7, -9, first]
    assert [after - first for after in seen[1][6:]] == [after - seen[0][3] for after in seen[0][3:16]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "sync_every must be a whole number of at least 1, not 0"),
        ((2.0, 1), "sync_every must be a whole number of at least 1, not 2.0"),
        ((True, 1), "sync_every must be a whole number of at least 1, not True"),
        ((4, 0), "num_fragments must be a whole number of at least 1, not 0"),
        ((4, 1, -1), "overlap must be a whole number of at least 0, not -1"),
        ((4, 1, 9), "overlap=9 exceeds two intervals of sync_every=4"),
        ((4, 2, 0, (1,)), r"offsets=\(1,\) needs one offset for each of the 2 fragments"),
        ((4, 2, 0, (1, 5)), "offset 5 must be a whole number from 0 to sync_every=4"),
        ((4, 2, 0, (1, -1)), "offset -1 must be"),
        ((4, 2, 0, (1, 2.0)), "offset 2.0 must be"),
    ],
)
def test_impossible_numbers_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(*arguments)


def test_more_fragments_than_steps_send_several_after_one_step() -> None:
    assert Schedule(1, 3).sends(5) == Schedule(1, 3, offsets=(0, 0, 0)).sends(5) == (0, 1, 2)
    assert Schedule(30, 36).offsets == tuple((p + 1) * 30 // 36 or 30 for p in range(36))
    assert max(len(Schedule(30, 36).sends(step)) for step in range(1, 31)) == 2


@st.composite
def _schedules(draw: st.DrawFn) -> Schedule:
    sync_every = draw(st.integers(1, 20))
    num_fragments = draw(st.integers(1, 25))
    offsets = draw(st.none() | st.tuples(*[st.integers(0, sync_every)] * num_fragments))
    return Schedule(sync_every, num_fragments, draw(st.integers(0, sync_every)), offsets)


@given(_schedules(), st.integers(0, 100))
def test_every_fragment_once_per_period_and_applied_exactly_tau_later(schedule: Schedule, start: int) -> None:
    period = range(start + 1, start + 1 + schedule.sync_every)
    sent = [p for step in period for p in schedule.sends(step)]
    assert sorted(sent) == list(range(schedule.num_fragments))
    for step in period:
        assert list(schedule.sends(step)) == sorted(schedule.sends(step))


@given(_schedules())
def test_peak_number_in_flight(schedule: Schedule) -> None:
    """Evenly spread, at most ⌈τ·P/H⌉ fragments travel at once: H/P steps lie between two sends, each travels τ."""
    in_flight, peak = 0, 0
    for step in range(1, 4 * schedule.sync_every + 1):
        in_flight += len(schedule.sends(step)) - len(applied(schedule, step))
        assert 0 <= in_flight <= schedule.num_fragments
        peak = max(peak, in_flight)
    even = Schedule(schedule.sync_every, schedule.num_fragments, schedule.overlap) == schedule
    if even and schedule.sync_every % schedule.num_fragments == 0:
        assert peak == -(-schedule.overlap * schedule.num_fragments // schedule.sync_every)


def test_sync_every_may_follow_a_schedule() -> None:
    schedule = Schedule(sync_every=((0, 3), (6, 4), (13, 2)), num_fragments=2, overlap=1)
    sent = [(step, schedule.sends(step)) for step in range(1, 18) if schedule.sends(step)]
    assert sent == [
        (1, (0,)), (3, (1,)), (4, (0,)), (6, (1,)),  # H = 3: offsets 1 and 3
        (8, (0,)), (10, (1,)), (12, (0,)),  # H = 4 from step 6: offsets 2 and 4
        (14, (0,)), (15, (1,)), (16, (0,)), (17, (1,)),  # H = 2 from step 13: offsets 1 and 2
    ]  # fmt: skip
    assert [schedule.sync_every_at(step) for step in (1, 6, 7, 13, 14)] == [3, 3, 4, 4, 2]
    for fragment in range(2):
        sends = [step for step, fragments in sent if fragment in fragments]
        for after in range(17):
            later = [step for step in sends if step > after]
            if later:
                assert schedule.next_send(fragment, after) == later[0]
                assert schedule.next_send(fragment, after + 0.5) == later[0]


@pytest.mark.parametrize(
    ("sync_every", "message"),
    [
        (((5, 3),), "start at 0"),
        (((0, 3), (0, 4)), "ascend"),
        (((0, 3), (5, 0)), "H of sync_every"),
        (((0, 3), 7), "pairs"),
        ((), "is an empty list"),
    ],
)
def test_an_impossible_schedule_of_intervals_is_refused(sync_every: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(sync_every=sync_every, num_fragments=1)
