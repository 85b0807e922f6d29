"""A learner's exchange with a syncer over the internet.

The learner dials out to one address and one port. Four threads keep the training thread free: one encodes and sends, one receives
and decodes, one watches for notices, one says that the learner is alive. Losing the syncer is not an error: everything is tried again
until it is back, and what was sent and not yet published is offered again. Being given up by the syncer means joining as a new
incarnation and starting from the newest model.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from google.protobuf.message import Message
from safetensors.torch import load, save
from torch import Tensor

from diloco.core import quorum
from diloco.core.fragments import Layout, digest, scatter
from diloco.core.method import Method
from diloco.core.update import Contribution, Update, advance
from diloco.errors import (
    AlreadyInitialisedError,
    ConfigError,
    DigestError,
    DilocoError,
    ExchangeError,
    NotInitialisedError,
    StaleIncarnationError,
)
from diloco.exchange.base import Arrived, Called, Event, Exchange, Model, Opened, Rejected, Rejoined, Report
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, frames, tensor_of
from diloco.exchange.wire.rpc import HEARTBEAT_S

log = logging.getLogger("diloco")

LEAVE_TIMEOUT_S = 10.0
"""What `close` waits at most for the syncer to take what is on its way and to hear goodbye."""

MIN_REPORT_S = 0.05
"""Between two reports of a learner whose steps drive the syncer's clock."""

Key = tuple[int, int]  # fragment, round
R = TypeVar("R", bound=Message)


def connect(
    address: str, *, run: str, token: str | None = None, learner: str | None = None, ca: str | Path | None = None,
    insecure: bool = False, initialise: bool = False, initial_step: int = 0, initial_tokens: int = 0, source: str = "learner",
    join_timeout_s: float | None = None,
) -> Remote:  # fmt: skip
    """An exchange with the syncer at `address`. Nothing is dialled before a `Learner` takes it.

    Arguments:
        address: "host:port" of the syncer.
        run: the run's name; a syncer that serves another refuses.
        token: bearer token with the role learner.
        learner: this learner's id, unique in the run and the same after a restart; default: the host's name.
        ca: PEM file of the authority that signed the syncer's certificate. None: the system's authorities; plain text only to a
            loopback address or with `insecure`.
        insecure: plain text to another machine, on purpose.
        initialise: give the run this learner's model. Exactly one learner does so, once.
        initial_step, initial_tokens: what that model was trained on before (a warm start).
        source: for people: where that model came from.
        join_timeout_s: how long to wait for a syncer to answer, and for the run to have a model; None: as long as it takes.

    Raises:
        ConfigError: an address or a combination that cannot be.
    """
    return Remote(
        Connection(address, token=token, ca=ca, insecure=insecure),
        run=run,
        learner=learner or socket.gethostname(),
        initial=_Initial(step=initial_step, tokens=initial_tokens, source=source) if initialise else None,
        join_timeout_s=join_timeout_s,
    )


class _Initial:
    """What an initialising learner says of its model."""

    def __init__(self, *, step: int, tokens: int, source: str) -> None:
        self.step, self.tokens, self.source = step, tokens, source


@dataclass(frozen=True)
class _Held:
    """The newest version of a fragment that has come, with the outer state where that is on the learners."""

    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]


