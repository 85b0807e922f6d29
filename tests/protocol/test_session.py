"""`SessionCore` alone, in virtual time: every event is scripted, and the answers are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from diloco import errors
from diloco.protocol.contribution import (
    DROPPED,
    OUTLIER,
    Budget,
    CallForWork,
    Contribution,
    Drained,
    Rejection,
    Settled,
    Standing,
    Verdict,
)
from diloco.protocol.leases import Ask, DataSet, Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Deadlines, Report
from diloco.protocol.session import requests
from diloco.protocol.session.heartbeat import ANSWER_FLOOR_S, HEARTBEAT_S, SHORTEST_S
from diloco.protocol.session.joining import AWAY_AFTER_S, GONE_TIMEOUT_S, LEAVE_TIMEOUT_S
from diloco.protocol.session.lanes import FIRST_RETRY_S
from diloco.protocol.session.session_core import SessionCore

WHO = Claim("a", process=7)
STANDING = Standing(step=0, start_step=0, run_tokens=0, num_live=1, sync_every=None, versions=(0, 0))
GONE = errors.UnreachableError("the syncer did not answer.")
STALE = errors.StaleIncarnationError("incarnation 1 of learner 'a' is not part of the run any more.")

C = TypeVar("C")


class Script:
    """A session, the time, and what it has asked for and told so far.

    Attributes:
        open: calls under way, by kind.
        told: news, drops, warnings and the like, in order; `take` empties it.
        boot, standing: what the syncer answers with; each process begins an epoch.
    """

    def __init__(self, claim: Claim = WHO, **options: Any) -> None:
        self.core = SessionCore("run", claim, 2, **options)
        self.now = 100.0
        self.open: dict[type, Any] = {}
        self.told: list[Any] = []
        self.boot, self.standing = 1, STANDING

    @property
    def lineage(self) -> Lineage:
        return Lineage("run", epoch=self.boot, boot=self.boot)

    def do(self, event: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> None:
        for action in event(self.now, *args, **kwargs):
            kind = type(action)
            if kind in CALLS:
                assert kind not in self.open, "two calls of one kind are under way"
                self.open[kind] = action
            else:
                self.told.append(action)

    def answer(self, kind: type, event: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> Any:
        """End the call of a kind."""
        call = self.open.pop(kind)
        self.do(event, call, *args, **kwargs)
        return call

    def fail(self, kind: type, error: errors.DilocoError = GONE) -> Any:
        return self.answer(kind, self.core.failed, error)

    def sleep_until(self, at: float) -> None:
        """Time passes; the session is woken as it asked to be."""
        while self.core.wake_at <= at:
            assert self.core.wake_at > self.now or self.core.wake_at == self.now
            self.now = max(self.now, self.core.wake_at)
            self.do(self.core.tick)
        self.now = at

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self.now + seconds)

    def until(self, kind: type) -> Any:
        """Time passes until a call of this kind is under way."""
        while kind not in self.open:
            assert self.core.wake_at < math.inf, f"{kind.__name__} never comes"
            self.now = max(self.now, self.core.wake_at)
            self.do(self.core.tick)
        return self.open[kind]

    def take(self, kind: type[C]) -> list[C]:
        """What was told of this kind; forget all that was told."""
        told, self.told = self.told, []
        return [each for each in told if isinstance(each, kind)]

    # --- whole passages -----------------------------------------------------------------------------------------------

    def join(self, incarnation: int = 1) -> None:
        join = self.open.pop(requests.Join)
        self.do(self.core.joined, join, self.lineage, incarnation)

    def fetch(self, *versions: int) -> None:
        """As a joiner: both fragments and the static tensors."""
        for fragment, version in enumerate(versions):
            fetch = self.answer(requests.Fetch, self.core.fetched, self.lineage, version)
            assert (fetch.fragment, fetch.base, fetch.joining) == (fragment, -1, True)
        assert self.answer(requests.Fetch, self.core.fetched, self.lineage, 0).fragment is None

    def beat(self) -> requests.Beat:
        return self.answer(requests.Beat, self.core.beaten, self.lineage, self.standing)  # type: ignore[no-any-return]

    def welcome(self) -> None:
        self.do(self.core.welcomed, self.open[requests.Watch], self.lineage, self.standing)

    def notice(self, **changes: Any) -> None:
        self.standing = replace(self.standing, **changes)
        self.do(self.core.heard, self.open[requests.Watch], self.lineage, self.standing)

    def start(self, versions: tuple[int, ...] = (0, 0)) -> Script:
        self.standing = replace(self.standing, versions=versions)
        self.do(self.core.begin)
        self.answer(requests.Describe, self.core.described, self.lineage, initialised=True)
        self.join()
        self.fetch(*versions)
        self.beat()
        self.welcome()
        assert isinstance(self.told[-1], requests.TellStart)
        self.told.clear()
        return self

    def offer(self, number: int, fragment: int = 0, incarnation: int = 1) -> Contribution:
        c = contribution(number, fragment, incarnation)
        self.do(self.core.offered, c)
        return c

    def push(self) -> Contribution:
        """The push under way is acknowledged."""
        call = self.answer(requests.Push, self.core.pushed)
        assert call.boot == self.boot, "it was meant for another process"
        return call.contribution  # type: ignore[no-any-return]


CALLS = (
    requests.Describe, requests.Initialise, requests.Join, requests.Fetch, requests.Watch, requests.Beat,
    requests.Push, requests.Lease, requests.Leave,
)  # fmt: skip


def contribution(number: int, fragment: int = 0, incarnation: int = 1) -> Contribution:
    return Contribution("a", incarnation, fragment, number, 0, 0, 5, 1, step=number)


# --- becoming part of a run -------------------------------------------------------------------------------------------


def test_a_learner_joins_fetches_listens_and_starts_from_where_it_was_welcome() -> None:
    it = Script(at_least=2)
    it.standing = replace(STANDING, step=12, start_step=8, run_tokens=70, versions=(3, 4))
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert it.open[requests.Join] == requests.Join(WHO)
    it.join()
    assert requests.Watch not in it.open, "it counts as live before it has the model"
    it.fetch(3, 4)
    it.beat()
    assert it.take(requests.Warn) == [], "said before it was welcome"
    it.welcome()
    assert "1 of at least 2 learners" in it.take(requests.Warn)[0].text
    it.standing = replace(it.standing, step=13, start_step=13, num_live=2)
    it.until(requests.Beat)
    it.beat()
    claim = replace(WHO, incarnation=1, seen=it.lineage, versions=(3, 4))
    assert it.told == [requests.TellStart(claim, 8, True, 70, None)]


def test_a_learner_that_a_round_of_others_waits_for_starts_at_once() -> None:
    """Those that have finished since do not come back."""
    it = Script(at_least=3)
    it.standing = replace(STANDING, step=12, start_step=8, num_live=2, versions=(3, 4))
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    it.fetch(3, 4)
    it.beat()
    it.welcome()
    assert [type(each) for each in it.told] == [requests.TellStart]


def test_a_learner_waits_for_the_runs_model_as_long_as_it_may() -> None:
    it = Script(join_timeout_s=1.0)
    it.do(it.core.begin)
    for _ in range(4):
        it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
        it.until(requests.Describe)
    assert [type(each) for each in it.told] == [requests.Warn]
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    assert isinstance(it.take(requests.Fail)[0].error, errors.NotInitialisedError)
    assert it.core.wake_at == math.inf


def test_a_syncer_that_never_answers_is_given_up_in_time() -> None:
    it = Script(join_timeout_s=1.0)
    it.do(it.core.begin)
    while not any(isinstance(each, requests.Fail) for each in it.told):
        it.until(requests.Describe)
        it.fail(requests.Describe)
    assert it.now - 100.0 < 3.0
    assert it.take(requests.Fail) == [requests.Fail(GONE)]


def test_the_first_learner_gives_the_run_its_model() -> None:
    it = Script(initialises=True)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    it.open.pop(requests.Initialise)
    it.do(it.core.initialised)
    assert requests.Join in it.open


def test_a_run_that_has_a_model_is_not_initialised_again() -> None:
    it = Script(initialises=True)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert isinstance(it.take(requests.Fail)[0].error, errors.AlreadyInitialisedError)
    assert not it.open


def test_a_model_that_another_learner_uploaded_is_not_taken_for_ones_own() -> None:
    """The first upload was refused for lack of room: it cannot have arrived."""
    it = Script(initialises=True)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    it.fail(requests.Initialise, errors.NoRoomError("the disk is full."))
    it.until(requests.Initialise)
    it.fail(requests.Initialise, errors.AlreadyInitialisedError("the run has a model already."))
    assert isinstance(it.take(requests.Fail)[0].error, errors.AlreadyInitialisedError)
    assert requests.Join not in it.open


@pytest.mark.parametrize("found", ["described", "refused"])
def test_an_initialisation_whose_answer_was_lost_is_found_to_be_there(found: str) -> None:
    """It may be found when the learner asks, or arrive so late that the next upload is refused."""
    it = Script(initialises=True)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    it.fail(requests.Initialise)
    it.until(requests.Describe)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=found == "described")
    if found == "refused":
        it.until(requests.Initialise)
        it.fail(requests.Initialise, errors.AlreadyInitialisedError("it has one."))
    it.until(requests.Join)
    assert it.take(requests.Fail) == []


def test_another_initialiser_fails() -> None:
    it = Script(initialises=True)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    error = errors.AlreadyInitialisedError("another learner was quicker.")
    it.fail(requests.Initialise, error)
    assert it.take(requests.Fail) == [requests.Fail(error)]


def test_a_learner_that_initialises_if_empty_begins_a_run_without_a_model() -> None:
    it = Script(initialises="if-empty")
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    it.open.pop(requests.Initialise)
    it.do(it.core.initialised)
    it.join()
    it.fetch(0, 0)
    it.beat()
    it.welcome()
    assert [type(each) for each in it.told] == [requests.TellStart]


@pytest.mark.parametrize("found", ["described", "refused"])
def test_a_learner_that_initialises_if_empty_takes_another_learners_model_and_says_so(found: str) -> None:
    """It is there when the learner asks, or arrives while the learner's own is refused."""
    it = Script(initialises="if-empty")
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=found == "described")
    if found == "refused":
        it.fail(requests.Initialise, errors.BusyError("another learner initialises the run."))
        it.until(requests.Initialise)
        it.fail(requests.Initialise, errors.AlreadyInitialisedError("it has one."))
    it.join()
    it.fetch(0, 0)
    it.beat()
    it.standing = replace(it.standing, step=7)
    it.welcome()
    *_, said, start = it.told
    assert said == requests.Warn("run 'run' has a model, at step 7; a uses it, not its own")
    assert isinstance(start, requests.TellStart)


