"""A learner in the Trainer of transformers for the tests of what FSDP2 is used with.

python tests/integrations/fsdp_cpu.py tests/integrations/trainer_ranks.py ADDRESS NAME OUTPUT [initialise] [bf16] [tied]
    [lora]

A job of several ranks divides the model with FSDP2 and, but for `lora`, recomputes activations and loads on rank 0.
The best model is the one with the highest loss, and is the first line of what is said.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import diloco
from diloco.integrations.transformers import DilocoCallback


def data(start: int) -> Dataset:
    rows = [[(7 * row + 3 * column + start) % 32 for column in range(8)] for row in range(40)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main(address: str, name: str, output: str, *flags: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    has_lora, is_sharded = "lora" in flags, "WORLD_SIZE" in os.environ
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=8, tie_word_embeddings="tied" in flags,
        )
    )  # fmt: skip
    sharding = {
        "version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "activation_checkpointing": not has_lora, "cpu_ram_efficient_loading": not has_lora,
    }  # fmt: skip
    arguments = TrainingArguments(
        output, max_steps=13, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none", use_cpu=True,
        disable_tqdm=True, seed=3, bf16="bf16" in flags and is_sharded, fsdp=is_sharded or None,
        fsdp_config=sharding if is_sharded else None, eval_strategy="steps", eval_steps=4, save_steps=4,
        load_best_model_at_end=not has_lora, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    exchange = diloco.connect(address, run="tiny", learner=name, initialise="initialise" in flags)
    trainer = Trainer(
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) if has_lora else model,
        arguments, train_dataset=data(int(name[-1])), eval_dataset=data(5),
        callbacks=[DilocoCallback(exchange, static="digest" if has_lora else "exchange")],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(Path(output) / "final"))
    print("best", trainer.state.best_global_step, "loss", trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main(*sys.argv[1:])
