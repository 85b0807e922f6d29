"""The frame holds: public names, light imports, the tree of errors, the command line, and what the repository may
contain."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import diloco
from diloco import errors
from diloco.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "diloco"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "diloco", *arguments)


# ------------------------------------------------------------------------------------------------------- public names


@pytest.mark.parametrize("name", diloco.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(diloco, name) is getattr(diloco, name)


def test_public_names_are_listed_once_and_no_other_is_public() -> None:
    assert len(set(diloco.__all__)) == len(diloco.__all__)
    assert set(diloco.__all__) <= set(dir(diloco))
    for name in diloco.__all__:
        getattr(diloco, name)
    public = {name for name, value in vars(diloco).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public - {"TYPE_CHECKING"} == {name for name in diloco.__all__ if name not in ("errors", "__version__")}


def test_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.asname or alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared | {"__version__", "errors"} == set(diloco.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Learnr'"):
        diloco.Learnr  # noqa: B018


def test_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


# ------------------------------------------------------------------------------------------------------ light imports


@pytest.mark.parametrize("statement", [
    "import diloco",
    "import diloco; dir(diloco); diloco.__version__; diloco.errors.DilocoError",
    "import diloco.errors",
    "import diloco.event_log",
    "import diloco.config",
    "import diloco.cli",
    *(f"import diloco.cli.{name}" for name in COMMANDS),
])  # fmt: skip
def test_import_leaves_torch_alone(statement: str) -> None:
    done = run(
        "-c",
        f"import sys; {statement}; print(*sorted({{'torch', 'transformers', 'numba', 'numpy'}} & set(sys.modules)))",
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_help_is_light_and_names_every_command() -> None:
    code = (
        "import sys\n"
        "from diloco.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(*sorted({'torch', 'numpy', 'pydantic', 'grpc', 'tomlkit'} & set(sys.modules)), file=sys.stderr)"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert all(re.search(rf"^\W*{name}\s+\w", done.stdout, re.MULTILINE) for name in COMMANDS)


# -------------------------------------------------------------------------------------------------- import directions


def test_core_imports_torch_numpy_the_standard_library_and_errors_only() -> None:
    """And Triton, torch's own compiler on GPUs, where it is there; and BLAKE3, for digests."""
    strangers, always = [], sys.stdlib_module_names | {"torch", "numpy"}
    elsewhere = {"triton_blocks.py": {"triton"}, "layout.py": {"blake3"}}
    for path in sorted((SOURCE / "core").rglob("*.py")):
        allowed = always | elsewhere.get(path.name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            strangers += [
                f"{path.name}: {name}" for name in names
                if name.split(".")[0] not in allowed and not re.match(r"diloco\.(core|errors)(\.|$)", name)
            ]  # fmt: skip
    assert strangers == []


# ------------------------------------------------------------------------------------------------------------- README


def contributing(title: str) -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def imported(module: str) -> set[str]:
    """What a module of core or protocol imports of both, as paths below the package; codecs and merges apart."""
    names = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse((SOURCE / module).read_text()))
        if isinstance(node, ast.ImportFrom) and re.match(r"diloco\.(core|protocol)\b", node.module or "")
        for alias in node.names
    ]
    found = set()
    for name in names:
        below = Path(*name.split(".")[1:])
        candidates = (Path(f"{below}.py"), Path(f"{below.parent}.py"), below.parent / "__init__.py")
        found.add(next(each for each in candidates if (SOURCE / each).is_file()).as_posix())
    return {each for each in found if not each.startswith(("core/codecs/", "core/merges/"))}


def test_the_reading_lists_are_closed_under_imports_and_whole() -> None:
    listed: list[str] = []
    lists = re.compile(r"^.*?`(core|protocol)/`: (.*?)\n\n", re.MULTILINE | re.DOTALL)
    for room, names in lists.findall(contributing("Reading the algorithm") + "\n\n"):
        for module in (f"{room}/{name}" for name in re.findall(r"`([\w/]+\.py)`", names)):
            assert imported(module) <= set(listed), module
            listed.append(module)
    assert len(listed) == len(set(listed))
    paths = (path for room in ("core", "protocol") for path in (SOURCE / room).rglob("*.py"))
    there = {path.relative_to(SOURCE).as_posix() for path in paths}
    apart = {each for each in there if re.match(r"core/(codecs|merges)/", each)}
    empty = {each for each in there if not imported(each) and each.endswith("__init__.py")}
    assert there - apart - empty == set(listed) - empty


def test_the_tree_of_rooms_is_the_real_one() -> None:
    tree = contributing("Packages").partition("    src/diloco/\n")[2].partition("    examples/")[0]
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(re.findall(r"(\w+)/  ", tree))
    for named in re.findall(r"(\w+)/  ", tree):
        assert list(SOURCE.glob(f"**/{named}/__init__.py")), named


# ------------------------------------------------------------------------------------------------------------- errors


