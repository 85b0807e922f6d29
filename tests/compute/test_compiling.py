"""What compiled loops need of a machine: Numba, and a place for what was compiled, or none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.compute import compiling
from diloco.core import arithmetic
from diloco.errors import ConfigError

ENCODE = """
import hashlib, logging
logging.basicConfig(level=logging.INFO)
import torch
from diloco.core import arithmetic
from diloco.core.codecs import BF16
arithmetic.choose("compiled")
print(hashlib.sha256(BF16().encode(torch.arange(1000.0)).numpy()).hexdigest())
"""

EVERYTHING = """
import torch
from diloco.core import arithmetic
from diloco.core.adopt import Mix
from diloco.core.codecs import E3M0
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import Encoded, RadialDirectional, merge_into
from diloco.core.outer import Nesterov
arithmetic.choose("compiled")
x, codec = torch.linspace(-1, 1, 1000), E3M0()
contributions = [Encoded(name, (codec.encode(x),), 1.0) for name in "ab"]
merge_into(delta := torch.empty(1000), RadialDirectional(), codec, contributions, (Placement(TensorSpec("w", (1000,), "float32"), 0),))
outer = Nesterov()
outer.step(outer.init(1000), x, delta)
Mix(0.5).adopt_into(x.clone(), x, x)
codec.decode(contributions[0].payloads[0], 1000)
"""  # noqa: E501

OWN_FORMULAS = """
import functools, numba, torch
from diloco.core import adopt, arithmetic, outer
arithmetic.choose("compiled")
def stepped(mu, lr, theta, delta, momentum):
    return theta - lr * delta, momentum
class Nesterov(outer.Nesterov):
    formula = staticmethod(WRAPPED(stepped))
class Mix(adopt.Mix):
    formula = staticmethod(numba.vectorize(lambda a, b, local, global_, origin: global_ + FACTOR * local))
one = Nesterov(lr=0.5)
print(one.step(one.init(1), torch.ones(1), torch.ones(1))[0].item())
Mix(0.5).adopt_into(own := torch.ones(1), torch.ones(1), torch.ones(1))
print(own.item())
"""

WITHOUT_NUMBA = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numba":
            raise ImportError("no numba here")
sys.meta_path.insert(0, Blocker())
"""

CHOOSE = "try: arithmetic.choose('compiled')\nexcept arithmetic.ConfigError as error: print(error)"