def test_a_learner_that_comes_back_gives_an_empty_run_the_model_of_its_checkpoint() -> None:
    """A syncer without a model is refused by all others that have trained in the run."""
    for initialises, is_refused in ((False, True), ("if-empty", False)):
        it = Script(replace(WHO, seen=Lineage("run", 4, 9)), initialises=initialises)
        it.do(it.core.begin)
        it.answer(requests.Describe, it.core.described, Lineage("", 0, 11), initialised=False)
        assert (requests.Initialise in it.open) is not is_refused


def test_a_learner_starts_without_others_in_a_run_whose_budget_is_spent() -> None:
    """They have ended."""
    it = Script(at_least=2)
    it.standing = replace(STANDING, run_tokens=100, budget=Budget(tokens=100))
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    it.fetch(0, 0)
    it.beat()
    it.welcome()
    assert [type(each) for each in it.told] == [requests.TellStart]


def test_a_learner_is_told_once_that_the_run_has_ended_after_its_last_version() -> None:
    it = Script().start((3, 4))
    it.notice(settled=True, versions=(3, 5), order=1)
    assert it.told == []
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 5)
    assert [type(each) for each in it.told] == [requests.TellArrival, Settled]
    it.told.clear()
    it.notice(order=2)
    assert it.told == []
    it.notice(settled=False, order=3)  # another learner has joined
    assert it.told == [Settled(False)]
    it.notice(settled=True, order=4)
    assert it.told == [Settled(False), Settled(True)]


def test_a_joiner_gives_signs_of_life_while_it_fetches_a_large_model() -> None:
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    for _ in range(5):
        it.until(requests.Beat)
        it.beat()
    assert it.now - 100.0 == pytest.approx(5 * HEARTBEAT_S)
    assert it.open[requests.Fetch].fragment == 0


def test_a_stream_lost_before_the_start_must_be_welcome_again() -> None:
    it = Script(at_least=2)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    it.fetch(0, 0)
    it.beat()
    it.welcome()
    it.fail(requests.Watch)
    it.standing = replace(it.standing, num_live=2, step=4, start_step=4)
    it.until(requests.Beat)
    it.beat()
    assert it.take(requests.TellStart) == []
    it.until(requests.Watch)
    it.welcome()
    assert [start.step for start in it.take(requests.TellStart)] == [4]


# --- retransmission ---------------------------------------------------------------------------------------------------


def test_one_process_of_the_syncer_is_sent_a_contribution_once() -> None:
    it = Script().start()
    first, second = it.offer(1), it.offer(2)
    assert it.push() == first
    assert it.push() == second
    for _ in range(3):
        it.until(requests.Beat)
        it.beat()
        it.notice()
    assert requests.Push not in it.open


def test_a_new_process_is_sent_all_without_a_verdict_in_ascending_order() -> None:
    it = Script().start()
    offers = [it.offer(1, 0), it.offer(1, 1), it.offer(2, 0)]
    assert [it.push() for _ in offers] == offers
    it.notice(verdicts=(Verdict(1, 1, None, 1),))
    fresh = it.offer(2, 1)
    it.fail(requests.Push)  # the syncer was killed
    it.fail(requests.Watch)
    it.boot = 2
    it.until(requests.Beat)
    it.beat()
    assert it.fail(requests.Push, errors.RestartedError("this is another process.")).contribution == fresh
    assert [it.push() for _ in range(3)] == [offers[0], offers[2], fresh]
    assert requests.Push not in it.open


def test_an_acknowledgement_that_comes_after_a_new_process_is_the_old_ones() -> None:
    """The bytes that the process before had acknowledged went with it."""
    it = Script().start()
    c = it.offer(1)
    push = it.open.pop(requests.Push)
    it.boot = 2
    it.notice()  # a new process is there
    it.do(it.core.pushed, push)
    assert it.push() == c


def test_a_process_that_is_not_the_one_meant_gets_older_contributions_first() -> None:
    """It has not heard of the first: taken before it, the second would overtake."""
    it = Script().start()
    first = it.offer(1)
    assert it.push() == first
    second = it.offer(2)
    it.fail(requests.Push, errors.RestartedError("this is another process."))
    assert it.told == [], "a restart is no failure"
    it.boot = 2
    it.until(requests.Beat)
    assert requests.Push not in it.open
    it.beat()
    assert [it.push(), it.push()] == [first, second]


