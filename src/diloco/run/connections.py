"""The open connections of learners, one per incarnation."""

from __future__ import annotations

from diloco.run.ports import ConnectionPort


class Connections:
    """The newest connection of each incarnation. A broken connection stays until the break is detected."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], ConnectionPort] = {}

    def opened(self, learner: str, incarnation: int, connection: ConnectionPort) -> None:
        """A connection was opened; an earlier one of the incarnation ends."""
        self.end(learner, incarnation)
        self._open[learner, incarnation] = connection

    def broke(self, learner: str, incarnation: int, connection: ConnectionPort) -> bool:
        """A connection broke. Returns whether it was the newest of its incarnation."""
        if self._open.get((learner, incarnation)) is not connection:
            return False
        del self._open[learner, incarnation]
        return True

    def end(self, learner: str, incarnation: int) -> None:
        """End an incarnation's connection, if it has one."""
        if (connection := self._open.pop((learner, incarnation), None)) is not None:
            connection.end()

    def end_all(self) -> None:
        """End all of them."""
        for learner, incarnation in list(self._open):
            self.end(learner, incarnation)

    def of(self, learner: str, incarnation: int) -> ConnectionPort | None:
        """An incarnation's connection; None: it has none."""
        return self._open.get((learner, incarnation))

    @property
    def learners(self) -> set[str]:
        """All learners with a connection."""
        return {learner for learner, _ in self._open}
