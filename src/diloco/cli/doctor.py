"""`diloco doctor`: checks of this machine before a run."""

import fcntl
import json
import os
import platform
import shutil
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import metadata
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from diloco.cli._options import Insecure, Json, Keys, Overrides
from diloco.cli._output import print_result
from diloco.cli._run_address import RunAddress, address_from
from diloco.config import RunConfig, load_config
from diloco.errors import ConfigError, DilocoError, StandbyError
from diloco.escaping import printable
from diloco.planning.units import SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.exchange.connection import Connection

State = Literal["ok", "absent", "missing"]
MARKS: dict[State, tuple[str, str | None]] = {
    "ok": ("", None), "absent": ("note", "yellow"), "missing": ("FAILS", "red"),
}  # fmt: skip

LOW_DISK_BYTES, NO_DISK_BYTES = 10 * 10**9, 10**8
SLOW_SYNC_S = 0.05
"""A version needs about four syncs to be durable; a round of a small model takes a second."""

NUM_SYNCS, SYNC_BYTES = 9, 1 << 20
NUM_PINGS, MAX_SKEW_S = 5, 1.0
DRIVER = Path("/proc/driver/nvidia/version")
SET_INTERFACE = "set GLOO_SOCKET_IFNAME to the interface that the ranks share"
FOR_DEVELOPERS = ("dev",)
INSTALLED, OTHER_EXTRAS = " (installed ", "other extras"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: name of the check.
        state: "ok"; "absent": something optional is not available; "missing": something required is not available.
        found: what the check found.
        advice: the consequence, and what to do; empty if the state is "ok".
    """

    what: str
    state: State
    found: str
    advice: str = ""


def command(
    run_file: Annotated[Path | None, typer.Argument(help="Also check this run file and its syncer.")] = None,
    address: Annotated[str | None, typer.Option(help="host:port of the syncer, instead of the run file's.")] = None,
    run: Annotated[str | None, typer.Option(help="The run's name, with --address and without a run file.")] = None,
    name: Annotated[str | None, typer.Option(help="Check as this learner: its table of the run file and keys.")] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Check whether a syncer can serve here.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the run; default: run.dir or the current one.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check this machine (torch, GPU, disk, packages, connection to the syncer): what would fail, what to do.

    Exit code 1: something required is missing.
    """

    config = None if run_file is None else load_config(run_file, overrides or (), learner=name)
    if config is None and overrides:
        raise ConfigError("--set has no effect without a run file; give one, or drop --set")
    if serve is not None and config is None:
        raise ConfigError("--serve checks the [syncer] table of a run file; give one")
    if config is None and (address is None) != (run is None):
        raise ConfigError("--address and --run belong together; give both, or a run file")
    syncer = address_from(config, address, run, keys, insecure)
    checks = _checks(config, directory, syncer, name, serve)
    findings = sorted(checks, key=lambda finding: (finding.state != "missing", finding.what == OTHER_EXTRAS))
    missing = sum(finding.state == "missing" for finding in findings)
    total = f"{missing} required and missing: see FAILS" if missing else "nothing required is missing"

    def show_text() -> None:
        for finding in findings:
            _print(finding)
        typer.echo(f"\n{total}")

    value = {"ok": not missing, "findings": [asdict(finding) for finding in findings]}
    print_result(as_json, value, show_text, indent=2)
    if missing:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    """Print one line, and a second one with the advice."""
    mark, colour = MARKS[finding.state]
    typer.echo(f"{typer.style(f'{mark:5}', fg=colour)} {finding.what:15} {printable(finding.found)}")
    if finding.advice:
        typer.echo(f"{'':21} {finding.advice}")


def _checks(
    config: RunConfig | None, directory: Path | None, syncer: RunAddress | None, learner: str | None,
    serve: str | None,
) -> Iterator[Finding]:  # fmt: skip
    """All checks, in order."""
    from diloco.exchange.wire.address import split_addresses

    yield _python()
    written = Path() if config is None else config.dir if serve is None else config.state_dir
    yield from _disk(directory or written)
    yield from _torch(needs_cuda=config is not None and serve is None and config.train.device == "cuda")
    yield from _packages()
    if syncer is not None and serve is not None:
        yield from _port(replace(syncer, address=serve))
    elif syncer is not None:
        for address in split_addresses(syncer.address):
            yield from _connection(replace(syncer, address=address), learner)


# --- the machine ------------------------------------------------------------------------------------------------------


def _python() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    machine = f"{cores}, {platform.machine()}, {SIZE.show(memory)} of memory"
    return Finding("python", "ok", f"{platform.python_version()}, {sys.executable}; {machine}")


