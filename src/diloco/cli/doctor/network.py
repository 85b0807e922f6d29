"""The way to the syncer of a run, and the port that a syncer would serve."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli._input import read_token
from diloco.cli.doctor.findings import Finding
from diloco.errors import DilocoError

if TYPE_CHECKING:
    from diloco.config import SyncerTable
    from diloco.exchange.connection import Connection

NUM_PINGS = 5
CONNECT_TIMEOUT_S = 10.0
MAX_SKEW_S = 1.0


@dataclass(frozen=True)
class Syncer:
    """How a learner or viewer reaches a syncer; `learner`: the name that its token is to speak for."""

    address: str
    run: str
    token_file: Path | None
    ca: Path | None
    insecure: bool
    learner: str | None


def look_at_way(syncer: Syncer) -> Iterator[Finding]:
    """Resolve, connect, speak TLS, show the token, compare clocks; the first that fails is the last finding."""
    from diloco.exchange.wire.address import split_address

    host, port = split_address(syncer.address)
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        yield Finding("name", "missing", f"{host}: {error.strerror}", "check syncer.address, or this machine's DNS")
        return
    yield Finding("name", "ok", f"{host} is {', '.join(sorted(map(str, addresses)))}")
    try:
        started = time.monotonic()
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        advice = "start the syncer, open its port in the firewall, and let it bind 0.0.0.0, not 127.0.0.1"
        yield Finding("port", "missing", f"{syncer.address}: {error}", advice)
        return
    yield Finding("port", "ok", f"{syncer.address} connects in {1000 * (time.monotonic() - started):.1f} ms")
    yield from _talk(syncer)


def _talk(syncer: Syncer) -> Iterator[Finding]:
    """What the syncer answers: whether it knows the run and takes the token, how fast, and by which clock."""
    from diloco.exchange.connection import Connection
    from diloco.exchange.wire import syncer_pb2 as pb

    try:
        token = read_token(syncer.token_file)
        with closing(Connection(syncer.address, token=token, ca=syncer.ca, insecure=syncer.insecure)) as connection:
            connection.call("control", "Describe", pb.DescribeRequest(run=syncer.run), pb.DescribeReply)
            if syncer.learner is not None:
                connection.probe("probes", pb.ProbeHeader(run=syncer.run, learner=syncer.learner))
            trips = [_round_trip(connection, syncer.run) for _ in range(NUM_PINGS)]
    except DilocoError as error:
        advice = "check the run's name, syncer.ca, syncer.token_file, and that the certificate names this address"
        yield Finding("syncer", "missing", str(error), advice)
        return
    trip_s, skew_s = min(trips)
    speaks = "" if syncer.learner is None else f", and lets this token speak for {syncer.learner}"
    yield Finding("syncer", "ok", f"answers for run {syncer.run!r} in {1000 * trip_s:.1f} ms{speaks}")
    found = (
        f"the syncer's is {abs(skew_s):.3f} s {'ahead' if skew_s > 0 else 'behind'}, give or take {trip_s / 2:.3f} s"
    )
    advice = "certificates may be refused and reports put events in the wrong order; run an NTP client on both machines"
    yield Finding("clocks", "ok", found) if abs(skew_s) <= MAX_SKEW_S else Finding("clocks", "absent", found, advice)


def _round_trip(connection: "Connection", run: str) -> tuple[float, float]:
    """Seconds there and back, and by how much the syncer's clock is ahead."""
    from diloco.exchange.wire import syncer_pb2 as pb

    asked_at, started = time.time(), time.monotonic()
    reply = connection.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply)
    trip_s = time.monotonic() - started
    told: float = json.loads(reply.status)["time_s"]
    return trip_s, told - (asked_at + trip_s / 2)


def look_at_port(address: str, table: "SyncerTable") -> Iterator[Finding]:
    """Whether a syncer with these settings could serve this address now."""
    from diloco.exchange.wire.address import split_address
    from diloco.syncer.auth import Authenticator, check_binding

    host, port = split_address(address)
    has_tls, has_tokens = table.cert is not None, table.tokens_file is not None
    try:
        check_binding(address, has_tls=has_tls, has_tokens=has_tokens, insecure=table.insecure)
        if table.tokens_file is not None:
            Authenticator(table.tokens_file)
    except DilocoError as error:
        yield Finding("keys", "missing", str(error), "a syncer refuses to start so")
    else:
        kinds = [name for name, there in (("TLS", has_tls), ("tokens", has_tokens)) if there]
        yield Finding("keys", "ok", " and ".join(kinds) or "none, which loopback and --insecure allow")
    if table.cert is not None and table.key is not None:  # the run file has both or neither
        yield _certificate(table.cert, table.key)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        advice = "another process has the port, or the address is not this machine's; learners only need this one port"
        yield Finding("port", "missing", f"{address}: {error}", advice)
    else:
        yield Finding("port", "ok", f"{address} is free; whether a firewall lets learners in, only they can say")


def _certificate(cert: Path, key: Path) -> Finding:
    """Whether the syncer's certificate and its key belong together, whether it is valid now, and for which names."""
    from cryptography import x509

    from diloco.syncer.certificates import read_certificate

    try:
        certificate, _, _ = read_certificate(cert, key)
    except DilocoError as error:
        return Finding("certificate", "missing", str(error), "a syncer refuses to start so")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    said = ", ".join(str(name.value) for name in names)
    until = certificate.not_valid_after_utc
    if certificate.not_valid_before_utc <= datetime.now(UTC) < until:
        return Finding("certificate", "ok", f"for {said}, until {until:%Y-%m-%d}")
    return Finding("certificate", "missing", f"for {said}, not valid now (until {until:%Y-%m-%d})",
                   "check this machine's clock, or make new keys with `diloco keys new`")  # fmt: skip
