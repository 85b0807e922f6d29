"""A worker's end of a run of reinforcement learning: what it has leased and done, over the calls Work and Groups.

A thread sends the worker's state every `HEARTBEAT_S`, sooner when it changes: what it holds and wants, and the scores
that have no answer yet. The answer says what it holds from then on (`protocol.groups`). So a message that was lost, a
syncer that was away or restarted, and a worker that was forgotten are repaired by the next message. Groups are sent on
a connection of their own, several at a time, since each is answered once it is durable.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self, TypeVar

from diloco.config import RunConfig
from diloco.errors import (
    DilocoError,
    ExchangeError,
    NotInitialisedError,
    PayloadError,
    StaleIncarnationError,
    StoppedError,
    StoreError,
    UnreachableError,
)
from diloco.escaping import MAX_REASON, printable
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.following.sources import SyncerSource
from diloco.protocol.workers import Score
from diloco.rl.scoring import Scorer
from diloco.rl.settings import table_of
from diloco.store.reading import NOT_WHOLE

log = logging.getLogger("diloco")

T = TypeVar("T")

HEARTBEAT_S = 2.0
"""Between two messages, or a third of `syncer.lost_floor_s`, after which a silent worker is forgotten."""

POLL_S = 0.5
"""Between two messages while the worker has fewer leases than it wants."""

ANSWER_S = 3.0
"""For the answer to a message; the next one repeats all of it."""

UPLOAD_S, UPLOAD_BYTES = 60.0, 1 << 20
"""For the answer to a call with groups, and the size of one with several of them."""

UPLOADS, SENDING = 4, 8
"""Calls with groups on their way at a time, and with those that wait for that."""

AWAY = (UnreachableError, StoreError)
"""Errors of a syncer that may answer the same call later."""

SHOWN = 20
"""Groups without use that are logged."""

SAY_S = 5.0
"""Between two lines about a worker's progress."""


def make_scorer(config: RunConfig, *, scores: bool = True) -> Scorer:
    """What samples the prompts of a run, and scores the completions. `scores`: False: it does without reward models.
    Raises ConfigError: the run file has no table [rl]."""
    table, tasks = table_of(config), config.task
    if not scores:
        tasks = {name: task.model_copy(update={"reward_model": None}) for name, task in tasks.items()}
    return Scorer(tasks, timeout_s=table.score_timeout_s, memory_bytes=table.score_memory_mb << 20)


@dataclass(frozen=True)
class Worked:
    """The result of a worker.

    Attributes:
        reason: "over": the run has ended; "stopped".
        groups: sent or scored. refused: those that could not be.
        mean_reward: over all of them; None: none has a reward.
    """

    name: str
    role: str
    reason: str
    groups: int
    refused: int
    mean_reward: float | None
    seconds: float


class Tally:
    """Counts what a worker does, and says it every `SAY_S`.

    Arguments:
        say: prints a line.
    """

    def __init__(self, name: str, role: str, say: Callable[[str], None]) -> None:
        self._name, self._role, self._say = name, role, say
        self.groups = self.refused = self._num_rewards = 0
        self._sum, self._began_at = 0.0, time.monotonic()
        self._said_at = self._began_at

    def add(self, score: Score, note: str = "") -> None:
        """A group is done, or cannot be. Say the counts, and `note`, if it is time for it."""
        if score.reason:
            self.refused += 1
        else:
            self.groups += 1
        self._num_rewards += len(score.rewards)
        self._sum += sum(score.rewards)
        if time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            refused = f", {self.refused:,} refused" if self.refused else ""
            reward = "" if self._mean is None else f", mean reward {self._mean:.3f}"
            self._say(f"{self._name}: {self.groups:,} groups{refused}{reward}{note}")

    @property
    def _mean(self) -> float | None:
        return self._sum / self._num_rewards if self._num_rewards else None

    def worked(self, *, is_over: bool) -> Worked:
        """The result."""
        seconds, reason = time.monotonic() - self._began_at, "over" if is_over else "stopped"
        return Worked(self._name, self._role, reason, self.groups, self.refused, self._mean, seconds)