def _disk(store: Path) -> Iterator[Finding]:
    """Free space below `store`, and the time to make a megabyte durable there."""
    place = next(path for path in (store, *store.absolute().parents) if path.exists())
    if not place.is_dir():
        yield Finding("disk", "missing", f"{place.absolute()} is not a directory", "remove it or set run.dir elsewhere")
        return
    free = shutil.disk_usage(place).free
    found = f"{SIZE.show(free)} free at {place.absolute()}"
    if free < NO_DISK_BYTES:
        yield Finding("disk", "missing", found, "no run fits; free space, or set run.dir elsewhere")
        return
    advice = "a checkpoint has the size of three models and two are kept; free space, or set run.dir elsewhere"
    yield _optional("disk", free >= LOW_DISK_BYTES, found, advice)
    try:
        sync_s = _sync_s(place)
    except OSError as error:
        yield Finding("store", "missing", str(error), "choose a directory where files can be written and locked")
        return
    advice = "rounds wait for it; keep the syncer's state on a local disk"
    yield _optional("store", sync_s <= SLOW_SYNC_S, f"1 MB is durable after {1000 * sync_s:.1f} ms; locks work", advice)


def _optional(what: str, is_ok: bool, found: str, advice: str) -> Finding:
    """A check that a run does not depend on."""
    return Finding(what, "ok", found) if is_ok else Finding(what, "absent", found, advice)


def _sync_s(directory: Path) -> float:
    """The median time of a write and fsync. Raises OSError if writing, syncing or locking fails."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _ in range(NUM_SYNCS):
            started = time.monotonic()
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.monotonic() - started)
    return statistics.median(times)


# --- torch and packages -----------------------------------------------------------------------------------------------


def _torch(*, needs_cuda: bool) -> Iterator[Finding]:
    """torch and its backends; `needs_cuda`: the run file requires a CUDA device."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "missing", str(error), "training needs it; reinstall torch")
        return
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")
    yield _gpu(needs_cuda)
    yield _gloo()
    if torch.cuda.is_available():
        advice = "ranks on GPUs need it; NCCL_DEBUG=INFO says more"
        yield _group("nccl", torch.zeros(1, device="cuda"), advice)
        if find_spec("triton"):
            yield look_for_compiler()


def _gpu(needed: bool) -> Finding:
    import torch

    driver = DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.is_file() else None
    if torch.cuda.is_available():
        devices = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        names = ", ".join(f"{it.name} ({SIZE.show(it.total_memory)}, sm_{it.major}{it.minor})" for it in devices)
        return Finding("gpu", "ok", f"{names}; {driver or 'driver version unknown'}")
    state: State = "missing" if needed else "absent"
    if driver is None:
        return Finding("gpu", state, "no NVIDIA driver", 'learners train on the CPU; train.device = "cuda" fails')
    visible = "make the devices visible (CUDA_VISIBLE_DEVICES, docker run --gpus all)"
    advice = f"this torch cannot use it; install a CUDA build that is not newer than the driver, and {visible}"
    return Finding("gpu", state, driver, advice)


def _gloo() -> Finding:
    """A gloo group of this process, and whether other machines can reach the address of this host's name."""
    import torch

    found = _group("gloo", torch.zeros(1), f"learners of several ranks need it; {SET_INTERFACE}")
    if found.state != "ok" or "GLOO_SOCKET_IFNAME" in os.environ:
        return found
    name, address = socket.gethostname(), "no address"
    with suppress(OSError):
        address = socket.gethostbyname(name)
        if not ip_address(address).is_loopback:
            return found
    advice = f"ranks on other machines cannot reach it; give the name its address in /etc/hosts, or {SET_INTERFACE}"
    return Finding("gloo", "absent", f"{found.found}, but this host's name {name!r} is {address}", advice)


def _group(backend: str, value: "Tensor", advice: str) -> Finding:
    """A sum in a process group of this process alone."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, and not in its __all__
    try:
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
        try:
            dist.all_reduce(value)
            value.cpu()
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return Finding(backend, "missing", str(error).splitlines()[0], advice)
    return Finding(backend, "ok", "a group of one rank works")


def look_for_compiler() -> Finding:
    """A C compiler and Python's headers, with which Triton compiles its launchers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    lacking = [name for name, exists in (("C compiler", compiler), (str(header), header.is_file())) if not exists]
    if not lacking:
        return Finding("compiler", "ok", f"{compiler}, and Python's headers")
    advice = "Triton, which encodes on the GPU, fails without it; install gcc and Python's headers (python3-dev)"
    return Finding("compiler", "missing", f"no {' and no '.join(lacking)}", advice)