def test_what_has_a_verdict_is_not_sent_again() -> None:
    """Its acknowledgement was lost, the verdict was heard: nothing of it goes out once more, to no process."""
    it = Script().start()
    c = it.offer(1)
    it.fail(requests.Push)
    it.notice(verdicts=(Verdict(0, 1, None, 1),))
    assert it.take(requests.Drop) == [requests.Drop(c)]
    it.boot = 2
    it.sleep(0.9)
    assert requests.Push not in it.open


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.NoRoomError("the disk is full."), "has no room yet, trying again: the disk is full."),
        (errors.BusyError("it is still being uploaded."), "is still busy, trying again: it is still being uploaded."),
    ],
    ids=["full", "busy"],
)
def test_a_syncer_without_room_is_asked_again_and_said_once(error: errors.NoRoomError, said: str) -> None:
    it = Script().start()
    c = it.offer(1)
    for _ in range(4):
        it.until(requests.Push)
        it.fail(requests.Push, error)
    assert [said in warn.text for warn in it.take(requests.Warn)] == [True]
    it.until(requests.Push)
    assert it.push() == c


# --- verdicts and what is fetched -------------------------------------------------------------------------------------


def test_a_rejection_that_a_broken_stream_swallowed_is_heard_with_the_next_heartbeat() -> None:
    it = Script().start()
    it.offer(1)
    it.push()
    it.standing = replace(it.standing, verdicts=(Verdict(0, 1, OUTLIER, 0),))  # said, and lost with the connection
    it.fail(requests.Watch)
    it.until(requests.Beat)
    assert it.beat().report.confirmed == (0, 0)
    assert it.take(Rejection) == [Rejection(0, 1, OUTLIER)]
    it.until(requests.Beat)
    assert it.beat().report.confirmed == (1, 0)


def test_an_older_standing_that_was_overtaken_is_not_news() -> None:
    it = Script().start()
    older, newer = (replace(it.standing, order=order, num_live=order, versions=(0, 0)) for order in (2, 3))
    it.notice(order=newer.order, num_live=newer.num_live)
    it.until(requests.Beat)
    it.standing = older
    it.beat()
    assert it.core.standing == newer
    it.until(requests.Beat)
    it.boot = 2  # another process of the syncer counts from the beginning
    it.beat()
    assert it.core.standing == older


def test_a_rejection_that_is_heard_again_and_again_is_told_once() -> None:
    it = Script().start()
    it.offer(1)
    it.push()
    rejected = Verdict(0, 1, DROPPED, 0)
    for _ in range(3):
        it.notice(verdicts=(rejected,))
        it.until(requests.Beat)
        it.beat()
    it.notice(versions=(1, 0))
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 1, (rejected,))
    news = it.take(Rejection | requests.TellArrival)  # type: ignore[arg-type]
    assert news == [Rejection(0, 1, DROPPED), requests.TellArrival(0, 1, merged=0)]


def test_an_unheard_rejection_comes_with_the_version_and_before_it() -> None:
    """What the version's answer says to be merged must not include what was refused."""
    it = Script().start()
    it.offer(1)
    it.push()
    it.offer(2)
    it.push()
    it.notice(versions=(1, 0))
    fetched = (Verdict(0, 1, OUTLIER, 0), Verdict(0, 2, None, 1))
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 1, fetched)
    news = it.take(Rejection | requests.TellArrival)  # type: ignore[arg-type]
    assert news == [Rejection(0, 1, OUTLIER), requests.TellArrival(0, 1, merged=2)]


def test_a_verdict_heard_before_its_version_counts_when_that_arrives() -> None:
    it = Script().start()
    for number in (1, 2):
        it.offer(number)
        it.push()
    it.notice(versions=(2, 0), verdicts=(Verdict(0, 1, None, 1), Verdict(0, 2, None, 2)))
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 1)  # confirmed since: the syncer says them no more
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 2)
    assert [arrival.merged for arrival in it.take(requests.TellArrival)] == [1, 2]


def test_confirmed_stops_at_the_first_contribution_without_a_verdict() -> None:
    it = Script().start()
    for number in (1, 2, 3):
        it.offer(number)
        it.push()
    it.notice(verdicts=(Verdict(0, 1, None, 1), Verdict(0, 3, OUTLIER, 1)))
    it.until(requests.Beat)
    assert it.beat().report.confirmed == (1, 0)
    it.notice(verdicts=(Verdict(0, 2, None, 2), Verdict(0, 3, OUTLIER, 1)))
    it.until(requests.Beat)
    assert it.beat().report.confirmed == (3, 0)


def test_versions_are_fetched_until_the_newest_is_here() -> None:
    it = Script().start()
    it.notice(versions=(2, 1))
    for fragment, base, version in [(0, 0, 1), (1, 0, 1), (0, 1, 2)]:
        fetch = it.answer(requests.Fetch, it.core.fetched, it.lineage, version)
        assert (fetch.fragment, fetch.base, fetch.joining) == (fragment, base, False)
    assert requests.Fetch not in it.open
    it.notice(versions=(1, 1))  # delayed
    assert requests.Fetch not in it.open
    it.until(requests.Beat)
    assert it.beat().claim.versions == (2, 1)


def test_the_budget_is_known_before_another_process_of_the_syncer_tells_it() -> None:
    it = Script().start()
    it.notice(versions=(1, 0), budget=Budget(tokens=70))
    it.boot = 2
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 1)
    assert it.core.standing is None
    assert it.core.last_standing is not None
    assert it.core.last_standing.budget == Budget(tokens=70)


@pytest.mark.parametrize("kind", [errors.DigestError, errors.CorruptPayloadError])
def test_an_update_that_leads_elsewhere_is_fetched_whole_and_fails_if_that_does_too(kind: Any) -> None:
    it = Script().start()
    it.notice(versions=(1, 0))
    error = kind("version 1 of fragment 0 has digest 1, the published one is 2")
    it.fail(requests.Fetch, error)
    assert "fetching the whole fragment" in it.take(requests.Warn)[0].text
    assert (it.open[requests.Fetch].base, it.open[requests.Fetch].joining) == (-1, False)
    it.fail(requests.Fetch, error)
    assert it.take(requests.Fail) == [requests.Fail(error)]


def test_a_whole_fragment_of_which_ranks_were_sent_different_versions_is_fetched_again() -> None:
    """One was published between the fetches of two ranks: while they join, and later."""
    error = errors.VersionError("rank 0 was sent version 3 of fragment 0 and rank 1 version 4")
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    fetch = it.fail(requests.Fetch, error)
    assert fetch.joining
    assert it.until(requests.Fetch) == fetch
    it = Script().start()
    it.notice(versions=(1, 0))
    for _ in range(3):
        it.fail(requests.Fetch, error)
        assert it.until(requests.Fetch).base == -1
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 1)
    assert it.take(requests.Fail) == []


def test_a_whole_fragment_serves_only_the_version_that_needed_it() -> None:
    it = Script().start()
    it.notice(versions=(2, 0))
    it.fail(requests.Fetch, errors.DigestError("damaged"))
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 2)
    it.notice(versions=(3, 0))
    assert it.open[requests.Fetch].base == 2


def test_a_fetch_that_fails_on_the_way_is_repeated() -> None:
    it = Script().start()
    it.notice(versions=(1, 0))
    fetch = it.fail(requests.Fetch)
    assert it.until(requests.Fetch) == fetch


def test_a_call_is_told_once_and_again_when_it_is_made_again() -> None:
    it = Script().start()
    it.notice(calls=((0, 0),))
    it.notice(calls=((0, 0),))
    it.notice(calls=())
    assert it.take(CallForWork) == [CallForWork(0, 0)]
    it.notice(calls=((0, 0),))  # its round could not be merged
    assert it.take(CallForWork) == [CallForWork(0, 0)]
    it.notice(calls=(), versions=(1, 0))
    it.notice(calls=((0, 0),))  # delayed
    assert it.take(CallForWork) == []


