"""Build the source distribution, the wheel from it, and try the wheel where only what it declares is installed.

    .venv/bin/python .ci/package.py

The clean environment is a venv of its own. Its dependencies are hard links to the files of the distributions that the
wheel requires, directly or through others and without any extra: what diloco imports and does not declare is not there.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_EXTRAS = (
    ("--version",),
    ("--help",),
    ("methods",),
    ("plan", "scaling", "--parameters", "1e9", "--out", "scaling.html"),
    ("doctor", "--json"),
)
REFUSED = (("demo",), "pip install 'diloco[demo]'")

TWO_LEARNERS = """
import torch, diloco

def learn(index, exchange):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.Learner(model, optimizer, method=diloco.DiLoCo(sync_every=2), exchange=exchange) as learner:
        for step in range(4):
            model(torch.full((2, 4), float(index + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=2)
        return learner.global_state_dict()["weight"]

one, other = diloco.run_local(learn, learners=2)
assert torch.equal(one, other) and one.isfinite().all()
"""


def main() -> None:
    """Run every step; the first that fails ends it with its output."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="package-") as made:
        directory = Path(made)
        sdist = build_sdist(directory)
        check_sdist(sdist)
        wheel = build_wheel(sdist, directory)
        python = clean_environment(directory / "clean")
        run([sys.executable, "-m", "pip", "--isolated", "--python", str(python), "install", "--no-index", str(wheel)])
        try_out(python, directory)
    print("package: the sdist holds every tracked file; the wheel works with what it declares, without any extra")


def build_sdist(directory: Path) -> Path:
    """The source distribution of this tree."""
    build = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(directory)!r}))"
    return directory / run([sys.executable, "-c", build]).splitlines()[-1]


def check_sdist(sdist: Path) -> None:
    """Every tracked file is in it."""
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run(["git", "ls-files", "-z"]).split("\0")) - {""}
    if missing := sorted(tracked - packed):
        raise SystemExit(f"package: not in the sdist, see MANIFEST.in: {', '.join(missing[:10])}")


def build_wheel(sdist: Path, directory: Path) -> Path:
    """The wheel that the unpacked source distribution gives, with a long description whose links are absolute."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    source = directory / sdist.name.removesuffix(".tar.gz")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(directory),
        str(source),
    ]
    run(build)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        description = archive.read(name).decode()
    if relative := re.findall(r"\]\((?!https?://|#)[^)]+\)", description):
        raise SystemExit(f"package: the long description has relative links: {relative[:5]}")
    return wheel


def clean_environment(directory: Path) -> Path:
    """The interpreter of a venv with the declared dependencies, and without pip."""
    venv.create(directory)
    (site,) = directory.glob("lib/python*/site-packages")
    for name in closure("diloco"):
        for file in metadata.distribution(name).files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    os.link(file.locate(), target)
    return directory / "bin" / "python"


def closure(root: str) -> set[str]:
    """The distributions that one requires, directly or through others, without itself and its extras."""
    found: set[tuple[str, str]] = set()
    to_do = list(required(root, ""))
    while to_do:
        name, extra = to_do.pop()
        if (name, extra) not in found:
            found.add((name, extra))
            to_do += required(name, extra)
    return {name for name, _ in found}


def required(name: str, extra: str) -> Iterator[tuple[str, str]]:
    """The distributions that one with an extra ("": without any) requires here, each once per extra asked of it."""
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(requirement.name), each) for each in ("", *requirement.extras))


def try_out(python: Path, directory: Path) -> None:
    """The command line and two learners, in the clean environment."""
    command = str(python.with_name("diloco"))
    for arguments in WITHOUT_EXTRAS:
        run([command, *arguments], cwd=directory)
    run([str(python), "-W", "error", "-c", TWO_LEARNERS], cwd=directory)
    arguments, advice = REFUSED
    refused = subprocess.run([command, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    if refused.returncode != 2 or advice not in refused.stderr:
        raise SystemExit(f"package: diloco {arguments[0]} without extras should name them, and said: {refused.stderr}")


def run(command: Sequence[str], *, cwd: Path = ROOT) -> str:
    """Standard output of a command; ends with its output where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"package: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
