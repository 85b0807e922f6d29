"""Rounds that nobody blocks on: called by the syncer, or pushed by the learners. Whoever comes too late is in the next one.

Called rounds are paced by a run clock, the inner steps that an average live learner has taken: it grows by newly reported steps ÷ live
learners. A fragment falls due when the clock passes its steps of the schedule, so that a fast network does not shorten H, and is
called once the round before is published. Decoupled DiLoCo, arXiv 2604.21428.

A contribution names the version that it was measured from, and goes into the round that is open when it comes. One of a learner that
has another there already is added to it: late and fresh displacements, tokens and steps add up. Where the outer optimizer takes outer
gradients one at a time (Delayed Nesterov, arXiv 2401.09135), each push has a round of its own instead: one push, one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from diloco.core.members import Member
from diloco.core.quorum import Called, Decision, Pushed, decide_open
from diloco.core.rounds import Accept, Action, Call, FragmentState, Reject, Round
from diloco.core.update import LATE, OUTLIER, VERSION, Contribution
from diloco.core.weights import weights_of

if TYPE_CHECKING:
    from diloco.core.syncer import SyncerCore


ROUNDING = 1e-6
"""Steps ÷ learners, summed up, may stay below a whole number by rounding."""


def answer(core: SyncerCore, now: float, c: Contribution) -> Accept | Reject:
    """Take a contribution into the open round, or say why not."""
    state, quorum = core.fragments[c.fragment], core.method.quorum
    assert isinstance(quorum, Called | Pushed)
    if _is_known(core, state, c):
        return Accept(c, duplicate=True)
    if core.books.is_counted(c):  # and not merged
        return core.books.reject(c, OUTLIER)
    if not 0 <= c.base <= state.version or c.round != c.base:
        return core.books.reject(c, VERSION)
    number = _number(core, state)
    if quorum.late == "drop" and c.base < number:
        return core.books.reject(c, LATE)
    round_ = state.rounds.get(number)
    if round_ is None:
        round_ = state.rounds[number] = Round(number, now, c.step, set(core.members))
    newest = round_.contributions.get(c.learner)
    if newest is not None:
        round_.earlier.append(newest)
    round_.contributions[c.learner] = c
    round_.step = min(round_.step, c.step)
    if isinstance(quorum, Pushed) or round_.called:
        round_.fresh.add(c.learner)
        _note_quorum(core, round_, now)
    return Accept(c, duplicate=False)


def _number(core: SyncerCore, state: FragmentState) -> int:
    """The round that a contribution goes into: the open one, or the first that none has come for where each is an arrival of its own."""
    number = state.version if state.phase == "open" else state.version + 1
    if isinstance(core.method.quorum, Pushed) and core.method.outer.one_at_a_time:
        while number in state.rounds:
            number += 1
    return number


def _is_known(core: SyncerCore, state: FragmentState, c: Contribution) -> bool:
    """Sent again because the answer was lost: it is merged, or waits for it."""
    if c.round <= core.books.merged_round(c.learner, c.incarnation, c.fragment):
        return True
    return any(c in round_.everything for round_ in state.rounds.values())


def _note_quorum(core: SyncerCore, round_: Round, now: float) -> None:
    needed = min(core.method.quorum.at_least, max(1, sum(member.ready for member in core.members.values())))
    if round_.quorum_at is None and len(round_.fresh) >= needed:
        round_.quorum_at = now
        core.pace.measured(quorum_s=now - round_.opened_at)


def before_decisions(core: SyncerCore, now: float) -> list[Action]:
    """Call the fragments whose turn it is; members of an open round are all who train now."""
    ready = {learner for learner, member in core.members.items() if member.ready}
    calls: list[Action] = []
    for index, state in enumerate(core.fragments):
        if (
            isinstance(core.method.quorum, Called)
            and state.phase == "open"
            and ready
            and core.clock > state.turn - ROUNDING
        ):
            round_ = state.rounds.get(state.version)
            if round_ is None:
                round_ = state.rounds[state.version] = Round(state.version, now, core.step, ready)
            if not round_.called:
                round_.called, round_.opened_at = True, now
                round_.fresh = {each.learner for each in round_.contributions.values() if each.base == state.version}
                _note_quorum(core, round_, now)
                state.turn = next_turn(core, index)
                calls.append(Call(index, state.version, tuple(sorted(core.members))))
        for round_ in state.rounds.values():
            round_.members = set(ready)
    return calls


def next_turn(core: SyncerCore, fragment: int) -> int:
    """The run clock at which a fragment is called next; the turn that it has reached, if only nearly, has been called."""
    return core.schedule.next_send(fragment, core.clock + ROUNDING)


def decision(core: SyncerCore, now: float, fragment: int) -> Decision | None:
    """What `decide_open()` says of the fragment's round; None if none is open."""
    state, quorum = core.fragments[fragment], core.method.quorum
    round_ = state.rounds.get(state.version)
    if round_ is None or state.phase != "open":
        return None
    if isinstance(quorum, Called) and not round_.called:
        return Decision(None, None, f"late work of {len(round_.contributions)} waits for the fragment's next turn")
    grace_s = quorum.grace_s(core.method.overlap, core.pace) if isinstance(quorum, Called) else 0.0
    return decide_open(
        now, round_.contributions, round_.fresh, round_.members, quorum, quorum_at=round_.quorum_at, grace_s=grace_s
    )


def reported(core: SyncerCore, steps: int) -> None:
    """A learner has taken this many more steps."""
    ready = [member for member in core.members.values() if member.ready]
    if ready:
        core.clock += steps / len(ready)
    step_times = [member.step_s for member in ready if member.step_s]
    if step_times:
        core.pace.measured(step_s=median(step_times))


def scale(core: SyncerCore, round_: Round, weights: Sequence[float]) -> float:
    """The part of the live weight that is in the round.

    Who is not in it counts with the work that it had pending when last heard of. Where learners push, somebody who has just pushed has
    none, and still counts: with what its last push brought.
    """
    if core.method.partial == "full":
        return 1.0
    absent = [core.members[learner] for learner in sorted(round_.members - round_.contributions.keys())]
    fragment = next(iter(round_.contributions.values())).fragment
    work = [_work(core, member, fragment) for member in absent]
    missing = sum(
        weights_of(core.method.weight, [tokens for tokens, _ in work], [steps for _, steps in work], [0] * len(work))
    )
    contributed = sum(weights)
    return contributed / (contributed + missing)


def _work(core: SyncerCore, member: Member, fragment: int) -> tuple[int, int]:
    """Tokens and steps that a learner which is not in a round would bring."""
    tokens = core.books.ledgers[member.learner][fragment].pending
    steps = max(1, member.step - member.sent_step.get(fragment, 0))
    last_tokens, last_steps = member.sent_work.get(fragment, (0, 1))
    if isinstance(core.method.quorum, Pushed) and last_tokens > tokens:
        return last_tokens, max(1, last_steps)
    return tokens, steps
