"""Rounds that the schedule calls: everybody who trains contributes to every round, and may block on its answer.

The first contribution opens a round, with everybody who trains at that moment as members; the set only shrinks (eviction, departure).
While one round of a fragment is merged or stored, contributions to the next are kept.

Learners block on the rounds they contributed to, so rounds of several fragments must not wait for each other in a circle. All
learners send the fragments in one order, that of the inner steps, but one that joins may be a little behind the others, or ahead:

    behind: it contributes after a step after which the others contributed to the round before. Its contribution is sent back, it
            keeps the work, and goes on to the step where the others are.
    ahead:  it had passed the step of a round before it counted as training. Such a round does not wait for it.

Should there be a circle nevertheless (a restart forgets who was where), everybody is blocked: then a round stops waiting for those
who are blocked in a round of a later step. All this needs a learner's contributions to arrive in order.

Where a round needs `at_least` learners and has lost too many, it waits for a joiner, which therefore starts before that round's step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diloco.core.members import Member
from diloco.core.quorum import AllLive, Decision, decide
from diloco.core.rounds import Accept, Action, Reject, Round
from diloco.core.contribution import DROPPED, MISSED, OUT_OF_STEP, TWICE, VERSION, Contribution

if TYPE_CHECKING:
    from diloco.core.syncer import SyncerCore


def answer(core: SyncerCore, now: float, c: Contribution) -> Accept | Reject:
    """Take a contribution into its round, or say why not."""
    state = core.fragments[c.fragment]
    version, round_ = state.version, state.rounds.get(c.round)
    earlier = round_.contributions.get(c.learner) if round_ else None
    if earlier == c:
        return Accept(c, duplicate=True)
    if not 0 <= c.base <= version or not _is_near(core, c):
        return core.books.reject(c, VERSION)
    if c.round < version or (c.round == version and state.phase != "open"):
        return _too_late(core, c, round_)
    if c.round == version:
        after_step: float = state.step
    else:  # to a round after the one that is open, by a learner that had to contribute to the one before first
        after_step = state.rounds[c.round - 1].step if c.round - 1 in state.rounds else math.inf
    if c.step <= after_step:
        return core.books.reject(c, OUT_OF_STEP)
    if earlier is not None:
        return core.books.reject(c, TWICE)
    if core.books.is_counted(c):  # its tokens are in an earlier one: they would be merged twice
        return core.books.reject(c, VERSION)
    if round_ is None:
        round_ = state.rounds[c.round] = Round(c.round, now, c.step, set(core.members))
    round_.contributions[c.learner] = c
    round_.step = min(round_.step, c.step)
    return Accept(c, duplicate=False)


def _is_near(core: SyncerCore, c: Contribution) -> bool:
    """Whether its round is one that a learner with that base can be in."""
    return 0 <= c.round - c.base <= core.schedule.intervals_in_flight


def _too_late(core: SyncerCore, c: Contribution, round_: Round | None) -> Accept | Reject:
    """Its round is closed. While that is not stored a crash would open it again, and wait for who was told and does not send again."""
    if core.books.is_counted(c):  # sent again because the answer was lost: merged since, perhaps before a restart
        return Accept(c, duplicate=True)
    if _all_live(core).drops(c.learner, c.fragment, c.round):
        return core.books.reject(c, DROPPED)
    if round_ is None:
        return core.books.reject(c, MISSED)
    if c in round_.missed:
        return Accept(c, duplicate=True)
    round_.missed.append(c)
    return Accept(c, duplicate=False)


def _all_live(core: SyncerCore) -> AllLive:
    quorum = core.method.quorum
    assert isinstance(quorum, AllLive)
    return quorum


def start_step(core: SyncerCore) -> int:
    """The inner step that a joiner starts from: the run's, or the send before the earliest round that would not have its `at_least`.

    Its first send is then that round's: after a later one it would stay a round ahead, and in the end leave the others in a round to
    which no learner comes any more. Learners whose connection has broken are not counted on, nor are those that have not
    trained since they joined (after a restart rounds wait for them all the same).
    """
    quorum = core.method.quorum
    if quorum.at_least == 1:
        return core.step
    connected = {
        learner for learner, member in core.members.items() if member.connected and member.ready and member.tokens > 0
    }
    starts = [core.step]
    for fragment, state in enumerate(core.fragments):
        closing = None if state.phase == "open" else state.rounds[state.version]
        round_ = state.rounds.get(state.version if closing is None else state.version + 1)
        if round_ is None:  # a contribution may be on its way
            step, present = core.schedule.next_send(fragment, (closing or state).step), connected
        else:
            step, present = round_.step, round_.contributions.keys() | (round_.members & connected)
        if step <= core.step and len(present) < quorum.at_least:
            starts.append(core.schedule.last_send(before=step))
    return min(starts)


def leave_out(core: SyncerCore, round_: Round) -> list[Action]:
    """Send back what `AllLive(drop=…)` leaves out of a round that is being closed, but never so much that fewer than K remain.

    Not when it comes: whoever is left might leave before it contributes, and nobody would close the round. What somebody brought
    who is gone since cannot be sent back.
    """
    quorum, rejects = _all_live(core), list[Action]()
    for learner, c in sorted(round_.contributions.items()):
        member = core.members.get(learner)
        is_there = member is not None and member.incarnation == c.incarnation
        if is_there and len(round_.contributions) > quorum.at_least and quorum.drops(learner, c.fragment, c.round):
            del round_.contributions[learner]
            rejects.append(core.books.reject(c, DROPPED))
    return rejects


def before_decisions(core: SyncerCore, now: float) -> list[Action]:
    """Nobody is waited for who does not belong to a round any more."""
    for state in core.fragments:
        for round_ in state.rounds.values():
            later = [other.contributions.keys() for other in state.rounds.values() if other.number > round_.number]
            gone = set[str]().union(*later) - round_.contributions.keys()  # contributions come in order
            round_.members = {learner for learner in round_.members - gone if _belongs(core, learner, round_)}
    return []


def decision(core: SyncerCore, now: float, fragment: int) -> Decision | None:
    """What `decide()` says of the fragment's open round; None if none is open."""
    state = core.fragments[fragment]
    round_ = state.rounds.get(state.version)
    if round_ is None or state.phase != "open":
        return None
    deadlines = {learner: core.deadlines.ends_at(member) for learner, member in core.members.items()}
    return decide(now, round_.contributions, round_.members, deadlines, core.method.quorum)


def _belongs(core: SyncerCore, learner: str, round_: Round) -> bool:
    """Whether a member stays one. A lost connection does not matter: until its deadline a learner may come back with its work."""
    member = core.members.get(learner)
    if member is None or learner in round_.contributions:
        return member is not None
    return member.ready and member.ready_step < round_.step and not _is_in_circle(core, member, round_)


def _is_in_circle(core: SyncerCore, member: Member, round_: Round) -> bool:
    """Whether all learners are blocked, and this one in a round of a later step that those it waits for have not reached."""
    if not all(each.waiting for each in core.members.values() if each.ready):
        return False
    for state in core.fragments:
        later = state.rounds.get(state.version)
        if later is None or later.step <= round_.step or state.phase != "open":
            continue
        missing = [core.members[each] for each in later.members - later.contributions.keys() if each in core.members]
        if member.learner in later.contributions and all(each.step < later.step for each in missing):
            return True
    return False
