"""templates/slurm/learner.sbatch on a real Slurm of one node, whose daemons this test starts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from benchmarks import processes

from diloco.config import load_config
from diloco.core.presets import method_from_table
from diloco.event_log import read_events
from diloco.events import Initialised, Joined, Stepped
from diloco.syncer.server import Options, Syncer

BATCH = Path(__file__).parents[2] / "templates" / "slurm" / "learner.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
LACKING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # ranks that import torch, twice
    pytest.mark.skipif(bool(LACKING), reason=f"Slurm is not installed (no {', '.join(LACKING)}): apt-get install "
                       "slurmctld slurmd slurm-client munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's node daemon runs jobs as other users, so it needs root"),
]  # fmt: skip

RUN = """
[run]
name = "slurm"
tokens = 100_000_000
steps = {steps}
dir = "runs"

[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2

[data]
kind = "text"
paths = ["text.txt"]
sequence_length = 32

[train]
global_batch = 8
log_every_steps = 1

[schedule]
warmup_steps = 4
steps = 1000

[evaluate]
sequences = 16

[method]
preset = "DiLoCo"
sync_every = 6

[syncer]
address = "{address}"
"""

SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
BatchStartTimeout=1
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=64 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""
"""A node that says it has the processors and devices that the template asks for."""


until = partial(processes.until, limit_s=100.0)


def free_ports(number: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.fixture
def slurm() -> Iterator[Mapping[str, str]]:
    """The environment in which Slurm's commands find a cluster of one node. Its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        yield from cluster(Path(directory))


def cluster(directory: Path) -> Iterator[Mapping[str, str]]:
    for name in ("state", "spool"):
        (directory / name).mkdir(parents=True)
    (directory / "slurm.conf").write_text(
        SLURM.format(host=socket.gethostname(), ports=free_ports(2), directory=directory)
    )
    devices = [directory / f"gpu{index}" for index in range(8)]
    for device in devices:
        device.touch()
    (directory / "gres.conf").write_text(f"NodeName=localhost Name=gpu File={directory}/gpu[0-7]\n")
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment = {**kept, "PATH": path, "SLURM_CONF": str(directory / "slurm.conf")}
    places = [
        f"--{name}={directory}/munge.{name.partition('-')[0]}"
        for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    daemons = [
        ["munged", "--force", "--foreground", f"--key-file={directory}/munge.key", *places],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "localhost"],
    ]
    running = []
    try:
        for command in daemons:
            running.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            if command[0] == "munged":
                until((directory / "munge.socket").exists, "munged does not serve")
        until(lambda: "idle" in run(environment, "sinfo", "--noheader", "--format=%T", check=False), "no idle node")
        yield environment
        run(environment, "scancel", "--user=root")  # of this cluster
        until(lambda: not run(environment, "squeue", "--noheader"), "jobs do not end")
    finally:
        for daemon in reversed(running):
            daemon.send_signal(signal.SIGTERM)
        for daemon in running:
            daemon.wait(timeout=300)


def run(environment: Mapping[str, str], *command: str, cwd: Path | None = None, check: bool = True) -> str:
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout.strip()


def test_a_learner_of_two_ranks_that_runs_out_of_time_is_queued_again_and_goes_on(
    slurm: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))
    log, events = tmp_path / "log", tmp_path / "runs" / "site-a" / "events.jsonl"
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN.format(steps=1_000_000, address="127.0.0.1:1"))
    method = method_from_table(load_config(run_file).method)

    def job_state() -> str:
        shown = run(slurm, "scontrol", "show", "job", job)
        return next(word for word in shown.split() if word.startswith("JobState=")).removeprefix("JobState=")

    def steps() -> list[int]:
        return [event.step for event in read_events(events) if isinstance(event, Stepped)] if events.exists() else []

    with Syncer("slurm", method, Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        run_file.write_text(RUN.format(steps=1_000_000, address=syncer.address))
        # The node's processors are fewer than the template asks for; the ranks are on the CPU.
        submit = ["sbatch", "--parsable", f"--output={log}", str(BATCH), "site-a", "0"]
        environment = {**slurm, "RANKS_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
        job = run(environment, *submit, cwd=tmp_path)

        def failed() -> bool:
            return job_state() in ("FAILED", "COMPLETED", "CANCELLED")

        until(lambda: len(steps()) > 3 or failed(), f"the learner took no step: {job_state()}")
        assert not failed(), log.read_text()
        run(slurm, "scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@120 sends
        until(lambda: job_state() == "PENDING" or failed(), "the job is not queued again")
        assert not failed(), log.read_text()
        (checkpoint,) = (tmp_path / "runs" / "site-a" / "checkpoints").iterdir()
        step = int(checkpoint.name.removeprefix("step-"))
        run_file.write_text(RUN.format(steps=step + 4, address=syncer.address))
        until(lambda: "idle" in run(slurm, "sinfo", "--noheader", "--format=%T"), "the first start does not end")
        # Slurm lets a job that is queued again wait for two minutes. It cannot start in the second of its end.
        run(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now+3")
        until(failed, "the learner does not end")
    said = log.read_text()
    assert job_state() == "COMPLETED", said
    assert "site-a trained" in said
    assert steps()[-1] == step + 4
    heard = list(read_events(tmp_path / "state" / "events.jsonl"))
    assert sum(isinstance(event, Initialised) for event in heard) == 1
    assert [event.step for event in heard if isinstance(event, Joined)][-1] == step  # it brought its checkpoint
