"""templates/: what one part of a template names is what another part makes, serves or mounts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.templates.test_templates import (
    KUBERNETES,
    TEMPLATES,
    batch_commands,
    compose_commands,
    kubernetes_commands,
    load,
    sky_commands,
    unit_commands,
)
from torch.distributed.run import get_args_parser

from diloco.config import load_config

RUN_FILE = tomllib.loads((TEMPLATES / "run.toml").read_text())
HOME = "/var/lib/diloco"


def option(words: list[str], name: str) -> list[str]:
    """The values of an option in a command."""
    return [after for word, after in pairwise(words) if word == name]


@pytest.mark.parametrize("kind", [compose_commands, kubernetes_commands, sky_commands, unit_commands, batch_commands])
def test_torchrun_takes_its_own_options(kind: Any) -> None:
    for words in kind():
        (start, *_) = [i + 1 for i, word in enumerate(words) if Path(word).name == "torchrun"] or [None]
        if start is not None:
            read = get_args_parser().parse_args(words[start:])
            assert (read.module, read.training_script) == (True, "diloco")
            assert read.training_script_args[:2] == ["train", "run.toml"]


# ------------------------------------------------------------------------------------------------------------- compose


def added(words: list[str], role: str) -> list[str]:
    """The names of `diloco keys add ROLE NAME…`, which prints no secret into the container's log."""
    assert words[:2] == ["add", role]
    assert words[-2:] == [">", "/dev/null"]
    return words[2:-2]


def test_what_composed_learners_dial_is_served_under_a_name_of_the_certificate() -> None:
    (whole,) = load(TEMPLATES / "compose.yaml")
    services = whole["services"]
    (made,) = services["keys"]["command"]
    init, learners_added, viewer_added = (line.split("diloco keys ")[1].split() for line in made.splitlines())
    (bound,) = option(services["syncer"]["command"], "--address")
    (looked_at,) = option(services["syncer"]["healthcheck"]["test"], "--address")
    host, _, port = looked_at.rpartition(":")
    assert bound == f"0.0.0.0:{port}"
    assert option(init, "--host") == [host]
    assert host in services
    assert option(services["syncer"]["healthcheck"]["test"], "--keys") == [
        f"keys/{name}" for name in added(viewer_added, "viewer")
    ]
    assert option(init, "--run") == [RUN_FILE["run"]["name"]]
    learners = {name: it["command"] for name, it in services.items() if it["command"][0] == "train"}
    assert list(learners) == added(learners_added, "learner") == list(RUN_FILE["learner"])
    assert [option(command, "--shard") for command in learners.values()] == [["0"], ["1"]]
    for name, command in learners.items():
        assert option(command, "--name") == [name]
        assert option(command, "--set") == [f"syncer.address={looked_at}"]
    for name, service in services.items():
        mounted = {it.split(":")[1]: it.split(":")[0] for it in service["volumes"]}
        own = {f"{HOME}/keys": "keys", f"{HOME}/run.toml": "./run.toml", f"{HOME}/runs": f"runs-{name}"}
        assert mounted == (own if name != "keys" else {f"{HOME}/keys": "keys"})


# ---------------------------------------------------------------------------------------------------------- Kubernetes


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every manifest that runs pods, and the template of its pods."""
    for path in KUBERNETES:
        for manifest in load(path):
            spec = manifest.get("spec", {})
            for job in spec.get("replicatedJobs", [{"template": {"spec": spec}}]):
                if "template" in job["template"]["spec"]:
                    yield manifest, job["template"]["spec"]["template"]


PODS = list(pods())


@pytest.mark.parametrize(("manifest", "pod"), PODS, ids=[manifest["kind"] for manifest, _ in PODS])
def test_pods_mount_what_they_have_where_the_run_file_says(manifest: dict[str, Any], pod: dict[str, Any]) -> None:
    volumes = {it["name"]: it for it in pod["spec"]["volumes"]}
    claims = [it["metadata"]["name"] for it in manifest["spec"].get("volumeClaimTemplates", ())]
    (container,) = pod["spec"]["containers"]
    mounts = {it["mountPath"]: it for it in container["volumeMounts"]}
    (keys,) = [path for path in mounts if path.startswith(f"{HOME}/keys/")]
    named = load_config(TEMPLATES / "run.toml", learner=None if manifest["kind"] == "StatefulSet" else Path(keys).name)
    assert Path(keys) == Path(HOME) / str(named.syncer.keys)
    assert set(mounts) - {"/dev/shm", keys} == {f"{HOME}/{name}" for name in ("run.toml", "runs")}
    assert {it["name"] for it in mounts.values()} == set(volumes) | set(claims)
    assert container["workingDir"] == HOME
    run = mounts[f"{HOME}/run.toml"]
    assert (run["subPath"], volumes[run["name"]]["configMap"]["name"]) == ("run.toml", "diloco-run")
    secret = volumes[mounts[keys]["name"]]["secret"]["secretName"]
    names = option(container["args"], "--name")
    if manifest["kind"] == "StatefulSet":
        assert (secret, names) == ("diloco-syncer", [])
        return
    assert pod["spec"]["restartPolicy"] in ("OnFailure", "Never")  # of a Job
    (name,) = names
    assert list(RUN_FILE["learner"]).index(name) == int(*option(container["args"], "--shard"))
    assert secret == volumes[mounts[f"{HOME}/runs"]["name"]]["persistentVolumeClaim"]["claimName"] == f"diloco-{name}"


def test_the_service_leads_to_the_syncer() -> None:
    service, syncer = load(TEMPLATES / "kubernetes" / "syncer.yaml")
    pod = syncer["spec"]["template"]
    assert service["spec"]["selector"] == syncer["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert syncer["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    (port,), (served,) = service["spec"]["ports"], container["ports"]
    assert port["targetPort"] == served["name"] == container["readinessProbe"]["tcpSocket"]["port"]
    assert option(container["args"], "--address") == [f"0.0.0.0:{served['containerPort']}"]
    assert RUN_FILE["syncer"]["address"].endswith(f":{port['port']}")


def test_the_nodes_of_a_jobset_meet_at_its_first_pod() -> None:
    _, jobset = load(TEMPLATES / "kubernetes" / "learner-jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = " ".join(container["command"])
    assert spec["parallelism"] == spec["completions"] == int(re.findall(r"--nnodes=(\d+)", command)[0])
    name, (port,) = jobset["metadata"]["name"], container["ports"]
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:{port['containerPort']}" in container["command"]