def ran(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def files_of(cache: Path) -> dict[Path, int]:
    """The files of a cache, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_loops_are_compiled_once_a_machine_and_anew_where_their_files_are_damaged(tmp_path: Path) -> None:
    first = ran(ENCODE, XDG_CACHE_HOME=str(tmp_path))
    files = files_of(tmp_path)
    assert {path.suffix for path in files} == {".nbi", ".nbc"}
    again = ran(ENCODE, XDG_CACHE_HOME=str(tmp_path))
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert files_of(tmp_path) == files  # nothing was compiled
    for suffix, damaged in ((".nbi", b""), (".nbc", bytes(5000))):
        for path in files:
            if path.suffix == suffix:
                path.write_bytes(damaged)
        found = ran(ENCODE, XDG_CACHE_HOME=str(tmp_path))
        assert found.stdout == first.stdout
        assert "the loop 'narrow' cannot be taken from or kept in" in found.stderr
        assert f"{tmp_path}/diloco/loops-" in found.stderr


@pytest.mark.slow
def test_no_loop_is_compiled_twice_on_a_machine(tmp_path: Path) -> None:
    """Whatever it encloses: a decoder's functions, the formula of an outer optimizer or of an adoption."""
    ran(EVERYTHING, XDG_CACHE_HOME=str(tmp_path))
    files = files_of(tmp_path)
    assert len([path for path in files if path.suffix == ".nbc"]) >= 6
    ran(EVERYTHING, XDG_CACHE_HOME=str(tmp_path))
    assert files_of(tmp_path) == files


@pytest.mark.slow
def test_a_users_own_formula_is_used_and_not_kept(tmp_path: Path) -> None:
    """Its class may have the name of ours, and it may give itself the name of ours; its source may change."""
    ran(EVERYTHING, XDG_CACHE_HOME=str(tmp_path))
    files = files_of(tmp_path)
    for factor, wrapped in ((1.0, ""), (2.0, "functools.wraps(outer.Nesterov.formula)")):
        code = OWN_FORMULAS.replace("WRAPPED", wrapped).replace("FACTOR", str(factor))
        assert ran(code, XDG_CACHE_HOME=str(tmp_path)).stdout.split() == ["0.5", str(1 + factor)]
    assert files_of(tmp_path) == files


@pytest.mark.slow
def test_two_loops_never_share_the_files_of_one(tmp_path: Path) -> None:
    """Numba numbers the files of a function without a lock: two processes that compile two loops for the first time
    could keep one under the number of the other."""
    code = ENCODE.replace("import BF16", "import BF16, E3M0, Int4").replace(
        "print(", "[codec.encode(torch.arange(1000.0)) for codec in (E3M0(), Int4(), Int4(128))]\nprint("
    )
    ran(code, XDG_CACHE_HOME=str(tmp_path))
    numbered = [path for path in files_of(tmp_path) if path.suffix == ".nbc"]
    assert len(numbered) == 5  # flush_denormals too
    assert all(path.name.endswith(".1.nbc") for path in numbered)


@pytest.mark.slow
def test_another_processor_compiles_anew(tmp_path: Path) -> None:
    first = ran(ENCODE, XDG_CACHE_HOME=str(tmp_path))
    files = files_of(tmp_path)
    other = ran(ENCODE, XDG_CACHE_HOME=str(tmp_path), NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert other.stdout == first.stdout
    assert len(files_of(tmp_path)) == 2 * len(files)
    assert files_of(tmp_path).items() >= files.items()


@pytest.mark.slow
def test_where_nothing_can_be_compiled_torch_computes_and_says_so() -> None:
    code = (
        "from diloco.compute import compiling\n"
        "def fails(*_): raise OSError('no executable memory')\n"
        "compiling._compiled = fails\n"
        "import torch; from diloco.core import arithmetic; from diloco.core.codecs import FP32\n"
        "FP32().encode(torch.ones(arithmetic.WORTH_ELEMENTS))\n"
        "assert arithmetic.loops() is None\n"
    ) + CHOOSE
    done = ran(code)
    assert "the loop '_flush' cannot be compiled (OSError('no executable memory'))" in done.stdout
    assert "; torch computes the same, more slowly.\n" in done.stderr


@pytest.mark.slow
def test_without_a_place_for_a_cache_loops_are_compiled_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    found = ran(ENCODE, XDG_CACHE_HOME=str(tmp_path / "file" / "below"))
    assert len(found.stdout) == 65
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user whom the system does not know, as in a container
    compiling.cache_directory.cache_clear()
    assert compiling.cache_directory() is None
    compiling.cache_directory.cache_clear()


def test_without_numba_torch_computes_and_says_so_once() -> None:
    code = (
        WITHOUT_NUMBA
        + (
            "import torch; from diloco.core import arithmetic; from diloco.core.codecs import FP32\n"
            "x = torch.ones(arithmetic.WORTH_ELEMENTS)\n"
            "for _ in range(2): FP32().encode(x)\n"
            "assert arithmetic.loops() is None\n"
        )
        + CHOOSE
    )
    done = ran(code)
    assert done.stdout == "the compiled loops cannot be loaded (no numba here); choose auto or torch.\n"
    assert done.stderr == (
        "the compiled loops cannot be loaded (no numba here); torch computes the same, more slowly.\n"
    )


@pytest.mark.slow
def test_loops_that_numba_is_told_not_to_compile_are_not_loaded() -> None:
    code = "from diloco.core import arithmetic\n" + CHOOSE
    assert "NUMBA_DISABLE_JIT is set" in ran(code, NUMBA_DISABLE_JIT="1").stdout


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="the arithmetic must be one of auto, compiled, torch, not 'fast'"):
        arithmetic.choose("fast")  # type: ignore[arg-type]


def test_loops_are_loaded_for_long_vectors_only() -> None:
    arithmetic.choose("auto")
    arithmetic.prepare(arithmetic.WORTH_ELEMENTS - 1)
    assert arithmetic.loops() is None
    arithmetic.prepare(arithmetic.WORTH_ELEMENTS)
    assert arithmetic.loops() is not None
    arithmetic.choose("torch")
    arithmetic.prepare(arithmetic.WORTH_ELEMENTS)
    assert arithmetic.loops() is None


@pytest.mark.slow
def test_threads_that_need_a_loop_at_the_same_time_compile_it(tmp_path: Path) -> None:
    code = ENCODE.replace(
        "print(",
        "from concurrent.futures import ThreadPoolExecutor\n"
        "same = [*ThreadPoolExecutor(3).map(lambda _: BF16().encode(torch.arange(1000.0)).tolist(), range(3))]\n"
        "assert same[0] == same[1] == same[2]\nprint(",
    )
    said = ran(code, XDG_CACHE_HOME=str(tmp_path)).stderr.splitlines()
    assert [line for line in said if not re.fullmatch(r"INFO:.*compiled.*", line)] == []  # where it takes seconds
    assert len(files_of(tmp_path)) == 4  # flush_denormals too, each with its index


@pytest.mark.slow
def test_a_run_of_a_small_model_needs_no_numba() -> None:
    """Neither its learners nor what closes its rounds."""
    code = (
        "import sys, torch, diloco\n"
        "def train(index, exchange):\n"
        "    model = torch.nn.Linear(30, 30)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    method = diloco.DiLoCo(sync_every=2, codec='e3m0')\n"
        "    with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:\n"
        "        for _ in range(4):\n"
        "            model(torch.randn(8, 30)).square().mean().backward()\n"
        "            optimizer.step(); learner.step(tokens=8)\n"
        "diloco.run_local(train, learners=2)\n"
        "sys.exit('numba' in sys.modules)"
    )
    ran(code)
