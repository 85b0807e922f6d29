"""A syncer's Prometheus metrics, on a loopback port of its own.

Participation is reported beside liveness: all learners may be alive while only half of them contribute.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco.errors import ConfigError
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.protocol.in_flight import Ledger, total
from diloco.syncer.ports import port_refusal
from diloco.syncer.wire_bytes import Direction

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
VERSIONS_BEHIND = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class LearnerSample:
    """A live learner: its step, its seconds per step (None: not measured), and whether it is healthy."""

    learner: str
    step: int
    step_s: float | None
    healthy: bool


@dataclass(frozen=True)
class RunSample:
    """The progress of the run.

    Attributes:
        tokens: trained by the run.
        budget_tokens: planned for the run; None: not known.
        held_out_loss: of the global model, as last reported by a learner; None: not reported.
        training_losses: by learner, nats per token.
        tokens_per_s, eta_s: from the last minute; None: not known.
        blocked_s: by learner, seconds that its training thread has waited for answers.
    """

    tokens: int
    budget_tokens: int | None
    held_out_loss: float | None
    training_losses: Mapping[str, float]
    tokens_per_s: float | None
    eta_s: float | None
    blocked_s: Mapping[str, float] = field(default_factory=dict)


class SyncerMetrics:
    """The metrics of one run in a registry of their own. Any thread may call any method."""

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
        self._version = self._gauge("fragment_version", "Newest published version of a fragment.", "fragment")
        self._staleness = Histogram(
            "diloco_contribution_staleness_versions",
            "Versions between the one a contribution was measured from and the one it is merged into.",
            ["learner"],
            buckets=VERSIONS_BEHIND,
            registry=self.registry,
        )
        self._merge_seconds = self._seconds("merge_seconds", "Merge, outer step and encoding of one fragment.")
        self._persist_seconds = self._seconds("persist_seconds", "Making one version durable.")
        self._rejected = self._counter(
            "rejected_contributions", "Contributions that will not be merged.", "learner", "reason"
        )
        self._sent_back = self._counter(
            "sent_back_contributions", "Contributions refused for lack of space; learners resend them."
        )
        self._resumed = self._counter(
            "resumed_bytes",
            "Bytes of transfers that were cut off and did not have to be sent again.",
            "learner",
            "kind",
        )
        self._refused = self._counter("refused_calls", "Calls that were refused.", "call", "reason")
        self._joins = self._counter("joins", "Incarnations that joined.", "learner")
        self._evictions = self._counter("evictions", "Incarnations that were evicted.", "learner")
        self._missing_events = self._gauge(
            "missing_events", "Events that this syncer could not write to its event log."
        )
        self._data_units = self._gauge(
            "data_units",
            "Units of leased data, over all passes that were begun: done, leased, and returned by a learner.",
            "state",
        )
        self._standing = self._gauge(
            "standing", "1 for what this syncer may do with the run in its bucket.", "standing"
        )
        self._claims = self._counter("claims", "Times that this syncer has claimed the run from its bucket.")
        self._snapshots = _Snapshots()
        self.registry.register(self._snapshots)
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"diloco_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"diloco_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"diloco_{name}", text, buckets=SECONDS, registry=self.registry)

    # events

    def refused(self, call: str, reason: str) -> None:
        """Count a refused call."""
        self._refused.labels(call, reason).inc()

    def resumed(self, learner: str, kind: str, num_bytes: int) -> None:
        """Count the bytes that a resumed transfer did not repeat."""
        self._resumed.labels(learner, kind).inc(num_bytes)

    def joined(self, learner: str) -> None:
        """Count an incarnation that joined."""
        self._joins.labels(learner).inc()

    def evicted(self, learner: str) -> None:
        """Count an evicted incarnation."""
        self._evictions.labels(learner).inc()

    def merged_contribution(self, learner: str, *, staleness: int) -> None:
        """Record a merged contribution; `staleness`: its round minus its base, in versions."""
        self._staleness.labels(learner).observe(staleness)

    def rejected(self, learner: str, reason: str) -> None:
        """Count a rejected contribution. `reason`: one of a few fixed words."""
        self._rejected.labels(learner, reason).inc()

    def sent_back(self) -> None:
        """Count a contribution that was sent back for lack of room."""
        self._sent_back.inc()

    def merged(self, fragment: int, *, contributors: int, live: int, seconds: float) -> None:
        """Record the merge of a round."""
        self._contributors.labels(fragment).set(contributors)
        self._participation.labels(fragment).set(contributors / live if live else 0.0)
        self._merge_seconds.observe(seconds)

    def persisted(self, seconds: float) -> None:
        """Record the seconds of making a version durable."""
        self._persist_seconds.observe(seconds)

    def published(self, fragment: int, version: int) -> None:
        """Record a published version."""
        self._version.labels(fragment).set(version)

    # snapshots: each call replaces the values of the one before

    def set_learners(self, learners: Sequence[LearnerSample]) -> None:
        """Set all learners that are live now; others are no longer reported."""
        self._snapshots.learners = tuple(learners)

    def set_ledgers(self, ledgers: Mapping[str, Sequence[Ledger]]) -> None:
        """Set the sums of all learners' ledgers, which have one ledger per fragment."""
        num_fragments = max((len(own) for own in ledgers.values()), default=0)
        self._snapshots.ledgers = tuple(total(own[i] for own in ledgers.values()) for i in range(num_fragments))

    def set_run(self, run: RunSample) -> None:
        """Set the progress of the run."""
        self._snapshots.run = run

    def set_missing_events(self, number: int) -> None:
        """Set the number of events that could not be written since this syncer started."""
        self._missing_events.set(number)

    def standing_changed(self, standing: str) -> None:
        """Set the standing of this syncer, and count a claim."""
        self._standing.clear()
        self._standing.labels(standing).set(1)
        self._claims.inc(standing == "claiming")

    def set_data(self, *, done: int, leased: int, returned: int) -> None:
        """Set the units of leased data by state."""
        for state, num in (("done", done), ("leased", leased), ("returned", returned)):
            self._data_units.labels(state).set(num)

    def set_bytes(self, totals: Mapping[tuple[str, str, Direction], int]) -> None:
        """Set the bytes by (learner, kind, direction), as in `WireBytes.totals`."""
        self._snapshots.bytes = dict(totals)

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


