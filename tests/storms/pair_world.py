"""A storm with two syncers: as `world.Storm`, but the run is served by whichever of the two may."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from tests.chaos.versions import BrokenInvariantError, require
from tests.storms.pair_disks import NodeAccounts, Published
from tests.storms.pair_links import Follow
from tests.storms.pair_nodes import Node, NodeDoor
from tests.storms.plans import Fault
from tests.storms.units import UnitLedger, check_leases
from tests.storms.world import ProcessKilled, Storm

from diloco.core.layout import digest
from diloco.errors import StoreError
from diloco.exchange.virtual.syncer import SyncerProcess
from diloco.protocol.succession import Standing, elector

SETTLES_S = 20.0
"""After a fault of a syncer or of a link between the two, and the silence before a takeover, the run has a syncer."""

OPERATOR_S = 60.0
"""After so long without a syncer that may publish, while nothing else is wrong, a person looks at it."""


class PairStorm(Storm):
    """A plan with a standby.

    Attributes:
        nodes: the two syncers; the run begins at the first one.
        published: what they have published.
        all_accounts: of their drivers.
        num_takeovers: how often a standby went on alone.
        num_promoted: how often a person had to decide.
    """

    num_addresses = 2
    nodes: tuple[Node, Node]

    def _start_syncer(self) -> None:
        self.published = Published(self.ledger, UnitLedger(len(self.plan.sizes)))
        self.all_accounts: list[NodeAccounts] = []
        self.accounts = NodeAccounts(self.ledger, self.all_accounts)
        self.num_takeovers = self.num_promoted = 0
        self.stood: Counter[Standing] = Counter()
        self.split_until_s = -math.inf
        self._cut_until_s: dict[tuple[int, int], float] = {}
        self._publishes_s = 0.0
        self._torn: Node | None = None
        self._promoted: Node | None = None  # by hand, the last one
        self.nodes = Node(self, 0), Node(self, 1)
        self.nodes[0].start(follows=False)
        self.after(self.draws.between("standby starts", 0.0, 8.0), lambda: self._come_back(self.nodes[1]))
        self.calm_s += self.plan.silence_s + SETTLES_S
        self.after(1.0, self._operate)

    # --- what learners reach ------------------------------------------------------------------------------------------

    @property
    def has_model(self) -> bool:
        return any(node.store.is_initialised for node in self.nodes)

    def door(self, address: int) -> SyncerProcess | None:
        node = self.nodes[address]
        return None if node.pair is None else NodeDoor(node)

    def boot_at(self, address: int) -> int:
        return self.nodes[address].process

    def reaches(self, learner: int, address: int) -> bool:
        is_cut = self._cut_until_s.get((learner, address), -math.inf) > self.now_s
        return self.nodes[address].pair is not None and not is_cut

    def heard(self, learner: str, address: int) -> None:
        if self.leading is self.nodes[address]:
            super().heard(learner, address)

    # --- the two syncers ----------------------------------------------------------------------------------------------

    @property
    def leading(self) -> Node | None:
        """The one that serves the run, and not one that has lost it and does not know it yet."""
        newest = max(self.published.by_epoch, default=0)
        serving = [node for node in self.nodes if node.serves and node.epoch >= newest]
        return max(serving, key=lambda node: node.epoch, default=None)

    @property
    def is_split(self) -> bool:
        """Whether the two syncers do not reach each other."""
        return self.now_s < self.split_until_s

    def next_boot(self) -> int:
        """A number that names a process, or a part in the pair."""
        self.boot += 1
        return self.boot

    def dial(self, node: Node) -> None:
        """A syncer that knows the other one's address calls it."""
        other = self.nodes[1 - node.address]
        if other.pair is None or self.is_split:
            self.after(1.0, lambda process=node.process: self.at_node(node, process, lambda: self.dial(node)))  # type: ignore[misc]
            return
        try:
            Follow(self, node, other)
        except StoreError:
            self.after(1.0, lambda process=node.process: self.at_node(node, process, lambda: self.dial(node)))  # type: ignore[misc]

    def at_node(self, node: Node, process: int, do: Callable[[], None]) -> None:
        """Something happens in a process of a node, if that is there."""
        if node.process == process:
            self.touched()
            do()

    def state_changed(self, node: Node, standing: Standing, epoch: int, why: str) -> None:
        """The standing of a node has changed."""
        self.stood[standing] += 1
        self.quiet_s = max(self.quiet_s, self.now_s + 2.0)
        self.num_takeovers += standing == "alone" and node is self.nodes[1]

    def disk_at(self, node: Node, point: str) -> None:
        """A node's disk is at one of its steps."""
        from diloco.run.memory import POINTS

        if node.tears_at is not None and point == POINTS[node.tears_at]:
            node.tears_at, self._torn = None, node
            raise ProcessKilled
        if self.now_s < node.refuses_until_s:
            raise OSError(f"no space left at {point!r}")

    def _kill_syncer(self, back_s: float) -> None:
        """The one whose write was torn."""
        assert self._torn is not None
        node, self._torn = self._torn, None
        self._kill(node, back_s)

    def _kill(self, node: Node, back_s: float) -> None:
        if node.pair is None:
            return
        node.end()
        self.touched()
        self._settles(back_s)
        for learner in self.learners:
            for process in learner.processes:
                process.wire.syncer_died(node.address)
        self.after(back_s, lambda: self._come_back(node))

    def refuse_calls(self, node: Node) -> None:
        """Its driver has ended: calls that wait for an answer of it fail."""
        for learner in self.learners:
            for process in learner.processes:
                process.wire.lose(node.address, is_silent=False)

    def _come_back(self, node: Node) -> None:
        """A person who has promoted the other one has it started only where it reaches that one (`docs/standby.md`)."""
        other = self.nodes[1 - node.address]
        if self._promoted is other and (self.is_split or other.pair is None):
            self._settles(1.0)
            self.after(1.0, lambda: self._come_back(node))
        elif node.pair is None:
            follows = node.store.is_initialised and self.draws.unit("first follows") < 0.7
            node.start(follows=node.address == 1 or follows)

    def _settles(self, seconds: float) -> None:
        self.quiet_s = max(self.quiet_s, self.now_s + seconds + self.plan.silence_s + SETTLES_S)

    def _make_room(self) -> None:
        super()._make_room()
        for node in self.nodes:
            node.spool.budget_bytes = None

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        first = self.leading or self.nodes[0]
        standby = self.nodes[1 - first.address]
        match fault.kind:
            case "kill syncer" | "kill first":
                self._kill(first, fault.seconds)
            case "kill standby":
                self._kill(standby, fault.seconds)
            case "kill both":
                self._kill(standby, fault.seconds * self.draws.unit("back sooner"))
                self._kill(first, fault.seconds)
            case "tear write":
                (first, first, standby)[fault.learner % 3].tears_at = fault.choice
            case "refuse writes" | "standby refuses":
                node = standby if fault.kind == "standby refuses" else first
                node.refuses_until_s = self.now_s + fault.seconds
            case "split":
                self.split_until_s = self.now_s + fault.seconds
            case "cut off":
                self._cut(standby if fault.choice == 2 else first, fault)
            case "isolate":
                self.split_until_s = self.now_s + fault.seconds
                self._cut(first, fault)
            case "promote":
                self._promote_if_safe()
            case _:
                super()._strike(fault)
                return
        self.struck[fault.kind] += 1
        self._settles(fault.seconds)

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

    def _promote_if_safe(self) -> None:
        """A person sees that one of the two is gone, and that the other one has all that was published."""
        alive = [node for node in self.nodes if node.pair is not None]
        if len(alive) == 1:
            self._promote(alive[0])

    def _promote(self, node: Node) -> None:
        other, pair = self.nodes[1 - node.address].store, node.pair
        assert pair is not None
        newest = sum(self.ledger.versions.newest(f) for f in range(len(self.plan.sizes))) if self.has_model else 0
        other_base = other.epoch() if other.position is None else other.position.base  # one that never had a standby
        has_all = pair.position.base >= other_base and node.store.contents().num_published >= newest
        if pair.standing in ("alone", "paired") or not node.store.is_initialised or not has_all:
            return
        try:
            pair.promote(self.now_s, force=True)
            self._promoted = node
            node.host_as_it_stands()
        except StoreError:
            return
        finally:
            self.touched()
        self.num_promoted += 1

    @property
    def may_publish(self) -> bool:
        """Whether the syncer that serves the run may publish."""
        leading = self.leading
        return leading is not None and leading.pair is not None and leading.pair.succession.may_publish

    def _operate(self) -> None:
        """Where nothing is wrong any more and no syncer may publish, too few of those that vote are left."""
        self.after(1.0, self._operate)
        publishes = any(node.serves and node.pair and node.pair.succession.may_publish for node in self.nodes)
        if publishes or not self.has_model or self.now_s < self.calm_s:
            self._publishes_s = self.now_s
        elif self.now_s - self._publishes_s > OPERATOR_S and all(node.pair is not None for node in self.nodes):
            told = [(node.name, node.pair and node.pair.status(self.now_s)) for node in self.nodes]
            require(self._are_electors_gone(), f"no syncer serves the run: {told}")
            # a torn write of a promotion ends the node: both are there when a person looks
            for node in sorted(self.nodes, key=lambda each: -each.pair.position.base if each.pair else 0):
                self._promote(node)
            self._publishes_s = self.now_s

    def _are_electors_gone(self) -> bool:
        """Whether no node can get a majority. A learner that has not heard that it has joined has no vote yet, and a
        node that is fenced asks for none."""
        alive = {
            elector(learner.name, process.client.core.claim.process)
            for learner in self.learners
            for process in learner.processes
            if process.is_alive and process.client.core.seen is not None
        }
        pairs = [node.pair.succession for node in self.nodes if node.pair is not None]
        electorates = [each.electorate for each in pairs if each.standing != "fenced"]
        return all(2 * len(each & alive) <= len(each) for each in electorates)

    # --- what holds ---------------------------------------------------------------------------------------------------

    def _check_syncer(self) -> None:
        leading = self.leading
        self.driver = None if leading is None else leading.driver
        if leading is not None:
            self.accounts, self._spool, self.began_s = leading.accounts, leading.spool, leading.began_s
        may_publish = [node for node in self.nodes if node.pair is not None and node.pair.succession.may_publish]
        for node in self.nodes:
            driver = node.driver
            if driver is None or not driver.state.is_initialised:
                continue
            node.accounts.take_events(self.now_s)
            node.accounts.check(driver.core)
            check_leases(driver.core.leases)
            for fragment, version in enumerate(driver.state.versions):
                self._check_shown(node, fragment, version)
        if len(may_publish) == 2:
            require(len({node.epoch for node in may_publish}) == 2, f"two may publish in epoch {may_publish[0].epoch}")

    def _check_shown(self, node: Node, fragment: int, version: int) -> None:
        """What a syncer serves is of the one line that was published, and does not go back."""
        require(version >= node.shown.get(fragment, 0), f"{node.name} went back to version {version} of {fragment}")
        node.shown[fragment] = version
        assert node.driver is not None
        own = node.driver.state.model.held(fragment).digest
        line = self.ledger.versions.digests.get((fragment, version))
        if own != line:
            raise BrokenInvariantError(f"{node.name} serves {own} as version {version} of {fragment}: it is {line}")

    def _wind_up(self) -> None:
        end_s = max(self.now_s, self.calm_s) + 2 * OPERATOR_S
        while (self.now_s < self.calm_s or not self.may_publish) and self._events[0][0] <= end_s:
            self._happen()  # where all learners have left, none votes: a person decides
        require(self.may_publish, "no syncer serves the run and may publish in the end")
        self._check_syncer()
        super()._wind_up()
        assert self.leading is not None
        pair, saved = self.leading.pair, self.leading.store.load()
        assert pair is not None
        assert saved is not None
        for held in saved.fragments:
            require(held.digest == digest(held.theta), f"fragment {held.fragment}: a wrong digest is on the disk")
        self.ledger.restored(saved)
        if pair.standing == "paired":
            held, copy = (node.store.contents().held for node in (self.leading, self.nodes[1 - self.leading.address]))
            require(held == copy, f"the first has {held}, and its standby {copy}")
