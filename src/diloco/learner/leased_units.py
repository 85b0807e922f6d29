"""Units of the run's data for a training loop, leased by the syncer (`protocol.leases`)."""

from __future__ import annotations

import math
from collections.abc import Callable

from diloco.learner.driver import LearnerDriver
from diloco.protocol.leases import MAX_ASKED, DataSet
from diloco.protocol.unit_queue import UnitQueue
from diloco.protocol.units import Ranges

END_POLL_S = 1.0
"""How often a wait for groups looks for the end of the run, which is no event of the exchange."""


class LeasedUnits:
    """The leased units of one learner, from `Learner.lease`; all its ranks draw and take the same ones in order."""

    def __init__(self, driver: LearnerDriver, data: DataSet, num_ahead: int) -> None:
        self._driver, self._are_groups = driver, data.groups is not None
        self._queue = driver.units = UnitQueue(data, min(num_ahead, MAX_ASKED))

    @property
    def incarnation(self) -> int:
        """The learner's, to which the units are leased."""
        return self._driver.incarnation

    def has(self, num: int) -> bool:
        """Whether `draw` returns at once."""
        return self._queue.has(num)

    @property
    def is_over(self) -> bool:
        """Whether the run's budget is spent, as far as is known."""
        return self._driver.is_done

    def draw(self, num: int) -> list[int]:
        """The next `num` units, or those that are left; none at the end of the data, or if others lease the rest. Of
        groups, fewer only if none follow: the run is over, or has no place for this learner.

        Units are requested ahead; blocks if these have not arrived in time.
        """
        driver, poll_s = self._driver, END_POLL_S if self._are_groups else math.inf

        def is_missing() -> bool:
            ends = self._are_groups and (self.is_over or driver.exchange.overview.drained)
            return not self.has(num) and not ends

        driver.lease(at_least=num)
        driver.wait_for_units(is_missing, poll_s=poll_s)
        units = self._queue.draw(num)
        driver.lease()
        return units

    def take(self, without: Ranges = ()) -> Ranges:
        """Count the oldest batch drawn as trained by the next `Learner.step`, alone or with other batches.

        Arguments:
            without: units of it that are not trained.

        Returns:
            The others that are leased to this learner: after an eviction, the rest may be another's.
        """
        self.confirm()
        return self._queue.take(without)

    def put_back(self) -> None:
        """Return batches that were drawn and not taken, to be drawn again; those of an earlier incarnation are claimed
        first."""
        if self._queue.has_drawn:
            self.confirm()
            self._queue.put_back()

    def confirm(self) -> None:
        """Block until drawn units are leased to this incarnation, which claims those of an earlier one."""
        self._driver.lease()
        self._driver.wait_for_units(lambda: not self._queue.is_sure)

    def wait_while(self, is_waiting: Callable[[], bool], *, poll_s: float = math.inf) -> None:
        """Block, and handle the exchange's events; ends at once if the learner was told to leave the run.

        Arguments:
            poll_s: how long to wait for an event before `is_waiting` is called again.

        Raises:
            StoppedError: the learner was interrupted.
        """
        self._driver.wait_for_units(is_waiting, poll_s=poll_s)