def test_a_call_that_stands_before_the_start_is_told_after_it() -> None:
    it = Script()
    it.standing = replace(it.standing, calls=((1, 0),))
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    it.fetch(0, 0)
    it.beat()
    it.welcome()
    assert [type(each) for each in it.told] == [requests.TellStart, CallForWork]


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_first_steps_are_reported_at_once_and_later_ones_in_time() -> None:
    it = Script().start()
    it.until(requests.Beat)
    it.beat()
    it.sleep(0.1)
    it.do(it.core.report, 1, Report(step=1, tokens=5))
    assert it.beat().report.tokens == 5
    began = it.now
    it.do(it.core.report, 1, Report(step=2, tokens=10))
    assert it.until(requests.Beat).report.step == 2
    assert it.now - began == pytest.approx(HEARTBEAT_S)


def test_every_step_is_reported_where_steps_pace_the_rounds_but_not_in_a_flood() -> None:
    it = Script(reports_every_step=True).start()
    it.sleep(0.1)
    num_beats, began = 0, it.now
    for step in range(1, 101):
        it.do(it.core.report, 1, Report(step=step, tokens=step))
        if requests.Beat in it.open:
            it.beat()
            num_beats += 1
        it.sleep(0.01)
        if requests.Beat in it.open:
            it.beat()
            num_beats += 1
    assert num_beats == pytest.approx((it.now - began) / SHORTEST_S, abs=2)


def test_a_connection_without_an_answer_is_dialled_anew_and_kept_until_there_is_one() -> None:
    it = Script().start()
    before = it.until(requests.Beat).connection
    it.fail(requests.Beat)
    assert it.take(requests.CloseConnection) == [], "a slow syncer would take it for death"
    second = it.until(requests.Beat)
    assert second.connection == before + 1
    it.fail(requests.Beat)
    assert it.take(requests.CloseConnection) == [requests.CloseConnection(before + 1)], "it never carried an answer"
    it.until(requests.Beat)
    it.beat()
    assert it.take(requests.CloseConnection) == [requests.CloseConnection(before)]
    it.fail(requests.Watch)  # it was on the old one
    assert it.until(requests.Watch).connection == before + 2


def test_a_learner_notices_a_dead_connection_well_before_the_syncer_gives_it_up() -> None:
    it = Script().start()
    it.until(requests.Beat)
    it.beat()
    died_at, call = it.now, it.until(requests.Beat)
    it.sleep(call.timeout_s)
    it.fail(requests.Beat)
    it.until(requests.Beat)
    assert it.now - died_at == pytest.approx(HEARTBEAT_S + ANSWER_FLOOR_S + FIRST_RETRY_S)
    assert it.now - died_at + 0.5 < Deadlines().reconnect_floor_s


def test_slow_answers_get_more_time_and_one_dead_connection_does_not_make_a_link_slow() -> None:
    it = Script().start()
    call = it.until(requests.Beat)
    it.sleep(call.timeout_s)
    it.fail(requests.Beat)
    call = it.until(requests.Beat)
    assert call.timeout_s <= 2 * ANSWER_FLOOR_S
    for _ in range(20):
        it.until(requests.Beat)
        it.sleep(0.5)
        call = it.beat()
    assert call.timeout_s == pytest.approx(8 * 0.5)


# --- leases of data ---------------------------------------------------------------------------------------------------

ASK, GRANT = Ask(1, 10, DataSet(100, 0, "d")), Grant(1, ((0, 10),))


def test_a_lease_is_asked_for_until_it_is_answered_and_told_once() -> None:
    it = Script().start()
    it.do(it.core.asked, 1, ASK)
    first = it.fail(requests.Lease)
    assert (first.ask, first.claim.incarnation, first.claim.seen) == (ASK, 1, it.lineage)
    assert it.until(requests.Lease).ask == ASK
    it.answer(requests.Lease, it.core.leased, GRANT)
    assert it.take(Grant) == [GRANT]
    assert requests.Lease not in it.open


def test_an_eviction_voids_the_request_for_a_lease_and_its_answer() -> None:
    it = Script().start()
    it.do(it.core.asked, 1, ASK)
    it.do(it.core.evicted, it.open[requests.Watch], "nothing heard for 6.0 s", replaced=False)
    it.fail(requests.Watch, STALE)
    it.answer(requests.Lease, it.core.leased, GRANT)
    assert it.take(Grant) == []
    it.until(requests.Join)
    it.join(2)
    it.do(it.core.asked, 1, ASK)  # by the training thread, which has not heard of it yet
    assert requests.Lease not in it.open

    it = Script().start()
    it.do(it.core.asked, 1, ASK)
    it.fail(requests.Lease, STALE)
    assert it.until(requests.Join).claim.incarnation == 1


def test_other_data_than_the_runs_ends_the_learner() -> None:
    it = Script().start()
    it.do(it.core.asked, 1, ASK)
    error = errors.ConfigError("'a' has data of 41 units, but the run has data of 40 units.")
    it.fail(requests.Lease, error)
    assert it.take(requests.Fail) == [requests.Fail(error)]


# --- eviction and joining again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("told_by", ["notice", "heartbeat", "push", "fetch"])
def test_an_evicted_learner_joins_again_and_what_it_said_is_void(told_by: str) -> None:
    it = Script().start()
    c = it.offer(1)
    it.do(it.core.report, 1, Report(step=9, tokens=45))
    it.notice(versions=(1, 0))
    match told_by:
        case "notice":
            it.do(it.core.evicted, it.open[requests.Watch], "nothing heard for 6.0 s", replaced=False)
        case "heartbeat":
            it.until(requests.Beat)
            it.fail(requests.Beat, STALE)
        case "push":
            it.fail(requests.Push, STALE)
        case "fetch":
            it.fail(requests.Fetch, STALE)
    assert it.take(requests.Drop) == [requests.Drop(c)]
    for kind in (
        requests.Watch,
        requests.Beat,
        requests.Push,
        requests.Fetch,
    ):  # all that was under way fails too
        if kind in it.open:
            it.fail(kind, STALE)
    assert it.until(requests.Join).claim.incarnation == 1
    it.join(2)
    it.do(it.core.report, 1, Report(step=10, tokens=50))
    it.offer(2, incarnation=1)
    it.standing = replace(it.standing, step=10, start_step=10, num_live=0)
    it.fetch(1, 0)
    report = it.until(requests.Beat).report
    assert report == Report(step=9, earlier_tokens=50, confirmed=(0, 0)), "also what it trained before it knew"
    it.beat()
    it.until(requests.Watch)
    it.welcome()
    [start] = [each for each in it.told if isinstance(each, requests.TellStart)]
    assert (start.claim.incarnation, start.step, start.claim.versions) == (2, 10, (1, 0))
    assert start.reason is not None
    assert requests.Push not in it.open
    mine = it.offer(1, incarnation=2)
    assert it.push() == mine


def test_news_of_an_old_incarnation_is_no_news() -> None:
    it = Script().start()
    it.notice(versions=(1, 0))
    fetch, watch = it.open.pop(requests.Fetch), it.open[requests.Watch]
    it.do(it.core.evicted, watch, "gone", replaced=False)
    it.take(requests.Warn)
    it.do(it.core.fetched, fetch, it.lineage, 1)
    it.do(it.core.heard, watch, it.lineage, replace(it.standing, versions=(9, 9)))
    it.do(it.core.evicted, watch, "gone", replaced=False)
    assert it.told == []
    assert requests.Join in it.open


