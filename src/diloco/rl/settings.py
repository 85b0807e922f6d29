"""What the roles of a run must agree on, from its run file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from diloco.config import RlTable, RunConfig
from diloco.errors import ConfigError
from diloco.protocol.leases import DataSet, GroupRules
from diloco.rl.loss import PRESETS, Loss
from diloco.rl.tokenizer import Tokenizer, open_tokenizer

OWN = {
    "tokenizer", "score_timeout_s", "score_memory_mb", "supervised_steps", "supervised_lr", "supervised_batch",
    "groups_per_step", "queue",
}  # fmt: skip
"""Settings in which workers and trainers may differ."""


def table_of(config: RunConfig) -> RlTable:
    """The table [rl].

    Raises:
        ConfigError: there is none.
    """
    if config.rl is None:
        raise ConfigError(f"run {config.run.name!r} has no table [rl]; add it, and a [task.NAME].")
    return config.rl


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The run's tokenizer. Raises ConfigError: there is no table [rl], or the tokenizer cannot be loaded."""
    return open_tokenizer(table_of(config).tokenizer)


def rules_of(config: RunConfig, tokenizer: Tokenizer) -> GroupRules:
    """The rules of the run's groups. Raises ConfigError: the run file has no table [rl]."""
    table = table_of(config)
    tasks = {name: task.model_dump(mode="json") for name, task in config.task.items()}
    shared: list[object] = [table.model_dump(mode="json", exclude=OWN), tasks, tokenizer.digest]
    if loss_of(table).kl:  # trainers make the reference themselves
        shared.append([config.run.seed, table.supervised_steps, table.supervised_lr, table.supervised_batch])
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
    queue = table.queue or 4 * table.groups_per_step * config.run.learners
    return GroupRules(
        digest, tokenizer.vocab_size, table.group_size, table.max_prompt_tokens, table.max_tokens, table.max_staleness,
        queue, inline=table.reward == "inline",
    )  # fmt: skip


def data_of(rules: GroupRules) -> DataSet:
    """The groups of a run, as the data that its trainers lease."""
    return DataSet(1, 0, rules.digest, groups=rules)


def loss_of(table: RlTable) -> Loss:
    """The loss of a run file: that of `rl.loss`, with the values of other keys in place of its own."""
    own = {key: value for key in ("kl", "scale") if (value := getattr(table, key)) is not None}
    return replace(PRESETS[table.loss], importance_cap=table.importance_cap or None, **own)
