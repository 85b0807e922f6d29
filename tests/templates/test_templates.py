"""templates/: each file by the checker of its kind, each `diloco` command in them by the command line, the run file by
its loader."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.docs.commands import parse

from diloco.cli import main
from diloco.config import load_config
from diloco.core.presets import method_from_table

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "templates"
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = sorted((TEMPLATES / "kubernetes").glob("*.yaml"))
COMPOSE = sorted(TEMPLATES.glob("compose*.yaml"))
UNITS = sorted((TEMPLATES / "systemd").glob("*.service"))
VERSION = "1.33"


def load(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


# ------------------------------------------------------------------------------------------------------------ commands


def shell_lines(text: str) -> Iterator[str]:
    """The lines of a script, those that end in a backslash with the next."""
    yield from re.sub(r"\\\n", " ", text).splitlines()


def script_commands(text: str) -> Iterator[list[str]]:
    for line in shell_lines(text):
        if re.search(r"(^|[\s/])diloco\s", line) and not line.lstrip().startswith("#"):
            yield shlex.split(line, comments=True)


def compose_commands() -> Iterator[list[str]]:
    (whole,), (gpu,) = load(TEMPLATES / "compose.yaml"), load(TEMPLATES / "compose.gpu.yaml")
    for name, service in whole["services"].items():
        own, overlaid = service.get("entrypoint", ["diloco"]), gpu["services"].get(name, {}).get("entrypoint")
        for entry_point in [own] if overlaid is None else [own, overlaid]:
            command = [*entry_point, *service["command"]]
            yield from script_commands(command[-1]) if command[0] == "sh" else [command]
        if "healthcheck" in service:
            yield service["healthcheck"]["test"][1:]


def kubernetes_commands() -> Iterator[list[str]]:
    def containers(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield from value.get("containers", [])
            for each in value.values():
                yield from containers(each)
        elif isinstance(value, list):
            for each in value:
                yield from containers(each)

    for path in KUBERNETES:
        for container in containers(load(path)):
            yield [*container["command"], *container["args"]]


def sky_commands() -> Iterator[list[str]]:
    for path in sorted((TEMPLATES / "skypilot").glob("*.yaml")):
        yield from script_commands(load(path)[0]["run"])


def unit_commands() -> Iterator[list[str]]:
    for path in UNITS:
        yield from (
            shlex.split(line.partition("=")[2]) for line in shell_lines(path.read_text()) if "ExecStart=" in line
        )


def batch_commands() -> Iterator[list[str]]:
    yield from script_commands((TEMPLATES / "slurm" / "learner.sbatch").read_text())


KINDS = [compose_commands, kubernetes_commands, sky_commands, unit_commands, batch_commands]
VALUES = {"shard": "1", "SHARD": "1", "i": "site-a", "@": "--json"}


def own_arguments(words: list[str]) -> list[str]:
    """What follows `diloco` in a command, up to the next command, with variables replaced."""
    start = next(i for i, word in enumerate(words) if Path(word).name == "diloco") + 1
    end = next(
        (i for i, word in enumerate(words) if i >= start and word in ("&", "&&", "||", "|", ";", ">")), len(words)
    )
    return [
        re.sub(r"\$\{?(\w+|@)\}?|%(i)", lambda m: VALUES.get(m[1] or m[2], "site-a"), it) for it in words[start:end]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_is_one(kind: Any) -> None:
    commands = [own_arguments(words) for words in kind()]
    assert commands
    for arguments in commands:
        parse(arguments)
    trains = [arguments for arguments in commands if arguments[0] == "train"]
    for arguments in trains:
        assert "--supervised" in arguments  # who starts it starts it again
        assert arguments[arguments.index("--initialise") + 1] == "if-empty"  # of all learners, the first gives a model


# ------------------------------------------------------------------------------------------------------------ run file


@pytest.mark.parametrize("learner", [None, "site-a", "site-b"])
def test_the_run_file_is_one(learner: str | None) -> None:
    config = load_config(TEMPLATES / "run.toml", learner=learner)
    assert method_from_table(config.method).quorum.at_least == 1  # one learner goes on while the other is away
    assert config.checkpoint.every_steps > 0
    assert config.syncer.keys == f"keys/{learner or 'syncer'}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The directories and files that the first commands of the README write."""
    directory = tmp_path_factory.mktemp("run")
    commands = [
        words for words in script_commands((TEMPLATES / "README.md").read_text()) if words[:2] == ["diloco", "keys"]
    ]
    assert [command[2] for command in commands] == ["init", "add", "add"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for command in commands:
            with pytest.raises(SystemExit) as ended:
                main(command[1:])
            assert not ended.value.code
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_keys_that_the_run_file_names_are_made(keys: set[str]) -> None:
    named = set(re.findall(r'"(keys/[^"]+)"', (TEMPLATES / "run.toml").read_text()))
    assert named <= keys


# -------------------------------------------------------------------------------------------------- Docker and compose

INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}


