"""What every way of calling rounds keeps to: its halves continue exactly from what they saved, and hearing a thing
again is no news.

A new way is in `QUORUMS`, and with that in these tests.
"""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from tests.protocol.driving import ledger, publish, record, restarted, verdicts

from diloco.core.quorum import QUORUMS, Quorum
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.protocol.actions import Acknowledge
from diloco.protocol.contribution import KEPT, Contribution
from diloco.protocol.in_flight import Send
from diloco.protocol.learner import LearnerCore
from diloco.protocol.members import Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore

H = 4
FRAGMENTS = 2
every = pytest.mark.parametrize("kind", tuple(QUORUMS), ids=lambda kind: kind.__name__)


class Pair:
    """Two learners and their syncer; nothing is lost, and a round is merged and stored at once when it is closed."""

    def __init__(self, kind: type[Quorum]) -> None:
        self.rules = Rules(kind(), Schedule(H, FRAGMENTS, 1), "tokens", wait=False)
        self.core = SyncerCore(self.rules, [0] * FRAGMENTS)
        for name in "ab":
            self.core.joined(0.0, name, ready=True)
        record(self.core)
        self.learners = {name: LearnerCore(self.rules, [0] * FRAGMENTS) for name in "ab"}
        self.sent: list[Contribution] = []
        self.now = 0.0

    def step(self) -> None:
        """Each takes one step, and hears all there is to hear."""
        self.now += 1.0
        for name, learner in self.learners.items():
            for fragment, version in learner.adoptions():
                learner.adopted(fragment, version)
            pace = self.core.standing(name).sync_every
            for send in learner.stepped(10, sync_every=pace):
                self.contribute(name, send)
            report = Report(learner.step, learner.tokens, 1.0, bool(learner.waiting()), steps=learner.steps)
            self.core.heartbeat(self.now, name, 1, report)
        for name, learner in self.learners.items():
            for fragment, version in self.core.standing(name).calls:
                if (send := learner.called(fragment, version)) is not None:
                    self.contribute(name, send)
        self.core.tick(self.now)
        self.close()

    def contribute(self, name: str, send: Send) -> None:
        c = Contribution(
            name, 1, send.fragment, send.number, send.round, send.base, send.tokens, send.steps,
            self.learners[name].tokens,
            send.discarded, step=self.learners[name].step,
        )  # fmt: skip
        self.sent.append(c)
        self.core.contributed(self.now, c)

    def close(self) -> None:
        for fragment, state in enumerate(self.core.fragments):
            while state.phase == "merging":
                publish(self.core, self.now, fragment)
        record(self.core, self.now)
        for name in self.learners:
            self.hear(name)

    def hear(self, name: str) -> None:
        learner = self.learners[name]
        for verdict in verdicts(self.core, name):
            if verdict.reason is not None:
                learner.rejected(verdict.fragment, verdict.number, verdict.reason)
        for fragment, state in enumerate(self.core.fragments):
            merged = [it.number for it in self.core.verdicts(name, fragment, state.version) if it.reason is None]
            learner.received(fragment, state.version, max(merged, default=0))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


@every
def test_learners_and_syncer_make_versions_and_agree_on_every_token(kind: type[Quorum]) -> None:
    pair = Pair(kind)
    pair.run(6 * H)
    assert all(state.version >= 3 for state in pair.core.fragments)
    for name, learner in pair.learners.items():
        for fragment, work in enumerate(learner.fragments):
            theirs = ledger(pair.core, name, fragment)
            assert (work.ledger.trained, work.ledger.merged) == (theirs.trained, theirs.merged)
            assert work.ledger.merged > 0


@every
def test_a_learner_continues_exactly_from_what_it_saved(kind: type[Quorum]) -> None:
    pair = Pair(kind)
    for _ in range(4 * H):
        pair.step()
        for name, learner in pair.learners.items():
            saved = json.loads(json.dumps(learner.state_dict()))
            copy = LearnerCore(pair.rules, [0] * FRAGMENTS)
            copy.load_state_dict(saved)
            assert copy.state_dict() == learner.state_dict() == saved
            assert (copy.versions, copy.newest, copy.adoptions(), copy.waiting()) == (
                learner.versions, learner.newest, learner.adoptions(), learner.waiting()
            )  # fmt: skip
            pair.learners[name] = copy  # which goes on in its place
    untouched = Pair(kind)
    untouched.run(4 * H)
    assert pair.sent == untouched.sent
    assert [each.state_dict() for each in pair.learners.values()] == [
        each.state_dict() for each in untouched.learners.values()
    ]


@every
def test_what_a_learner_saved_shares_nothing_with_it(kind: type[Quorum]) -> None:
    pair = Pair(kind)
    pair.run(H)
    saved = {name: learner.state_dict() for name, learner in pair.learners.items()}
    before = json.dumps(saved)
    for state in saved.values():
        copy = LearnerCore(pair.rules, [0] * FRAGMENTS)
        copy.load_state_dict(state)
        for _ in range(H):
            copy.stepped(7)
    pair.run(2 * H)
    assert json.dumps(saved) == before


