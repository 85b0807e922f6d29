"""The state of one run in its driver: the state machine and the published model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from diloco.errors import AlreadyInitialisedError, ConfigError, LayoutError, NotInitialisedError, UnknownRunError
from diloco.protocol.contribution import Budget
from diloco.protocol.dealing import Dealing
from diloco.protocol.lineage import Epoch, Lineage
from diloco.protocol.members import Deadlines
from diloco.protocol.rounds.base import Rules
from diloco.protocol.steering import Pool
from diloco.protocol.syncer import SyncerCore
from diloco.run.experts import ExpertStatus
from diloco.run.global_model import GlobalModel
from diloco.run.ports import H, InitialModel, P, RunMethod, SavedRun, T, first_epoch


def require_run(served: str, run: str) -> None:
    """Raises UnknownRunError for any other run than the one that is served."""
    if run != served:
        raise UnknownRunError(f"this syncer serves run {served!r}, not {run!r}; check the run's name and the address.")


class RunState(Generic[H, P]):
    """The state of one run, without a model until `begin` or `restore`.

    Arguments:
        run: its id.
        method: its method.
        deadlines: when a silent learner is evicted.
        pool: how many learners may train; None: as many as join.
        budget: when the run ends.

    Attributes:
        initial_tokens: tokens that the model was trained on before the run.
        cut: how the method cut the model, in words; "" without a model.
        dealing: sets of experts, which learners are promised before the run has a model.
        experts: of the mixture that the model may be.
        run_id: as in `protocol.lineage`.
        epochs: the starts on this run's state.
    """

    def __init__(
        self, run: str, method: RunMethod, deadlines: Deadlines | None = None, pool: Pool | None = None,
        budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.run = run
        self.method, self.budget = method, budget or Budget()
        self.initial_tokens = 0
        self.run_id = self.cut = ""
        self.dealing, self.experts = Dealing(*method.dealing), ExpertStatus(())
        self.epochs: tuple[Epoch, ...] = ()
        self._deadlines, self._pool = deadlines, pool
        self._core: SyncerCore | None = None
        self._model: GlobalModel[H, P] | None = None

    @property
    def is_initialised(self) -> bool:
        """Whether the run has a model."""
        return self._core is not None

    @property
    def core(self) -> SyncerCore:
        """The state machine.

        Raises:
            NotInitialisedError: there is no model yet.
        """
        return self._given(self._core)

    @property
    def model(self) -> GlobalModel[H, P]:
        """The published model. Raises as `core`."""
        return self._given(self._model)

    def _given(self, value: T | None) -> T:
        if value is None:
            raise NotInitialisedError(f"run {self.run!r} has no model yet; start one learner that initialises it.")
        return value

    @property
    def step(self) -> int:
        """The highest inner step known."""
        return 0 if self._core is None else self._core.step

    @property
    def run_tokens(self) -> int:
        """Tokens trained by the run, and before it."""
        return 0 if self._core is None else self._core.accounting.run_tokens + self.initial_tokens

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to merge, and the run has ended: its budget is spent, or an operator has ended it. A
        run without a budget ends once all present learners have finished."""
        core = self.core
        has_ended = self.budget.is_spent(self.run_tokens, self.step) or core.steering.ended is not None
        return core.is_settled and (has_ended or (self.budget == Budget() and bool(core.members)))

    def lineage(self, boot: int) -> Lineage:
        """The lineage that the process `boot` serves."""
        return Lineage(self.run_id, self.epochs[-1].number if self.epochs else 0, boot)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each fragment, published; empty before there is a model."""
        return () if self._model is None else self._model.versions

    # --- beginnings ---------------------------------------------------------------------------------------------------

    def begin(self, initial: InitialModel[H], epoch: int) -> None:
        """The run begins with this model. `epoch`: that its syncer has claimed."""
        core = self.first_core(initial)
        self._tell_digests(core, initial.fragments)
        self._hold(core, initial, [()] * len(initial.fragments))
        self.epochs = (first_epoch(initial, epoch),)

    def first_core(self, initial: InitialModel[Any]) -> SyncerCore:
        """The state machine of a run that begins with this model.

        Raises:
            AlreadyInitialisedError: the run has a model. LayoutError: its method cannot train this model.
        """
        if self.is_initialised:
            raise self.already_initialised()
        num_fragments = len(initial.layout.fragments)
        try:
            rules = Rules.of(self.method, num_fragments)
        except ConfigError as error:
            raise LayoutError(f"the run's method cannot train this model: {error}") from error
        return self._core_of(rules, [0] * num_fragments, initial.step)

    def _core_of(self, rules: Rules, versions: Sequence[int], step: int) -> SyncerCore:
        deadlines, pool = self._deadlines, self._pool
        return SyncerCore(rules, versions, deadlines=deadlines, step=step, pool=pool, dealing=self.dealing)

    def already_initialised(self) -> AlreadyInitialisedError:
        """The error of a second initialisation."""
        return AlreadyInitialisedError(
            f"run {self.run!r} has a model already and keeps it; join it without initialising it."
        )

    def restore(self, saved: SavedRun[H], now_s: float) -> None:
        """Continue from the durable state.

        Raises:
            UnknownRunError: another run is saved. AlreadyInitialisedError: it has another method.
        """
        if saved.run != self.run:
            raise UnknownRunError(f"the state is that of run {saved.run!r}, not {self.run!r}; use another directory.")
        if difference := self.method.difference(saved.method, "now", "in the saved run"):
            raise AlreadyInitialisedError(
                f"run {self.run!r} was started with another method ({difference}); start a new run to change it."
            )
        rules = Rules.of(self.method, len(saved.fragments))
        core = self._core_of(rules, [fragment.version for fragment in saved.fragments], saved.step)
        self._tell_digests(core, saved.fragments)
        if saved.record is not None:
            core.restore(now_s, saved.record)
        self._hold(core, saved, saved.contributors)
        self.epochs = saved.epochs

    @staticmethod
    def _tell_digests(core: SyncerCore, fragments: Sequence[Any]) -> None:
        for index, fragment in enumerate(fragments):
            core.groups.publishes(index, fragment.version, fragment.digest)

    def _hold(
        self, core: SyncerCore, model: InitialModel[H] | SavedRun[H], contributors: Sequence[tuple[str, ...]]
    ) -> None:  # fmt: skip
        self._core, self.initial_tokens, self.run_id = core, model.tokens, model.run_id
        self._model = GlobalModel(model.layout, model.static, model.fragments, contributors)
        self.cut = self.method.cut_in_words(model.layout)
        self.experts = ExpertStatus(self.method.experts_of(model.layout))
