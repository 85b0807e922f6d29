"""Storms with two syncers over one store: each waits as a standby while the other one serves the run."""

from __future__ import annotations

from tests.storms.nodes import Node
from tests.storms.plans import Fault
from tests.storms.world import Storm

from diloco.errors import DilocoError
from diloco.protocol.publishing import Standing


class StandbyStorm(Storm):
    """A plan with a standby.

    Attributes:
        num_takeovers: how often another syncer than the last one began to serve the run.
    """

    num_addresses = 2

    def _start(self) -> None:
        self.num_takeovers = 0
        self._served_last: Node | None = None
        super()._start()
        self.after(self.draws.between("standby starts", 0.0, 8.0), lambda: self._come_back(self.nodes[1]))

    def began_to_serve(self, node: Node) -> None:
        super().began_to_serve(node)
        self.num_takeovers += self._served_last not in (None, node)
        self._served_last = node

    def _come_back(self, node: Node) -> None:
        """As a standby, or as a first, which is refused where the other one serves."""
        if node.publisher is None:
            node.start(is_standby=node.address == 1 or self.draws.unit("comes back as a standby") < 0.7)

    def stands(self, node: Node, standing: Standing, why: str) -> None:
        super().stands(node, standing, why)
        if standing in ("claiming", "fenced"):
            self.quiet_s = max(self.quiet_s, self.now_s + self.plan.lease_s)

    def _fenced(self, node: Node) -> None:
        """It waits for its turn."""
        process = node.process

        def begin_again() -> None:
            if node.driver is not None:
                node.driver.stop()
                node.driver.end()
            node.end()
            for learner in self.learners:
                for each in learner.processes:
                    each.wire.lose(node.address, is_silent=False)
            node.start(is_standby=True)

        self.after(0.0, lambda: node.at_process(process, begin_again))

    def start_refused(self, node: Node, error: DilocoError) -> None:
        super().start_refused(node, error)
        self.quiet_s = max(self.quiet_s, self.now_s + 1.0 + self.plan.lease_s)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        first = self._first
        standby = self.nodes[1 - first.address]
        match fault.kind:
            case "kill first":
                self._kill(first, fault.seconds)
            case "kill standby":
                self._kill(standby, fault.seconds)
            case "kill both":
                self._kill(standby, fault.seconds * self.draws.unit("back sooner"))
                self._kill(first, fault.seconds)
            case "sleep":
                (first, first, standby)[fault.choice].asleep_until_s = self.now_s + fault.seconds
            case "sleep in a swap":
                first.sleeps_at_swap = fault.seconds, fault.choice == 0
            case "cut off store":
                (first, first, standby)[fault.choice].unreachable_until_s = self.now_s + fault.seconds
            case "cut off learners":
                self._cut(standby if fault.choice == 2 else first, fault)
            case "isolate":
                first.unreachable_until_s = self.now_s + fault.seconds
                self._cut(first, fault)
            case "promote":
                if standby.store is not None:
                    standby.store.promote()
            case "stop first":
                self._stop(first, fault.seconds)
            case _:
                super()._strike(fault)
                return
        self.touched()
        self.struck[fault.kind] += 1
        self.quiet_s = max(self.quiet_s, self.now_s + fault.seconds + self.plan.lease_s)

    def _cut(self, node: Node, fault: Fault) -> None:
        """A syncer reaches only some learners: half of them, or fewer."""
        num = len(self.learners)
        num_away = num if self.draws.unit("all away") < 0.3 else max(1, num // 2 + (fault.choice == 1))
        for offset in range(num_away):
            learner = self.learners[(fault.learner + offset) % num]
            self._cut_until_s[learner.index, node.address] = self.now_s + fault.seconds
            is_silent = self.draws.unit("cut is silent") < 0.3
            for process in learner.processes:
                process.wire.lose(node.address, is_silent=is_silent)
