"""The way to the syncer of a run, and the port that a syncer would serve."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli._input import read_token
from diloco.cli.doctor.findings import Finding
from diloco.errors import DilocoError, StandbyError

if TYPE_CHECKING:
    from diloco.config import SyncerTable
    from diloco.exchange.connection import Connection

NUM_PINGS = 5
CONNECT_TIMEOUT_S = 10.0
MAX_SKEW_S = 1.0


@dataclass(frozen=True)
class Access:
    """What a learner or viewer shows to a syncer, as `Credentials` takes it."""

    keys: Path | None
    token_file: Path | None
    ca: Path | None
    insecure: bool


@dataclass(frozen=True)
class Syncer:
    """How a learner or viewer reaches a syncer; `learner`: the name that its keys are to speak for."""

    address: str
    run: str
    access: Access
    learner: str | None


def look_at_way(syncer: Syncer) -> Iterator[Finding]:
    """Resolve, connect, speak TLS, show the keys, compare clocks, for each address; the first that fails is the last
    finding of it."""
    from diloco.exchange.wire.address import split_addresses

    for address in split_addresses(syncer.address):
        yield from _look_at(replace(syncer, address=address))


def _look_at(syncer: Syncer) -> Iterator[Finding]:
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
    """What the syncer answers: whether it knows the run and takes the keys, how fast, and by which clock."""
    from diloco.exchange.connection import Connection
    from diloco.exchange.wire import syncer_pb2 as pb

    try:
        its = syncer.access
        token = read_token(its.token_file)
        with closing(
            Connection(syncer.address, keys=its.keys, token=token, ca=its.ca, insecure=its.insecure)
        ) as connection:
            connection.call("control", "Describe", pb.DescribeRequest(run=syncer.run), pb.DescribeReply)
            if syncer.learner is not None:
                connection.probe("probes", pb.ProbeHeader(run=syncer.run, learner=syncer.learner))
            trips = [_round_trip(connection, syncer.run) for _ in range(NUM_PINGS)]
    except StandbyError as error:
        yield Finding("syncer", "ok", str(error))
        return
    except DilocoError as error:
        advice = "check the run's name, syncer.keys, and that the syncer's certificate names this address"
        yield Finding("syncer", "missing", str(error), advice)
        return
    trip_s, skew_s = min(trips)
    speaks = "" if syncer.learner is None else f", and lets these keys speak for {syncer.learner}"
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


def look_at_port(address: str, run: str, table: "SyncerTable") -> Iterator[Finding]:
    """Whether a syncer with these settings could serve this address now."""
    from diloco.exchange.wire.address import split_address
    from diloco.syncer.auth import Authenticator, check_binding

    host, port = split_address(address)
    has_tls, has_tokens = table.keys is not None, table.tokens_file is not None
    asks = has_tls and not table.no_client_certificates
    try:
        check_binding(address, keys=has_tls, client_certificates=asks, tokens=has_tokens, insecure=table.insecure)
        Authenticator(run, keys=table.keys if asks else None, tokens_file=table.tokens_file)
    except DilocoError as error:
        yield Finding("keys", "missing", str(error), "a syncer refuses to start so")
    else:
        kinds = (("TLS", has_tls), ("client certificates", asks), ("tokens", has_tokens))
        said = " and ".join(name for name, there in kinds if there)
        yield Finding("keys", "ok", said or "none, which this machine's own addresses and --insecure allow")
    if table.keys is not None:
        yield _certificate(table.keys)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        advice = "another process has the port, or the address is not this machine's; learners only need this one port"
        yield Finding("port", "missing", f"{address}: {error}", advice)
    else:
        yield Finding("port", "ok", f"{address} is free; whether a firewall lets learners in, only they can say")


def _certificate(keys: Path) -> Finding:
    """Whether the syncer's keys can be used now, and for which hosts."""
    from diloco.exchange.key_pair import hosts_of
    from diloco.syncer.certificates import holder_of
    from diloco.syncer.ends_soon import SOON
    from diloco.syncer.tls import read_syncer_keys

    try:
        cert = read_syncer_keys(keys).cert
    except DilocoError as error:
        return Finding("certificate", "missing", str(error), "a syncer refuses to start so")
    expires = holder_of(cert).expires
    found = f"for {', '.join(hosts_of(cert))}, until {expires:%Y-%m-%d}"
    if expires - datetime.now(UTC) <= SOON:
        return Finding("certificate", "absent", found, "it ends soon; `diloco keys rotate syncer` makes a new one")
    return Finding("certificate", "ok", found)
