"""A learner in a storm: `LearnerCore` and `SessionCore` with scripted inner steps on a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tests.chaos.versions import require
from tests.storms.drivers import StormClient
from tests.storms.groups import GroupReader
from tests.storms.tensors import StormTensors
from tests.storms.units import Reader
from tests.storms.wire import StormWire, gone

from diloco.core.fragments import Experts
from diloco.errors import AlreadyInitialisedError, StaleIncarnationError, StoreError
from diloco.exchange.base import Arrived
from diloco.exchange.virtual.client import News
from diloco.protocol.contribution import CallForWork, Contribution, Hold, Rejection, Settled
from diloco.protocol.in_flight import Send
from diloco.protocol.learner import LearnerCore
from diloco.protocol.leases import Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Report
from diloco.protocol.session import requests
from diloco.protocol.session.requests import TellStart
from diloco.protocol.session.session_core import SessionCore
from diloco.run.ports import InitialModel

if TYPE_CHECKING:
    from tests.storms.world import Storm

    from diloco.core.global_fragment import GlobalFragment

CHECKPOINT_STEPS = 4


class Process:
    """One process of a learner.

    Attributes:
        number: its own.
        is_alive: it was neither killed nor has it given up or left.
        core: the learner's state machine, once it has started.
        tokens: trained, by all its incarnations.
        held: the fragments that it holds.
    """

    def __init__(
        self, learner: LearnerProcess, storm: Storm, number: int, checkpoint: dict[str, Any] | None,
        dealt: frozenset[int] | None,
    ) -> None:  # fmt: skip
        plan = storm.plan
        self.name, self.index = learner.name, learner.index
        self.number, self.tokens = number, 0
        self.is_alive, self.core = True, None  # type: tuple[bool, LearnerCore | None]
        self._learner, self._storm, self._checkpoint = learner, storm, checkpoint
        self._rules = plan.rules_of(learner.index)
        self._is_waiting = self._is_leaving = self._is_starved = self._is_held = self._stays = False
        self._settled_with: tuple[int, ...] | None = None  # the versions when it was told that the run has ended
        self._must_end_with: tuple[int, ...] | None = None  # the first of them when all had taken their steps, and
        self._told_by: object = None  # the driver that said so: one that is started again may merge late work
        self._frozen_until_s = 0.0
        self._incarnation = 0
        of_process = number % 1000 if checkpoint is None else checkpoint["trains of"]
        self._trains_of, self._trains = of_process, plan.trained_by(learner.index, of_process)
        held = plan.held_by(learner.index, of_process) if dealt is None else plan.trunk | dealt
        self.held = storm.ledger.held_by[number] = frozenset(range(len(plan.sizes))) if held is None else held
        self._dealt = dealt
        self._counts_routed = plan.num_experts > 0 and storm.draws.unit(f"{self.name} counts routed") < 0.8
        self._seen: Lineage | None = None
        self.wire = StormWire(storm, self, plan.latency_s[learner.index])
        claim = Claim(self.name, process=number, seen=None if checkpoint is None else checkpoint["seen"])
        initialises = learner.index == 0 and not storm.has_model
        core = SessionCore(
            "storm", claim, len(plan.sizes), at_least=plan.method.quorum.at_least,
            reports_every_step=plan.method.quorum.reports_every_step, initialises=initialises,
            num_addresses=storm.num_addresses, held=held,
        )  # fmt: skip
        from tests.storms.world import StormClock

        self.client = StormClient(
            core, self.wire, lambda ring: StormClock(storm, lambda: self._awake(ring)), plan.layout, storm.replicas,
            initial=self._initial, ready=False, overlap=plan.overlaps[learner.index], held=held,
            is_dealt=dealt is not None, on_news=self._news,
        )  # fmt: skip
        self.client.accounts = storm.accounts
        self._reader: Reader | None = None
        if plan.num_units:
            self._reader = GroupReader(self, storm) if plan.rules is not None else Reader(plan.num_units)
        self.client.begin()

    @property
    def incarnation(self) -> int:
        """That its core has started as."""
        return self._incarnation

    def was_dealt_others(self, dealt: tuple[int, ...]) -> bool:
        """Whether it holds other groups than these that it was dealt."""
        return self._dealt is not None and dealt not in ((), tuple(sorted(self._dealt)))

    @property
    def is_leaving(self) -> bool:
        """It has taken all its steps, and was not killed since."""
        return self._is_leaving

    @property
    def speaks(self) -> bool:
        """The syncer is to hear what it has trained."""
        return self._is_leaving or (self.is_alive and self.client.core.phase == "running")

    def check_end(self, versions: tuple[int, ...]) -> None:
        """A learner that stayed to the end of the run was told so, with the run's last versions."""
        if self.is_alive and self._stays and self.client.core.phase == "running":
            own = tuple(version for fragment, version in enumerate(versions) if fragment in self.held)
            said = {self._settled_with, self._must_end_with or own}
            require(said == {own}, f"{self.name} ended with {said}, not {own}")

    def check_line(self) -> None:
        """It follows one line of epochs: never an earlier one, and not two syncers in one."""
        seen, before = self.client.core.seen, self._seen
        if seen is before or seen is None:
            return
        self._seen = seen
        if before is not None and before != seen:
            require(before.epoch < seen.epoch, f"{self.name} has followed {before}, and follows {seen}")

    def touched(self) -> None:
        """Something happens here."""
        self._storm.touched(self._learner)

    def _awake(self, event: Callable[[], None]) -> None:
        """Do something, if the process is alive; later, if it is frozen."""
        if not self.is_alive and not self._is_leaving:
            return
        if self._storm.now_s < self._frozen_until_s:
            self._storm.at(self._frozen_until_s, lambda: self._awake(event))
            return
        self.touched()
        event()

    def freeze(self, seconds: float) -> None:
        """Stand still for some seconds."""
        self._frozen_until_s = max(self._frozen_until_s, self._storm.now_s + seconds)
        self.wire.freeze(seconds)

    def lost(self, call: requests.Request) -> None:
        """A connection is gone."""
        self._awake(lambda: self.client.lost(call, gone()))

    def kill(self) -> None:
        """The process is gone."""
        self.is_alive = self._is_leaving = False
        self.wire.cut()

    def _initial(self) -> InitialModel[GlobalFragment]:
        thetas = [torch.full((size,), 1.0 + index) for index, size in enumerate(self._storm.plan.sizes)]
        return self._storm.jobs.initial(
            self._storm.plan.layout, thetas, b"", learner=self.name, source="storm", run_id="0" * 32
        )

    # --- news ---------------------------------------------------------------------------------------------------------

    def _news(self, news: News) -> None:
        if not self.is_alive:
            return
        match news:
            case TellStart() as start:
                self._start(start)
                return
            case requests.Fail(error=error):
                self._failed(error)
                return
            case Arrived(held=held, merged=merged):
                assert self.core is not None
                fragment, version = held.fragment, held.version
                self._storm.ledger.held(self.name, held)
                for flight in self.core.received(fragment, version, merged):
                    self._storm.ledger.listed(self.name, self._incarnation, fragment, flight.number, version)
                    self._tensors.merged(fragment, flight.number)
                self._tensors.received[fragment, version] = held.theta
            case CallForWork(fragment=fragment, version=version):
                assert self.core is not None
                if not self._stays and (send := self.core.called(fragment, version)) is not None:
                    self._send(send)
                    if self._leaves_for_others():  # with work that it has sent only now
                        self._build()
                        return
            case Grant():
                self._granted(news)
            case Hold(is_paused=is_paused):
                self._is_held = is_paused
            case Settled(is_settled=is_settled):
                held = tuple(each.version for each in self.client.held if each is not None)
                self._settled_with = held if is_settled else None
                is_end = is_settled and all(learner.has_finished for learner in self._storm.learners)
                if is_end and self._told_by is not self._storm.driver:
                    self._told_by, self._must_end_with = self._storm.driver, held
            case Rejection(fragment=fragment, number=number, reason=reason):
                assert self.core is not None
                self._storm.ledger.rejected(self.name, self._incarnation, fragment, number, reason)
                if self.core.rejected(fragment, number, reason) is not None:
                    self._tensors.not_merged(fragment, number)
        if self._is_waiting:
            self._storm.after(0.0, lambda: self._awake(self._settle_again))

    def _failed(self, error: Exception) -> None:
        self.is_alive = False
        if isinstance(error, AlreadyInitialisedError | StoreError) and self._learner.index == 0:
            self._storm.after(0.5, self._learner.start)  # as an operator would
        elif not isinstance(error, StaleIncarnationError):
            raise error
        self.wire.cut()

    def _start(self, start: TellStart) -> None:
        self._incarnation = start.claim.incarnation
        self._storm.began(self)
        self._storm.ledger.held_as[self.name, self._incarnation] = self.held
        for each in self.client.held:
            if each is not None:
                self._storm.ledger.held(self.name, each)
        self._tensors = StormTensors(self._storm.plan, self._trains, self.client.held)
        is_first = self.core is None
        if self.core is None:
            self.core = LearnerCore(self._rules, start.claim.versions, step=start.step)
        else:
            self.core.rejoined(start.claim.versions, start.step, awaited=start.awaited)
            if self._reader is not None:
                self._reader.queue.start_over()
        if is_first and self._checkpoint is not None:
            self._resume(start, self._checkpoint)
        self._is_waiting = self._is_starved = self._is_held = False
        self._num_starts = getattr(self, "_num_starts", 0) + 1
        self._go_on()

    def _resume(self, start: TellStart, checkpoint: dict[str, Any]) -> None:
        """As `learner.state_dict.resume` does over a syncer."""
        assert self.core is not None
        newest = [work["version"] for work in checkpoint["core"]["fragments"]]
        for fragment, version in checkpoint["tensors"]["received"]:
            newest[fragment] = max(newest[fragment], version)
        if tuple(newest) != start.claim.versions:
            step = start.step if start.awaited else max(start.step, checkpoint["core"]["step"])
            self.core.rejoined(start.claim.versions, step, awaited=start.awaited)
            return
        self.core.load_state_dict(deepcopy(checkpoint["core"]))
        self.core.forget_in_flight(keep_work=False)
        self.core.reincarnated()
        self._tensors.load(checkpoint["tensors"])
        for fragment, version in self._tensors.received:
            self.core.received(fragment, version, 0)

    # --- training -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the next inner step, or leave."""
        assert self.core is not None
        if self._stays or self.core.step >= self._storm.plan.steps:
            self._report(finished=True)
            self._learner.finished(self)
            self._stays = self._stays or self._storm.draws.of(f"{self.name} stays", (False, True))
            if not self._stays:
                self._leave()
            return
        if self._reader is not None:
            self._lease()
            if not self._reader.is_ready():
                self._is_starved = True
                self._report(waiting=True)
                return
            self._lease()
        draws, index, number = self._storm.draws, self._learner.index, self._num_starts
        step_s = self._storm.plan.step_s[index] * draws.between(f"{self.name} step", 0.8, 1.3)
        incarnation = self._incarnation
        self._storm.after(
            step_s,
            lambda: self._awake(
                lambda: self._stepped() if (incarnation, number) == (self._incarnation, self._num_starts) else None
            ),
        )

    def _lease(self) -> None:
        """Ask for units of data, where few are left."""
        assert self.core is not None
        assert self._reader is not None
        ask = self._reader.queue.ask(self.core.unsent_units)
        if ask is not None:
            self.client.ask(self._incarnation, ask)

    def _granted(self, grant: Grant) -> None:
        assert self.core is not None
        assert self._reader is not None
        self._reader.queue.granted(grant)
        if grant.number == 1:
            for send in self.core.keep_units(grant.claimed):
                self._send(send)
        if isinstance(self._reader, GroupReader):
            self._reader.granted(grant)
        self.has_groups()

    def has_groups(self) -> None:
        """What it reads may be there now."""
        if self._is_starved:
            self._is_starved = False
            self._report()
            self._go_on()

    def _stepped(self) -> None:
        core = self.core
        if core is None or not self.is_alive:
            return
        draws = self._storm.draws
        self._tensors.step(draws.between(f"{self.name} change", -0.1, 0.1))
        standing = self.client.core.standing
        sync_every = None if standing is None else standing.sync_every
        units = () if self._reader is None else self._reader.trained()
        tokens = draws.whole(f"{self.name} tokens", 1, 100)
        self.tokens += tokens
        self._storm.ledger.trained.update({(self.name, fragment): tokens for fragment in self.held})
        for send in core.stepped(tokens, units=units, sync_every=sync_every):
            self._send(send)
        self._report()
        self._settle()
        if core.step % CHECKPOINT_STEPS == 0 and self.is_alive:
            self._save()

    def _save(self) -> None:
        """A checkpoint; of scheduled rounds, once all answers in flight are here."""
        assert self.core is not None
        if all(answer in self._tensors.received for answer in self.core.answers_on_their_way()):
            state = {"core": deepcopy(self.core.state_dict()), "tensors": self._tensors.saved()}
            more = {"seen": self.client.core.seen, "trains of": self._trains_of, "dealt": self._dealt}
            self._learner.checkpoints.append({**state, **more})

    def _send(self, send: Send) -> None:
        core, f = self.core, send.fragment
        assert core is not None
        c = Contribution(
            self.name, self._incarnation, f, send.number, send.round, send.base, send.tokens, send.steps, core.tokens,
            send.discarded, step=core.step, tensors=self._tensors.trains[f], units=send.units,
            overwritten=send.overwritten, routed=self._routed_in(send),
        )  # fmt: skip
        self.client.offer(c, self._tensors.encode(send))

    def _routed_in(self, send: Send) -> tuple[int, ...] | None:
        """Tokens routed to the experts of a fragment's tensors; None: they are not counted, or it has no experts."""
        tensors = self._storm.plan.layout.fragments[send.fragment].tensors
        experts = [Experts.expert_of(each.spec) for each in tensors]
        if not self._counts_routed or None in experts:
            return None
        draws = self._storm.draws
        tokens = {expert: draws.whole(f"{self.name} routed", 0, send.tokens) for expert in dict.fromkeys(experts)}
        return tuple(tokens[expert] for expert in experts)

    def _report(
        self, *, waiting: bool = False, finished: bool = False, blocked_with: tuple[int, ...] = ()
    ) -> None:  # fmt: skip
        core = self.core
        assert core is not None
        step_s = self._storm.plan.step_s[self._learner.index]
        report = Report(
            core.step, core.tokens, step_s, waiting, finished, core.steps, blocked_with, core.earlier_tokens
        )
        self.client.report(self._incarnation, report)

    def _settle_again(self) -> None:
        if self._is_waiting and self.is_alive:
            self._settle()

    def _settle(self) -> None:
        """Wait for the answers that are due, adopt, and go on."""
        core = self.core
        assert core is not None
        if core.waiting() or self._is_held:
            self._is_waiting = True
            versions = tuple(max(version, 0) for version in core.received_versions)  # as on the wire
            self._report(waiting=True, blocked_with=versions if core.waiting() else ())
            return
        if self._is_waiting:
            self._is_waiting = False
            self._report()
        for fragment, version in core.adoptions():
            self._tensors.adopt(fragment, version, keeps_own=core.keeps_own(fragment, version))
            for flight in core.adopted(fragment, version):
                if not flight.listed:
                    self._tensors.not_merged(fragment, flight.number)
        if self._leaves_for_others():
            self._build()
        else:
            self._go_on()

    def _leaves_for_others(self) -> bool:
        """As `Learner.dealt`, and it holds others."""
        assert self.core is not None
        standing = self.client.core.standing
        has_sent = (self.core.fragments[fragment].pending_steps == 0 for fragment in self.held)
        is_sent = (all if self.core.sends_together else any)(has_sent)
        is_over = self._stays or self.core.step >= self._storm.plan.steps
        return is_sent and not is_over and standing is not None and self.was_dealt_others(standing.dealt)

    def _build(self) -> None:
        """Leave, and join again with the experts that it was dealt."""
        self._leave()
        self._storm.after(self._storm.draws.between(f"{self.name} builds", 0.05, 4.0), self._learner.start_over)

    def _leave(self) -> None:
        self.is_alive, self._is_leaving = False, True
        self.client.leave()


