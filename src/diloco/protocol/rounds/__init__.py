"""Ways of calling rounds: for each value of `core.quorum` a file with the syncer's half and the learner's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco.core.quorum import AllLive, Called, Pushed, Quorum
from diloco.protocol.in_flight import FragmentWork
from diloco.protocol.rounds.base import LearnerRounds, Rules, RunView, SyncerRounds
from diloco.protocol.rounds.called import CalledLearner, CalledSyncer
from diloco.protocol.rounds.pushed import PushedLearner, PushedSyncer
from diloco.protocol.rounds.scheduled import ScheduledLearner, ScheduledSyncer


class RoundHalves(NamedTuple):
    """The syncer's half, made from (quorum, run), and the learner's, from (quorum, rules, fragments, first step)."""

    syncer: Callable[[Any, RunView], SyncerRounds]
    learner: Callable[[Any, Rules, Sequence[FragmentWork], int], LearnerRounds]


HALVES: dict[type[Quorum], RoundHalves] = {
    AllLive: RoundHalves(ScheduledSyncer, ScheduledLearner),
    Called: RoundHalves(CalledSyncer, CalledLearner),
    Pushed: RoundHalves(PushedSyncer, PushedLearner),
}
