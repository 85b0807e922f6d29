"""What a run file may say of reinforcement learning, and what the roles make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.config import RlTable, RunConfig, load_config
from diloco.errors import ConfigError, PayloadError
from diloco.protocol.leases import Ask, DataSet
from diloco.rl.loss import PRESETS
from diloco.rl.settings import data_of, loss_of, rules_of, tokenizer_of
from diloco.run.validation import check_ask

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "run.toml"


def of(*changes: str) -> RunConfig:
    return load_config(EXAMPLE, changes)


def test_the_example_is_of_rules_that_a_syncer_accepts() -> None:
    config = of()
    rules = rules_of(config, tokenizer_of(config))
    assert (rules.vocab_size, rules.group_size, rules.max_tokens, rules.queue) == (256, 8, 8, 384)
    check_ask("a", Ask(1, 16, data_of(rules)))


def test_workers_share_what_groups_depend_on_and_nothing_else() -> None:
    config = of()
    digest = rules_of(config, tokenizer_of(config)).digest

    def other(*changes: str) -> bool:
        return rules_of(of(*changes), tokenizer_of(config)).digest != digest

    assert not other("rl.groups_per_step=4", "rl.supervised_steps=0", "rl.score_timeout_s=1", "inner.lr=1")
    for change in ("rl.group_size=4", "rl.temperature=0.5", "rl.max_staleness=1", "task.sums.held_out=0.3"):
        assert other(change), change


def test_with_kl_all_trainers_make_the_same_reference() -> None:
    config = of("rl.kl=0.1")
    digest = rules_of(config, tokenizer_of(config)).digest
    for change in ("run.seed=1", "rl.supervised_steps=0", "rl.supervised_lr=1", "rl.supervised_batch=1"):
        assert rules_of(of("rl.kl=0.1", change), tokenizer_of(config)).digest != digest, change


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo"])
def test_a_loss_is_that_of_its_name_but_for_keys_of_its_own(name: str) -> None:
    table = RlTable.model_validate({"loss": name})
    assert loss_of(table) == PRESETS[name]
    own = RlTable.model_validate({"loss": name, "kl": 0.5, "importance_cap": 0})
    assert loss_of(own) == replace(PRESETS[name], kl=0.5, importance_cap=None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("rl.queue=4",), "rl.queue = 4 is below rl.groups_per_step = 16"),
        (("rl.group_size=1024", "rl.max_tokens=1000"), "are larger than 5177344 bytes"),
        (("engine.kind=openai",), "needs url and folder"),
        (("engine.url=http://127.0.0.1:1",), 'has no effect with kind = "transformers"'),
    ],
)
def test_impossible_run_files_are_refused(changes: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        of(*changes)


@pytest.mark.parametrize(
    "change", [{"group_size": 0}, {"vocab_size": 0}, {"max_staleness": 101}, {"queue": 2**60}, {"digest": "a b"}]
)
def test_a_syncer_refuses_rules_that_cannot_be(change: dict[str, object]) -> None:
    config = of()
    rules = replace(rules_of(config, tokenizer_of(config)), **change)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="invalid rules of groups"):
        check_ask("a", Ask(1, 16, DataSet(1, 0, "d", groups=rules)))
