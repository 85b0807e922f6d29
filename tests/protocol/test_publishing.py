"""The right to publish a run: the rules of `protocol.publishing`, by scripted events in virtual time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.chaos.versions import BrokenInvariantError
from tests.run.simulated import Place

from diloco.errors import DamagedObjectError, DilocoError, StoreError, SwapRefusedError, UnknownRunError
from diloco.protocol.groups import MAX_PACKS
from diloco.protocol.manifest import FORMAT, MOST_BYTES, MOST_FRAGMENTS, Manifest, NamedVersion, epoch_of
from diloco.protocol.publishing import (
    RETRY_S,
    Act,
    Change,
    Confirmed,
    Delete,
    List,
    Publisher,
    Read,
    RefuseStart,
    Serve,
    Stand,
    Swap,
)

LEASE_S, KEEP_S = 9.0, 60.0
KEPT_AWAKE = int(2 * KEEP_S / RETRY_S)


class Script:
    """A syncer at a place. Its requests wait in `sent` until they are answered, or fail.

    Attributes:
        rate: seconds of its clock in a second.
    """

    def __init__(self, place: Place, boot: int = 1, *, now: float = 100.0, rate: float = 1.0, **options: Any) -> None:
        self.place, self.now, self.rate = place, now, rate
        self.sent: list[Read | Swap | List] = []
        self.swaps: list[Swap] = []
        self.stood: list[str] = []
        self.confirmed: list[Any] = []
        self.served: list[Manifest] = []
        self.deleted: list[str] = []
        self.error: DilocoError | None = None
        self.publisher = Publisher(
            "run", boot=boot, **{"lease_s": LEASE_S, "keep_s": KEEP_S, "address": f"syncer-{boot}", **options}
        )

    @property
    def standing(self) -> str:
        return self.publisher.standing

    def do(self, acts: list[Act]) -> None:
        for act in acts:
            match act:
                case Read() | Swap() | List():
                    self.sent.append(act)
                    self.swaps += [act] if isinstance(act, Swap) else []
                case Delete(names=names):
                    self.place.delete(names)
                    self.deleted += names
                case Serve(manifest=manifest):
                    self.served.append(manifest)
                case Confirmed(tickets=tickets):
                    self.confirmed += tickets
                case Stand(standing=standing, why=why):
                    assert why
                    self.stood.append(standing)
                case RefuseStart(error=error):
                    self.error = error
        assert sum(isinstance(each, Swap) for each in self.sent) <= 1

    def execute(self, request: Read | Swap | List) -> Callable[[], list[Act]]:
        """A request takes effect; returns the event of its answer."""
        it, place = self.publisher, self.place
        match request:
            case Read():
                found = place.found
                manifest = None if found is None else Manifest.from_bytes(found.data, "the place")
                return lambda: it.read(self.now, manifest, None if found is None else found.token)
            case List():
                names = [*place.objects]
                return lambda: it.listed(self.now, names)
            case Swap(data=data, token=token):
                try:
                    new = place.swap(data, token)
                except SwapRefusedError:
                    return lambda: it.refused(self.now)
                return lambda: it.swapped(self.now, new)

    def start(self) -> None:
        self.do(self.publisher.start(self.now))

    def answer(self) -> None:
        """Answer the oldest request."""
        self.do(self.execute(self.sent.pop(0))())

    def settle(self) -> None:
        while self.sent:
            self.answer()

    def lose(self) -> None:
        """The oldest request takes effect, and its answer is lost."""
        self.execute(self.sent.pop(0))
        self.do(self.publisher.failed(self.now))

    def drop(self) -> Callable[[], object]:
        """The oldest request is not answered, and has no effect until the returned function is called."""
        request = self.sent.pop(0)
        self.do(self.publisher.failed(self.now))
        return lambda: self.execute(request)

    def wait(self, seconds: float, *, answers: bool = True) -> None:
        """Time passes; requests are answered at once, or wait."""
        until = self.now + seconds * self.rate
        while (at := self.publisher.wake_at) <= until:
            self.now = max(self.now, at)
            self.do(self.publisher.tick(self.now))
            if answers:
                self.settle()
        self.now = until

    def change(self, ticket: Any, **fields: Any) -> None:
        self.do(self.publisher.change(self.now, Change(ticket, **fields)))

    def object(self, what: str) -> str:
        """The name of a new object, which is there."""
        name = f"{self.publisher.next_name()}-{what.encode().hex():0>64}"
        self.place.put(name, what)
        return name

    def initialise(self, num_fragments: int = 1) -> None:
        held = tuple((NamedVersion(0, self.object("held")),) for _ in range(num_fragments))
        frozen, record = self.object("frozen"), self.object("record")
        self.change("initial", initial={"run_id": "r", "frozen": frozen, "record": record, "fragments": held})
        self.settle()

    def publish(self, version: int, ticket: Any = None) -> tuple[str, str]:
        """Ask for a version of fragment 0 to be published; returns its names."""
        held, update = self.object("held"), self.object("update")
        self.change(ticket or version, published={0: NamedVersion(version, held, update)})
        return held, update


def serving(place: Place, boot: int = 1, **options: Any) -> Script:
    it = Script(place, boot, **options)
    it.start()
    it.settle()
    assert it.standing == "serving"
    return it


def running(place: Place, boot: int = 1, **options: Any) -> Script:
    """With a model."""
    it = serving(place, boot, **options)
    it.initialise()
    return it


def manifest_of(place: Place) -> Manifest:
    assert place.manifest is not None
    return place.manifest


# --- the start --------------------------------------------------------------------------------------------------------


def test_every_start_claims_a_new_epoch_before_it_names_anything() -> None:
    place = Place()
    first = serving(place)
    claimed = manifest_of(place)
    assert (claimed.epoch, claimed.boot, claimed.serial, claimed.address) == (1, 1, 1, "syncer-1")
    assert (claimed.run_id, claimed.fragments, first.served) == ("", (), [claimed])
    first.initialise()
    assert [epoch_of(name) for name in manifest_of(place).names] == [1] * 3
    second = serving(place, 2, former=1)
    assert (manifest_of(place).epoch, second.served[0].names) == (2, manifest_of(place).names)
    assert second.publisher.next_name() == "2/1"
    assert [each.serial for each in place.history] == [*range(1, len(place.history) + 1)]


def test_a_directory_has_no_lease_and_its_start_claims_at_once() -> None:
    place = Place()
    running(place, 1, lease_s=math.inf)
    second = serving(place, 2, lease_s=math.inf)
    num_swaps = len(place.history)
    second.wait(1e6)
    assert len(place.history) == num_swaps  # nothing has changed


def test_a_plain_start_on_a_store_that_is_served_is_refused() -> None:
    place = Place()
    first = running(place)
    second = Script(place, 2)
    second.start()
    second.settle()
    first.wait(LEASE_S / 2)
    second.wait(LEASE_S / 2)
    assert isinstance(second.error, StoreError)
    assert str(second.error) == (
        "the store is served by another syncer at syncer-1, in epoch 1; stop that one, or start this one with "
        "--standby."
    )
    assert (second.swaps, second.standing, second.publisher.wake_at) == ([], "fenced", math.inf)
    assert manifest_of(place).boot == 1


def test_a_plain_start_claims_what_nobody_has_served_for_a_lease() -> None:
    place = Place()
    running(place)
    second = Script(place, 2)
    second.start()
    second.settle()
    second.wait(0.99 * LEASE_S)
    assert (second.standing, second.swaps) == ("waiting", [])
    second.wait(0.2 * LEASE_S)
    assert (second.standing, manifest_of(place).epoch) == ("serving", 2)


def test_the_next_process_of_a_syncer_claims_at_once() -> None:
    place = Place()
    running(place, 1)
    assert serving(place, 2, former=1).now == 100.0
    other = Script(place, 3, former=1)  # another one has served since its end
    other.start()
    other.settle()
    assert other.standing == "waiting"


def test_a_released_store_is_claimed_at_once() -> None:
    place = Place()
    first = running(place)
    first.publish(1)
    first.do(first.publisher.release(first.now))
    assert len(first.sent) == 1
    first.settle()
    assert (first.standing, first.confirmed) == ("released", ["initial", 1])
    assert (manifest_of(place).boot, manifest_of(place).address, manifest_of(place).versions) == (0, "", (1,))
    first.wait(100.0)
    assert serving(place, 2, is_standby=True).now == 100.0


def test_a_store_of_another_run_is_refused_and_not_changed() -> None:
    place = Place()
    place.swap(Manifest("other").to_bytes(), None)
    it = Script(place)
    it.start()
    it.settle()
    assert isinstance(it.error, UnknownRunError)
    assert str(it.error) == "the store holds run 'other', not 'run'; use another place for this run."
    assert len(place.history) == 1


def test_of_two_that_claim_at_once_one_has_the_run() -> None:
    for is_standby in (False, True):
        place = Place()
        one, two = Script(place, 1), Script(place, 2, is_standby=is_standby)
        for each in (one, two):
            each.start()
            each.answer()  # there is no manifest
        one.answer()
        two.settle()
        assert (one.standing, two.stood) == ("serving", ["claiming", "waiting"])
        one.wait(LEASE_S / 2)
        two.wait(LEASE_S / 2)
        assert (two.standing, two.error is None) == ("waiting" if is_standby else "fenced", is_standby)
        assert manifest_of(place).boot == 1


def test_a_claim_that_its_former_process_overtakes_is_made_again() -> None:
    """A swap of a process that was killed lands late, between the look and the claim."""
    place = Place()
    first = running(place)
    first.publish(1)
    land = first.drop()
    second = Script(place, 2, former=1)
    second.start()
    second.answer()
    land()
    second.settle()
    assert (second.standing, second.error, second.served[0].versions) == ("serving", None, (1,))


def test_a_start_waits_for_a_store_that_does_not_answer() -> None:
    place = Place()
    it = Script(place)
    it.start()
    for _ in range(3):
        it.drop()
        it.wait(RETRY_S, answers=False)
    it.answer()
    it.drop()
    it.wait(RETRY_S)
    assert it.standing == "serving"


def test_a_start_that_is_stopped_changes_nothing_after_that() -> None:
    for num_answers in (0, 1):
        place = Place()
        it = Script(place)
        it.start()
        for _ in range(num_answers):
            it.answer()
        it.do(it.publisher.release(it.now))
        it.settle()
        assert it.stood[-1] == "released"
        assert it.served == []
        it.wait(100.0)
        assert len(place.history) == num_answers


# --- a standby --------------------------------------------------------------------------------------------------------


def test_a_standby_claims_when_the_manifest_has_not_changed_for_a_lease() -> None:
    place = Place()
    first = running(place)
    second = Script(place, 2, now=7e5, is_standby=True)
    second.start()
    second.settle()
    for _ in range(10):
        first.wait(LEASE_S)
        second.wait(LEASE_S)
    assert second.swaps == []
    second.wait(1.2 * LEASE_S)
    assert (second.standing, manifest_of(place).epoch) == ("serving", 2)
    assert second.served[0].versions == (0,)
    first.wait(LEASE_S)
    assert (first.standing, first.stood[-1]) == ("fenced", "fenced")


@pytest.mark.parametrize("rate", [0.25, 2.0])
def test_a_clock_that_differs_only_moves_a_takeover(rate: float) -> None:
    place = Place()
    first = running(place)
    second = Script(place, 2, now=-5.0, rate=rate, is_standby=True)
    second.start()
    second.settle()
    for _ in range(100):
        first.wait(0.05 * LEASE_S)
        second.wait(0.05 * LEASE_S)
    assert (first.standing, second.standing) == ("serving", "waiting")
    second.wait(0.3 * LEASE_S / rate)
    assert second.standing == "waiting"
    second.wait(0.9 * LEASE_S / rate)
    assert second.standing == "serving"


def test_a_standby_whose_clock_is_far_too_fast_fences_a_first_that_is_well() -> None:
    place = Place()
    first = running(place)
    second = Script(place, 2, rate=4.0, is_standby=True)
    second.start()
    second.settle()
    for _ in range(20):
        first.wait(0.05 * LEASE_S)
        second.wait(0.05 * LEASE_S)
    assert (first.standing, second.standing) == ("fenced", "serving")
    assert [each.serial for each in place.history] == [*range(1, len(place.history) + 1)]


def test_promote_claims_at_once_and_the_first_is_fenced() -> None:
    place = Place()
    first = running(place)
    second = Script(place, 2, is_standby=True)
    second.start()
    second.settle()
    second.do(second.publisher.promote(second.now))
    first.publish(1)
    second.answer()
    first.answer()  # it was faster
    second.settle()
    assert (second.standing, second.served[0].versions) == ("serving", (1,))
    first.publish(2)
    first.settle()
    assert (first.standing, first.confirmed) == ("fenced", ["initial", 1])
    assert manifest_of(place).versions == (1,)


def test_a_promotion_during_a_look_claims_with_it() -> None:
    place = Place()
    running(place)
    second = Script(place, 2, is_standby=True)
    second.start()
    second.do(second.publisher.promote(second.now))
    assert len(second.sent) == 1
    second.settle()
    assert second.standing == "serving"


# --- a first ----------------------------------------------------------------------------------------------------------


def test_a_first_swaps_three_times_in_a_lease() -> None:
    place = Place()
    it = running(place)
    before = manifest_of(place)
    it.wait(LEASE_S + 0.1)
    after = manifest_of(place)
    assert after.serial == before.serial + 3
    assert after == replace(before, serial=after.serial)


def test_changes_share_the_next_swap_and_one_is_in_flight() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    record = it.object("record")
    it.publish(2)
    it.change("record", record=record)
    assert len(it.swaps) == 3  # the claim, the model, version 1
    it.answer()
    assert it.confirmed == ["initial", 1]
    assert len(it.swaps) == 4
    it.answer()
    assert it.confirmed == ["initial", 1, 2, "record"]
    assert (manifest_of(place).record, [each.version for each in manifest_of(place).fragments[0]]) == (record, [2, 1])
    assert it.publisher.is_idle


def test_swaps_keep_their_distance_also_after_one_that_was_repeated() -> None:
    place = Place()
    it = running(place, shortest_swap_s=1.0)
    it.wait(1.0)
    sent_s = list[float]()
    for version in range(1, 5):
        it.publish(version)
        while it.publisher.manifest and it.publisher.manifest.versions != (version,):
            if it.sent:
                sent_s.append(it.now)
                it.answer() if version != 2 or len(sent_s) % 2 else it.drop()
            else:
                it.now = it.publisher.wake_at
                it.do(it.publisher.tick(it.now))
    assert len(sent_s) == 5
    assert min(after - before for before, after in pairwise(sent_s)) >= 1.0


def test_a_swap_whose_fate_is_unknown_is_repeated_with_the_same_bytes_and_condition() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    it.drop()
    it.publish(2)
    for _ in range(2):
        assert it.publisher.is_retrying
        it.wait(RETRY_S, answers=False)
        assert not it.publisher.is_retrying
        it.drop()
    it.wait(RETRY_S, answers=False)
    assert len(set(it.swaps[2:])) == 1
    assert len(it.swaps) == 6
    it.settle()
    assert it.confirmed == ["initial", 1, 2]


def test_a_lost_answer_is_found_by_the_refusal_of_the_repeated_swap() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    it.lose()
    it.wait(RETRY_S, answers=False)
    it.answer()  # refused: another manifest is there, its own
    assert (it.confirmed, it.sent) == (["initial"], [Read()])
    it.answer()
    assert (it.confirmed, it.standing) == (["initial", 1], "serving")
    assert len(place.history) == 3


def test_a_look_after_a_refusal_is_repeated() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    it.lose()
    it.wait(RETRY_S, answers=False)
    it.answer()
    it.drop()
    assert it.publisher.is_retrying
    it.wait(RETRY_S)
    assert (it.confirmed, it.standing) == (["initial", 1], "serving")


def test_a_look_that_shows_the_manifest_of_before_tells_nothing() -> None:
    place = Place()
    it = running(place)
    before = place.found
    it.publish(1)
    it.lose()
    it.wait(RETRY_S, answers=False)
    it.answer()
    after, place.found = place.found, before
    it.answer()
    place.found = after
    assert (it.standing, it.sent) == ("serving", [])
    it.wait(RETRY_S)
    assert (it.standing, it.confirmed) == ("serving", ["initial", 1])


@pytest.mark.parametrize("lands", ["before the next try", "after the next try", "after the next manifest"])
def test_a_swap_that_lands_late_counts_once(lands: str) -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    land = it.drop()
    if lands == "before the next try":
        land()
    it.wait(RETRY_S)
    assert it.confirmed == ["initial", 1]
    if lands == "after the next manifest":
        it.publish(2)
        it.settle()
    num_swaps = len(place.history)
    land()
    assert len(place.history) == num_swaps
    it.publish(3)
    it.settle()
    assert it.confirmed[-1] == 3


def test_what_has_landed_before_another_one_claims_is_kept_by_that_one_and_never_confirmed_here() -> None:
    place = Place()
    first = running(place)
    first.publish(1)
    first.lose()
    second = Script(place, 2, is_standby=True)
    second.start()
    second.do(second.publisher.promote(second.now))
    second.settle()
    assert second.served[0].versions == (1,)
    first.wait(RETRY_S)
    assert (first.standing, first.confirmed) == ("fenced", ["initial"])


# --- a lease that passes ----------------------------------------------------------------------------------------------


def test_a_first_without_its_store_is_suspended_after_a_lease_and_a_success_ends_that() -> None:
    place = Place()
    it = running(place)
    sent_s = it.now
    it.publish(1)
    it.drop()
    while it.standing == "serving":
        it.now = it.publisher.wake_at
        it.do(it.publisher.tick(it.now))
        if it.sent and it.standing == "serving":
            it.drop()
    assert it.now == sent_s + LEASE_S
    assert it.publisher.is_serving
    it.settle()
    assert (it.stood[-2:], it.confirmed) == (["suspended", "serving"], ["initial", 1])


def test_a_lease_counts_from_when_the_confirmed_swap_was_sent_first() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    sent_s = it.now
    it.drop()
    it.wait(RETRY_S, answers=False)
    it.now += 0.9 * LEASE_S - RETRY_S
    it.answer()
    assert (it.standing, it.confirmed, len(it.sent)) == ("serving", ["initial", 1], 1)
    it.now = sent_s + LEASE_S
    it.do(it.publisher.tick(it.now))
    assert it.standing == "suspended"


def test_a_first_that_slept_through_its_lease_is_fenced_by_its_next_swap() -> None:
    place = Place()
    first = running(place)
    held = first.publish(1)
    second = Script(place, 2, is_standby=True)
    second.start()
    second.settle()
    second.wait(1.5 * LEASE_S)
    assert second.standing == "serving"
    first.now += 2 * LEASE_S
    first.do(first.publisher.tick(first.now))
    assert first.standing == "suspended"
    first.settle()
    assert first.stood[-2:] == ["suspended", "fenced"]
    assert first.confirmed == ["initial"]
    assert set(held) <= place.objects.keys()  # it deletes nothing of a swap that was refused
    assert (first.publisher.wake_at, first.deleted) == (math.inf, [])
    first.publish(2)
    assert first.sent == []


def test_a_first_that_slept_while_its_swap_was_answered_publishes_and_is_suspended_until_the_next_one() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    it.now += 2 * LEASE_S
    it.answer()
    assert it.confirmed == ["initial", 1]
    assert it.stood[-1] == "suspended"
    it.settle()
    assert it.standing == "serving"


def test_a_first_that_slept_before_it_read_again_is_suspended_first() -> None:
    place = Place()
    it = running(place)
    it.publish(1)
    it.lose()
    it.wait(RETRY_S, answers=False)
    it.answer()  # refused, and the manifest is not read
    it.drop()
    it.now += 2 * LEASE_S
    it.do(it.publisher.tick(it.now))
    assert (it.standing, it.sent) == ("suspended", [Read()])


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_fenced_syncer_names_objects_in_its_own_epoch(is_gone: bool) -> None:
    place = Place()
    first = running(place)
    second = serving(place, 2, former=1)
    assert second.publisher.next_name() == "2/1"
    if is_gone:  # removed by hand
        place.found = None
    first.publish(1)
    first.settle()
    assert first.standing == "fenced"
    assert epoch_of(first.object("record")) == 1


@pytest.mark.parametrize("standing", ["serving", "suspended"])
def test_a_first_is_fenced_by_a_manifest_that_cannot_be_read(standing: str) -> None:
    place = Place()
    it = running(place)
    serving(place, 2, former=1)
    if standing == "suspended":
        it.now += 2 * LEASE_S
    it.publish(1)
    it.answer()
    assert (it.standing, it.sent) == (standing, [Read()])
    it.do(it.publisher.fail(StoreError("it has a later format.")))
    assert (str(it.error), it.standing, it.publisher.wake_at) == ("it has a later format.", "fenced", math.inf)
    it.do(it.publisher.release(it.now))
    assert (len(it.sent), it.confirmed) == (1, ["initial"])


@pytest.mark.parametrize("what", ["are not answered", "are refused"])
def test_no_time_is_asked_for_again_at_that_time(what: str) -> None:
    """Whatever the sums of times round to, and whatever waits to be deleted."""
    for step in range(100):
        place = Place()
        it = running(place, now=step / 7, lease_s=LEASE_S if step % 2 else math.inf)
        for version in (1, 2):
            it.publish(version)
        it.settle()
        it.publish(3)
        if what == "are refused":
            it.lose()
            it.wait(RETRY_S, answers=False)
            it.answer()
        for _ in range(KEPT_AWAKE):
            while it.sent:
                it.drop()
            before = it.now
            it.now = it.publisher.wake_at
            it.do(it.publisher.tick(it.now))
            assert it.sent or before < it.now < math.inf
        assert it.standing == ("suspended" if step % 2 else "serving")


# --- deletion ---------------------------------------------------------------------------------------------------------


def test_what_is_not_named_any_more_is_deleted_after_a_while() -> None:
    place = Place()
    it = running(place)
    names = [it.publish(version) for version in (1, 2, 3)]
    it.settle()
    initial = {name for name in place.objects if name.endswith(b"held".hex())} - {held for held, _ in names}
    assert len(initial) == 1
    it.wait(0.9 * KEEP_S)
    assert it.deleted == []
    it.wait(0.2 * KEEP_S)
    assert set(it.deleted) == {*initial, *names[0]}
    assert set(it.deleted).isdisjoint(place.objects)
    assert manifest_of(place).names <= place.objects.keys()


def test_nothing_is_deleted_for_a_swap_whose_fate_is_unknown_or_after_a_refusal() -> None:
    place = Place()
    first = running(place)
    first.publish(1)
    first.publish(2)
    first.settle()
    first.publish(3)  # version 1 is not named by it
    first.drop()
    first.now += 2 * KEEP_S
    first.do(first.publisher.tick(first.now))
    assert first.deleted == []
    second = Script(place, 2, is_standby=True)
    second.start()
    second.do(second.publisher.promote(second.now))
    second.settle()
    first.answer()  # refused
    first.do(first.publisher.tick(first.now))
    assert (first.sent, first.deleted) == ([Read()], [])
    first.settle()
    first.wait(2 * KEEP_S)
    assert (first.standing, first.deleted) == ("fenced", [])


def test_what_an_earlier_epoch_left_is_deleted_and_what_a_manifest_of_this_one_named_is_kept_for_a_while() -> None:
    place = Place()
    first = running(place)
    first.publish(1)
    first.publish(2)
    first.settle()
    left = first.object("never named")
    second = serving(place, 2, former=1)
    own = second.object("not named yet")
    kept = manifest_of(place).names
    second.wait(0.9 * KEEP_S)
    second.publish(3)
    second.settle()
    assert second.deleted == []
    second.wait(0.2 * KEEP_S)
    assert left in second.deleted
    assert set(second.deleted).isdisjoint({*kept, own})  # version 1 was named until a moment ago
    second.wait(KEEP_S)
    assert kept - manifest_of(place).names == kept & set(second.deleted) != set()
    assert own in place.objects


def test_what_waits_to_be_deleted_waits_while_the_syncer_is_suspended() -> None:
    place = Place()
    it = running(place)
    for version in (1, 2, 3):
        it.publish(version)
    it.settle()
    it.now += 2 * KEEP_S
    it.do(it.publisher.tick(it.now))
    assert (it.standing, it.deleted) == ("suspended", [])
    it.settle()
    it.wait(0.1)
    assert (it.standing, len(it.deleted)) == ("serving", 3)


# --- manifests --------------------------------------------------------------------------------------------------------


def test_the_same_bytes_never_come_twice() -> None:
    place = Place()
    it = running(place)
    found = place.found
    it.wait(LEASE_S)
    assert found is not None
    with pytest.raises(BrokenInvariantError, match="was there before"):
        place.swap(found.data, place.found.token if place.found else None)


def test_a_manifest_of_the_most_fragments_fits_and_of_more_is_refused() -> None:
    name = f"{10**7 - 1}/{10**12 - 1}-{'f' * 64}"
    versions = tuple(NamedVersion(10**9 + number, name, name) for number in (1, 0))
    packs = tuple((10**9 + number, name) for number in range(MAX_PACKS + 100))
    full = Manifest(
        "r" * 64, "0" * 32, 10**7, 2**62, 10**18 - 1, "a" * 250, name, name, (versions,) * MOST_FRAGMENTS, packs=packs
    )  # fmt: skip
    assert MOST_BYTES * 0.8 < len(full.to_bytes()) <= MOST_BYTES
    assert Manifest.from_bytes(full.to_bytes(), "here") == full
    with pytest.raises(
        StoreError, match="of 151 fragments do not fit in .* cut the model into at most 150 fragments.$"
    ):
        replace(full, fragments=(versions,) * (MOST_FRAGMENTS + 1)).to_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data.replace(b'"epoch":1', b'"epoch":2'),
        lambda _: b"",
        lambda _: b"[]",
        lambda _: b"\xff",
        lambda _: json.dumps({"format": 10}).encode(),
    ],
)
def test_a_damaged_manifest_is_refused(damage: Callable[[bytes], bytes]) -> None:
    place = Place()
    running(place)
    assert place.found is not None
    with pytest.raises(DamagedObjectError, match=r"the manifest of here is damaged .*`diloco syncer check here`"):
        Manifest.from_bytes(damage(place.found.data), "here")


def test_a_manifest_of_a_later_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("diloco.protocol.manifest.FORMAT", FORMAT + 1)
        data = Manifest("run").to_bytes()
    with pytest.raises(StoreError, match=f"^here has format {FORMAT + 1} and this .* {FORMAT}; upgrade diloco"):
        Manifest.from_bytes(data, "here")


def test_a_manifest_names_the_packs_and_versions_that_groups_need() -> None:
    names = [f"1/{number}-{'f' * 64}" for number in range(9)]
    first = tuple((NamedVersion(0, name),) for name in names[:2])
    manifest = Manifest("run", "0" * 32, 1, 1, 1, "", names[2], names[3], first, packs=((1, names[4]),))
    after = Change(None, {0: NamedVersion(1, names[5])}, names[3], packs={2: names[6]}, live=[1, 2], keep=3)
    manifest = after.applied_to(manifest)
    assert (manifest.packs, manifest.keep) == (((1, names[4]), (2, names[6])), 3)
    manifest = Change(None, {0: NamedVersion(2, names[7])}, names[3], packs={2: names[8]}, live=[2]).applied_to(
        manifest
    )
    assert manifest.packs == ((2, names[8]),)  # by number, after a repair has begun again
    assert [len(each) for each in manifest.fragments] == [2, 1]  # no more than are kept now
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    assert names[8] in manifest.names
