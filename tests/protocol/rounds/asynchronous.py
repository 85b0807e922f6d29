"""A syncer of rounds that learners do not block on; its merges and stores are done when the test says so."""

from __future__ import annotations

from dataclasses import replace

from tests.protocol.driving import publish, record

from diloco.core.fragments import Whole
from diloco.core.method import Method
from diloco.core.presets import DecoupledDiLoCo
from diloco.core.quorum import Quorum
from diloco.protocol.actions import Acknowledge, Action, MergeRound, PersistRecord, WakeAt
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore


def method(quorum: Quorum, **changes: object) -> Method:
    """H = 4, one fragment, weighted by tokens."""
    decoupled = DecoupledDiLoCo(sync_every=4, fragments=Whole(), weight="tokens")
    return replace(decoupled, quorum=quorum, **changes)  # type: ignore[arg-type]


class Run:
    """One token a step. A record is written whenever one is asked for; these actions and `WakeAt` are left out of the
    answers."""

    def __init__(self, how: Method, learners: str = "abc") -> None:
        self.core = SyncerCore(Rules.of(how, 1), [0])
        self.now = 0.0
        self.steps = dict.fromkeys(learners, 0)
        self.bases = dict.fromkeys(learners, 0)
        self.sent = dict.fromkeys(learners, 0)
        self.numbers = dict.fromkeys(learners, 0)
        for learner in learners:
            self.core.joined(0.0, learner, ready=True)
        record(self.core)

    @property
    def phase(self) -> str:
        return self.core.fragments[0].phase

    def step(self, learners: str, times: int = 1, step_s: float = 1.0) -> list[Action]:
        """These learners take steps, one after the other; what the last reports caused."""
        actions: list[Action] = []
        for _ in range(times):
            for learner in learners:
                self.steps[learner] += 1
                step = self.steps[learner]
                actions = self.core.heartbeat(self.now, learner, 1, Report(step, step, step_s, steps=step))
        return self._settled(actions)

    def contribution(self, learner: str, base: int | None = None) -> Contribution:
        """All work since the learner's last contribution."""
        step = self.steps[learner]
        base = self.bases[learner] if base is None else base
        work = step - self.sent[learner]
        self.sent[learner] = step
        self.numbers[learner] += 1
        return Contribution(learner, 1, 0, self.numbers[learner], base, base, work, work, step, step=step)

    def send(self, learner: str, base: int | None = None) -> list[Action]:
        return self._settled(self.core.contributed(self.now, self.contribution(learner, base)))

    def close(self, adopted_by: str = "") -> list[Action]:
        """The merge under way is done and published; these learners adopt it."""
        actions = publish(self.core, self.now)
        for learner in adopted_by:
            self.bases[learner] += 1
        return self._settled(actions)

    def calls(self, learner: str) -> tuple[tuple[int, int], ...]:
        """The open calls for a fragment at a version that the learner has not answered."""
        return self.core.standing(learner).calls

    def _settled(self, actions: list[Action]) -> list[Action]:
        if any(isinstance(action, PersistRecord) for action in actions):
            record(self.core, self.now)
        return [action for action in actions if not isinstance(action, WakeAt | PersistRecord)]


def is_accepted(action: Action) -> bool:
    return isinstance(action, Acknowledge) and not action.duplicate


def contributors(action: Action) -> list[str]:
    """Learners in a round that is merged, once for each contribution."""
    assert isinstance(action, MergeRound)
    return [c.learner for c in action.contributions]