def test_a_joiner_evicted_while_it_fetches_joins_again() -> None:
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.join()
    it.answer(requests.Fetch, it.core.fetched, it.lineage, 3)
    it.fail(requests.Fetch, STALE)
    assert it.open[requests.Join].claim.incarnation == 1
    it.join(2)
    it.fetch(4, 4)
    it.until(requests.Beat)
    it.beat()
    it.welcome()
    [start] = it.take(requests.TellStart)
    assert (start.claim.incarnation, start.claim.versions, start.reason) == (2, (4, 4), None)


def test_a_replaced_learner_fails_and_stays_away() -> None:
    it = Script().start()
    it.do(it.core.evicted, it.open[requests.Watch], "replaced", replaced=True)
    assert isinstance(it.take(requests.Fail)[0].error, errors.StaleIncarnationError)
    it.do(it.core.ended, it.open.pop(requests.Watch))
    it.sleep(60.0)
    assert requests.Join not in it.open
    assert requests.Watch not in it.open


def test_a_learner_that_had_no_place_at_first_is_replaced_as_any_other() -> None:
    """Its first request to join was refused: it cannot arrive late."""
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.fail(requests.Join, errors.NoRoomError("the run's pool has no place."))
    it.until(requests.Join)
    it.join()
    it.fetch(0, 0)
    it.until(requests.Beat)
    it.beat()
    it.welcome()
    it.do(it.core.evicted, it.open[requests.Watch], "replaced", replaced=True)
    assert isinstance(it.take(requests.Fail)[0].error, errors.StaleIncarnationError)
    assert requests.Join not in it.open


def test_a_call_to_join_that_arrives_late_is_no_other_process() -> None:
    """It failed on the way, was made again, and replaces the incarnation of the second one."""
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.fail(requests.Join)
    it.until(requests.Join)
    it.join(1)
    it.fetch(0, 0)
    it.until(requests.Beat)
    it.beat()
    it.welcome()
    it.do(it.core.evicted, it.open[requests.Watch], "replaced", replaced=True)
    assert it.open[requests.Join].claim.incarnation == 1
    assert it.take(requests.Fail) == []


def test_a_learner_that_may_not_join_again_fails() -> None:
    it = Script().start()
    it.do(it.core.evicted, it.open[requests.Watch], "gone", replaced=False)
    error = errors.StaleIncarnationError("another process has joined run 'run' as 'a'.")
    it.fail(requests.Join, error)
    assert it.take(requests.Fail) == [requests.Fail(error)]


def test_a_finished_learner_comes_back_as_finished() -> None:
    it = Script().start()
    it.do(it.core.report, 1, Report(step=9, tokens=45, finished=True))
    it.until(requests.Beat)
    it.beat()
    it.do(it.core.evicted, it.open.pop(requests.Watch), "gone", replaced=False)
    it.join(2)
    it.fetch(0, 0)
    assert it.until(requests.Beat).report == Report(step=9, finished=True, earlier_tokens=45, confirmed=(0, 0))


def test_a_new_incarnation_says_what_the_process_has_trained_before_it() -> None:
    """Also steps between its start and the boundary at which the learner hears of it, and over several evictions."""
    it = Script().start()
    for incarnation in (2, 3):
        it.do(it.core.report, incarnation - 1, Report(step=9, tokens=45, earlier_tokens=60 * (incarnation - 2)))
        it.do(it.core.evicted, it.open[requests.Watch], "gone", replaced=False)
        it.fail(requests.Watch, STALE)
        it.until(requests.Join)
        it.do(it.core.report, incarnation - 1, Report(step=10, tokens=50, earlier_tokens=60 * (incarnation - 2)))
        it.join(incarnation)
        it.fetch(0, 0)
        it.until(requests.Beat)
        it.beat()
        it.until(requests.Watch)
        it.welcome()
        it.do(it.core.report, incarnation - 1, Report(step=12, tokens=60, earlier_tokens=60 * (incarnation - 2)))
        it.until(requests.Beat)
        assert it.beat().report.earlier_tokens == 60 * (incarnation - 1)
    it.do(it.core.report, 3, Report(step=13, tokens=5, earlier_tokens=120))
    it.do(it.core.leave)
    leave = it.open[requests.Leave]
    assert (leave.report.tokens, leave.report.earlier_tokens) == (5, 120)


@pytest.mark.parametrize("phase", ["joining", "leaving", "parting"])
def test_an_evicted_learner_that_leaves_says_what_it_has_trained(phase: str) -> None:
    it = Script().start()
    it.do(it.core.report, 1, Report(step=9, tokens=45))
    if phase == "parting":
        it.do(it.core.leave)
        it.fail(requests.Leave, STALE)
    elif phase == "leaving":
        it.offer(1)
        it.do(it.core.leave)
        it.do(it.core.evicted, it.open[requests.Watch], "gone", replaced=False)
    else:
        it.do(it.core.evicted, it.open[requests.Watch], "gone", replaced=False)
        it.until(requests.Join)
        it.do(it.core.report, 1, Report(step=10, tokens=50))
        it.do(it.core.leave)
    leave = it.open.pop(requests.Leave)
    assert leave.claim.incarnation == 0
    assert leave.report.all_tokens == (50 if phase == "joining" else 45)
    assert it.core.wake_at == math.inf
    it.do(it.core.failed, leave, STALE)
    assert [type(each) for each in it.told[-2:]] == [requests.Warn, requests.Close]


def test_a_learner_that_leaves_before_it_has_trained_says_no_goodbye() -> None:
    it = Script().start()
    it.do(it.core.evicted, it.open[requests.Watch], "gone", replaced=False)
    it.do(it.core.leave)
    assert requests.Leave not in it.open
    assert it.take(requests.Close)


LATER = Lineage("run", epoch=3, boot=3)
"""That a checkpoint has followed."""


def test_a_learner_that_goes_on_from_a_checkpoint_joins_no_older_copy_of_the_run() -> None:
    it = Script(replace(WHO, seen=LATER))
    it.do(it.core.begin)
    for _ in range(2):
        it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
        assert not it.open
        it.until(requests.Describe)
    [warned] = it.take(requests.Warn)
    assert "epoch 1 of the run, which has been at epoch 3: an older copy of its state" in warned.text
    it.boot = 4
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert it.open[requests.Join].claim.seen == LATER
    it.boot = 1  # the older copy is at the address again, and would give it a place
    it.join()
    assert requests.Fetch not in it.open
    assert it.core.phase == "joining"
    it.boot = 5
    it.until(requests.Join)
    it.join()
    it.fetch(0, 0)
    assert it.core.seen == it.lineage


def test_a_learner_that_goes_on_from_a_checkpoint_follows_the_same_syncer_and_no_other_of_its_epoch() -> None:
    for boot, follows in ((3, True), (5, False)):
        it = Script(replace(WHO, seen=LATER))
        it.do(it.core.begin)
        it.answer(requests.Describe, it.core.described, replace(LATER, boot=boot), initialised=True)
        assert (requests.Join in it.open) == follows


def test_a_learner_that_finds_only_an_older_copy_in_time_ends_with_that_sentence() -> None:
    it = Script(replace(WHO, seen=LATER), join_timeout_s=30.0)
    it.do(it.core.begin)
    while not (failed := [each for each in it.told if isinstance(each, requests.Fail)]):
        it.until(requests.Describe)
        it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert isinstance(failed[0].error, errors.LineageError)
    assert 130.0 <= it.now <= 135.0


def test_a_learner_of_another_run_of_the_name_ends() -> None:
    it = Script(replace(WHO, seen=replace(LATER, run_id="other")))
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    [failed] = it.take(requests.Fail)
    assert isinstance(failed.error, errors.UnknownRunError)


