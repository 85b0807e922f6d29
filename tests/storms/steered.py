"""Storms in which an operator steers: the run is paused and resumed, learners are evicted, the quorum is lowered."""

from __future__ import annotations

from contextlib import suppress

from tests.storms.plans import ORDERS, Fault
from tests.storms.world import Storm

from diloco.errors import ConfigError
from diloco.protocol.steering import Order

AGAIN_S = 1.0
"""Between two looks whether the run is paused that is to go on: a syncer that dies may forget that it was resumed."""

LATEST_S = 10.0
"""After the last fault: a write that the disk has refused may tear later, and bring the pause back."""


class SteeredStorm(Storm):
    """With one syncer. An order that it dies with is not given again."""

    def _strike(self, fault: Fault) -> None:
        if fault.kind not in ORDERS:
            super()._strike(fault)
            return
        self.quiet_s = max(self.quiet_s, self.now_s + fault.seconds)
        if self.driver is None or not self.driver.state.is_initialised:
            return
        core, name = self.driver.core, self.learners[fault.learner].name
        if fault.kind == "pause":
            self._give(Order("pause"))
            self.after(fault.seconds, self._resume)
        elif fault.kind == "evict" and name in core.members:
            self._give(Order("evict", name))
        elif fault.kind == "lower quorum":
            self._give(Order("quorum", at_least=1))
        else:
            return
        self.struck[fault.kind] += 1

    def _give(self, order: Order) -> None:
        assert self.driver is not None
        self.touched()
        self.driver.steer(order, "storm", lambda _: None)

    def _resume(self) -> None:
        """Until no fault can bring the pause back."""
        if self.driver is not None and self.driver.state.is_initialised and self.driver.core.steering.paused:
            self.quiet_s = max(self.quiet_s, self.now_s + AGAIN_S)
            with suppress(ConfigError):  # the order before is not durable yet
                self._give(Order("resume"))
        if self.now_s <= self.calm_s + LATEST_S:
            self.after(AGAIN_S, self._resume)