class _Snapshots(Collector):
    """Metrics that are replaced as a whole, so that a learner that left has none."""

    def __init__(self) -> None:
        self.learners: tuple[LearnerSample, ...] = ()
        self.ledgers: tuple[Ledger, ...] = ()
        self.bytes: Mapping[tuple[str, str, Direction], int] = {}
        self.run: RunSample | None = None

    def collect(self) -> Iterator[Metric]:
        learners, ledgers, totals, run = self.learners, self.ledgers, self.bytes, self.run
        if run is not None:
            yield from _of_run(run)
        count = GaugeMetricFamily(
            "diloco_learners", "Learners by state; the healthy are among the live.", labels=["state"]
        )
        count.add_metric(["live"], len(learners))
        count.add_metric(["healthy"], sum(it.healthy for it in learners))
        yield count
        step = GaugeMetricFamily("diloco_learner_step", "Inner steps of a live learner.", labels=["learner"])
        seconds = GaugeMetricFamily(
            "diloco_learner_step_seconds", "Seconds per inner step of a live learner.", labels=["learner"]
        )
        for it in learners:
            step.add_metric([it.learner], it.step)
            if it.step_s is not None:
                seconds.add_metric([it.learner], it.step_s)
        yield step
        yield seconds
        trained = GaugeMetricFamily(
            "diloco_trained_tokens", "Tokens that were trained on a fragment.", labels=["fragment"]
        )
        tokens = GaugeMetricFamily(
            "diloco_ledger_tokens",
            "Where the trained tokens of a fragment are; over all states they add up to diloco_trained_tokens.",
            labels=["fragment", "state", "reason"],
        )
        for fragment, ledger in enumerate(ledgers):
            trained.add_metric([str(fragment)], ledger.trained)
            states = {"pending": ledger.pending, "merged": ledger.merged, "lost": ledger.lost}
            for state, number in states.items():
                tokens.add_metric([str(fragment), state, ""], number)
            for reason, number in ledger.discarded.items():
                tokens.add_metric([str(fragment), "discarded", reason], number)
        yield trained
        yield tokens
        on_the_wire = CounterMetricFamily(
            "diloco_wire_bytes",
            "Bytes of messages with gRPC's framing, without HTTP/2, TLS and TCP; direction as the syncer sees it.",
            labels=["learner", "kind", "direction"],
        )
        for key, number in totals.items():
            on_the_wire.add_metric(key, number)
        yield on_the_wire


def _of_run(run: RunSample) -> Iterator[Metric]:
    """The metrics of a run's progress; an unknown value has no sample."""
    yield CounterMetricFamily("diloco_run_tokens", "Tokens that the run has trained.", value=run.tokens)
    known = {
        "diloco_budget_tokens": ("Tokens that the run is to train.", run.budget_tokens),
        "diloco_held_out_loss": ("Held-out loss of the global model, nats per token.", run.held_out_loss),
        "diloco_tokens_per_second": ("Tokens per second of the run, over the last minute.", run.tokens_per_s),
        "diloco_eta_seconds": ("Until the run has its tokens, at this speed.", run.eta_s),
    }
    for name, (text, value) in known.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    losses = GaugeMetricFamily(
        "diloco_training_loss", "Training loss of a learner, nats per token.", labels=["learner"]
    )
    for learner, loss in sorted(run.training_losses.items()):
        losses.add_metric([learner], loss)
    yield losses
    blocked = CounterMetricFamily(
        "diloco_blocked_seconds", "Seconds a learner's training thread has waited for answers.", labels=["learner"]
    )
    for learner, seconds in sorted(run.blocked_s.items()):
        blocked.add_metric([learner], seconds)
    yield blocked
