"""A run small enough to train in a second."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.config import RunConfig, parse_config

TINY = """
[run]
name = "tiny"
tokens = 5_120
seed = 7
learners = 2

[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2

[data]
kind = "text"
sequence_length = 32

[train]
global_batch = 8
log_every_steps = 1

[schedule]
warmup_steps = 4

[evaluate]
sequences = 16
sample_bytes = 8

[method]
preset = "StreamingDiLoCo"
sync_every = 6
overlap = 2
fragments = {type = "ByLayer", layers = 1}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunConfig]:
    """A 20-step run over two shards of a text file, in a directory of its own."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))

    def make(*overrides: str, learner: str | None = None) -> RunConfig:
        places = [f"data.paths=['{text}']", f"run.dir={tmp_path / 'run'}"]
        return parse_config(TINY, overrides=[*places, *overrides], learner=learner)

    return make
