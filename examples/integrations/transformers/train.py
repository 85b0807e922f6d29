"""The `Trainer` of transformers: what is marked "diloco" is all that a user adds.

    diloco syncer …                                                              docs/two-sites.md
    python examples/integrations/transformers/train.py HOST:PORT --shard 0       and the same again after a crash
    python examples/integrations/transformers/train.py HOST:PORT --shard 1

A tiny model from scratch, on text that is made here, so that nothing is downloaded. `torchrun --nproc-per-node N` makes
N ranks one learner.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import diloco  # diloco
from diloco.integrations.transformers import DilocoCallback  # diloco

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    attention_dropout=0.1,  # takes random numbers, which a checkpoint has to resume too
)  # fmt: skip


def windows() -> Dataset:
    """160 windows of 16 bytes of a text, the squares of the numbers."""
    text = " ".join(str(number**2) for number in range(1000)).encode()
    rows = [list(text[16 * row : 16 * row + 16]) for row in range(160)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("syncer", help="its address, HOST:PORT")
    parser.add_argument("--shard", type=int, default=0, help="which half of the data")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of the run")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--fsdp", choices=["FULL_STATE_DICT", "SHARDED_STATE_DICT"], help="divide the model (FSDP2)")
    parser.add_argument("--output", type=Path, help="default: runs/transformers-SHARD")
    chosen = parser.parse_args()
    chosen.output = chosen.output or Path(f"runs/transformers-{chosen.shard}")

    torch.manual_seed(chosen.shard)
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    data = windows().train_test_split(test_size=8, shuffle=False)
    name = f"learner-{chosen.shard}"
    exchange = diloco.connect(chosen.syncer, run="tiny", learner=name, initialise="if-empty")  # diloco
    trainer = Trainer(
        model=LlamaForCausalLM(CONFIG),
        args=TrainingArguments(
            output_dir=str(chosen.output),
            max_steps=chosen.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=5,
            eval_strategy="steps",
            eval_steps=chosen.save_every,
            save_steps=chosen.save_every,
            load_best_model_at_end=False,
            seed=chosen.shard,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            fsdp=True if chosen.fsdp else None,
            fsdp_config={"fsdp_version": 2, "state_dict_type": chosen.fsdp} if chosen.fsdp else None,
        ),
        train_dataset=data["train"].shard(num_shards=2, index=chosen.shard),
        eval_dataset=data["test"],
        callbacks=[DilocoCallback(exchange)],  # diloco
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(chosen.output) if chosen.output.exists() else None)
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # else nothing is saved
    trainer.save_model()  # the global model


if __name__ == "__main__":
    main()
