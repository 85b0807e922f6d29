"""Units of the run's data for the training loop, leased by the syncer (`protocol.leases`)."""

from __future__ import annotations

from diloco.learner.driver import LearnerDriver
from diloco.protocol.leases import MAX_ASKED, DataSet
from diloco.protocol.unit_queue import UnitQueue


class LeasedUnits:
    """The units of one learner; `Learner.lease` makes it. All ranks of the learner draw and take the same, in the same
    order."""

    def __init__(self, driver: LearnerDriver, data: DataSet, num_ahead: int) -> None:
        self._driver = driver
        self._queue = driver.units = UnitQueue(data, min(num_ahead, MAX_ASKED))

    def draw(self, num: int) -> list[int]:
        """The next `num` units, or those that are left; none: the data has ended, or others have the rest of it.

        Blocks only where none were leased in time: more are asked for ahead.
        """
        self._driver.lease(at_least=num)
        self._driver.wait_for_units(lambda: not self._queue.has(num))
        units = self._queue.draw(num)
        self._driver.lease()
        return units

    def take(self) -> None:
        """The oldest batch drawn is what the next `Learner.step` has trained, or a part of it."""
        self._queue.take()

    def put_back(self) -> None:
        """Draw the batches again that were drawn and not taken. Those of an earlier incarnation are claimed before."""
        if self._queue.has_drawn:
            self._driver.lease()
            self._driver.wait_for_units(lambda: not self._queue.is_sure)
            self._queue.put_back()