@dataclass(eq=False)
class LearnerProcess:
    """A learner over all its processes.

    Attributes:
        processes: those that may still say something; the newest comes last.
        checkpoints: that its processes have saved.
        has_finished: one of them has taken all its steps.
    """

    storm: Storm
    index: int
    processes: list[Process] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    has_finished: bool = False
    _num_processes: int = 0

    @property
    def name(self) -> str:
        return f"learner-{self.index}"

    @property
    def core(self) -> LearnerCore | None:
        process = self.process
        return process.core if process is not None and process.is_alive else None

    @property
    def process(self) -> Process | None:
        """The newest that is alive. Of two that join at once either may be the one that gives up."""
        for each in reversed(self.processes):
            if each.is_alive:
                return each
        return self.processes[-1] if self.processes else None

    @property
    def waits_for_others(self) -> bool:
        """It has not started, and waits until enough learners are there."""
        return any(each.is_alive and each.client.core.phase == "starting" for each in self.processes)

    def told(self) -> str:
        """For the message of a failure."""
        core, process = self.core, self.process
        phase = process.client.core.phase if process is not None else "gone"
        return f"{self.name}: {phase}, step {core.step if core else None}, waits for {core.waiting() if core else None}"

    def start(self, checkpoint: dict[str, Any] | None = None) -> None:
        """A new process. Without a checkpoint it knows of no epoch yet, and would follow any; it asks for a set that is
        dealt."""
        impostor = self.storm.impostor
        if impostor is not None and (checkpoint is None or checkpoint["seen"].epoch < impostor.epoch):
            self.storm.after(1.0, lambda: self.start(checkpoint))
            return
        dealt = None if checkpoint is None else checkpoint["dealt"]
        if dealt is None and (size := self.storm.plan.num_dealt(self.index)):
            if self.storm.driver is None or not self.storm.may_publish:
                self.storm.after(1.0, self.start_over)
                return
            self.storm.touched()
            dealt = frozenset(self.storm.driver.deal(self.name, size))
        self._num_processes += 1
        process = Process(self, self.storm, 1000 * self.index + self._num_processes, checkpoint, dealt)
        self.processes = [*(each for each in self.processes if each.is_alive or each._is_leaving), process]

    def start_over(self) -> None:
        """After it has left for another set, or was not told its set yet."""
        if not self.has_finished and not any(each.is_alive for each in self.processes):
            self.start()

    def finished(self, process: Process) -> None:
        """A process has taken all its steps."""
        self.storm.num_finished += not self.has_finished
        self.has_finished = True

    def wire_do(self, do: Callable[[StormWire], None]) -> None:
        for process in self.processes:
            do(process.wire)

    def freeze(self, seconds: float) -> None:
        for process in self.processes:
            process.freeze(seconds)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def come_back(self, choice: int) -> None:
        """After a kill."""
        if self.has_finished or any(each.is_alive for each in self.processes):
            return
        kept = {0: [], 1: self.checkpoints[:1], 2: self.checkpoints[-1:]}[choice]
        self.start(kept[0] if kept else None)

    def replace(self) -> None:
        """Another process joins by this name."""
        if self.process is not None and self.process.is_alive and not self.has_finished:
            self.start()