def test_a_learner_is_blocked_once_its_contributions_are_acknowledged() -> None:
    """A round must not be closed without a contribution that is on its way."""
    it, blocked = Script().start(), Report(step=9, tokens=45, waiting=True, blocked_with=(0, 0))
    it.offer(1)
    it.do(it.core.report, 1, blocked)
    it.until(requests.Beat)
    assert it.beat().report == replace(blocked, blocked_with=(), confirmed=(0, 0))
    it.push()
    assert it.until(requests.Beat).report == replace(blocked, confirmed=(0, 0))


def test_a_learner_has_finished_once_its_last_contribution_is_acknowledged() -> None:
    """A heartbeat may overtake a push, and no round waits for a learner that has finished."""
    it = Script().start()
    it.offer(1)
    it.offer(2)
    it.do(it.core.report, 1, Report(step=9, tokens=45, finished=True))
    it.until(requests.Beat)
    assert it.beat().report == Report(step=9, tokens=45, confirmed=(0, 0))
    it.push()
    it.until(requests.Beat)
    assert not it.beat().report.finished
    it.push()
    began = it.now
    it.until(requests.Beat)
    assert it.beat().report.finished
    assert it.now - began <= SHORTEST_S


def test_a_finished_learner_tells_a_new_process_so_once_that_has_its_contributions() -> None:
    it = Script().start()
    it.offer(1)
    it.push()
    it.do(it.core.report, 1, Report(step=9, tokens=45, finished=True))
    it.until(requests.Beat)
    assert it.beat().report.finished
    it.boot = 2
    it.until(requests.Beat)
    before = it.beat().claim.seen
    assert before is not None
    assert before.boot == 1
    it.until(requests.Beat)
    beat = it.beat()
    assert (beat.claim.seen, beat.report.finished) == (it.lineage, False)
    it.push()
    it.until(requests.Beat)
    assert it.beat().report.finished


def test_a_learner_without_a_place_in_the_pool_asks_again_and_says_so_once() -> None:
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    full = errors.NoRoomError("the run's pool has places for 1 of 2 learners at step 0, and b have them.")
    for _ in range(3):
        it.until(requests.Join)
        it.fail(requests.Join, full)
    assert it.take(requests.Warn) == [requests.Warn(f"the syncer has no room yet, trying again: {full}")]
    it.until(requests.Join)
    it.join()
    it.fetch(0, 0)


def test_a_learner_that_is_evicted_and_has_no_place_now_says_so_and_asks_again() -> None:
    it = Script().start()
    it.do(it.core.evicted, it.open[requests.Watch], "nothing heard for 6.0 s", replaced=False)
    it.take(requests.Warn)
    full = errors.NoRoomError("the run's pool has places for 2 of 2 learners at step 9, taken by b, c.")
    for _ in range(3):
        it.until(requests.Join)
        it.fail(requests.Join, full)
    assert it.told == [requests.Warn(f"the syncer has no room yet, trying again: {full}")]


DRAINED = errors.DrainedError("the run's pool has places for 1 of 2 learners at step 20, taken by b; it has shrunk.")


def test_a_learner_that_is_evicted_and_has_lost_its_place_for_good_asks_no_more() -> None:
    it = Script().start()
    it.offer(1)
    it.do(it.core.evicted, it.open[requests.Watch], "nothing heard for 6.0 s", replaced=False)
    it.take(requests.Warn)
    it.until(requests.Join)
    it.do(it.core.report, 1, Report(step=9, tokens=45))
    it.fail(requests.Join, DRAINED)
    assert it.told == [requests.Warn(str(DRAINED)), Drained()]
    it.do(it.core.report, 1, Report(step=10, tokens=50))
    for kind in [*it.open]:
        it.fail(kind, errors.AuthError("no such token."))
    assert it.core.wake_at == math.inf
    assert not it.open
    it.do(it.core.leave)
    leave = it.open.pop(requests.Leave)
    assert (leave.report.tokens, leave.report.earlier_tokens) == (0, 50)
    it.do(it.core.left)
    assert it.take(requests.Close)


def test_a_joiner_without_a_place_for_good_fails() -> None:
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.until(requests.Join)
    it.fail(requests.Join, DRAINED)
    assert it.take(requests.Fail) == [requests.Fail(DRAINED)]
    it.sleep(60.0)
    assert requests.Join not in it.open


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_learner_leaves_when_all_is_acknowledged() -> None:
    it = Script().start()
    it.do(it.core.report, 1, Report(step=9, tokens=45))
    it.until(requests.Beat)
    it.beat()
    it.offer(1)
    it.offer(2)
    it.do(it.core.leave)
    assert requests.Leave not in it.open
    it.push()
    it.push()
    assert it.open[requests.Leave].report.tokens == 45
    assert it.open[requests.Leave].timeout_s == LEAVE_TIMEOUT_S
    assert it.core.wake_at == math.inf
    it.open.pop(requests.Leave)
    it.do(it.core.left)
    assert it.told == [requests.Close()]


def test_a_learner_that_leaves_still_gives_signs_of_life() -> None:
    it = Script().start()
    it.offer(1)
    it.do(it.core.leave)
    for _ in range(3):
        it.until(requests.Beat)
        it.beat()
    assert requests.Leave not in it.open


def test_a_learner_does_not_wait_for_a_syncer_that_is_away() -> None:
    it = Script().start()
    it.offer(1)
    it.fail(requests.Push)
    it.take(requests.Warn)
    it.do(it.core.leave)
    assert it.open[requests.Leave].timeout_s == GONE_TIMEOUT_S
    assert "before its last contribution" in it.take(requests.Warn)[0].text
    it.fail(requests.Leave)
    assert it.take(requests.Close) == [requests.Close()]
    assert it.core.phase == "over"


def test_a_learner_that_is_to_end_soon_says_a_short_goodbye() -> None:
    it = Script().start()
    it.do(it.core.leave, timeout_s=0.25)
    assert it.open[requests.Leave].timeout_s == 0.25
    it = Script().start()
    it.offer(1)
    it.do(it.core.leave, timeout_s=0.25)
    it.sleep(0.25)
    assert it.open[requests.Leave].timeout_s == 0.25
    assert "before its last contribution" in it.take(requests.Warn)[0].text


def test_a_fragment_that_rises_faster_than_it_is_fetched_holds_no_other_up() -> None:
    it, fetched = Script().start(), list[int]()
    for version in range(1, 5):
        it.notice(versions=(version, 1))
        call = it.open[requests.Fetch]
        fetched.append(call.fragment)
        it.notice(versions=(version + 1, 1))
        it.answer(requests.Fetch, it.core.fetched, it.lineage, call.base + 1)
    assert 1 in fetched[:2]


def test_a_learner_whose_heartbeat_is_late_sends_its_last_work_before_it_leaves() -> None:
    it = Script().start()
    it.until(requests.Beat)
    it.fail(requests.Beat)
    it.offer(1)
    it.do(it.core.leave)
    assert requests.Leave not in it.open
    it.push()
    assert requests.Leave in it.open


def test_a_learner_waits_no_longer_than_a_silent_syncer_may_be_silent() -> None:
    it = Script().start()
    it.offer(1)
    began = it.now
    it.do(it.core.leave)
    it.until(requests.Leave)
    assert it.now - began <= AWAY_AFTER_S


def test_a_learner_that_is_evicted_while_it_leaves_is_gone() -> None:
    it = Script().start()
    it.offer(1)
    it.do(it.core.leave)
    it.fail(requests.Push, STALE)
    assert it.told == [requests.Close()]
    assert requests.Join not in it.open


