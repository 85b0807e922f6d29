"""`diloco doctor`: what it finds on a machine that has everything, and what it says of each thing that fails."""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import diloco
from diloco.cli import main
from diloco.cli.doctor import look_for_compiler
from diloco.demo.plan import free_port
from diloco.errors import ConfigError
from diloco.exchange.key_pair import key_line, read_key_pair
from diloco.syncer.server import Options, Syncer

Findings = dict[str, dict[str, str]]
Doctor = Callable[..., tuple[object, Findings]]


@pytest.fixture
def doctor(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Doctor:
    """The command: its exit code, and its findings by name."""

    def call(*arguments: object) -> tuple[object, Findings]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--json", "--dir", str(tmp_path), *map(str, arguments)])
        out, err = capfd.readouterr()
        assert out, err
        said = json.loads(out)
        found = {finding["what"]: finding for finding in said["findings"]}
        assert said["ok"] is (ended.value.code in (None, 0)) is all(it["state"] != "missing" for it in found.values())
        return ended.value.code or 0, found

    return call


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    path = tmp_path / "run.toml"
    keys = tmp_path / "keys"
    path.write_text(
        f"run = {{name = 'demo', tokens = 1_000_000, dir = '{tmp_path / 'run'}'}}\n"
        f"[syncer]\nkeys = '{keys}/syncer'\n[learner.site-a]\nsyncer.keys = '{keys}/site-a'\n"
    )
    return path


def make_keys(directory: Path) -> None:
    main_exits("keys", "init", "--run", "demo", "--host", "127.0.0.1", "--dir", directory)
    main_exits("keys", "add", "learner", "site-a", "--dir", directory)


def main_exits(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code


@pytest.fixture
def syncer(run_file: Path, tmp_path: Path) -> Iterator[Syncer]:
    options = Options("127.0.0.1:0", tmp_path / "state", tmp_path / "keys" / "syncer")
    with Syncer("demo", diloco.DiLoCo(), options) as serving:
        yield serving


def test_here_is_what_the_suite_needs(doctor: Doctor, capfd: pytest.CaptureFixture[str]) -> None:
    code, found = doctor()
    assert code == 0
    for what in ("python", "disk", "store", "torch", "gloo", "packages"):
        assert found[what]["state"] != "missing", found[what]
    assert torch.__version__ in found["torch"]["found"]
    assert f"diloco {diloco.__version__}" in found["packages"]["found"]
    assert found["gpu"]["state"] == ("ok" if torch.cuda.is_available() else "absent")
    assert found["extra train"]["found"].startswith("transformers ")
    assert found.pop("other extras", {}).get("state", "absent") == "absent"
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "ok")
    main_exits("doctor")
    plain = capfd.readouterr().out
    assert all(finding["what"] in plain for finding in found.values())
    assert "nothing required is missing" in plain


def test_a_syncer_answers_with_its_round_trip_and_clock(doctor: Doctor, syncer: Syncer, run_file: Path) -> None:
    code, found = doctor(run_file, "--address", syncer.address, "--name", "site-a")
    assert code == 0
    assert "for run 'demo'" in found["syncer"]["found"]
    assert "accepts these keys for site-a" in found["syncer"]["found"]
    assert found["clocks"]["state"] == "ok"  # one machine has one clock
    assert "±" in found["clocks"]["found"]


@pytest.mark.parametrize(("arguments", "what", "said"), [
    (["--name", "site-b", "--keys", "keys/site-a"], "syncer", "may speak for learner 'site-a' only, not for 'site-b'"),
    (["--name", "site-b"], "syncer", "has the role 'standby' and this needs 'learner'"),
    (["--run", "other"], "syncer", "other"),
    (["--set", "syncer.keys='keys'"], "syncer", "cannot read the key keys/key.pem"),
])  # fmt: skip
def test_what_a_syncer_refuses_is_said_in_its_words(
    doctor: Doctor, syncer: Syncer, run_file: Path, arguments: list[str], what: str, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(run_file.parent)
    code, found = doctor(run_file, "--address", syncer.address, *arguments)
    assert code == 1
    assert (found[what]["state"], said in found[what]["found"]) == ("missing", True), found[what]
    assert "clocks" not in found


def test_no_syncer_at_the_address(doctor: Doctor, run_file: Path) -> None:
    code, found = doctor(run_file, "--address", "127.0.0.1:1")
    assert (code, found["syncer"]["state"]) == (1, "missing")
    assert "nothing listens at 127.0.0.1:1" in found["syncer"]["found"]
    code, found = doctor(run_file, "--address", "syncer.invalid:7700")  # RFC 6761: this name never exists
    assert (code, found["syncer"]["state"]) == (1, "missing")
    assert "the host name 'syncer.invalid' of the syncer is not known here" in found["syncer"]["found"]


def test_one_of_two_addresses_answers(doctor: Doctor, syncer: Syncer, run_file: Path) -> None:
    main_exits("keys", "add", "viewer", "eye", "--dir", run_file.parent / "keys")
    line = key_line(read_key_pair(run_file.parent / "keys" / "eye"))
    with pytest.raises(SystemExit, match="^1$"):
        main(["doctor", "--run", "demo", "--address", f"{syncer.address},127.0.0.1:1", "--keys", line])


def test_the_machine_of_the_syncer(doctor: Doctor, run_file: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", int(address.partition(":")[2]))):
        code, found = doctor(run_file, "--serve", address)
        assert (code, found["port"]["state"]) == (1, "missing")
        assert found["keys"]["found"].startswith("for 127.0.0.1, until ")
    code, found = doctor(run_file, "--serve", address)
    assert (code, found["port"]["state"], found["keys"]["state"]) == (0, "ok", "ok")
    assert "syncer" not in found


def test_a_syncer_that_would_be_refused(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "open.toml"
    path.write_text("run = {name = 'demo', tokens = 1_000_000}\n")
    code, found = doctor(path, "--serve", "0.0.0.0:0")
    assert (code, found["keys"]["state"]) == (1, "missing")
    assert "has no keys" in found["keys"]["found"]
    code, found = doctor(path, "--serve", "0.0.0.0:0", "--set", "syncer.keys='none'")
    assert (code, found["keys"]["state"]) == (1, "missing")


def test_a_key_of_another_certificate(doctor: Doctor, run_file: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "others")
    own = tmp_path / "keys" / "syncer"
    options = Options("127.0.0.1:0", tmp_path / "state", own)

    def refused(said: str) -> None:
        code, found = doctor(run_file, "--serve", "127.0.0.1:0")
        assert (code, found["keys"]["state"], found["port"]["state"]) == (1, "missing", "ok")
        assert said in found["keys"]["found"]
        with pytest.raises(ConfigError, match=said):
            Syncer("demo", diloco.DiLoCo(), options)

    (own / "key.pem").unlink()
    refused("cannot read the key")
    shutil.copy(tmp_path / "others" / "syncer" / "key.pem", own / "key.pem")
    refused("is not the key of")
    (own / "key.pem").chmod(0o644)
    refused("is open to every user of this machine")


def test_clocks_that_are_apart(doctor: Doctor, syncer: Syncer, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(time=lambda: time.time() - 7.0, monotonic=time.monotonic)
    monkeypatch.setattr("diloco.cli.doctor.time", slow)
    code, found = doctor(run_file, "--address", syncer.address, "--name", "site-a")
    assert (code, found["clocks"]["state"]) == (0, "absent")
    assert found["clocks"]["found"].startswith(("the syncer's clock is 7.", "the syncer's clock is 6.9"))
    assert "ahead" in found["clocks"]["found"]


def test_a_directory_where_no_run_fits(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    code, found = doctor("--dir", tmp_path / "file" / "run")
    assert (code, found["disk"]["state"]) == (1, "missing")
    assert "file is not a directory" in found["disk"]["found"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=2**40, free=10**7))
    code, found = doctor()
    assert (code, found["disk"]["state"], "store" in found) == (1, "missing", False)
    assert found["disk"]["found"].startswith("10 MB free at")


def test_a_host_whose_name_leads_nowhere(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.gethostbyname", lambda _: "127.0.1.1")
    code, found = doctor()
    assert (code, found["gloo"]["state"]) == (0, "absent")
    assert "is 127.0.1.1" in found["gloo"]["found"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor()[1]["gloo"]["state"] == "ok"


def test_what_triton_compiles_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr("shutil.which", lambda _: None)
    found = look_for_compiler()
    assert (found.state, found.found) == ("missing", f"no C compiler and no {tmp_path / 'Python.h'}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", "cc")
    assert look_for_compiler().state == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_that_asks_for_cuda_fails_without_it(doctor: Doctor, syncer: Syncer, run_file: Path) -> None:
    code, found = doctor(run_file, "--address", syncer.address, "--set", "train.device=cuda")
    assert (code, found["gpu"]["state"]) == (1, "missing")


@pytest.mark.parametrize("arguments", [["--address", "127.0.0.1:1"], ["--serve", ":1"], ["--set", "run.name=x"]])
def test_wrong_use(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("diloco: --")


def test_packages_that_are_missing_or_too_old(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "torch>=2.9", "grpcio>=1000", 'no-such-package; extra == "train"', 'rich<1; extra == "train"',
        'elsewhere; sys_platform == "plan9"', 'no-such-package; extra == "trl"', 'rich; extra == "trl"',
        'no-such-package; extra == "eval"',
    ]  # fmt: skip
    monkeypatch.setattr("importlib.metadata.requires", lambda _: declared)
    code, found = doctor()
    assert (code, found["packages"]["state"]) == (1, "missing")
    assert found["packages"]["found"].startswith("without grpcio>=1000 (installed 1.")
    assert found["extra train"]["state"] == "absent"
    assert "without no-such-package, rich<1 (installed " in found["extra train"]["advice"]
    assert next(iter(found)) == "packages"  # what is wrong comes first
    assert list(found)[-1] == "other extras"
    assert found["other extras"]["found"] == "trl, eval: not installed; pip install 'diloco[NAME]'"
