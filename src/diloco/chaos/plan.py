"""What a chaos run is: its length, its learners, its run file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diloco
from diloco.chaos.schedule import STANDBY, SYNCER, Fault, Kind, kinds, schedule
from diloco.config import RunConfig, dump_config, load_config, parse_config
from diloco.demo.plan import free_port
from diloco.errors import ConfigError, StoreError, translated
from diloco.tables import write_toml
from diloco.whole_files import write_whole

RUN, WATCHER = "chaos", "watcher"
ENDLESS_TOKENS = 10**12
"""The run ends when the chaos does."""

LOST_S = 2.0
"""The deadline of a silent learner, in the run that chaos makes itself."""

WIDTH = 32
"""A hidden size of 32 gives 29 thousand parameters, of which no transfer is long enough to be resumed."""

CUT_BYTES = 40_000
"""Of such a model, a transfer that is to be cut breaks within so many bytes."""


@dataclass(frozen=True)
class ChaosPlan:
    """One chaos run.

    Attributes:
        directory: of all that it writes.
        seconds: how long faults happen.
        calm_s: how long the run is measured before them.
        every_s: mean time from one fault to the next.
        only: the names of the kinds of faults that happen; empty: all.
        standby: a second syncer follows the first.
        width: of the model that chaos makes itself.
    """

    directory: Path
    seed: int
    seconds: float
    learners: int
    calm_s: float
    every_s: float
    only: tuple[str, ...] = ()
    standby: bool = False
    width: int = WIDTH

    @property
    def syncers(self) -> list[str]:
        """Their names."""
        return [SYNCER, STANDBY] if self.standby else [SYNCER]

    @property
    def names(self) -> list[str]:
        """Of the learners."""
        return [f"learner-{index}" for index in range(self.learners)]

    @property
    def cut_bytes(self) -> int:
        """A transfer that is to be cut breaks within so many bytes: they grow as the model does."""
        return int(CUT_BYTES * max(1.0, (self.width / WIDTH) ** 2))

    def kinds(self, lost_s: float) -> tuple[Kind, ...]:
        """The kinds of faults that can happen. Raises ConfigError: `only` names another."""
        every = [each for each in kinds(lost_s) if each.needs != ("one" if self.standby else "standby")]
        if unknown := sorted(set(self.only) - {each.name for each in every}):
            names = ", ".join(each.name for each in every)
            raise ConfigError(f"there is no fault {unknown[0]!r}; choose among {names}")
        return tuple(each for each in every if not self.only or each.name in self.only)

    def faults(self, lost_s: float) -> tuple[Fault, ...]:
        """The faults of the seed."""
        return schedule(self.seed, self.seconds, self.names, self.kinds(lost_s), self.every_s)


def prepare(plan: ChaosPlan, run_file: Path | None) -> RunConfig:
    """Make the directory, with `run.toml` in it: that of `run_file`, or a small model's.

    Raises:
        ConfigError: there is something in the directory, or the run file cannot be used.
    """
    directory = plan.directory.absolute()
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{plan.directory} is not empty; choose another directory with --out")
    address = f"127.0.0.1:{free_port()}"
    own: dict[str, str | int | float | bool] = {
        "run.dir": str(directory), "run.tokens": ENDLESS_TOKENS, "run.learners": plan.learners,
        "train.threads": 1, "syncer.address": address, "syncer.backup": str(directory / "backups"),
        "syncer.backup_every_s": 5.0, "syncer.backup_keep": 3, "syncer.record_contributions": True,
    }  # fmt: skip
    overrides = [f"{key}={_toml(value)}" for key, value in own.items()]
    with translated(OSError, StoreError, f"cannot write to {directory}", "choose another directory with --out"):
        directory.mkdir(parents=True, exist_ok=True)
        if run_file is None:
            text = write_toml(_tables(plan))
            config = parse_config(text, source="the run of `diloco chaos`", overrides=overrides)
        else:
            config = load_config(run_file, overrides)
        if config.syncer.keys or config.syncer.token_file or config.syncer.tokens_file:
            raise ConfigError(f"{run_file} names keys or tokens; chaos makes keys of its own, so leave them out")
        write_whole(directory / "run.toml", dump_config(config))
    return config


def _toml(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _tables(plan: ChaosPlan) -> dict[str, dict[str, Any]]:
    """A small model that learns the source of this package, in leased ranges."""
    texts = sorted(str(each) for each in (Path(diloco.__file__).parent / "core").glob("*.py"))
    return {
        "run": {"name": RUN, "tokens": ENDLESS_TOKENS, "seed": plan.seed, "learners": plan.learners},
        "model": {
            "type": "llama", "hidden_size": plan.width, "intermediate_size": 2 * plan.width, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2,
        },
        "data": {"kind": "text", "paths": texts, "sequence_length": 32, "deal": "leases"},
        "train": {"global_batch": 4 * plan.learners},
        "schedule": {"kind": "constant", "warmup_steps": 0, "steps": 1000},
        "evaluate": {"sequences": 4, "sample_bytes": 0},
        "checkpoint": {"every_steps": 100},
        "method": {
            "preset": "StreamingDiLoCo", "sync_every": 20, "overlap": 1, "mix": 0.0, "codec": "e3m0",
            "fragments": {"type": "ByLayer", "layers": 1, "pattern": "strided"},
        },
        "syncer": {"lost_floor_s": LOST_S, "reconnect_floor_s": 1.0},
    }  # fmt: skip