def test_a_learner_that_never_joined_leaves_without_a_word() -> None:
    it = Script()
    it.do(it.core.begin)
    it.do(it.core.leave)
    assert it.told == [requests.Close()]
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert not it.open


# --- older states of the run ------------------------------------------------------------------------------------------


def test_an_older_state_of_the_run_is_not_followed_and_said_once() -> None:
    it = Script().start()
    it.boot = 3
    it.until(requests.Beat)
    it.beat()
    it.boot = 2
    it.standing = replace(it.standing, versions=(9, 9))
    for _ in range(3):
        it.until(requests.Beat)
        it.beat()
    said = [each.text for each in it.take(requests.Warn)]
    assert len(said) == 1
    assert "epoch 2" in said[0]
    assert "epoch 3" in said[0]
    assert requests.Fetch not in it.open
    assert it.core.standing is not None
    assert it.core.standing.versions == (0, 0)
    it.boot = 4
    it.until(requests.Beat)
    it.beat()
    assert it.open[requests.Fetch].base == 0


def test_of_two_syncers_with_the_same_epoch_the_first_one_heard_is_followed() -> None:
    it = Script().start()
    call = it.until(requests.Beat)
    del it.open[requests.Beat]
    it.do(it.core.beaten, call, replace(it.lineage, boot=77), it.standing)
    assert "two syncers" in it.take(requests.Warn)[0].text
    it.until(requests.Beat)
    it.beat()
    assert it.core.seen == it.lineage


def test_another_run_of_the_same_name_ends_the_learner() -> None:
    it = Script().start()
    call = it.until(requests.Beat)
    del it.open[requests.Beat]
    it.do(it.core.beaten, call, replace(it.lineage, run_id="other", epoch=9), it.standing)
    (failed,) = it.take(requests.Fail)
    assert isinstance(failed.error, errors.UnknownRunError)


def test_a_part_comes_from_a_syncer_that_can_be_followed_and_is_followed_from_then_on() -> None:
    it = Script().start()
    later = replace(it.lineage, epoch=2, boot=2)
    assert it.core.distrusts(it.lineage) is it.core.distrusts(later) is None
    assert isinstance(it.core.distrusts(replace(it.lineage, epoch=0, boot=2)), errors.LineageError)
    it.notice(versions=(1, 0))
    fetch = it.open.pop(requests.Fetch)
    assert (fetch.claim.seen, fetch.claim.versions) == (it.lineage, (0, 0))
    it.do(it.core.fetched, fetch, later, 1)
    assert it.core.seen == later


def test_requests_say_which_syncer_was_followed_and_what_is_held() -> None:
    it = Script().start(versions=(3, 4))
    watch = it.open[requests.Watch]
    assert (watch.claim.seen, watch.claim.versions) == (it.lineage, (3, 4))
    it.fail(requests.Watch, errors.StaleIncarnationError("version 4 is not part of it any more"))
    assert it.until(requests.Join) == requests.Join(Claim("a", 1, 7, it.lineage))


# --- two syncers ------------------------------------------------------------------------------------------------------

STANDBY = errors.StandbyError("this syncer waits; another one serves the run.")
SUSPENDED = errors.StandbyError("this syncer does not reach its store now.")


def suspended(it: Script) -> requests.Beat:
    return it.answer(  # type: ignore[no-any-return]
        requests.Beat, it.core.beaten, it.lineage, it.standing, is_suspended=True
    )


def is_at_first(call: Any) -> bool:
    """Whether a call goes to the first of two addresses."""
    return bool(call.connection % 2)


def test_a_learner_whose_syncer_is_silent_asks_both_in_turn_and_follows_the_one_that_comes_to_serve() -> None:
    """A standby counts learners as lost some seconds after it has taken over."""
    it = Script(num_addresses=2).start()
    c = it.offer(1)
    it.push()
    began, last = it.now, {True: it.now, False: it.now}
    while it.now < began + 30.0:
        it.until(requests.Beat)
        address = is_at_first(it.open[requests.Beat])
        assert it.now - last[address] < Deadlines().lost_floor_s
        last[address] = it.now
        if address:  # a machine that is gone: no answer, also no refusal
            it.sleep(it.open[requests.Beat].timeout_s)
        it.fail(requests.Beat, GONE if address else STANDBY)
    assert len(it.take(requests.Warn)) == 2, "one for each kind of failure"
    while is_at_first(it.until(requests.Beat)):
        it.fail(requests.Beat)
    it.boot = 2
    it.beat()
    assert it.core.seen == it.lineage
    assert requests.Dial(1) in it.told
    assert it.push() == c, "the one before may have been the only one to have it"


def test_a_restarted_syncer_is_followed_at_its_address() -> None:
    it = Script(num_addresses=2).start()
    it.until(requests.Beat)
    it.fail(requests.Beat)
    it.until(requests.Beat)
    it.fail(requests.Beat, STANDBY)
    assert is_at_first(it.until(requests.Beat))
    it.boot = 2
    it.beat()
    assert it.core.seen == it.lineage
    assert requests.Dial(1) not in it.told


def test_a_learner_of_several_addresses_leaves_an_older_state_for_the_next() -> None:
    it = Script(num_addresses=2)
    it.boot = 5
    it.start()
    it.boot = 4
    it.until(requests.Beat)
    it.beat()
    assert not is_at_first(it.until(requests.Beat))
    it.boot = 6
    it.beat()
    assert it.core.seen == it.lineage
    (warned,) = it.take(requests.Warn)
    assert "is not the one to follow, trying again: the syncer serves epoch 4 of the run, which has been" in warned.text


def test_a_suspended_syncer_is_left_at_the_next_heartbeat_and_asked_again_in_turn() -> None:
    it = Script(num_addresses=2).start()
    c = it.offer(1)
    it.until(requests.Beat)
    asked = [suspended(it)]
    assert requests.CloseConnection(asked[0].connection) not in it.told, "its stream of notices goes on"
    it.fail(requests.Push, SUSPENDED)
    for _ in range(8):
        asked.append(it.until(requests.Beat))
        if is_at_first(asked[-1]):
            suspended(it)
        else:
            it.fail(requests.Beat, STANDBY)
        if requests.Push in it.open:
            it.fail(requests.Push, SUSPENDED)
    assert [is_at_first(each) for each in asked] == [True, False] * 4 + [True]
    assert len([each for each in it.told if isinstance(each, requests.Warn)]) == 2
    assert not [each for each in it.told if isinstance(each, requests.Drop | requests.Fail | requests.Dial)]
    while not is_at_first(it.until(requests.Beat)):
        it.fail(requests.Beat, STANDBY)
    it.told.clear()
    it.beat()
    it.until(requests.Push)
    assert it.push() == c
    assert is_at_first(it.until(requests.Beat))
    suspended(it)
    assert "does not reach its store" in it.take(requests.Warn)[0].text, "it is said again"


def test_the_syncer_that_took_over_from_a_suspended_one_gets_all_without_a_verdict() -> None:
    it = Script(num_addresses=2).start()
    first = it.offer(1)
    it.push()
    second = it.offer(2)
    it.until(requests.Beat)
    suspended(it)
    it.fail(requests.Push, SUSPENDED)
    it.boot = 2
    assert not is_at_first(it.until(requests.Beat))
    it.beat()
    if requests.Push in it.open:
        it.fail(requests.Push, errors.RestartedError("meant for another process."))
    it.until(requests.Push)
    assert [it.push(), it.push()] == [first, second]


def test_a_learner_of_one_address_stays_with_its_suspended_syncer() -> None:
    it = Script().start()
    c = it.offer(1)
    for _ in range(5):
        beat = it.until(requests.Beat)
        it.fail(requests.Push, SUSPENDED)
        suspended(it)
        it.until(requests.Push)
        assert (beat.connection, it.core.is_away) == (1, False)
    (warned,) = it.told
    assert warned == requests.Warn(
        "the syncer does not reach its store; training goes on, and contributions wait for it"
    )
    assert it.push() == c


