"""One run's state: the state machine, the tensors, and how both are saved and restored."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from diloco.core.layout import Layout
from diloco.core.members import Deadlines, Member
from diloco.core.method import Method
from diloco.core.quorum import Pace
from diloco.core.syncer import SyncerCore
from diloco.errors import AlreadyInitialisedError, ConfigError, LayoutError, NotInitialisedError, UnknownRunError
from diloco.syncer.held import HeldModel, MergedRounds
from diloco.syncer.store import RosterRow, Saved, Store, understood


class RunState:
    """What everything in a syncer works on.

    `lock` guards it all and is never held across disk or tensor work. `durable` is held from the moment that something is read
    to be stored until it is stored, so that what is on disk never goes back in time; it is taken before `lock`, never after.

    Attributes:
        boot: names this process.
        initial_tokens: what the model was trained on before the run.
    """

    def __init__(self, run: str, method: Method, deadlines: Deadlines) -> None:
        self.run = run
        self.method = method
        self.deadlines = deadlines
        self.boot = secrets.randbits(63) + 1
        self.lock = threading.RLock()
        self.durable = threading.Lock()
        self.initial_tokens = 0
        self._core: SyncerCore | None = None
        self._model: HeldModel | None = None

    @property
    def is_initialised(self) -> bool:
        return self._core is not None

    @property
    def core(self) -> SyncerCore:
        """The state machine.

        Raises:
            NotInitialisedError: there is no model yet.
        """
        if self._core is None:
            raise NotInitialisedError(f"run {self.run!r} has no model yet; start one learner with --initialise.")
        return self._core

    @property
    def model(self) -> HeldModel:
        """The tensors. Raises as `core`."""
        if self._model is None:
            raise NotInitialisedError(f"run {self.run!r} has no model yet; start one learner with --initialise.")
        return self._model

    def beginning(self, layout: Layout, *, step: int) -> SyncerCore:
        """The state machine of a run that begins with a model of this layout.

        Raises:
            LayoutError: the run's method cannot train it.
        """
        try:
            versions = [0] * len(layout.fragments)
            return SyncerCore(self.method, versions, deadlines=self.deadlines, step=step, clock=float(step))
        except ConfigError as error:
            raise LayoutError(
                f"run {self.run!r} cannot begin with a model of {len(layout.fragments)} fragments, which its method cannot "
                f"schedule ({error.args[0]}); initialise it with a model cut as the method says."
            ) from error

    def begin(self, core: SyncerCore, model: HeldModel, *, tokens: int) -> None:
        """The run has a model."""
        self._core, self._model, self.initial_tokens = core, model, tokens

    # --- durable state ----------------------------------------------------------------------------------------------------

    def restore(self, saved: Saved, store: Store) -> None:
        """Continue where the run was last published.

        Raises:
            UnknownRunError: the directory holds another run. AlreadyInitialisedError: the run has another method.
            StoreError: what is stored does not make a run.
        """
        with understood(store.path):
            self._restore(saved, store)

    def _restore(self, saved: Saved, store: Store) -> None:
        if saved.run != self.run:
            raise UnknownRunError(
                f"{store.path} holds run {saved.run!r}, not {self.run!r}; use another state directory."
            )
        if difference := self.method.difference(Method.from_dict(saved.method)):
            raise AlreadyInitialisedError(
                f"run {self.run!r} was started with another method ({difference}); start a new run to change it."
            )
        state = saved.state
        self.initial_tokens = int(state["initial_tokens"])
        layout = Layout.from_dict(saved.layout)
        merged = {learner: [(i, r) for i, r in rounds] for learner, rounds in state.get("merged_rounds", {}).items()}
        contributors = {it.fragment: it.contributors for it in store.history()}
        indices = range(len(layout.fragments))
        fragments = [saved.fragments[f] for f in indices]
        self._model = HeldModel(
            self.method, layout, saved.static, fragments, [contributors.get(f, ()) for f in indices],
            [_of(merged, f) for f in indices],
        )  # fmt: skip
        now = time.monotonic()
        self._core = SyncerCore(
            self.method,
            [fragment.version for fragment in fragments],
            deadlines=self.deadlines,
            roster=[_member(row, now) for row in saved.roster if row.alive],
            incarnations={row.learner: row.incarnation for row in saved.roster},
            ledgers=saved.ledgers,
            step=int(state["step"]),
            round_steps=state["round_steps"],
            clock=float(state.get("clock", state["step"])),
            merged_rounds=merged,
        )
        self._core.pace = Pace(**state.get("pace", {}))

    def to_save(self) -> dict[str, Any]:
        """What is stored with a version: how things are once it is published."""
        core = self.core
        return {
            "step": core.step,
            "initial_tokens": self.initial_tokens,
            "round_steps": core.round_steps,
            "clock": core.clock,
            "pace": asdict(core.pace),
            "merged_rounds": core.books.durable_merged_rounds(),
        }

    def roster(self) -> list[RosterRow]:
        """Every learner that the run has seen."""
        core = self.core
        return [
            _row(learner, incarnation, core.members.get(learner)) for learner, incarnation in core.incarnations.items()
        ]

    def merged_rounds(self, fragment: int) -> MergedRounds:
        """Whose work is in the fragment's published version."""
        return _of(self.core.books.merged_rounds, fragment)


def _of(merged: dict[str, list[tuple[int, int]]], fragment: int) -> MergedRounds:
    return {learner: rounds[fragment] for learner, rounds in merged.items()}


def _member(row: RosterRow, now: float) -> Member:
    """A learner that was there before a restart: it has its deadline, as measured, to come back."""
    return Member(
        row.learner, row.incarnation, row.step, now, now, step_s=row.step_s, connected=False, ready=True, tokens=row.tokens,
        sent_step=dict(enumerate(row.sent_steps)),
    )  # fmt: skip


def _row(learner: str, incarnation: int, member: Member | None) -> RosterRow:
    if member is None:
        return RosterRow(learner, incarnation, 0, 0, alive=False)
    return RosterRow(
        learner,
        incarnation,
        member.step,
        member.tokens,
        alive=True,
        step_s=member.step_s,
        sent_steps=_sent_steps(member),
    )


def _sent_steps(member: Member) -> Sequence[int]:
    """By fragment, 0 where it has not contributed."""
    last = max(member.sent_step, default=-1)
    return tuple(member.sent_step.get(fragment, 0) for fragment in range(last + 1))
