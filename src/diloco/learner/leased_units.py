"""Units of the run's data for a training loop, leased by the syncer (`protocol.leases`)."""

from __future__ import annotations

from diloco.learner.driver import LearnerDriver
from diloco.protocol.leases import MAX_ASKED, DataSet
from diloco.protocol.unit_queue import UnitQueue


class LeasedUnits:
    """The leased units of one learner, from `Learner.lease`; all its ranks draw and take the same ones in order."""

    def __init__(self, driver: LearnerDriver, data: DataSet, num_ahead: int) -> None:
        self._driver = driver
        self._queue = driver.units = UnitQueue(data, min(num_ahead, MAX_ASKED))

    def draw(self, num: int) -> list[int]:
        """The next `num` units, or those that are left; none at the end of the data, or if others lease the rest.

        Units are requested ahead; blocks if these have not arrived in time.
        """
        self._driver.lease(at_least=num)
        self._driver.wait_for_units(lambda: not self._queue.has(num))
        units = self._queue.draw(num)
        self._driver.lease()
        return units

    def take(self) -> None:
        """Count the oldest batch drawn as trained by the next `Learner.step`, alone or with other batches."""
        self._queue.take()

    def put_back(self) -> None:
        """Return batches that were drawn and not taken, to be drawn again; those of an earlier incarnation are claimed
        first."""
        if self._queue.has_drawn:
            self._driver.lease()
            self._driver.wait_for_units(lambda: not self._queue.is_sure)
            self._queue.put_back()
