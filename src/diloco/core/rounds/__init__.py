"""All kinds of rounds, by the name of their quorum."""

from diloco.core.choices import Registry
from diloco.core.rounds.base import Quorum
from diloco.core.rounds.called import Called
from diloco.core.rounds.pushed import Pushed
from diloco.core.rounds.scheduled import AllLive

__all__ = ["QUORUMS", "AllLive", "Called", "Pushed", "Quorum"]

QUORUMS: Registry[Quorum] = Registry("quorum", AllLive, Called, Pushed)