@every
def test_a_syncer_continues_exactly_from_what_it_saved(kind: type[Quorum]) -> None:
    """Restarted after every step; what was open is sent again."""
    pair, untouched = Pair(kind), Pair(kind)
    for _ in range(5 * H):
        pair.step()
        untouched.step()
        saved = pair.core.saved()
        pair.core = restarted(pair.core, saved, pair.now)
        assert pair.core.saved().values == json.loads(json.dumps(saved.values))
        for c in pair.sent:
            assert isinstance(pair.core.contributed(pair.now, c)[0], Acknowledge)
    assert [state.version for state in pair.core.fragments] == [state.version for state in untouched.core.fragments]
    for name in "ab":
        assert verdicts(pair.core, name) == verdicts(untouched.core, name)
        for fragment in range(FRAGMENTS):
            assert ledger(pair.core, name, fragment) == ledger(untouched.core, name, fragment)


@every
def test_what_a_syncer_saved_shares_nothing_with_it(kind: type[Quorum]) -> None:
    pair = Pair(kind)
    pair.run(2 * H + 1)
    saved = pair.core.saved().values
    before = json.dumps(saved)
    restarted(pair.core, pair.core.saved(), pair.now)
    pair.run(2 * H)
    assert json.dumps(saved) == before


@every
def test_what_is_said_again_changes_nothing(kind: type[Quorum]) -> None:
    """Contributions that are open or settled, standings, versions and calls."""
    pair = Pair(kind)
    for _ in range(4 * H):
        pair.step()
        before = json.dumps(pair.core.saved().values)
        for c in reversed(pair.sent):
            assert pair.core.contributed(pair.now, c)[0] == Acknowledge(c, duplicate=True)
        assert json.dumps(pair.core.saved().values) == before
        for name, learner in pair.learners.items():
            for fragment, version in pair.core.standing(name).calls:
                assert learner.called(fragment, version) is None or not learner.fragments[fragment].pending_steps
            state = json.dumps(learner.state_dict())
            pair.hear(name)
            for fragment, version in pair.core.standing(name).calls:
                assert learner.called(fragment, version) is None
            assert json.dumps(learner.state_dict()) == state


@every
@pytest.mark.parametrize("reason", [*KEPT, "outlier", "not finite"])
def test_a_rejection_heard_twice_is_heard_once(kind: type[Quorum], reason: str) -> None:
    pair = Pair(kind)
    learner = pair.learners["a"]
    while not any(c.learner == "a" for c in pair.sent):
        sends = learner.stepped(10)
        pair.sent += [
            Contribution(
                "a", 1, s.fragment, s.number, s.round, s.base, s.tokens, s.steps, learner.tokens, step=learner.step
            )
            for s in [*sends, *filter(None, [learner.called(0, 0)] if learner.step == H else [])]
        ]
    c = pair.sent[0]
    assert learner.rejected(c.fragment, c.number, reason) is not None
    state = json.dumps(learner.state_dict())
    assert learner.rejected(c.fragment, c.number, reason) is None
    assert json.dumps(learner.state_dict()) == state
    work = learner.fragments[c.fragment]
    assert work.pending_steps == (learner.step if reason in KEPT else learner.step - c.steps)
    assert work.ledger.pending == work.ledger.trained - (0 if reason in KEPT else c.tokens)


@every
def test_a_round_names_its_contributors_and_members_only_while_it_is_open(kind: type[Quorum]) -> None:
    pair = Pair(kind)
    for fragment in range(FRAGMENTS):
        assert pair.core.rounds.roster(fragment) == ((), ())
        assert pair.core.decision(0.0, fragment) is None
    closed = 0
    for name, learner in pair.learners.items():
        for _ in range(H):
            for send in learner.stepped(10):
                pair.contribute(name, send)
                if pair.core.fragments[send.fragment].phase == "merging":
                    closed += 1
                    assert pair.core.rounds.roster(send.fragment) == ((), ())
                    assert pair.core.decision(0.0, send.fragment) is None
    for fragment in pair.core.rounds.open_fragments():
        decision = pair.core.decision(0.0, fragment)
        assert decision is not None
        assert decision.merge is None
        assert decision.reason


@every
def test_its_value_can_be_written_and_read(kind: type[Quorum]) -> None:
    quorum = kind(at_least=3)
    assert QUORUMS.read(json.loads(json.dumps(quorum.to_dict()))) == quorum
    assert {field.name for field in fields(kind)} == quorum.to_dict().keys() - {"type"}
    with pytest.raises(ConfigError, match="did you mean 'at_least'"):
        QUORUMS.read({"type": kind.__name__, "atleast": 3})
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\(at_least=…\)"):
            kind(at_least=wrong)  # type: ignore[arg-type]
