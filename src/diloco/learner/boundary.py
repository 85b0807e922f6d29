"""What a learner does between two inner steps: send what is due, take in what has come, wait for what is due, adopt it.

`core.learner` decides; here are the tensors, and the exchange that carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from diloco.core.adopt import Eager, KeepDisplacement
from diloco.core.flights import Send
from diloco.core.fragments import Layout
from diloco.core.learner import LearnerCore
from diloco.core.method import Method
from diloco.core.update import KEPT, Contribution
from diloco.exchange.base import Arrived, Called, Exchange, Opened, Rejected, Rejoined, Report
from diloco.learner.eager import EagerSteps
from diloco.learner.error_feedback import ErrorFeedback
from diloco.learner.tensors import LearnerTensors
from diloco.learner.timing import Timing


class Boundary:
    """One learner's end of its exchange.

    Arguments:
        core: whose decisions are carried out.
        values: the learner's tensors.
        trained: per fragment the indices of the tensors that this learner trains; None: all of them.
        opened: what the learner starts from.

    Attributes:
        name, incarnation: who the learner is in the run.
        residuals, eager: of this incarnation; `eager` where the method's updates are.
        received: versions that are here and not adopted, by (fragment, version).
        has_finished: no more steps will be taken.
        updates, merges: versions heard of, and those among them that this learner's work is in.
    """

    def __init__(
        self, method: Method, layout: Layout, exchange: Exchange, core: LearnerCore, values: LearnerTensors,
        trained: Sequence[tuple[int, ...] | None], opened: Opened,
    ) -> None:  # fmt: skip
        self.method, self.layout, self.exchange = method, layout, exchange
        self.core, self.values = core, values
        self.timing = Timing(lambda: exchange.now_s)
        self.received: dict[tuple[int, int], Arrived] = {}
        self.merges = self.updates = 0
        self.has_finished = False
        self._trained = trained
        self._begin(opened)

    def _begin(self, opened: Opened) -> None:
        """A new incarnation: parameters, frozen ones and buffers become the run's, and nothing is on its way."""
        self.name, self.incarnation = opened.learner, opened.incarnation
        self.received.clear()
        self.residuals = ErrorFeedback(self.method, len(self.layout.fragments))
        self._sent: dict[int, Send] = {}  # at this boundary
        self.eager = EagerSteps(self.method, opened) if isinstance(self.method.adopt, Eager) else None
        # Where gradients are exchanged, a fragment's later versions are gradients, and the model is the learners' own.
        self.values.take(opened.model, write=self.method.exchanged != "gradients" or not any(opened.versions))

    def rejoin(self, opened: Opened, *, step: int = 0) -> None:
        """Start again as a new incarnation, at the run's step or the learner's own (`step`), whichever is later."""
        self.core.rejoined(
            opened.versions, opened.step if opened.awaited else max(opened.step, step), awaited=opened.awaited
        )
        self._begin(opened)

    # --- the two kinds of boundary ----------------------------------------------------------------------------------------

    def after_step(self, tokens: int) -> None:
        """After an inner step: outer gradients go out, global fragments come in."""
        for send in self.core.stepped(tokens, sync_every=self.exchange.sync_every):
            self._send(send, self.values.parameters)
        self.report()
        self._settle()
        while self.exchange.boundary():
            self._settle()
        self.values.end_boundary(self._sent, keep=self._keeps_origins)
        self._sent.clear()

    def before_step(self) -> None:
        """Before an inner step, where gradients are exchanged: every gradient becomes the mean over learners."""
        self.exchange.stepped()
        gradients = self.values.gradients()
        for send in self.core.stepped(0):
            self._send(send, gradients)
        self._settle()
        self._sent.clear()

    def report(self, *, waiting: bool = False) -> None:
        """Tell the others how far this learner is."""
        self.exchange.report(Report(self.core.step, self.core.tokens, self.timing.step_s, waiting, self.has_finished))

    @property
    def _keeps_origins(self) -> bool:
        """Whether what is measured next may start from the parameters as they were sent."""
        return self.method.adopt.needs_origin or (self.core.schedule.intervals_in_flight > 0 and self.eager is None)

    # --- out --------------------------------------------------------------------------------------------------------------

    def _send(self, send: Send, tensors: Mapping[str, Tensor]) -> None:
        self._sent[send.fragment] = send
        self.values.static.check(send.fragment, len(self.layout.fragments))
        if not self.exchange.sends and self.eager is None:
            return
        fragment = self.layout.fragments[send.fragment]
        snapshots = self.values.snapshots
        snapshot = snapshots.take(fragment, tensors)
        measured = self._measured_from(send.fragment)
        contribution = Contribution(
            self.name, self.incarnation, send.fragment, send.round, send.base, send.tokens, send.steps,
            self.core.tokens, send.discarded, step=self.core.step, tensors=self._trained[send.fragment],
        )  # fmt: skip

        residuals = self.residuals  # a new incarnation has others
        tentative = residuals.offered(send.fragment, send.round)

        def payload() -> Tensor:
            outer_gradient = snapshots.displacement(fragment, measured, snapshot)
            encoded = residuals.encode(tentative, outer_gradient)
            snapshots.give_back(snapshot)
            return encoded

        if self.eager is None:
            self.exchange.offer(contribution, payload)
        else:  # the learner steps with it at this very boundary
            encoded = payload()
            self.eager.sent(send, encoded, fragment.numel)
            self.exchange.offer(contribution, lambda: encoded)

    def _measured_from(self, fragment: int) -> Tensor | None:
        """What a displacement is the difference to; None where gradients themselves are sent."""
        if self.method.exchanged == "gradients":
            return None
        anchors = self.values.anchors if self.eager is None else self.eager.anchors
        return self.values.origins.get(fragment, anchors[fragment])

    # --- in ---------------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take in what has come, wait for what is due, adopt."""
        self.take_in()
        self.wait_while(lambda: bool(self.core.waiting()))
        arrived = {}
        for fragment, version in self.core.adoptions():
            arrived[fragment] = self.received[fragment, version]
            self._adopt(fragment, version)
        if self.eager is not None:
            for fragment in sorted(self._sent.keys() | arrived.keys()):
                self._step_eagerly(self.eager, fragment, arrived.get(fragment))
            self._sent.clear()

    def _step_eagerly(self, eager: EagerSteps, fragment: int, arrived: Arrived | None) -> None:
        """The anchor moves, and with it the parameters; work that was not sent stays on top of it."""
        send, before = self._sent.get(fragment), eager.anchors[fragment]
        anchor = eager.step(fragment, send, arrived, self.exchange.num_live)
        if send is not None:
            self.values.write(fragment, anchor)
        else:
            self.values.write(fragment, anchor, how=KeepDisplacement(), origin=before)

    def wait_while(self, missing: Callable[[], bool]) -> None:
        """Block until the answers that are missing are here."""
        if self.timing.wait_while(missing, self._wait):
            self.report()

    def _wait(self) -> None:
        self.report(waiting=True)
        self.exchange.wait()
        self.take_in()

    def take_in(self) -> None:
        """Note what has happened since the last time; nothing is adopted."""
        for event in self.exchange.poll():
            match event:
                case Arrived():
                    self._arrived(event)
                case Called(fragment=fragment, version=version):
                    if (send := self.core.called(fragment, version)) is not None:
                        self._send(send, self.values.parameters)
                case Rejected():
                    self._rejected(event)
                case Rejoined(opened=opened):
                    self.rejoin(opened)

    def _arrived(self, arrived: Arrived) -> None:
        update, fragment = arrived.update, arrived.update.fragment
        self.received[fragment, update.version] = arrived
        self.updates += update.version > self.core.versions[fragment]
        listed = self.core.received(fragment, update.version, arrived.merged_round)
        self.merges += bool(listed)
        for flight in listed:
            self.residuals.commit(fragment, flight.round)
        if self.core.mode == "scheduled" and arrived.merged_round < update.base:
            self.residuals.roll_back(fragment, update.base)

    def _rejected(self, rejected: Rejected) -> None:
        fragment = rejected.fragment
        if not self.core.rejected(fragment, rejected.round, rejected.reason):
            return
        self.residuals.roll_back(fragment, rejected.round)
        if rejected.reason in KEPT:
            self._sent.pop(fragment, None)
            self.values.measure_from((fragment,), here=False)

    def _adopt(self, fragment: int, version: int) -> None:
        arrived = self.received[fragment, version]
        if self.method.exchanged == "gradients":
            self.values.write(fragment, arrived.theta, self.values.gradients())
        elif self.eager is None and not self.core.keeps_own(fragment, version):
            self.values.adopt(fragment, arrived.theta, just_sent=fragment in self._sent)
            self._sent.pop(fragment, None)
        self.values.adopted(fragment, arrived.theta)
        for flight in self.core.adopted(fragment, version):
            if not flight.listed:
                self.residuals.roll_back(fragment, flight.round)
        self.received = {key: value for key, value in self.received.items() if key[0] != fragment or key[1] > version}

    def newest(self) -> list[Tensor]:
        """The global fragments adopted; where learners push, those that have come and wait for this one's own push too."""
        newest = list(self.values.anchors)
        if self.core.mode == "pushed":
            for (fragment, _), arrived in sorted(self.received.items(), key=lambda each: each[0]):
                newest[fragment] = arrived.theta
        return newest
