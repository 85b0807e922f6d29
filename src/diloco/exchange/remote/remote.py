"""A learner's exchange with a syncer over the internet.

The learner only dials out: to one address and one port, or to two if the run has a standby. Losing the syncer is not
an error: every request is repeated until the syncer is back, and contributions without a verdict are sent again. An
evicted learner joins as a new incarnation and starts from the newest model. `protocol.session` decides all of this;
background threads make the requests (`session`), so that the training thread never waits for one.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.core.choices import positive, whole_number
from diloco.core.fragments import Layout
from diloco.core.global_fragment import AppliedUpdate
from diloco.core.method import Method
from diloco.errors import ConfigError, ExchangeError, PayloadError, StoppedError, translated
from diloco.exchange.base import Event, FlatModel, Overview, ShardedExchange, StartingState
from diloco.exchange.dialling import Dialler, Door, dialler
from diloco.exchange.key_pair import find_keys, learner_of
from diloco.exchange.lanes import CommandLanes
from diloco.exchange.remote.entry import Entry, Initial, answer, describe, model_parts
from diloco.exchange.remote.inbox import STOPPED
from diloco.exchange.remote.messages import method_of
from diloco.exchange.remote.session import Session
from diloco.exchange.remote.shards_of_ranks import FollowingRank, LeadingReceiver, LeadingSender, divided, sharded_parts
from diloco.exchange.remote.transfers import Receiver, Sender
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.contribution import Contribution
from diloco.protocol.leases import Ask
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Report
from diloco.protocol.session.joining import LEAVE_TIMEOUT_S, Initialises
from diloco.protocol.session.session_core import SessionCore
from diloco.run.validation import check_name

STOPPED_TIMEOUT_S = 0.2
"""How long an interrupted learner waits until the syncer has all of its contributions, and then for the answer to its
`Leave`: with the delay of `interrupt` and the end of a process, less than a second."""


def connect(
    address: str,
    *,
    run: str,
    learner: str | None = None,
    keys: str | Path | None = None,
    insecure: bool = False,
    initialise: Initialises = False,
    initial_step: int = 0,
    initial_tokens: int = 0,
    source: str = "learner",
    lineage: Mapping[str, Any] | None = None,
    join_timeout_s: float | None = None,
    tokens_per_step: int | None = None,
) -> Remote:
    """An exchange with the syncer of a run. Nothing is dialled before a `Learner` takes it.

    Arguments:
        address: "host:port" of the syncer; if the run has a standby, both addresses, with a comma between them; the
            ranks of an island give them in the same order.
        run: the run's name; a syncer of another run refuses the learner.
        learner: this learner's id, unique in the run and the same after a restart: letters, digits, dots, dashes and
            underscores; default: the name in `keys`, or else the host's name. A certificate is for one learner.
        keys: this learner's keys from `diloco keys add`: the directory with its certificate, its private key and the
            run's authority, or the line "diloco1.…" with the same content. None: the value of the environment variable
            DILOCO_KEYS, in either form; without it, plain text to a syncer on this machine, or with `insecure`.
        insecure: plain text to another machine, on purpose.
        initialise: whether this learner gives the run its model. "if-empty": if the run has none yet; otherwise the
            learner takes the run's and says so. Of two learners the syncer takes one model, and the same line serves
            every start of every learner. True: exactly one learner, once. False: it waits until the run has a model.
        initial_step: inner steps that the model was trained for before (a warm start).
        initial_tokens: the tokens of those steps.
        source: a description of that model's origin, for people.
        lineage: of the checkpoint that this learner resumes ("lineage" of `Learner.state_dict`). The learner does not
            follow a syncer that serves an older copy of the run's state: it warns, and waits for the newest. Where it
            initialises, for a run whose syncer has lost its state: the run continues from that model under its old
            id, so that the other learners follow. None: it follows any syncer of the run, or begins a new run.
        join_timeout_s: how long to wait for a syncer to answer, and for the run to have a model; None: without limit.
        tokens_per_step: the maximum that this learner trains in an inner step, over all of its ranks: the syncer
            refuses a message with more tokens, with the reason. None: only the syncer's own bound holds.

    Raises:
        ConfigError: an invalid address or combination, or keys that cannot be used.
    """
    for name, value, kind, wanted in (
        ("address", address, str, '"host:port"'), ("run", run, str, "the run's name"),
        ("learner", learner, str | None, "a name"),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise ConfigError(f"connect({name}={value!r}) cannot be used; give {wanted}.")
    if not (isinstance(initialise, bool) or initialise == "if-empty"):
        raise ConfigError(f'connect(initialise={initialise!r}) cannot be used; give "if-empty", True or False.')
    if tokens_per_step is not None:
        whole_number("tokens_per_step", tokens_per_step, 1)
    if join_timeout_s is not None:
        positive("join_timeout_s", join_timeout_s)
    with translated(
        TypeError, ConfigError, f"connect(lineage={lineage!r}) cannot be used", "give that of a state_dict"
    ):
        seen = None if lineage is None else Lineage(**lineage)
    own = find_keys(keys, address, insecure=insecure)
    if learner is None and own is not None:
        learner = learner_of(own.read())
    learner = learner or socket.gethostname()
    try:
        check_name(learner)
    except PayloadError as error:
        raise ConfigError(str(error)) from error
    return Remote(
        dialler(address, keys=own, insecure=insecure),
        run=run,
        learner=learner,
        initial=Initial(initial_step, initial_tokens, source, seen, initialise) if initialise else None,
        seen=None if initialise is True else seen,
        join_timeout_s=join_timeout_s,
        tokens_per_step=tokens_per_step,
        door=Door(address, run, own, insecure),
    )


class Remote(ShardedExchange):
    """One learner's end of a run that a syncer serves; `connect` makes it.

    Attributes:
        door: for calls of others than the learner, on connections of their own.
    """

    gradients = False
    dials_out = True
    has_syncer = True

    def __init__(
        self,
        dialler: Dialler,
        *,
        run: str,
        learner: str,
        initial: Initial | None = None,
        seen: Lineage | None = None,
        join_timeout_s: float | None = None,
        tokens_per_step: int | None = None,
        door: Door | None = None,
    ) -> None:
        self.door = door
        self._tokens_per_step = tokens_per_step
        self._dialler, self._initial, self._join_timeout_s = dialler, initial, join_timeout_s
        self._run, self._claim = run, Claim(learner, process=secrets.randbits(64), seen=seen)
        self._incarnation = 0  # as which the training thread reports
        self._session: Session | None = None
        self._lanes: CommandLanes | None = None  # of a learner of several ranks
        self._follower: FollowingRank | None = None  # on other ranks than 0
        self._closing = threading.Lock()
        self._closed = self._is_interrupted = False

    # --- joining ------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        run = self._run
        with self._stoppable():
            method = method_of(describe(self._dialler, run, self._join_timeout_s))
        if given is not None and (difference := given.difference(method, "in the given one", "in the run's")):
            raise ConfigError(
                f"the given method differs from that of run {run!r}: {difference}; pass method=None to take the run's."
            )
        return method

    def deal(self, method: Method, size: int) -> tuple[int, ...]:
        request = pb.DealRequest(run=self._run, learner=self._claim.learner, size=size)

        def ask() -> pb.DealReply:
            return self._dialler.current.call("control", "Deal", request, pb.DealReply)

        with self._stoppable():
            return tuple(answer(self._dialler, self._join_timeout_s, ask).groups)

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        first = self._first
        core = SessionCore(
            self._run,
            self._claim,
            len(layout.fragments),
            at_least=method.quorum.at_least,
            reports_every_step=method.quorum.reports_every_step,
            initialises=False if first is None else first.initialises,
            join_timeout_s=self._join_timeout_s,
            num_addresses=self._dialler.num_addresses,
            held=self.held,
        )
        model, dialler, lanes = None if first is None else initial(), self._dialler, self._lanes
        run = self._run
        sender, receiver, parts = Sender(dialler, run), Receiver(dialler, run, layout, method), model_parts
        if lanes is not None:
            spans, shards = divided(layout, method, lanes)
            sender = LeadingSender(dialler, run, spans, lanes.send)
            receiver = LeadingReceiver(dialler, run, layout, method, shards, lanes.receive)
            parts = partial(sharded_parts, lanes=lanes)
        entry = Entry(
            dialler, run, layout, first, model, parts, overlap=overlap, held=self.held, is_dealt=self.is_dealt,
            tokens_per_step=self._tokens_per_step,
        )  # fmt: skip
        self._session = Session(core, dialler, entry, sender, receiver)
        self._session.begin()
        with ExitStack() as undo:
            if lanes is None:  # else the caller closes, after the other ranks have the error
                undo.callback(self.close)
            with self._stoppable():
                opened = self._session.inbox.wait_for_start()
            undo.pop_all()
        self._incarnation = opened.incarnation
        return opened

    @property
    def _first(self) -> Initial | None:
        """Of the model that this learner would give the run, unless it has a part of one and is not told to."""
        given = self._initial
        return given if given is None or self.has_whole or given.initialises is True else None

    # --- one of several ranks -----------------------------------------------------------------------------------------

    def divide(self, lanes: CommandLanes) -> None:
        self._lanes = lanes

    def follow(self, layout: Layout, method: Method, initial: Callable[[], FlatModel]) -> None:
        assert self._lanes is not None
        model = None if self._first is None else initial()
        self._follower = FollowingRank(self._dialler, self._run, layout, method, self._lanes, model)

    def fetched(self, fragment: int, version: int, incarnation: int | None = None) -> AppliedUpdate:
        assert self._follower is not None
        return self._follower.fetched.take(fragment, version, incarnation)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        if self._follower is not None:
            self._follower.sender.keep(contribution, payload)
            return
        session = self._opened
        session.sender.keep(contribution, payload)
        session.enter(partial(session.core.offered, c=contribution))

    def ask(self, ask: Ask) -> None:
        session = self._opened
        session.enter(partial(session.core.asked, incarnation=self._incarnation, ask=ask))

    def poll(self) -> Sequence[Event]:
        return self._opened.inbox.take()

    def rejoined(self, incarnation: int) -> None:
        self._incarnation = incarnation

    def wait(self, timeout_s: float) -> None:
        self._opened.inbox.wait(timeout_s)

    @property
    def obstacles(self) -> str:
        if self._opened.core.is_away:
            return "the syncer cannot be reached"
        return f"{super().obstacles}, and `diloco status` shows which are missing"

    def report(self, report: Report) -> None:
        session = self._opened
        session.enter(partial(session.core.report, incarnation=self._incarnation, report=report))

    @property
    def overview(self) -> Overview:
        return Overview.of(self._opened.core.last_standing)

    @property
    def lineage(self) -> Lineage | None:
        return None if self._session is None else self._session.core.seen

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return self._transfers.num_bytes

    @property
    def resumed_bytes(self) -> int:
        return self._transfers.resumed_bytes

    @property
    def _transfers(self) -> FollowingRank | Session:
        return self._follower or self._opened

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise ExchangeError("this exchange has not joined a run yet; give it to a Learner first.")
        return self._session

    # --- being stopped ------------------------------------------------------------------------------------------------

    def interrupt(self, after_s: float) -> None:
        timer = threading.Timer(after_s, self._interrupt)
        timer.daemon = True
        timer.start()

    def _interrupt(self) -> None:
        self._is_interrupted = True
        if self._session is not None:
            self._session.inbox.interrupt()
        elif self._lanes is None or self._lanes.group.rank == 0:  # the other ranks of a learner wait for rank 0
            self._dialler.close()

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Translate the error of a connection that `interrupt` has closed."""
        try:
            yield
        except ExchangeError as error:
            if not self._is_interrupted:
                raise
            raise StoppedError(STOPPED) from error

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        timeout_s = STOPPED_TIMEOUT_S if self._is_interrupted else LEAVE_TIMEOUT_S
        if self._follower is not None:
            self._follower.close(timeout_s)
        if self._session is not None:
            self._session.close(timeout_s)
            for lane in (self._lanes.send, self._lanes.receive) if self._lanes is not None else ():
                with suppress(ExchangeError):  # the other ranks are lost
                    lane.end()
        self._dialler.close()
