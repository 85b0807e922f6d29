"""How the blocks of the pages are checked, and the ones that cannot be executed here, each with the reason.

A block is named by its page and its beginning. `test_blocks.py` fails for a block that is not checked and not listed,
and for an entry that matches no block any more.
"""

from __future__ import annotations

from typing import Any

from tests.docs import preparing
from tests.docs.preparing import Preparation

Name = tuple[str, str]

# --- Python: every block is executed, a page's in order and with the same names ---------------------------------------

PREPARATIONS: dict[Name, Preparation] = {
    ("docs/data.md", "exchange ="): preparing.with_leases,
    ("docs/run-file.md", "from diloco"): preparing.with_events,
    ("docs/integrations.md", "from diloco.integrations.accelerate"): preparing.with_accelerate,
    ("docs/integrations.md", "from diloco.integrations.transformers"): preparing.with_transformers,
    ("docs/integrations.md", "from diloco.integrations.lightning"): preparing.with_lightning,
    ("docs/islands.md", "mesh ="): preparing.with_ranks,
    ("docs/islands.md", "from torch.distributed.fsdp"): preparing.with_fsdp1,
    ("docs/learner.md", "learner = diloco.Learner(model"): preparing.with_buffers,
    ("docs/learner.md", "chosen ="): preparing.with_named_buffers,
    ("docs/learner.md", "model = peft"): preparing.with_an_adapter,
    ("docs/integrations.md", "from diloco.exchange.torchft"): preparing.with_a_lighthouse,
    ("docs/operate.md", "from diloco"): preparing.with_wandb,
    ("docs/operate.md", "learner.log"): preparing.with_a_learner,
    ("docs/your-model.md", "from safetensors.torch import load_file"): preparing.with_a_learner,
    ("docs/your-model.md", "from safetensors.torch import load_model"): preparing.with_the_runs_model,
    ("examples/digits/README.md", "exchange ="): preparing.with_digits,
    ("examples/moe/README.md", "dense ="): preparing.with_experts,
}
"""What is made before a block, where the names of every page (`Session.common`) and a syncer are not enough."""


def decoupled(names: dict[str, Any]) -> None:
    assert [round(metrics["steps"] / 40) for metrics in names["metrics"]] == [5, 5, 3, 2]  # 1 : 1 : 0.6 : 0.4
    assert all(metrics["merges"] > 10 for metrics in names["metrics"])


RESULTS = {
    "docs/methods.md": decoupled,
}
"""What a page's names hold in the end."""

NOT_EXECUTED: dict[Name, str] = {
    ("docs/your-model.md", "import diloco"): "follows a run until its end: tests/following",
    ("docs/integrations.md", "from diloco.integrations.torchtitan"): (
        "torchtitan is not installed beside the rest; `make torchtitan` runs its example"
    ),
    ("docs/rl.md", "import sys"): "a script that needs workers of a run: tests/rl/test_workers.py runs it",
    ("docs/start.md", "import sys"): "a script with arguments: tests/test_start.py runs it as two processes",
}
"""Python that is compiled only."""

# --- what commands print, formulas, ... ------------------------------------------------------------------------------

PRINTED: dict[Name, tuple[int, str]] = {
    ("docs/adviser.md", "4 learners"): (120, "plan advise examples/site.toml"),
    ("docs/planning.md", "1b, Streaming"): (
        120,
        "plan utilization --model 1b --method streaming --overlap 1 --codec e3m0",
    ),
    ("docs/planning.md", "64 chips"): (
        120,
        "plan goodput --chips 64 --learners 8 --no-elastic-learners --mtbi 200d --repair 4h --up 10min --step 1s",
    ),
}
"""Text that a command of `diloco` prints, word for word, in a terminal of so many columns."""