def _packages() -> Iterator[Finding]:
    """One finding for the required dependencies, one for each extra that is installed, and one for all others."""
    found, lacking = _versions("")
    if lacking:
        yield Finding("packages", "missing", f"without {lacking}", "reinstall diloco with its dependencies")
    else:
        yield Finding("packages", "ok", f"diloco {metadata.version('diloco')}; {found}")
    absent = []
    for name in metadata.metadata("diloco").get_all("Provides-Extra") or ():
        found, lacking = _versions(name)
        if name in FOR_DEVELOPERS:
            continue
        if lacking and INSTALLED not in lacking:
            absent.append(name)
        else:
            yield _optional(f"extra {name}", not lacking, found, f"without {lacking}; pip install 'diloco[{name}]'")
    if absent:
        yield Finding(OTHER_EXTRAS, "absent", f"{', '.join(absent)}: not installed; pip install 'diloco[NAME]'")


def _versions(extra: str) -> tuple[str, str]:
    """Of the packages that an extra requires ("": the package itself): the installed ones with their versions, and the
    missing or incompatible ones."""
    from packaging.requirements import Requirement

    installed, lacking = [], []
    for each in map(Requirement, metadata.requires("diloco") or ()):
        if (not each.marker.evaluate({"extra": extra})) if each.marker is not None else extra:
            continue
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            lacking.append(each.name)
            continue
        installed.append(f"{each.name} {version}")
        if not each.specifier.contains(version, prereleases=True):
            lacking.append(f"{each.name}{each.specifier}{INSTALLED}{version})")
    return ", ".join(installed), ", ".join(lacking)


# --- the connection to a syncer, and its port -------------------------------------------------------------------------


def _connection(syncer: RunAddress, learner: str | None) -> Iterator[Finding]:
    """A syncer's answer: whether it serves the run and accepts the keys, the round trip, and the clock difference."""
    from diloco.exchange.connection import Connection
    from diloco.exchange.probe import probe
    from diloco.exchange.wire import syncer_pb2 as pb

    try:
        with closing(Connection(syncer.address, keys=syncer.keys, insecure=syncer.insecure)) as connection:
            connection.call("control", "Describe", pb.DescribeRequest(run=syncer.run), pb.DescribeReply)
            if learner is not None:
                probe(connection, pb.ProbeHeader(run=syncer.run, learner=learner))
            trip_s, skew_s = min(_round_trip(connection, syncer.run) for _ in range(NUM_PINGS))
    except StandbyError as error:
        yield Finding("syncer", "ok", str(error))
        return
    except DilocoError as error:
        advice = "check the address, the run's name, the keys, and the firewall's rule for the port"
        yield Finding("syncer", "missing", str(error), advice)
        return
    accepts = "" if learner is None else f", and accepts these keys for {learner}"
    yield Finding("syncer", "ok", f"answers for run {syncer.run!r} in {1000 * trip_s:.1f} ms{accepts}")
    apart = f"{abs(skew_s):.3f} s {'ahead' if skew_s > 0 else 'behind'}, ± {trip_s / 2:.3f} s"
    advice = "certificates may be refused and reports put events in the wrong order; run an NTP client on both machines"
    yield _optional("clocks", abs(skew_s) <= MAX_SKEW_S, f"the syncer's clock is {apart}", advice)


def _round_trip(connection: "Connection", run: str) -> tuple[float, float]:
    """Seconds of the round trip, and seconds by which the syncer's clock is ahead."""
    from diloco.exchange.wire import syncer_pb2 as pb

    asked_at, started = time.time(), time.monotonic()
    reply = connection.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply)
    trip_s = time.monotonic() - started
    syncer_time_s: float = json.loads(reply.status)["time_s"]
    return trip_s, syncer_time_s - (asked_at + trip_s / 2)


def _port(syncer: RunAddress) -> Iterator[Finding]:
    """Whether a syncer with these settings can serve its address now."""
    from cryptography.x509 import load_pem_x509_certificate

    from diloco.exchange.key_pair import find_keys, hosts_of
    from diloco.exchange.wire.address import split_address
    from diloco.syncer.keys.auth import Authenticator, check_binding
    from diloco.syncer.keys.tls import read_syncer_keys

    try:
        keys = find_keys(syncer.keys, syncer.address, insecure=syncer.insecure)
        check_binding(syncer.address, keys=keys is not None, insecure=syncer.insecure)
        if keys is None:
            yield Finding("keys", "ok", "none, as loopback addresses and --insecure allow")
        else:
            directory = keys.required_directory()
            cert = read_syncer_keys(directory).cert
            Authenticator(syncer.run, keys=directory)
            expires = load_pem_x509_certificate(cert).not_valid_after_utc
            yield Finding("keys", "ok", f"for {', '.join(hosts_of(cert))}, until {expires:%Y-%m-%d}")
    except DilocoError as error:
        yield Finding("keys", "missing", str(error), "a syncer refuses to start with them")
    host, port = split_address(syncer.address)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        advice = "another process has the port, or the address is not this machine's; learners need this port only"
        yield Finding("port", "missing", f"{syncer.address}: {error}", advice)
    else:
        yield Finding("port", "ok", f"{syncer.address} is free; run doctor on a learner's machine to test the path")
