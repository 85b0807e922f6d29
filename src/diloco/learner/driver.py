"""The driver of `LearnerCore`: it executes the decisions of the state machine on tensors, over an exchange.

It runs at the boundaries between inner steps: send the fragments that are due, receive updates, wait, adopt versions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from diloco.core.adopt import Eager, KeepDisplacement
from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.errors import ConfigError, StoppedError
from diloco.exchange.base import Arrived, Exchange, Interrupted, Rejoined, StartingState
from diloco.learner.eager import EagerSteps
from diloco.learner.error_feedback import ErrorFeedback
from diloco.learner.experts import RoutedWork, UntrainedRows
from diloco.learner.master_weights import MasterWeightDetector
from diloco.learner.rewarm import Rewarm
from diloco.learner.tensors import LearnerTensors
from diloco.learner.timing import Timing
from diloco.protocol.contribution import KEPT, Budget, CallForWork, Contribution, Drained, Hold, Rejection, Settled
from diloco.protocol.in_flight import Send
from diloco.protocol.learner import LearnerCore
from diloco.protocol.leases import Grant
from diloco.protocol.members import Evaluation, Report
from diloco.protocol.unit_queue import UnitQueue
from diloco.protocol.units import Ranges

log = logging.getLogger("diloco")

FINISH_SAID_AFTER_S = 2.0
"""How long `finish` waits before it says so; it says it again at doubled times."""


class LearnerDriver:
    """Executes the decisions of one learner's state machine.

    Arguments:
        core: the state machine.
        tensors: the learner's tensors.
        master_weights: detects optimizers that an adoption does not reach.
        trained: per fragment the indices of the tensors that this learner trains; None: all of them.
        untrained: keeps the rows that this learner does not train.
        routed: counts the tokens of each expert; None: the method does not cut the model into experts.
        rewarm: the re-warm-up of the learning rate of a new inner optimizer.
        opened: the run's state when the learner joined.

    Attributes:
        name, incarnation: the learner's identity in the run.
        residuals: error feedback of this incarnation.
        eager: eager updates of this incarnation; None for other methods.
        received: versions received and not adopted, by (fragment, version).
        digests: of the global fragments that this learner has adopted, or of the part of them that this process
            exchanges.
        has_finished: the learner takes no more steps.
        is_interrupted: a wait raises StoppedError from now on.
        is_drained: the learner was evicted and may not rejoin.
        is_paused: the run is paused.
        is_settled: the run has ended, and this learner has its last versions.
        units: leased units of the run's data; None: no data is leased.
        training_loss, evaluation: the newest from `Learner.log`.
        updates, merges: numbers of versions received, and of those that contain this learner's work.
    """

    def __init__(
        self, method: Method, layout: Layout, exchange: Exchange, core: LearnerCore, tensors: LearnerTensors,
        master_weights: MasterWeightDetector, trained: Sequence[tuple[int, ...] | None], untrained: UntrainedRows,
        routed: RoutedWork | None, rewarm: Rewarm, opened: StartingState,
    ) -> None:  # fmt: skip
        self.method, self.layout, self.exchange = method, layout, exchange
        self.core, self.tensors = core, tensors
        self.timing = Timing(lambda: exchange.now_s)
        self.received: dict[tuple[int, int], Arrived] = {}
        self.digests: list[str] = []
        self.merges = self.updates = 0
        self.has_finished = self.is_drained = self.is_interrupted = False
        self.training_loss: float | None = None
        self.evaluation: Evaluation | None = None
        self.units: UnitQueue | None = None
        self.rewarm, self.untrained, self._routed = rewarm, untrained, routed
        self._master_weights, self._trained = master_weights, trained
        self._held = [each.index for each in layout.fragments if each.tensors]
        self._begin(opened)

    def _begin(self, opened: StartingState) -> None:
        """Start a new incarnation from the run's model, with no contribution in flight."""
        self.name, self.incarnation = opened.learner, opened.incarnation
        self.is_paused = self.is_settled = False
        self.received.clear()
        self.tensors.uploads.keep(())
        self.residuals = ErrorFeedback(self.method, len(self.layout.fragments))
        self._sent: dict[int, Send] = {}  # at this boundary
        self._sent_or_adopted: set[int] = set()  # at this boundary
        self._master_weights.begin()
        places = [self.tensors.partition.places(fragment) for fragment in range(len(self.layout.fragments))]
        self.eager = EagerSteps(self.method, places, opened) if isinstance(self.method.adopt, Eager) else None
        # Where gradients are exchanged, versions after 0 are gradients, and each learner's parameters are its own.
        write = self.method.exchanged != "gradients" or max(opened.versions) <= 0
        self.tensors.load_model([held.theta for held in opened.fragments], opened.static, write=write)
        self.digests = [held.digest for held in opened.fragments]
        self.untrained.adopted()
        self.discard_routed()

    def rejoin(self, opened: StartingState, *, step: int = 0) -> None:
        """Start a new incarnation, at the later of the run's step and the learner's own (`step`)."""
        step = opened.step if opened.awaited else max(opened.step, step)
        self.core.rejoined(opened.versions, step, awaited=opened.awaited)
        self._begin(opened)
        if self.units is not None:
            self.units.start_over()

    # --- the two kinds of boundary ------------------------------------------------------------------------------------

    def after_step(self, tokens: int) -> None:
        """The boundary after an inner step: send outer gradients, adopt global fragments."""
        self.tensors.frozen.check_boundary()
        self._master_weights.stepped()
        self.tensors.parameters |= self.tensors.frozen.averaged()
        sync_every, units = self.exchange.overview.sync_every, self._trained_units()
        for send in self.core.stepped(tokens, units=units, sync_every=sync_every):
            self._send(send, self.tensors.parameters)
        self.report()
        self._wait_out_pause()
        self._settle()
        while self.exchange.boundary():
            self._settle()
        if self._keeps_origins:
            self.tensors.measure_from(self._sent, here=True)
        self._sent.clear()
        self.tensors.frozen.boundary_ends(self.layout.fragments[fragment] for fragment in self._sent_or_adopted)
        self._sent_or_adopted.clear()
        self.untrained.adopted()

    def before_step(self) -> None:
        """The boundary before an inner step, where gradients are exchanged: set each to the mean over learners."""
        self.exchange.stepped()
        self.tensors.frozen.check_boundary()
        gradients = self.tensors.gradients()
        for send in self.core.stepped(0):
            self._send(send, gradients)
        self._settle()
        self._sent.clear()

    def report(self, *, waiting: bool = False, blocked_with: tuple[int, ...] = ()) -> None:
        """Report this learner's progress to the exchange."""
        core, step_s = self.core, self.timing.step_s
        self.exchange.report(Report(
            core.step, core.tokens, step_s, waiting, self.has_finished, core.steps, blocked_with, core.earlier_tokens,
            self.training_loss, self.evaluation, self.timing.blocked_s,
        ))  # fmt: skip

    @property
    def _keeps_origins(self) -> bool:
        """Whether outer gradients of a fragment that was sent and not adopted are measured from the parameters sent."""
        return self.method.adopt.needs_origin or (
            self.core.rules.schedule.intervals_in_flight > 0 and self.eager is None
        )

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, send: Send, tensors: Mapping[str, Tensor]) -> None:
        self._sent[send.fragment] = send
        fragment, measured = self.layout.fragments[send.fragment], self._measured_from(send.fragment)
        self.tensors.registered.check()
        self._master_weights.check_groups()
        self.tensors.frozen.check(self._held.index(fragment.index), len(self._held))
        if measured is not None:
            self.tensors.frozen.check_trained(fragment, self._trained[fragment.index])
            self._master_weights.check_copies(fragment)
            self._sent_or_adopted.add(fragment.index)
        contribution = Contribution(
            self.name, self.incarnation, send.fragment, send.number, send.round, send.base, send.tokens, send.steps,
            self.core.tokens, send.discarded, step=self.core.step, tensors=self._trained[send.fragment],
            units=send.units, overwritten=send.overwritten, routed=self._routed_to(send.fragment, send.number),
        )  # fmt: skip
        if contribution.is_empty:
            self.exchange.offer(contribution, lambda: torch.empty(0, dtype=torch.uint8))
            return
        snapshots = self.tensors.snapshots
        snapshot = snapshots.take(send.fragment, tensors)
        num_elements = snapshot.values.numel()
        residuals = self.residuals  # those of this incarnation
        tentative = residuals.offered(send.fragment, send.number)

        def payload() -> Tensor:
            outer_gradient = snapshots.displacement(send.fragment, measured, snapshot)
            encoded = residuals.encode(tentative, outer_gradient)
            snapshots.give_back(snapshot)
            return encoded

        if self.eager is None:
            self.exchange.offer(contribution, payload)
        else:  # the learner's own outer step at this boundary needs the payload
            encoded = payload()
            self.eager.sent(send, encoded, num_elements)
            self.exchange.offer(contribution, lambda: encoded)

    def _measured_from(self, fragment: int) -> Tensor | None:
        """The origin or anchor of an outer gradient; None where gradients themselves are sent."""
        if self.method.exchanged == "gradients":
            return None
        anchors = self.tensors.anchors if self.eager is None else self.eager.anchors
        return self.tensors.origins.get(fragment, anchors[fragment])

    def _routed_to(self, fragment: int, number: int | None) -> tuple[int, ...] | None:
        """Read the tokens routed to the experts of a fragment, and add them to the contribution with this number, or
        else to the pending work. Returns their sum; None: they are not counted."""
        if self._routed is None or not self._routed.counts(fragment):
            return None
        return self.core.fragments[fragment].add_routed(self._routed.read(fragment), number)

    def read_routed(self) -> None:
        """Add the tokens routed to experts so far to the pending work."""
        for fragment in range(len(self.layout.fragments)):
            self._routed_to(fragment, None)

    def discard_routed(self) -> None:
        """Forget the tokens routed to experts so far."""
        if self._routed is not None:
            for fragment in range(len(self.layout.fragments)):
                self._routed.discard(fragment)

    # --- data ---------------------------------------------------------------------------------------------------------

    def lease(self, *, at_least: int = 0) -> None:
        """Request units of the run's data ahead, if few are left."""
        if self.units is not None and not self.has_finished and self.units.wants(at_least):
            ask = self.units.ask(self.core.unsent_units, at_least=at_least)
            if ask is not None:
                self.exchange.ask(ask)

    def wait_for_units(self, missing: Callable[[], bool], *, poll_s: float = math.inf) -> None:
        """Block while units are `missing`; a new incarnation requests them again.

        `poll_s`: how often to look where not only events of the exchange change that.
        """

        def wait(timeout_s: float) -> None:
            self._wait(min(timeout_s, poll_s))
            self.lease()

        def reason() -> str:
            are_groups = self.units is not None and self.units.data.groups is not None
            what = "scored groups of completions" if are_groups else "units of data"
            return f"it waits for {what}; {self.exchange.obstacles}."

        self._block_while(lambda: missing() and not self.has_finished, reason, wait)

    def _trained_units(self) -> Ranges:
        """The units of data of the inner step."""
        if (queue := self.units) is None:
            if self.core.has_units:
                raise ConfigError(
                    "this learner's checkpoint has work on leased units of data; lease the same data again "
                    "(LeasedSampler) before the first step."
                )
            return ()
        self.lease()
        self.wait_for_units(lambda: not queue.is_sure)
        if (units := queue.trained()) is None:
            raise ConfigError(
                "no batch of leased data was taken since the previous step; iterate over sampler.batches(loader) "
                "(LeasedSampler), and step after its batches only."
            )
        return units

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Receive, wait for the updates that are due, adopt."""
        self.receive()
        self.wait_while(self.core.waiting)
        arrived = {}
        for fragment, version in self.core.adoptions():
            arrived[fragment] = self.received[fragment, version]
            self._adopt(fragment, version)
        if self.eager is not None:
            for fragment in sorted(self._sent.keys() | arrived.keys()):
                self._step_eagerly(self.eager, fragment, arrived.get(fragment))
            self._sent.clear()

    def _step_eagerly(self, eager: EagerSteps, fragment: int, arrived: Arrived | None) -> None:
        """Take the learner's own outer step and adopt its anchor. Work that was not sent is added to the new anchor."""
        send, before = self._sent.get(fragment), eager.anchors[fragment]
        anchor = eager.step(fragment, send, arrived, self.exchange.overview.num_live)
        with self._master_weights.writing(fragment):
            if send is not None:
                self.tensors.write(fragment, anchor)
            else:
                self.tensors.write(fragment, anchor, how=KeepDisplacement(), origin=before)

    def wait_while(self, missing: Callable[[], Sequence[tuple[int, int]]]) -> None:
        """Block while updates are `missing`: (fragment, version) of each."""

        def reason() -> str:
            updates = " and ".join(f"version {version} of fragment {fragment}" for fragment, version in missing())
            return f"it waits for {updates}; {self.exchange.obstacles}."

        def wait(timeout_s: float) -> None:
            self._wait(timeout_s, self.core.received_versions)

        if self._block_while(lambda: bool(missing()), reason, wait):
            self.report()

    @property
    def is_done(self) -> bool:
        """Whether the run's budget is spent, as far as is known."""
        overview = self.exchange.overview
        return overview.budget.is_spent(overview.run_tokens, self.core.step)

    def finish(self, timeout_s: float, ends_run: bool | None) -> str | None:
        """Take no more steps, and wait for the run's last versions; as `Learner.finish`. Returns the reason if they may
        not be here, as the end of a sentence."""
        self.has_finished = True
        self.report()
        exchange, began_s, say_at_s = self.exchange, self.exchange.now_s, FINISH_SAID_AFTER_S
        while True:
            waited_s = exchange.now_s - began_s
            is_late = exchange.sum_over_ranks(int(waited_s >= timeout_s), "finish") > 0
            self.receive()
            # Only the last versions are of use to a learner that adopts nothing more, and others may make many yet.
            kept = {*enumerate(self.newest_versions), *self.core.answers_on_their_way()}
            self.received = {key: it for key, it in self.received.items() if key in kept}
            self.tensors.uploads.keep(self.received)
            if ends_run is None and (self.is_done or exchange.overview.budget == Budget()):
                ends_run = True  # the last contributions may have spent the budget
            awaits_others = ends_run and exchange.has_syncer and not (self.is_drained or exchange.overview.drained)
            if self.is_settled or not (self.core.has_unanswered or awaits_others):
                return "the run goes on" if exchange.has_syncer and not self.is_settled else None
            if is_late or self.is_interrupted:
                return f"the run has not ended after {waited_s:.0f} s ({exchange.obstacles})"
            if waited_s >= say_at_s:
                say_at_s, left_s = 2 * waited_s, timeout_s - waited_s
                self.say(f"has finished and awaits the last merges, at most {left_s:.0f} s more; {exchange.obstacles}.")
            exchange.wait(min(timeout_s, say_at_s) - waited_s)

    def _wait_out_pause(self) -> None:
        """Block while the run is paused. Versions that arrive meanwhile are adopted afterwards."""

        self.receive()
        if self._block_while(
            lambda: self.is_paused and not self.has_finished, lambda: "the run is paused.", self._wait
        ):
            self.report()

    def _block_while(
        self, is_waiting: Callable[[], bool], reason: Callable[[], str], wait: Callable[[float], None]
    ) -> bool:
        """Wait as long as `is_waiting`, and count the time. Warn with the reason after `Exchange.remind_after_s`, and
        each time that the wait has doubled. Returns whether there was anything to wait for.

        Arguments:
            wait: blocks for at most the given seconds.
        """
        if not is_waiting():
            return False
        exchange, began_s, say_at_s = self.exchange, self.exchange.now_s, self.exchange.remind_after_s
        while is_waiting():
            waited_s = exchange.now_s - began_s
            if waited_s >= say_at_s:
                self.say(f"has been blocked after step {self.core.step} for {waited_s:.0f} s: {reason()}")
                say_at_s = 2 * waited_s
            wait(say_at_s - waited_s)
        self.timing.waited(exchange.now_s - began_s)
        return True

    def say(self, text: str) -> None:
        """Log a warning about this learner, once for all of its ranks."""
        if self.exchange.rank[0] == 0:
            log.warning("learner %s %s", self.name, text)

    def take_back(self) -> None:
        """Make the work of unanswered contributions pending again (`LearnerCore.take_back`)."""
        for fragment, number in self.core.take_back():
            self.residuals.roll_back(fragment, number)
            self.tensors.measure_from((fragment,), here=False)

    def _wait(self, timeout_s: float, blocked_with: tuple[int, ...] = ()) -> None:
        if self.is_interrupted:
            raise StoppedError(
                f"learner {self.name} was told to stop while it waited after step {self.core.step}; save its state, "
                "and close it."
            )
        self.report(waiting=True, blocked_with=blocked_with)
        self.exchange.wait(timeout_s)
        self.receive()

    def receive(self) -> None:
        """Handle the exchange's events since the last call, without adopting a version."""
        for event in self.exchange.poll():
            match event:
                case Arrived():
                    self._arrived(event)
                case CallForWork(fragment=fragment, version=version):
                    if not self.has_finished and (send := self.core.called(fragment, version)) is not None:
                        self._send(send, self.tensors.parameters)
                case Rejection():
                    self._rejected(event)
                case Rejoined(opened=opened):
                    self.rejoin(opened)
                    self.exchange.rejoined(opened.incarnation)
                case Grant():
                    self._granted(event)
                case Interrupted():
                    self.is_interrupted = True
                case Hold(is_paused=is_paused):
                    self.is_paused = is_paused
                case Settled(is_settled=is_settled):
                    self.is_settled = is_settled
                case Drained():
                    self.core.drained()
                    self.has_finished = self.is_drained = True

    def _granted(self, grant: Grant) -> None:
        assert self.units is not None
        self.units.granted(grant)
        if grant.number == 1:
            for send in self.core.keep_units(grant.claimed):
                self._send(send, self.tensors.parameters)

    def _arrived(self, arrived: Arrived) -> None:
        update, fragment = arrived.update, arrived.update.fragment
        self.received.setdefault((fragment, update.version), arrived)  # an update may arrive twice
        if self.eager is None and update.version > self.core.versions[fragment]:
            self.tensors.uploads.start((fragment, update.version), arrived.held.theta)
        self.updates += update.version > self.core.versions[fragment]
        listed = self.core.received(fragment, update.version, arrived.merged)
        self.merges += bool(listed)
        for flight in listed:
            self.residuals.commit(fragment, flight.number)

    def _rejected(self, rejected: Rejection) -> None:
        fragment = rejected.fragment
        if self.core.rejected(fragment, rejected.number, rejected.reason) is None:
            return
        self.residuals.roll_back(fragment, rejected.number)
        if rejected.reason in KEPT:
            self._sent.pop(fragment, None)
            self.tensors.measure_from((fragment,), here=False)

    def _adopt(self, fragment: int, version: int) -> None:
        self._sent_or_adopted.add(fragment)
        arrived = self.received[fragment, version]
        if self.method.exchanged == "gradients":
            theta = self.tensors.uploads.take((fragment, version), arrived.held.theta)
            self.tensors.write(fragment, theta, self.tensors.gradients())
        elif self.eager is None and not self.core.keeps_own(fragment, version):
            theta = self.tensors.uploads.take((fragment, version), arrived.held.theta)
            with self._master_weights.writing(fragment):
                self.tensors.adopt(fragment, theta, just_sent=fragment in self._sent)
            self._sent.pop(fragment, None)
        self.tensors.set_anchor(fragment, arrived.held.theta)
        self.digests[fragment] = arrived.held.digest
        for flight in self.core.adopted(fragment, version):
            if not flight.listed:
                self.residuals.roll_back(fragment, flight.number)
        if self._routed is not None and not self.core.fragments[fragment].pending_steps:  # overwritten
            self._routed.discard(fragment)
        self.received = {key: value for key, value in self.received.items() if key[0] != fragment or key[1] > version}
        self.tensors.uploads.keep(self.received)

    @property
    def newest_versions(self) -> tuple[int, ...]:
        """The versions of `newest`. A learner that has finished adopts nothing more: all that it has received count."""
        return self.core.received_versions if self.has_finished else self.core.newest

    def newest(self) -> list[Tensor]:
        """The newest global fragments in this process: those adopted, or later ones that were received."""
        newest = list(self.tensors.anchors)
        for fragment, version in enumerate(self.newest_versions):
            if version > self.core.versions[fragment]:
                newest[fragment] = self.received[fragment, version].held.theta
        return newest

    def close(self) -> None:
        """Leave the run."""
        if self._routed is not None:
            self._routed.close()
        self.exchange.close()