def test_documented_tree_of_errors_is_the_real_one() -> None:
    documented = []
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^    ([│ ├└─]*)([A-Z]\w*Error)\b", line):
            depth = len(found[1]) // 4
            path = [*path[:depth], found[2]]
            documented.append((found[2], path[depth - 1] if depth else "Exception"))
    real = {
        (
            name,
            next(base.__name__ for base in cls.__bases__ if issubclass(base, errors.DilocoError) or base is Exception),
        )
        for name, cls in vars(errors).items()
        if inspect.isclass(cls)
    }
    assert len(documented) == len(set(documented))
    assert set(documented) == real


def test_every_error_is_documented() -> None:
    for name, cls in vars(errors).items():
        if inspect.isclass(cls):
            assert cls.__doc__, name


def test_a_foreign_error_becomes_one_sentence_with_its_first_line_and_advice() -> None:
    with pytest.raises(errors.StoreError, match=r"^cannot read it \(disk on fire\); call for help$") as caught:
        with errors.translated(OSError, errors.StoreError, "cannot read it", "call for help"):
            raise OSError("disk on fire\nsecond line")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(errors.StoreError, match=r"^cannot read it \(No such file or directory: 'x'\); call for help$"):
        with errors.translated(OSError, errors.StoreError, "cannot read it", "call for help"):
            raise FileNotFoundError(2, "No such file or directory", "x")
    with pytest.raises(KeyError), errors.translated(OSError, errors.StoreError, "cannot read it", "call for help"):
        raise KeyError("a defect")


# ------------------------------------------------------------------------------------------------------- command line


def test_every_command_file_is_a_command() -> None:
    files = {path.stem for path in (SOURCE / "cli").glob("*.py") if not path.stem.startswith("_")}
    packages = {path.parent.name for path in (SOURCE / "cli").glob("*/__init__.py")}
    assert files | packages == set(COMMANDS)


Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line in this process: its exit code and what it writes on standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code or 0, *capfd.readouterr()

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help_and_the_listed_summary(name: str, call: Call) -> None:
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert f"diloco {name}" in out
    assert COMMANDS[name] in out


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_option_is_wrong_use(name: str, call: Call) -> None:
    code, out, err = call(name, "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err


def test_unknown_command_is_wrong_use_and_names_the_nearest() -> None:
    done = run_cli("metods")
    assert (done.returncode, done.stdout) == (2, "")
    assert "methods" in done.stderr


def test_no_command_is_wrong_use() -> None:
    assert run_cli().returncode == 2


def test_version() -> None:
    assert run_cli("--version").stdout == f"diloco {diloco.__version__}\n"


@pytest.mark.parametrize(("raised", "exit_code", "stderr"), [
    ("diloco.errors.ConfigError('mix is 2; use one in 0..1.')", 2, "diloco: mix is 2; use one in 0..1.\n"),
    ("diloco.errors.StoreError('the disk is full; free some.')", 1, "diloco: the disk is full; free some.\n"),
    ("KeyboardInterrupt", 130, ""),
])  # fmt: skip
def test_errors_become_exit_codes(raised: str, exit_code: int, stderr: str) -> None:
    done = run(
        "-c",
        f"""
import diloco, diloco.cli.methods
def command(): raise {raised}
diloco.cli.methods.command = command
diloco.cli.main(["methods"])
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["methods", "--json"], ["--version"]])
def test_standard_output_without_space_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "diloco", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "diloco: cannot write to standard output (No space left on device); redirect it elsewhere.\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_foreign_errors_propagate() -> None:
    done = run(
        "-c",
        """
import diloco.cli.methods
def command(): raise ZeroDivisionError("seven")
diloco.cli.methods.command = command
diloco.cli.main(["methods"])
""",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: seven\n")


def test_methods_prints_resolved_presets_with_their_papers(call: Call) -> None:
    from diloco.core.method import Method
    from diloco.core.presets import PRESETS

    done = run_cli("methods", "--json")
    assert done.returncode == 0
    printed = json.loads(done.stdout)
    assert [Method.from_dict(values) for values in printed] == [preset() for preset in PRESETS.values()]
    assert all(values["paper"] for values in printed)
    code, table, err = call("methods")
    assert (code, err) == (0, "")
    assert all(name in table for name in PRESETS)
    assert "2501.18512" in table
    rows: dict[str, set[str]] = {}
    for line in table.splitlines():
        name, *cells = line.split() or [""]
        rows.setdefault(name, set()).update(cells)
    assert (rows["screen"], rows["offsets"]) == ({"none"}, {"(p+1)·H/P"})  # what None stands for
    assert rows["up"] == {preset().up.name for preset in PRESETS.values()}


# --------------------------------------------------------------------------------------------------------- repository


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_local_path_is_in_the_repository() -> None:
    local = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path != Path(__file__).resolve() and local.search(text := path.read_text(errors="replace"))
        for number, line in enumerate(text.splitlines(), start=1)
        if local.search(line)
    ]
    assert found == []


def test_constraints_pin_every_line_and_name_no_place() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", pin) for pin in pins)
    assert any(pin.startswith("torch==") for pin in pins)


def test_generated_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    wire = "diloco/exchange/wire"
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    done = run("-m", "grpc_tools.protoc", f"-I{ROOT / 'src'}", *outputs, f"{wire}/syncer.proto")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("syncer_pb2.py", "syncer_pb2.pyi"):
        assert (tmp_path / wire / name).read_text() == (ROOT / "src" / wire / name).read_text(), "run make proto"
