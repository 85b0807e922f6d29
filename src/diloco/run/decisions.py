"""The decisions of a driver in words, for a journal and for those that compare it with a replay."""

from __future__ import annotations

from diloco.core.actions import Acknowledge, Action, Evict, MergeRound, Publish, Reject
from diloco.core.contribution import Contribution


def told(action: Action) -> str | None:
    """An action in a few words; None: it follows from others (a wake-up, a standing, a record), and only the digest of
    an entry has it."""
    match action:
        case MergeRound():
            return (
                f"closes round {action.round} of fragment {action.fragment} with "
                f"{', '.join(map(_named, action.contributions))}, weights {list(action.weights)}, scale {action.scale}"
            )
        case Reject():
            return f"rejects {_said(action.contribution)}: {action.reason}"
        case Acknowledge(duplicate=False):
            return f"takes {_said(action.contribution)}"
        case Acknowledge():
            return f"has {_said(action.contribution)} already"
        case Publish():
            return f"publishes version {action.version} of fragment {action.fragment}"
        case Evict():
            return f"evicts {action.learner} (incarnation {action.incarnation}): {action.reason}"
    return None


def _named(c: Contribution) -> str:
    return f"{c.learner}#{c.number}"


def _said(c: Contribution) -> str:
    return f"contribution {c.number} of {c.learner} to fragment {c.fragment}"
