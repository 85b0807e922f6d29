"""All kinds of rounds, by the name of their quorum."""

from diloco.core.choices import Registry
from diloco.protocol.rounds.base import Quorum
from diloco.protocol.rounds.called import Called
from diloco.protocol.rounds.pushed import Pushed
from diloco.protocol.rounds.scheduled import AllLive

__all__ = ["QUORUMS", "AllLive", "Called", "Pushed", "Quorum"]

QUORUMS: Registry[Quorum] = Registry("quorum", AllLive, Called, Pushed)
