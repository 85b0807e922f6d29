"""The Triton kernels of the block formats: their bits, and the instructions that they become."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


@pytest.mark.timeout(900)
def test_kernels_write_and_read_the_bits_of_the_cpu() -> None:
    """On the GPU where there is one, else by Triton's interpreter."""
    assert ran("tests.core.triton_bits").count("the CPU's bits") == 9


@pytest.mark.timeout(900)
def test_compiled_kernels_have_no_instruction_that_rounds_differently() -> None:
    assert ran("tests.core.triton_ptx").count("exact instructions only") == 3


def ran(module: str) -> str:
    """What a fresh process prints: Triton chooses between interpreter and compiler when it is imported."""
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
