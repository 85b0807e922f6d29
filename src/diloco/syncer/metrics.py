"""A syncer's Prometheus metrics, on a loopback port of its own.

Participation is reported beside liveness: all learners may be alive while only half of them contribute.
"""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco.errors import ConfigError
from diloco.events import GroupsProgress
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.protocol.in_flight import Ledger, total
from diloco.protocol.members import Member
from diloco.syncer.ports import port_refusal
from diloco.syncer.wire_bytes import Direction

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
VERSIONS_BEHIND = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


class SyncerMetrics(Collector):
    """The metrics of one run in a registry of their own. Any thread may call any method.

    Attributes:
        registry: of all metrics.
        version, staleness, persist_seconds, rejected, sent_back, resumed, refused, joins, evictions, missing_events,
            data_units: of single events, with the labels that they have in the registry.
    """

    def __init__(self, run: str) -> None:
        self.registry = CollectorRegistry()
        self._gauge("run", "1 for the run that this syncer serves.", "run").labels(run).set(1)
        self._participation = self._gauge(
            "participation_ratio", "Contributors of the newest merge of a fragment, over the learners live then.",
            "fragment",
        )  # fmt: skip
        self._contributors = self._gauge(
            "merge_contributors", "Contributors of the newest merge of a fragment.", "fragment"
        )
        self.version = self._gauge("fragment_version", "Newest published version of a fragment.", "fragment")
        behind = "Versions between the one a contribution was measured from and the one it is merged into."
        self.staleness = self._histogram("contribution_staleness_versions", behind, "learner", buckets=VERSIONS_BEHIND)
        self._merge_seconds = self._histogram("merge_seconds", "Merge, outer step and encoding of one fragment.")
        self.persist_seconds = self._histogram("persist_seconds", "Making one version durable.")
        self.rejected = self._counter(
            "rejected_contributions", "Contributions that will not be merged.", "learner", "reason"
        )
        self.sent_back = self._counter(
            "sent_back_contributions", "Contributions refused for lack of space; learners resend them."
        )
        self.resumed = self._counter(
            "resumed_bytes",
            "Bytes of transfers that were cut off and did not have to be sent again.",
            "learner",
            "kind",
        )
        self.refused = self._counter("refused_calls", "Calls that were refused.", "call", "reason")
        self.joins = self._counter("joins", "Incarnations that joined.", "learner")
        self.evictions = self._counter("evictions", "Incarnations that were evicted.", "learner")
        self.missing_events = self._gauge("missing_events", "Events that this syncer could not write to its event log.")
        self.data_units = self._gauge(
            "data_units",
            "Units of leased data, over all passes that were begun: done, leased, and returned by a learner.",
            "state",
        )
        self._standing = self._gauge(
            "standing", "1 for what this syncer may do with the run in its bucket.", "standing"
        )
        self._claims = self._counter("claims", "Times that this syncer has claimed the run from its bucket.")
        self._snapshots: dict[str, list[Metric]] = {}
        self.set_learners(())
        self.registry.register(self)
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"diloco_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"diloco_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"diloco_{name}", text, labels, buckets=buckets, registry=self.registry)

    # events

    def merged(self, fragment: int, *, contributors: int, live: int, seconds: float) -> None:
        """Record the merge of a round."""
        self._contributors.labels(fragment).set(contributors)
        self._participation.labels(fragment).set(contributors / live if live else 0.0)
        self._merge_seconds.observe(seconds)

    def standing_changed(self, standing: str) -> None:
        """Set the standing of this syncer, and count a claim."""
        self._standing.clear()
        self._standing.labels(standing).set(1)
        self._claims.inc(standing == "claiming")

    # snapshots: each call replaces the values of the one before

    def set_learners(self, members: Collection[Member]) -> None:
        """Set all learners that are live now; others are no longer reported."""
        steps = {(it.learner,): it.step for it in members}
        seconds = {(it.learner,): it.step_s for it in members if it.step_s is not None}
        states = {("live",): len(members), ("healthy",): sum(it.healthy for it in members)}
        self._snapshots["learners"] = [
            _gauges("learners", "Learners by state; the healthy are among the live.", states, "state"),
            _gauges("learner_step", "Inner steps of a live learner.", steps, "learner"),
            _gauges("learner_step_seconds", "Seconds per inner step of a live learner.", seconds, "learner"),
        ]

    def set_ledgers(self, ledgers: Mapping[str, Sequence[Ledger]]) -> None:
        """Set the sums of all learners' ledgers, which have one ledger per fragment."""
        num_fragments = max((len(own) for own in ledgers.values()), default=0)
        trained, tokens = dict[tuple[str, ...], int](), dict[tuple[str, ...], int]()
        for index in range(num_fragments):
            fragment, ledger = str(index), total(own[index] for own in ledgers.values())
            trained[fragment,] = ledger.trained
            for state, number in (("pending", ledger.pending), ("merged", ledger.merged), ("lost", ledger.lost)):
                tokens[fragment, state, ""] = number
            tokens |= {(fragment, "discarded", reason): number for reason, number in ledger.discarded.items()}
        where = "Where the trained tokens of a fragment are; over all states they add up to diloco_trained_tokens."
        self._snapshots["ledgers"] = [
            _gauges("trained_tokens", "Tokens that were trained on a fragment.", trained, "fragment"),
            _gauges("ledger_tokens", where, tokens, "fragment", "state", "reason"),
        ]

    def set_run(
        self, *, tokens: int, budget_tokens: int | None, held_out_loss: float | None,
        training_losses: Mapping[str, float], tokens_per_s: float | None, eta_s: float | None,
        blocked_s: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Set the progress of the run; a value that is not known (None) has no sample.

        Arguments:
            tokens: trained by the run.
            budget_tokens: planned for the run.
            held_out_loss: of the global model, as last reported.
            training_losses: by learner, nats per token.
            tokens_per_s, eta_s: from the last minute.
            blocked_s: by learner, seconds that its training thread has waited for answers.
        """
        known = {
            "budget_tokens": ("Tokens that the run is to train.", budget_tokens),
            "held_out_loss": ("Held-out loss of the global model, nats per token.", held_out_loss),
            "tokens_per_second": ("Tokens per second of the run, over the last minute.", tokens_per_s),
            "eta_seconds": ("Until the run has its tokens, at this speed.", eta_s),
        }
        losses, blocked = ({(it,): each[it] for it in sorted(each)} for each in (training_losses, blocked_s))
        waited = "Seconds a learner's training thread has waited for answers."
        self._snapshots["run"] = [
            _counters("run_tokens", "Tokens that the run has trained.", {(): tokens}),
            *(_gauges(name, text, {(): value}) for name, (text, value) in known.items() if value is not None),
            _gauges("training_loss", "Training loss of a learner, nats per token.", losses, "learner"),
            _counters("blocked_seconds", waited, blocked, "learner"),
        ]

    def set_groups(self, groups: GroupsProgress) -> None:
        """Set the state of groups of reinforcement learning."""
        states = {"waiting": groups.waiting, "leased": groups.leased, **groups.ended}
        staleness = {(versions,): num for versions, num in groups.staleness.items()}
        rewards = {(task,): reward for task, reward in groups.rewards.items()}
        done = {
            (worker.role, worker.name, what): getattr(worker, what)
            for worker in groups.workers for what in ("generated", "scored", "refused")
        }  # fmt: skip
        live = Counts(worker.role for worker in groups.workers if worker.live)
        summed = "Groups by state; they add up to diloco_acknowledged_groups."
        self._snapshots["groups"] = [
            _counters("acknowledged_groups", "Groups that were received.", {(): groups.acknowledged}),
            _gauges("groups", summed, {(state,): num for state, num in states.items()}, "state"),
            _counters("leased_groups", "Groups by versions of staleness when leased.", staleness, "staleness"),
            _gauges("reward", "Mean reward of the newest groups.", rewards, "task"),
            _gauges("workers", "Workers that are live.", {(role,): num for role, num in live.items()}, "role"),
            _counters("worker_groups", "Groups by worker and result.", done, "role", "worker", "result"),
        ]

    def set_bytes(self, totals: Mapping[tuple[str, str, Direction], int]) -> None:
        """Set the bytes by (learner, kind, direction), as in `WireBytes.totals`."""
        text = "Bytes of messages with gRPC's framing, without HTTP/2, TLS and TCP; direction as the syncer sees it."
        self._snapshots["bytes"] = [_counters("wire_bytes", text, totals, "learner", "kind", "direction")]

    def collect(self) -> Iterator[Metric]:
        """As `Collector`: the snapshots. A learner that left has no sample in them."""
        for metrics in list(self._snapshots.values()):
            yield from metrics

    # the port

    def serve(self, address: str = "127.0.0.1:0") -> int:
        """Answer scrapes at http://address/metrics on a thread of its own; returns the port (port 0 chooses one).

        Raises:
            ConfigError: the address is not loopback, or cannot be bound. RunError: it is in use.
        """
        host, port = split_address(address)
        if not is_loopback(host):
            raise ConfigError(
                f"metrics at {address} would be open to other machines; bind 127.0.0.1 and let a local Prometheus "
                "scrape it."
            )
        try:
            self._server = start_http_server(port, host, self.registry)
        except OSError as error:
            choice = "choose another port with --metrics-port, or 0"
            raise port_refusal(address, error, what="metrics", choice=choice) from error
        return int(self._server[0].server_port)

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()


Samples = Mapping[Any, float]
"""Values by the tuples of their labels' values."""


def _gauges(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"diloco_{name}", text, labels=labels), samples)


def _counters(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"diloco_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
