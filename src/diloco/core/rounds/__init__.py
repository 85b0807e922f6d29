"""All ways of calling rounds, by name."""

from collections.abc import Mapping

from diloco.core.choices import choice_from_dict
from diloco.core.rounds.base import Quorum
from diloco.core.rounds.called import Called
from diloco.core.rounds.pushed import Pushed
from diloco.core.rounds.scheduled import AllLive

__all__ = ["QUORUMS", "AllLive", "Called", "Pushed", "Quorum", "quorum_from_dict"]

QUORUMS: tuple[type[Quorum], ...] = (AllLive, Called, Pushed)


def quorum_from_dict(values: Mapping[str, object]) -> Quorum:
    """Read back `Quorum.to_dict()`, e.g. `{"type": "AllLive"}`. Raises ConfigError naming a typo."""
    return choice_from_dict("quorum", QUORUMS, values)