@pytest.mark.parametrize("num_addresses", [1, 2])
def test_no_request_that_a_syncer_refuses_because_it_does_not_serve_is_given_up(num_addresses: int) -> None:
    """Neither is the learner taken for evicted, nor is a stream that is refused a connection that has failed."""
    it = Script(num_addresses=num_addresses).start()
    it.do(it.core.asked, 1, ASK)
    it.offer(1)
    it.notice(versions=(1, 0))
    it.do(it.core.ended, it.open.pop(requests.Watch))
    it.told.clear()
    for kind in (requests.Push, requests.Fetch, requests.Lease, requests.Watch):
        for _ in range(4):
            it.until(kind)
            it.fail(kind, SUSPENDED)
            if requests.Beat in it.open:
                it.beat()
    assert it.core.phase == "running"
    assert it.told == []
    assert it.until(requests.Beat).connection == 1
    for kind in (requests.Push, requests.Fetch, requests.Lease, requests.Watch):
        it.until(kind)


def test_a_learner_that_leaves_waits_for_a_suspended_syncer_as_for_one_that_answers() -> None:
    it = Script().start()
    it.offer(1)
    it.do(it.core.leave)
    began = it.now
    while requests.Leave not in it.open:
        if requests.Push in it.open:
            it.fail(requests.Push, SUSPENDED)
        elif requests.Beat in it.open:
            suspended(it)
        else:
            it.now = max(it.now, it.core.wake_at)
            it.do(it.core.tick)
    assert it.now - began == pytest.approx(LEAVE_TIMEOUT_S)


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_learner_that_asks_another_syncer_says_goodbye_to_the_one_that_answered_last(is_evicted: bool) -> None:
    """A single late heartbeat makes it ask one that waits, which knows nothing of what it has trained."""
    it = Script(num_addresses=2).start()
    it.until(requests.Beat)
    it.fail(requests.Beat)
    asked = it.until(requests.Beat)
    assert not is_at_first(asked)
    it.do(it.core.report, 1, Report(step=9, tokens=45))
    if is_evicted:
        it.do(it.core.evicted, it.open[requests.Watch], "nothing heard for 6.0 s", replaced=False)
    it.do(it.core.leave)
    leave = it.open[requests.Leave]
    assert is_at_first(leave)
    assert (leave.timeout_s, leave.report.all_tokens) == (GONE_TIMEOUT_S, 45)
    it.told.clear()
    it.fail(requests.Beat, STANDBY)
    assert it.take(requests.CloseConnection) == [requests.CloseConnection(asked.connection)], "the goodbye goes on"
    it.open.pop(requests.Leave)
    it.do(it.core.left)
    assert it.told == [requests.Close()]


@pytest.mark.parametrize("timeout_s", [0.25, LEAVE_TIMEOUT_S])
@pytest.mark.parametrize("num_addresses", [1, 2, 3])
def test_a_goodbye_that_does_not_arrive_is_said_at_each_other_address_in_the_same_time(
    num_addresses: int, timeout_s: float
) -> None:
    it = Script(num_addresses=num_addresses).start()
    for _ in range(4):
        it.until(requests.Beat)
        it.fail(requests.Beat)
    it.do(it.core.leave, timeout_s=timeout_s)
    addresses, ends_at = list[int](), it.now + min(timeout_s, GONE_TIMEOUT_S)
    while requests.Leave in it.open:
        leave = it.open[requests.Leave]
        assert it.now + leave.timeout_s == pytest.approx(ends_at)
        addresses.append((leave.connection - 1) % num_addresses)
        it.sleep(0.05)
        it.fail(requests.Leave, STANDBY if leave.connection % 2 else GONE)
    assert addresses == [*range(num_addresses)]
    assert it.told[-1] == requests.Close()


def test_a_goodbye_without_an_answer_in_its_time_is_not_said_again() -> None:
    it = Script(num_addresses=2).start()
    it.do(it.core.leave)
    it.sleep(LEAVE_TIMEOUT_S)
    it.fail(requests.Leave)
    assert requests.Leave not in it.open
    assert it.take(requests.Close) == [requests.Close()]


def test_a_goodbye_that_the_syncer_itself_refuses_is_not_said_elsewhere() -> None:
    it = Script(num_addresses=2).start()
    it.do(it.core.leave)
    it.fail(requests.Leave, errors.BusyError("too many calls."))
    assert "too many calls" in it.take(requests.Warn)[0].text
    assert it.core.phase == "over"


def test_a_learner_that_cannot_join_asks_around_who_serves_the_run() -> None:
    """Once for each join that is lost; a syncer that has answered is not left for one slow join."""
    it = Script(num_addresses=2)
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.fail(requests.Join)
    assert it.fail(requests.Describe).connection == 1
    assert it.until(requests.Describe).connection == 2
    it.fail(requests.Join)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert requests.Dial(1) in it.told
    it.until(requests.Join)
    assert requests.Describe not in it.open
    it.fail(requests.Join)
    assert it.open[requests.Describe].connection == 2
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.until(requests.Join)
    it.join()
    assert it.core.phase == "fetching"


@pytest.mark.parametrize("error", [
    GONE, STANDBY, errors.LineageError("this syncer serves an older state."),
])  # fmt: skip
def test_an_evicted_learner_joins_again_at_the_syncer_that_serves(error: errors.DilocoError) -> None:
    it = Script(num_addresses=2).start()
    it.do(it.core.evicted, it.open.pop(requests.Watch), "lost", replaced=False)
    it.fail(requests.Join, error)
    if requests.Beat in it.open:
        it.fail(requests.Beat)
    assert is_at_first(it.until(requests.Describe))
    it.fail(requests.Describe, error)
    assert not is_at_first(it.until(requests.Describe))
    it.boot = 2
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    assert requests.Dial(1) in it.told
    it.until(requests.Join)
    it.join(incarnation=2)
    it.fetch(0, 0)
    assert it.core.seen == it.lineage


def test_a_learner_that_begins_waits_for_a_syncer_that_serves() -> None:
    it = Script(num_addresses=2, initialises=True)
    it.do(it.core.begin)
    for _ in range(4):
        it.until(requests.Describe)
        it.fail(requests.Describe, STANDBY)
    it.until(requests.Describe)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    it.fail(requests.Initialise, SUSPENDED)
    it.until(requests.Describe)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=False)
    it.until(requests.Initialise)
    assert not it.take(requests.Fail)


def test_with_one_address_a_join_is_tried_again_and_nothing_else() -> None:
    it = Script()
    it.do(it.core.begin)
    it.answer(requests.Describe, it.core.described, it.lineage, initialised=True)
    it.fail(requests.Join)
    assert not it.open
    it.until(requests.Join)


REFUSED = errors.AuthError("the token of 'a' was revoked.")


def test_a_refusal_by_the_syncer_that_is_followed_ends_a_learner_and_one_by_another_does_not() -> None:
    it = Script(num_addresses=2).start()
    for _ in range(3):
        it.until(requests.Beat)
        it.fail(requests.Beat, GONE)
        it.until(requests.Beat)
        it.fail(requests.Beat, REFUSED)
    assert "refuses this learner" in str(it.told)
    assert not it.take(requests.Fail)
    it.until(requests.Beat)
    it.beat()
    it.until(requests.Beat)
    it.fail(requests.Beat, REFUSED)
    assert [fail.error for fail in it.take(requests.Fail)] == [REFUSED]
