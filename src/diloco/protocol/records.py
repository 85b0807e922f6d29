"""The records of a run: its durable state besides the tensors, as `SyncerCore.saved` takes it, and the changes that
copies, repairs and checkpoints make to one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.protocol import leases
from diloco.protocol.in_flight import require_whole_numbers


@dataclass(frozen=True)
class Record:
    """The durable state of a run besides its tensors.

    Attributes:
        serial: ascending. What a record holds is durable once it, or a later one, is stored.
        values: plain values (JSON).
    """

    serial: int
    values: Mapping[str, Any]


def progress_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """The highest inner step of a record's run, and the tokens that its learners have trained.

    Raises:
        ValueError, TypeError, LookupError or AttributeError: this is no record.
    """
    found = record["step"], sum(max(ledger[0] for ledger in it["ledgers"]) for it in record["accounts"].values())
    require_whole_numbers(*found)
    return found


def require_numbers(record: Mapping[str, Any]) -> None:
    """Check the numbers of a record that are used only when the run goes on.

    Raises:
        ValueError, TypeError, LookupError or AttributeError: this is no record.
    """
    for member in record["members"].values():
        require_whole_numbers(member["step"], member["tokens"], int(member["step_s"] or 0))
    for account in record["accounts"].values():
        numbers = (account[each] for each in ("incarnation", "earlier_tokens", "others_tokens"))
        held = (*account.get("held", ()), *account.get("held_before", ()))
        require_whole_numbers(*numbers, *account["confirmed"], *held)
        _require_ledgers(account["ledgers"])
    if (dealing := record.get("dealing")) is not None:
        require_whole_numbers(dealing["turn"], *(group for own in dealing["sets"].values() for group in own))


def _require_ledgers(ledgers: Sequence[Any]) -> None:
    for trained, merged, lost, by_reason in ledgers:
        require_whole_numbers(trained, merged, lost, *map(abs, by_reason.values()))


def without_members(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record without its members: their pending tokens are lost, and they join again."""
    return {**record, "members": {}}


def rolled_back(record: Mapping[str, Any], versions: Sequence[int]) -> Mapping[str, Any]:
    """As `without_members`, after a repair that went back to these versions of the fragments: units of data merged in
    later versions are returned."""
    return {**without_members(record), "leases": leases.rolled_back(record["leases"], versions)}


def rewound(
    record: Mapping[str, Any], learner: str, saved: Mapping[str, Any], *, fragments: Collection[int]
) -> Mapping[str, Any]:  # fmt: skip
    """A record with the state of a member from its checkpoint (`SyncerCore.saved_of`).

    `fragments`: those whose steps are taken from there; with them, the clock, the rounds and the dealt sets of the run.

    Raises:
        ValueError, TypeError or LookupError: `saved` is no such state.
    """
    require_whole_numbers(saved["step"], *saved["fragment_steps"])
    _require_ledgers(saved["ledgers"])
    member = {**record["members"][learner], "step": saved["step"], "rounds": saved["own_rounds"]}
    account = {**record["accounts"][learner], "ledgers": saved["ledgers"]}
    run = {key: saved[key] for key in ("step", "rounds", "dealing")} if fragments else {}
    steps = zip(record["fragment_steps"], saved["fragment_steps"], strict=True)
    own = [theirs if fragment in fragments else ours for fragment, (ours, theirs) in enumerate(steps)]
    return {
        **record,
        **run,
        "fragment_steps": own,
        "members": {**record["members"], learner: member},
        "accounts": {**record["accounts"], learner: account},
    }