def test_the_dockerfile_copies_what_there_is_and_installs_what_is_declared() -> None:
    text = (TEMPLATES / "Dockerfile").read_text()
    steps = [line.split(maxsplit=1) for line in shell_lines(text) if line.strip() and not line.startswith("#")]
    assert {name for name, _ in steps} == INSTRUCTIONS
    ignored = (TEMPLATES / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]
    assert {f"!{source}" for source in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    extras = re.search(r'ARG EXTRAS="(\w+)"', text)
    assert extras is not None
    assert extras[1] in (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    for name, rest in steps:
        if name in ("ENTRYPOINT", "CMD"):
            assert json.loads(rest)  # the form without a shell, so that signals arrive
        if name == "RUN" and "pip install" in rest:
            assert any("gcc" in before for _, before in steps[: steps.index([name, rest])])  # Triton needs it
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_fit_the_published_schema(path: Path) -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text())
    (whole,) = load(path)
    jsonschema.Draft202012Validator(schema).validate(whole)
    service = next(iter(whole["services"].values()))
    service["comand"] = service.pop("command", [])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(whole)


def test_what_compose_files_mount_and_wait_for_is_there() -> None:
    (whole,) = load(TEMPLATES / "compose.yaml")
    (gpu,) = load(TEMPLATES / "compose.gpu.yaml")
    assert set(gpu["services"]) <= set(whole["services"])
    for service in whole["services"].values():
        assert (TEMPLATES / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert set(service.get("depends_on", {})) <= set(whole["services"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (TEMPLATES / source).is_file() if source.startswith(".") else source in whole["volumes"]


# ---------------------------------------------------------------------------------------------------------- Kubernetes


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raise where a manifest does not fit the schema of its kind; JobSet by its own, and its Jobs as Jobs."""
    if manifest["kind"] != "JobSet":
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / "jobset.json").read_text())).validate(manifest)
    for job in manifest["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, VERSION, strict=True)


MANIFESTS = [(path.name, manifest) for path in KUBERNETES for manifest in load(path)]


@pytest.mark.parametrize(("name", "manifest"), MANIFESTS, ids=[f"{name}-{it['kind']}" for name, it in MANIFESTS])
def test_kubernetes_manifests_fit_their_schemas(name: str, manifest: dict[str, Any]) -> None:
    check_manifest(manifest)
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check_manifest({**manifest, "spec": {**manifest["spec"], "replicaz": 1}})


def test_an_unknown_kind_fails() -> None:
    for unknown in ({"apiVersion": "v1", "kind": "Pood"}, {"apiVersion": "jobset.x-k8s.io/v1", "kind": "JobSet"}):
        with pytest.raises((kubernetes_validate.utils.SchemaNotFoundError, jsonschema.ValidationError)):
            check_manifest({**unknown, "metadata": {"name": "x"}, "spec": {}})


def test_what_manifests_mount_is_made_by_the_commands_of_the_page(keys: set[str]) -> None:
    made: dict[str, set[str]] = {}
    for line in re.findall(r"^    kubectl create (.*)$", (TEMPLATES / "README.md").read_text(), re.MULTILINE):
        words = line.split()
        files = [word.removeprefix("--from-file=") for word in words if word.startswith("--from-file=")]
        assert all(file in keys or (TEMPLATES / file).is_file() for file in files)
        made[words[-len(files) - 1]] = {Path(file).name for file in files}
    text = "".join(path.read_text() for path in KUBERNETES)
    assert set(re.findall(r"secretName: (\S+)", text)) | {"diloco-run"} == set(made)
    for name in ("syncer", "site-a", "site-b"):
        assert made[f"diloco-{name}"] == {name}
        assert f"mountPath: /var/lib/diloco/keys/{name}\n" in text
    claims = [it["metadata"]["name"] for _, it in MANIFESTS if it["kind"] == "PersistentVolumeClaim"]
    assert sorted(re.findall(r"claimName: (\S+)", text)) == sorted(claims)


# ------------------------------------------------------------------------------------------------- systemd and scripts


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (package systemd)"
)
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_verified_by_systemd(path: Path, tmp_path: Path) -> None:
    def verify(text: str) -> str:
        name = path.name.replace("@", "@site-a")
        (tmp_path / name).write_text(re.sub(r"/opt/diloco/bin/\w+", sys.executable, text))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
            capture_output=True, text=True, check=False,
            env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        )  # fmt: skip
        return "".join(line for line in (done.stdout + done.stderr).splitlines(True) if name in line)

    text = path.read_text()
    assert verify(text) == ""
    assert "Restrat" in verify(text.replace("Restart=", "Restrat="))


def test_the_batch_script_is_bash() -> None:
    script = TEMPLATES / "slurm" / "learner.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