A_RUN = "printed by a run, and another time by another one; "
TEXTS: dict[Name, str] = {
    ("CONTRIBUTING.md", "src/diloco/"): "the tree: tests/test_project.py",
    ("README.md", "[  0.0 s] starting"): A_RUN + "its form: tests/test_demo.py",
    ("docs/data.md", "done + leased"): "an identity: tests/protocol/test_leases.py",
    ("docs/data.md", "Σ fates"): "an identity: tests/protocol/test_leases.py",
    ("docs/methods.md", "grace = "): "a formula: tests/protocol/rounds",
    ("docs/concepts.md", "Δ ="): "formulas: tests/core/test_merge.py, tests/core/test_outer.py",
    ("docs/methods.md", "unequal:"): A_RUN + "its form: tests/syncer/test_status.py",
    ("docs/start.md", "[  0.0 s] starting"): A_RUN + "its form: tests/test_demo.py",
    ("docs/planning.md", "not elastic"): "a formula: tests/planning/test_goodput.py",
    ("dev/replay.md", "starts of the syncer"): A_RUN + "its form: tests/syncer/test_replay.py",
    ("dev/replay.md", "STATE/journal/"): "files of a journal: tests/store/test_journal_files.py",
    ("docs/rl.md", "prompt → leased"): "states: tests/protocol/test_groups.py",
    ("docs/rl.md", "acknowledged ="): "an identity: tests/protocol/test_groups.py",
    ("docs/start.md", "tensor("): "printed by examples/start/first.py: tests/test_start.py",
    ("docs/start.md", "first: StreamingDiLoCo, step"): A_RUN + "its form: tests/syncer/test_status.py",
    ("docs/start.md", "2026-"): A_RUN + "its form: tests/syncer/test_log.py",
    ("docs/start.md", "first: StreamingDiLoCo, 295,968"): A_RUN + "its form: tests/test_report.py",
    ("docs/integrations.md", "08:25:47"): A_RUN + "what happens: tests/exchange/test_torchft.py",
    ("docs/planning.md", "computing"): "a formula: tests/planning/test_wallclock.py",
    ("docs/operate.md", "2026-11-24T09:12:00Z"): A_RUN + "its form: tests/syncer/test_log.py",
    ("docs/operate.md", "2026-11-24T09:12:03Z"): A_RUN + "its form: tests/syncer/test_log.py",
    ("docs/protocol.md", "BLAKE3( BLAKE3("): "a format: tests/core/test_fragments.py",
    ("docs/protocol.md", "[scale"): "a format: tests/core/test_codecs.py",
    ("docs/protocol.md", "scale ="): "a format: tests/core/test_codecs.py",
    ("docs/protocol.md", "[codebook: 4"): "a format: tests/core/test_codecs.py",
    ("docs/protocol.md", "y ="): "a format: tests/core/test_codecs.py",
    ("docs/protocol.md", "[codebook: 256"): "a format: tests/core/test_codecs.py",
    ("docs/protocol.md", "w ="): "a format: tests/core/test_codecs.py",
    ("docs/protocol.md", "[positions"): "a format: tests/core/test_codecs.py",
    ("examples/digits/README.md", "shards mixed"): A_RUN + "half a minute; its order: tests/test_examples.py",
    ("examples/moe/README.md", "336,512"): A_RUN + "minutes; its order: tests/test_examples.py",
}
"""Other text, and what holds it."""

# --- commands --------------------------------------------------------------------------------------------------------

PARSED: dict[str, str] = {
    "syncer run.toml": "serves until it is stopped; the run that the other commands find was served by this one",
    "syncer examples/": "serves until it is stopped",
    "syncer promote": "needs two syncers: tests/syncer/test_standby.py",
    "follow": "follows a run until its end: tests/following",
    "tokenize": "needs texts: tests/training/test_token_shards.py",
    "train": "trains until the run is over; the run that the other commands find was trained by this one",
    "export run.toml --raw global.safetensors --store": "the syncer of the run runs: tests/test_export.py",
    "export run.toml --raw global.safetensors --checkpoint": "of another run: tests/training/test_cli.py",
    "export run.toml model --checkpoint": "of another run: tests/training/test_cli.py",
    "demo": "a minute of two cores: tests/test_demo.py",
    "doctor run.toml": "tests/test_doctor.py",
    "status --store": "reads a store: tests/following/test_commands.py",
    "page --store": "reads a store: tests/following/test_commands.py",
    "rl": "minutes of two cores: tests/rl",
    "page examples/rl/": "of a run that the page has started",
    "status examples/rl/": "of a run that the page has started",
    "status examples/start/": "asks for the run `first`: tests/test_start.py",
    "report runs/first/": "of the run `first`: tests/test_report.py",
    "evaluate": "lambada_openai is fetched from the hub: tests/evaluation",
    "plan measure": "seconds of training: tests/training/test_measure.py",
}
"""Commands of `diloco` that are read by the command line and not executed, by their beginning. All others are
executed."""

PROGRAMS: dict[str, str] = {
    ".": "an environment of its own",
    "chown": "changes the machine",
    "cp": "changes the machine",
    "docker": "needs Docker; the files: tests/templates",
    "export": "the keys of a run: tests/exchange/test_key_lines.py",
    "install": "changes the machine",
    "jupyter": "a browser; tests/docs/test_notebooks.py executes the notebooks",
    "kubectl": "needs a cluster; the files: tests/templates",
    "mkdir": "another machine's",
    "printf": "changes the machine",
    "sbatch": "needs a cluster; the script: tests/templates",
    "scp": "needs another machine",
    "sky": "needs a cloud; the files: `make sky`",
    "ssh": "needs another machine",
    "systemctl": "needs systemd; the units: tests/templates",
    "torchft_lighthouse": "serves until it is stopped: tests/exchange/test_torchft.py",
    "torchrun": "one process for each GPU; the `diloco train` in it is read",
    "useradd": "changes the machine",
}
"""Programs that are not executed; the files of the repository that a command names are there."""
