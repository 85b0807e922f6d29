"""The integrations as a package: libraries that are not installed, and processes that are forked beside a learner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.harness import end_all, running, serve

import diloco

BLOCK = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
import diloco, diloco.integrations, diloco.learner
try:
    import diloco.integrations.{module}
except diloco.errors.ConfigError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "absent"), [
    ("accelerate", ["accelerate"]),
    ("transformers", ["transformers"]),
])  # fmt: skip
def test_a_library_that_is_not_installed_is_named_with_its_extra(module: str, absent: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(module=module, absent=absent)],
        capture_output=True, text=True, timeout=300, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == (
        f"this integration needs {absent[0]}, which is not installed; pip install 'diloco[{module}]'\n"
    )


@pytest.mark.slow
def test_processes_that_are_forked_beside_a_learner_live(tmp_path: Path) -> None:
    """With gRPC's fork handlers, one of eight is aborted."""
    with serve(tmp_path / "syncer", diloco.DiLoCo(sync_every=2)) as syncer, running() as scripts:
        forks = scripts.start(Path(__file__).with_name("forks.py"), syncer.address, log=tmp_path / "log")
        end_all([forks])
    assert "{0: 40}" in forks.said