class WorkClient:
    """Leases, scores and groups of one worker; a context manager. Any thread may call any method.

    Arguments:
        config: of the run, with the syncer's address and the keys.
        name: of the worker.
        digest: of the settings that it shares with the run, `GroupRules.digest`.
        num_ahead: prompts or groups that it holds at a time, apart from groups that are being sent.

    Attributes:
        closing: set once this is being closed, or has failed.

    Raises:
        ConfigError: an invalid address, or keys that cannot be used.
    """

    def __init__(
        self, config: RunConfig, role: Literal["rollout", "reward"], name: str, digest: str, num_ahead: int
    ) -> None:
        self.name, self.closing = name, threading.Event()
        syncer = config.syncer
        self._source = SyncerSource(syncer.address, config.run.name, keys=syncer.keys, insecure=syncer.insecure)
        self._run, self._role, self._digest, self.num_ahead = config.run.name, role, digest, num_ahead
        self._heartbeat_s = min(HEARTBEAT_S, syncer.lost_floor_s / 3)
        self._process, self._order = secrets.randbits(64), 0
        self._changed = threading.Condition()
        self._leases: dict[int, pb.GroupPlace] = {}
        self._fresh: list[int] = []  # leased, and not taken
        self._sending, self._num_calls = set[int](), 0
        self._scores: dict[int, Score] = {}
        self._num_said = 0
        self._num_answers, self._is_short, self._is_away, self._gives_back = 0, False, False, False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._talk, name="diloco-work", daemon=True)
        self._uploads = ThreadPoolExecutor(UPLOADS, thread_name_prefix="diloco-groups")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join()  # its last message gives back what this holds
        self._source.close()
        self._uploads.shutdown(cancel_futures=True)

    def close(self) -> None:
        """End all waiting. Idempotent."""
        with self._changed:
            self.closing.set()
            self._changed.notify_all()

    # --- work ---------------------------------------------------------------------------------------------------------

    def take(self, most: int, timeout_s: float | None = None) -> list[pb.GroupPlace]:
        """The next leases, at least one; of a rollout worker, only their number is set. None: closed, or the time has
        passed.

        Raises:
            ConfigError: the run has other settings. StaleIncarnationError: another process works under this name.
            AuthError, UnknownRunError, PayloadError: the syncer refuses this worker.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self.closing.is_set(), timeout_s)
            if self._failure is not None:
                raise self._failure
            taken = [] if self.closing.is_set() else self._fresh[:most]
            del self._fresh[: len(taken)]
            return [self._leases[number] for number in taken]

    def hold(self, num: int) -> None:
        """From now on, hold up to so many prompts or groups; with 0, what is not being sent is given back."""
        with self._changed:
            self.num_ahead = num
            if not num:
                self._leases = {number: place for number, place in self._leases.items() if number in self._sending}
                self._fresh.clear()
                self._gives_back = True
            self._changed.notify_all()

    def score(self, score: Score) -> None:
        """The worker is done with a prompt or group: its rewards, or why it cannot be used (cut to `MAX_REASON`)."""
        reason = printable(score.reason)[:MAX_REASON]
        with self._changed:
            if reason:
                self._say(f"cannot use group {score.number}: {reason}")
            self._leases.pop(score.number, None)
            self._scores[score.number] = Score(score.number, score.rewards, reason)
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        """Log what becomes of a group, of the first `SHOWN` ones. Under the lock."""
        self._num_said += 1
        if self._num_said <= SHOWN:
            further = "; further groups are only counted" if self._num_said == SHOWN else ""
            log.warning("%s %s%s", self.name, text, further)

    def send(self, groups: Sequence[pb.MadeGroup]) -> None:
        """Send groups, with one call where their size permits it; waits while `SENDING` calls are under way."""
        while groups:
            ends = list(accumulate(len(group.data) for group in groups))
            num = max(1, bisect_right(ends, UPLOAD_BYTES))
            request = pb.GroupsRequest(run=self._run, learner=self.name, process=self._process, groups=groups[:num])
            groups = groups[num:]
            with self._changed:
                self._changed.wait_for(lambda: self._num_calls < SENDING or self.closing.is_set())
                if self.closing.is_set():
                    return
                self._num_calls += 1
                self._sending.update(group.number for group in request.groups)
                self._changed.notify_all()
            self._uploads.submit(self._upload, request)

    def get(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Bytes of an object. Raises as `SyncerSource.get`, and StoppedError: this was closed."""
        return self._repeated(lambda: self._source.get(name, start, stop))

    def manifest(self) -> bytes:
        """That of the run, as `SyncerSource.manifest`. Raises as `get`."""
        return self._repeated(self._source.manifest).data

    def _repeated(self, call: Callable[[], T]) -> T:
        """The result of a call, which is repeated with the answers to messages while the syncer is away."""
        while not self.closing.is_set():
            num_answers = self._num_answers
            try:
                return call()
            except AWAY as error:
                if isinstance(error, NOT_WHOLE):
                    raise
                self._wait_for_answer(num_answers)
        raise StoppedError(f"{self.name} was stopped.")

    def _wait_for_answer(self, num_answers: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_answers > num_answers or self.closing.is_set(), self._heartbeat_s)

    def _upload(self, request: pb.GroupsRequest) -> None:
        """Send groups; those that are refused are dropped."""
        numbers = [group.number for group in request.groups]
        try:
            self._send(request)
            with self._changed:
                for number in numbers:
                    self._leases.pop(number, None)
                self._sending.difference_update(numbers)
                self._num_calls -= 1
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            self._fail(error)

    def _send(self, request: pb.GroupsRequest) -> None:
        """Repeat a call until it is answered. One that is refused as a whole is sent group by group, to find which."""
        while not self.closing.is_set():
            num_answers = self._num_answers
            try:
                reply = self._repeated(lambda: self._source.answer(
                    lambda syncer: syncer.call("groups", "Groups", request, pb.GroupsReply, timeout_s=UPLOAD_S)
                ))  # fmt: skip
            except StaleIncarnationError:  # forgotten: the next message says who this is
                self._wait_for_answer(num_answers)
                continue
            except (PayloadError, ExchangeError) as error:
                if self.closing.is_set():
                    return
                [group, *others] = request.groups
                if not others:
                    self.score(Score(group.number, reason=str(error)))  # or its prompt would be leased again
                for one in request.groups if others else ():
                    self._send(pb.GroupsRequest(run=self._run, learner=self.name, process=self._process, groups=[one]))
                return
            for refused in reply.refused:
                with self._changed:
                    self._say(f"drops group {refused.number}: {printable(refused.reason)}")
            return

    # --- messages -----------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            while not self.closing.is_set():
                self._try_to_work()
            if not self._is_away:
                with suppress(DilocoError):
                    self._work(is_last=True)
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.closing.is_set():
            self._failure = error
        self.close()

    def _try_to_work(self) -> None:
        """Send a message, and wait until the next one is due."""
        try:
            self._work()
        except (*AWAY, NotInitialisedError) as error:
            if not self._is_away:
                log.warning("%s tries again: %s", self.name, error)
            self._is_away = True
            self.closing.wait(POLL_S)
            return
        if self._is_away:
            log.info("%s: the syncer answers", self.name)
        self._is_away = False
        with self._changed:
            self._changed.wait_for(
                lambda: self.closing.is_set() or self._is_due, POLL_S if self._is_short else self._heartbeat_s
            )

    @property
    def _num_wanted(self) -> int:
        return max(0, self.num_ahead - len(self._leases.keys() - self._sending))

    @property
    def _is_due(self) -> bool:
        return (
            bool(self._scores)
            or self._gives_back
            or (not self._is_short and 0 < self.num_ahead <= 2 * self._num_wanted)
        )

    def _work(self, *, is_last: bool = False) -> None:
        """Send a message, and apply the answer. `is_last`: give everything back."""

        def ask(syncer: Connection) -> tuple[pb.WorkRequest, pb.WorkReply]:
            with self._changed:
                self._order += 1  # also of a repeated message: the syncer does not apply one twice
                self._gives_back = False
                holds, wants = ([], 0) if is_last else (list(self._leases), self._num_wanted)
                request = pb.WorkRequest(
                    run=self._run, learner=self.name, role=self._role, process=self._process, order=self._order,
                    digest=self._digest, holds=holds, wants=wants,
                    scores=[pb.GroupScore(**vars(score)) for score in self._scores.values()],
                )  # fmt: skip
            return request, syncer.call("work", "Work", request, pb.WorkReply, timeout_s=ANSWER_S)

        request, reply = self._source.answer(ask)
        places, held, num_new = {place.number: place for place in reply.groups}, set(request.holds), 0
        with self._changed:
            self._num_answers += 1
            for score in request.scores:
                del self._scores[score.number]
            for number in held - set(reply.numbers):  # it may be in the middle of one: the first answer counts
                self._leases.pop(number, None)
            self._fresh = [number for number in self._fresh if number in self._leases]
            for number in reply.numbers:
                place = pb.GroupPlace(number=number) if self._role == "rollout" else places.get(number)
                if place is None:  # a repair has lost it
                    self._scores.setdefault(number, Score(number, reason=f"the bytes of group {number} are lost"))
                elif number not in held and self.num_ahead:
                    self._leases[number] = place
                    self._fresh.append(number)
                    num_new += 1
            self._is_short = num_new < request.wants
            self._changed.notify_all()