class Remote(Exchange):
    """One learner's end of a run that a syncer serves; `connect` makes it."""

    gradients = False

    def __init__(
        self, connection: Connection, *, run: str, learner: str, initial: _Initial | None, join_timeout_s: float | None
    ) -> None:
        self._connection = connection
        self._run = run
        self._learner = learner
        self._initial = initial
        self._join_timeout_s = join_timeout_s
        self._incarnation = 0
        self._newest: list[_Held] = []  # advanced by the receiver only
        self._offered: dict[Key, tuple[Contribution, Tensor]] = {}  # not yet published or rejected
        self._events: deque[Event] = deque()
        self._news = threading.Condition()
        self._failure: BaseException | None = None
        self._report = Report()
        self._beat = threading.Event()
        self._run_tokens = 0
        self._num_live = 1
        self._sync_every: int | None = None
        self._welcome_step: int | None = None
        self._counts: dict[str, int] = {"contributions": 0, "updates": 0, "joins": 0}
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="diloco-send")
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="diloco-receive")
        self._threads: list[threading.Thread] = []
        self._closed = False

    # --- joining ----------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        description = self._describe()
        method = Method.from_dict(json.loads(description.method))
        if given is not None and (difference := given.difference(method)):
            raise ConfigError(
                f"the method given (here) is not run {self._run!r}'s (there): {difference}; pass method=None to take the run's."
            )
        return method

    def open(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> Opened:
        self._layout, self._method = layout, method
        self._initialise(initial)
        opened = self._join()
        for name, body in (("diloco-watch", self._watch_forever), ("diloco-heartbeat", self._beat_forever)):
            thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return replace(opened, step=self._wait_for_start(method.quorum.at_least))

    def _wait_for_start(self, at_least: int) -> int:
        """Until the syncer counts on this learner and the quorum is there; returns the step to start from."""
        with self._news:
            self._news.wait_for(lambda: self._welcome_step is not None or self._failure is not None)
        self.raise_failure()
        said = False
        while (live := self._heartbeat().live) < at_least:
            if not said:
                log.warning("%d of at least %d learners are here; waiting for the others", live, at_least)
                said = True
            self._connection.closing.wait(0.2)
            self.raise_failure()
        assert self._welcome_step is not None
        return self._welcome_step

    def raise_failure(self) -> None:
        """Raise what a background thread failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def _describe(self) -> pb.DescribeReply:
        request = pb.DescribeRequest(run=self._run)
        return self._connection.retrying(
            lambda: self._connection.call("control", "Describe", request, pb.DescribeReply),
            on_retry=self._say_waiting("the syncer does not answer"),
            give_up_after_s=self._join_timeout_s,
        )

    def _initialise(self, initial: Callable[[], Model]) -> None:
        """Give the run its model, or wait until somebody has."""
        started = time.monotonic()
        description = self._describe()
        if self._initial is not None:
            if description.initialised:
                raise AlreadyInitialisedError(
                    f"run {self._run!r} has a model already and keeps it; join it without initialise=True."
                )
            model = initial()
            parts = [bytes_of(theta) for theta in model.fragments] + [memoryview(save(dict(model.static)))]
            header = pb.InitialiseHeader(
                run=self._run, learner=self._learner, layout=json.dumps(self._layout.to_dict()), source=self._initial.source,
                step=self._initial.step, tokens=self._initial.tokens, part_bytes=[len(part) for part in parts],
            )  # fmt: skip
            self._give(lambda: frames(header, *parts))
            self._counts["joins"] += sum(len(part) for part in parts)
            return
        said = False
        while not description.initialised:
            if self._join_timeout_s is not None and time.monotonic() - started > self._join_timeout_s:
                raise NotInitialisedError(
                    f"run {self._run!r} has no model after {self._join_timeout_s:g} s; start one learner with --initialise."
                )
            if not said:
                log.warning("run %r has no model yet; waiting for the learner that initialises it", self._run)
                said = True
            self._connection.closing.wait(0.3)
            description = self._describe()

    def _give(self, stream: Callable[[], Iterator[bytes]]) -> None:
        """Upload the initial model, again when the syncer was lost on the way and came back without it."""
        lost = False

        def attempt() -> Message:
            nonlocal lost
            if lost:
                request = pb.DescribeRequest(run=self._run)
                found = self._connection.call("control", "Describe", request, pb.DescribeReply)
                if found.initialised:  # it was durable; only the answer did not arrive
                    log.warning("the syncer was lost while run %r was given its model, and has it", self._run)
                    return found
            lost = True
            return self._connection.upload("joins", "Initialise", stream(), pb.InitialiseReply)

        self._retry(attempt)

    def _join(self) -> Opened:
        """As a new incarnation: everything from the syncer, losslessly."""
        layout = json.dumps(self._layout.to_dict())
        request = pb.JoinRequest(run=self._run, learner=self._learner, layout=layout)
        while True:
            reply = self._retry(lambda: self._connection.call("joins", "Join", request, pb.JoinReply))
            self._incarnation = reply.incarnation
            try:
                opened = self._fetch()
            except StaleIncarnationError:  # given up while it was fetching a large model over a slow link
                continue
            self._connection.close_channel("joins")
            return opened

    def _fetch(self) -> Opened:
        stop_beating = threading.Event()
        beat = threading.Thread(
            target=self._beat_until, args=(stop_beating,), name="diloco-join-heartbeat", daemon=True
        )
        beat.start()
        try:
            fragments = [self._pull_whole(fragment.index)[1] for fragment in self._layout.fragments]
            _, static = self._retry_pull(pb.PullRequest(run=self._run, learner=self._learner, incarnation=self._incarnation,
                                                        static=True, base=-1), "joins")  # fmt: skip
        finally:
            stop_beating.set()
            beat.join()
        self._newest = fragments
        beaten = self._heartbeat()
        return Opened(
            self._learner,
            self._incarnation,
            beaten.step,
            tuple(held.version for held in fragments),
            Model(tuple(held.theta for held in fragments), load(bytes(static))),
            beaten.run_tokens,
            tuple(held.outer_state for held in fragments) if self._method.outer_at == "learners" else (),
        )

    def _pull_whole(self, fragment: int) -> tuple[pb.PullHeader, _Held]:
        request = pb.PullRequest(
            run=self._run, learner=self._learner, incarnation=self._incarnation, fragment=fragment, base=-1
        )
        header, buffer = self._retry_pull(request, "joins")
        return header, self._whole(fragment, header, buffer)

    def _whole(self, fragment: int, header: pb.PullHeader, buffer: memoryview) -> _Held:
        """A fragment that came losslessly."""
        theta_bytes = len(buffer) - header.outer_bytes
        theta = tensor_of(buffer[:theta_bytes], torch.float32)
        self._verify(fragment, header, theta)
        outer_state = load(bytes(buffer[theta_bytes:])) if header.outer_bytes else {}
        return _Held(header.version, theta, outer_state)

    def _verify(self, fragment: int, header: pb.PullHeader, theta: Tensor) -> None:
        if theta.numel() != self._layout.fragments[fragment].numel or digest(theta) != header.digest:
            raise DigestError(
                f"version {header.version} of fragment {fragment} is not what the syncer published (digest {header.digest[:12]}); "
                "check both machines' memory and disks."
            )

    # --- the protocol -----------------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._submit(self._sender, lambda: self._send(contribution, payload))

    def poll(self) -> Sequence[Event]:
        self.raise_failure()
        with self._news:
            events = tuple(self._events)
            self._events.clear()
        return events

    def wait(self) -> None:
        with self._news:
            self._news.wait_for(lambda: bool(self._events) or self._failure is not None)

    def report(self, report: Report) -> None:
        first = self._report.tokens == 0 and report.tokens > 0
        self._report = report
        if first or self._reports_steps:
            self._beat.set()

    @property
    def _reports_steps(self) -> bool:
        """Whether every step is reported: where the syncer calls, they drive its clock."""
        return isinstance(self._method.quorum, quorum.Called)

    @property
    def num_live(self) -> int:
        return self._num_live

    @property
    def sync_every(self) -> int | None:
        return self._sync_every

    @property
    def run_tokens(self) -> int | None:
        return self._run_tokens

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._incarnation:
            self._say_goodbye()
        self._connection.close()
        self._beat.set()
        for pool in (self._sender, self._receiver):
            pool.shutdown(wait=True, cancel_futures=True)
        for thread in self._threads:
            thread.join()

    def _say_goodbye(self) -> None:
        """Let what is on its way arrive, then leave; a syncer that is away is not waited for."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        drained = self._sender.submit(lambda: None)
        try:
            drained.result(timeout=LEAVE_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s leaves while a contribution is still on its way", self._learner)
        request = pb.LeaveRequest(
            run=self._run, learner=self._learner, incarnation=self._incarnation, tokens=self._report.tokens
        )
        try:
            left_s = max(1.0, deadline - time.monotonic())
            self._connection.call("control", "Leave", request, pb.LeaveReply, timeout_s=left_s)
        except DilocoError as error:
            log.warning("%s left without the syncer's answer: %s", self._learner, error)

    # --- sending ----------------------------------------------------------------------------------------------------------

    def _send(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        encoded = payload()
        if contribution.incarnation != self._incarnation:
            return  # given up meanwhile; the learner is told with `Rejoined`
        self._offered[contribution.fragment, contribution.round] = (contribution, encoded)
        self._push(contribution, encoded)

    def _push(self, c: Contribution, payload: Tensor) -> None:
        header = pb.PushHeader(
            run=self._run, learner=c.learner, incarnation=c.incarnation, fragment=c.fragment, round=c.round, base=c.base,
            tokens=c.tokens, steps=c.steps, trained=c.trained, step=c.step, num_bytes=payload.numel(),
            discarded=[pb.Discard(reason=reason, tokens=tokens) for reason, tokens in c.discarded],
            part=c.tensors is not None, tensors=c.tensors,
        )  # fmt: skip
        try:
            reply = self._retry(
                lambda: self._connection.upload(
                    "contributions", "Push", frames(header, bytes_of(payload)), pb.PushReply
                )
            )
        except StaleIncarnationError as error:
            self._given_up(c.incarnation, str(error))
            return
        self._counts["contributions"] += payload.numel()
        if not reply.accepted:
            self._offered.pop((c.fragment, c.round), None)
            self._tell(Rejected(c.fragment, c.round, reply.reason))

    def _offer_again(self) -> None:
        """After the connection was lost: the syncer may have been restarted and know only what it has published."""
        for contribution, payload in list(self._offered.values()):
            if contribution.incarnation == self._incarnation:
                self._push(contribution, payload)

    # --- receiving --------------------------------------------------------------------------------------------------------

    def _catch_up(self, fragment: int, version: int) -> None:
        """On the receiver: fetch until the fragment is at `version` or newer."""
        incarnation = self._incarnation
        while (held := self._newest[fragment]).version < version:
            request = pb.PullRequest(
                run=self._run, learner=self._learner, incarnation=incarnation, fragment=fragment, base=held.version
            )
            try:
                header, buffer = self._retry_pull(request, "updates")
            except StaleIncarnationError as error:
                self._given_up(incarnation, str(error))
                return
            mean: Tensor | None = None
            try:
                if header.lossless:
                    new = self._whole(fragment, header, buffer)
                else:
                    advanced = advance(self._method, held.theta, held.outer_state, tensor_of(buffer))
                    new, mean = _Held(header.version, advanced.theta, advanced.outer_state), advanced.mean
                    self._verify(fragment, header, new.theta)
            except DigestError as error:
                log.error("%s; fetching it whole", error)
                header, new = self._pull_whole(fragment)
            update = Update(
                fragment, header.base, header.version, tuple(header.contributors), tuple(header.weights), header.scale, header.digest,
                header.lossless,
            )  # fmt: skip
            self._newest[fragment] = new
            self._settle_offers(fragment, header.version, header.merged_round)
            started_over = self._method.outer_at == "learners" and mean is None
            state = new.outer_state if started_over else None
            self._tell(Arrived(update, new.theta, header.merged_round, mean, state))

    def _settle_offers(self, fragment: int, version: int, merged_round: int) -> None:
        """What is merged need not be offered again, nor what a scheduled round has gone on without."""
        passed = version if self._method.quorum.scheduled else merged_round + 1
        for key in [key for key in self._offered if key[0] == fragment and key[1] < passed]:
            self._offered.pop(key, None)

    def _retry_pull(self, request: pb.PullRequest, channel: str) -> tuple[pb.PullHeader, memoryview]:
        pulled: list[tuple[pb.PullHeader, memoryview]] = []

        def attempt() -> pb.PullHeader:
            pulled.append(self._connection.pull(channel, request))
            return pulled[-1][0]

        self._retry(attempt)
        self._counts[channel] += len(pulled[-1][1])
        return pulled[-1]

    # --- signs of life ----------------------------------------------------------------------------------------------------

    def _heartbeat(self) -> pb.HeartbeatReply:
        report = self._report
        request = pb.HeartbeatRequest(
            run=self._run, learner=self._learner, incarnation=self._incarnation, step=report.step, tokens=report.tokens,
            step_s=report.step_s or 0.0, waiting=report.waiting,
        )  # fmt: skip
        reply = self._retry(lambda: self._connection.call("control", "Heartbeat", request, pb.HeartbeatReply))
        self._run_tokens = reply.run_tokens
        self._num_live = max(1, reply.live)
        self._sync_every = reply.sync_every or None
        return reply

    def _beat_until(self, stop: threading.Event) -> None:
        """While a model is fetched, so that a slow link does not look like death."""
        while not stop.wait(HEARTBEAT_S):
            try:
                self._heartbeat()
            except DilocoError as error:
                log.warning("no sign of life could be given while joining: %s", error)
                return

    def _beat_forever(self) -> None:
        while not self._connection.closing.is_set():
            self._beat.wait(HEARTBEAT_S)
            self._beat.clear()
            if self._connection.closing.is_set():
                return
            incarnation = self._incarnation
            try:
                reply = self._heartbeat()
            except StaleIncarnationError as error:
                self._given_up(incarnation, str(error))
                continue
            for fragment, version in enumerate(reply.versions):  # a notice may have been lost
                if incarnation == self._incarnation and version > self._newest[fragment].version:
                    self._submit(self._receiver, lambda f=fragment, v=version: self._catch_up(f, v))  # type: ignore[misc]
            if self._reports_steps:
                self._connection.closing.wait(MIN_REPORT_S)

    def _watch_forever(self) -> None:
        while not self._connection.closing.is_set():
            incarnation = self._incarnation
            request = pb.WatchRequest(run=self._run, learner=self._learner, incarnation=incarnation)
            try:
                for notice in self._connection.watch(request):
                    self._take_notice(notice, incarnation)
            except StaleIncarnationError as error:
                self._given_up(incarnation, str(error))
            except ExchangeError:
                self._say_away()
            self._connection.closing.wait(0.2)
            if incarnation == self._incarnation and not self._connection.closing.is_set():
                self._submit(self._sender, self._offer_again)

    def _take_notice(self, notice: pb.Notice, incarnation: int) -> None:
        match notice.WhichOneof("what"):
            case "welcome":
                with self._news:
                    self._welcome_step = notice.welcome.step
                    self._news.notify_all()
            case "published":
                published = notice.published
                self._submit(self._receiver, lambda: self._catch_up(published.fragment, published.version))
            case "called":
                self._tell(Called(notice.called.fragment, notice.called.version))
            case "rejected":
                rejected = notice.rejected
                self._offered.pop((rejected.fragment, rejected.round), None)
                self._tell(Rejected(rejected.fragment, rejected.round, rejected.reason))
            case "evicted":
                if notice.evicted.replaced:
                    self._fail(
                        StaleIncarnationError(
                            f"another process has joined run {self._run!r} as {self._learner!r}; give every learner its own name."
                        )
                    )
                else:
                    self._given_up(incarnation, notice.evicted.reason)

    def _given_up(self, incarnation: int, reason: str) -> None:
        """The syncer has given this incarnation up: join again, on the receiver, once."""
        self._submit(self._receiver, lambda: self._rejoin(incarnation, reason))

    def _rejoin(self, incarnation: int, reason: str) -> None:
        if incarnation != self._incarnation or self._connection.closing.is_set():
            return
        log.warning("%s was given up (%s) and joins again", self._learner, reason)
        self._offered.clear()
        self._report = Report(step=self._report.step)
        opened = self._join()
        with self._news:
            self._events.clear()
            self._events.append(Rejoined(opened, reason))
            self._news.notify_all()

    # --- helpers ----------------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()

    def _submit(self, pool: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        if self._connection.closing.is_set():
            return
        pool.submit(job).add_done_callback(self._note)

    def _note(self, future: Future[None]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not self._connection.closing.is_set():
            self._fail(error)

    def _guarded(self, body: Callable[[], None]) -> None:
        """A thread's whole life; what ends it reaches the training thread."""
        future: Future[None] = Future()
        future.add_done_callback(self._note)
        try:
            body()
        except DilocoError as error:
            future.set_exception(error)

    def _retry(self, action: Callable[[], R]) -> R:
        """Until the syncer is back."""
        return self._connection.retrying(action, on_retry=self._say_waiting("the syncer cannot be reached"))

    def _say_away(self) -> None:
        if not self._connection.closing.is_set():
            log.warning("lost the connection to the syncer at %s; trying again", self._connection.address)

    def _say_waiting(self, what: str) -> Callable[[DilocoError], None]:
        said: list[bool] = []

        def say(error: DilocoError) -> None:
            if not said:
                log.warning("%s yet, trying again: %s", what, error)
                said.append(True)

        return say


def fetch_model(
    address: str, *, run: str, token: str | None = None, ca: str | Path | None = None, insecure: bool = False
) -> dict[str, Tensor]:
    """The run's newest global model: name to tensor in the parameters' dtypes, frozen ones and buffers too. For viewers.

    Raises:
        ExchangeError: no syncer answers. NotInitialisedError: there is no model yet. AuthError: the token may not read.
    """
    connection = Connection(address, token=token, ca=ca, insecure=insecure)
    try:
        description = connection.call("control", "Describe", pb.DescribeRequest(run=run), pb.DescribeReply)
        if not description.initialised:
            raise NotInitialisedError(f"run {run!r} has no model yet; start one learner with --initialise.")
        layout = Layout.from_dict(json.loads(description.layout))
        model: dict[str, Tensor] = {}
        for fragment in layout.fragments:
            header, buffer = connection.pull("joins", pb.PullRequest(run=run, fragment=fragment.index, base=-1))
            theta = tensor_of(buffer, torch.float32)
            if digest(theta) != header.digest:
                raise DigestError(
                    f"version {header.version} of fragment {fragment.index} arrived damaged; fetch it again."
                )
            for name, value in scatter(fragment, theta).items():
                spec = next(place.spec for place in fragment.tensors if place.spec.name == name)
                model[name] = value.to(getattr(torch, spec.dtype))
        _, static = connection.pull("joins", pb.PullRequest(run=run, static=True, base=-1))
        return {**model, **load(bytes(static))}
    finally:
        connection.close()


def fetch_status(
    address: str, *, run: str, token: str | None = None, ca: str | Path | None = None, insecure: bool = False
) -> dict[str, object]:
    """What the syncer knows of its run, as plain values. For viewers. Raises as `fetch_model`."""
    connection = Connection(address, token=token, ca=ca, insecure=insecure)
    try:
        reply = connection.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply)
        status: dict[str, object] = json.loads(reply.status)
        return status
    finally:
        connection.close()
