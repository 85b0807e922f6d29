"""TRL's `SFTTrainer`, and with `--lora` an adapter of peft: what is marked "diloco" is all that a user adds.

    diloco syncer …                                                              docs/two-sites.md
    python examples/integrations/trl/train.py HOST:PORT --shard 0                and the same again after a crash
    python examples/integrations/trl/train.py HOST:PORT --shard 1

A tiny model from scratch, on text that is made here, so that nothing is downloaded. With `--lora` all learners have to
begin from the same base model.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import diloco  # diloco
from diloco.integrations.transformers import DilocoCallback  # diloco


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of digits and spaces."""
    tokens = [*"0123456789 ", "<eos>", "<pad>", "<unk>"]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def texts() -> Dataset:
    """160 texts of one to four squares, so that batches are padded."""
    squares = [str(number**2) for number in range(1000)]
    return Dataset.from_dict({"text": [" ".join(squares[5 * row : 5 * row + 1 + row % 4]) for row in range(160)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("syncer", help="its address, HOST:PORT")
    parser.add_argument("--shard", type=int, default=0, help="which half of the data")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of the run")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--lora", action="store_true", help="train an adapter")
    parser.add_argument("--output", type=Path, help="default: runs/trl-SHARD")
    chosen = parser.parse_args()
    chosen.output = chosen.output or Path(f"runs/trl-{chosen.shard}")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    data = texts().train_test_split(test_size=8, shuffle=False)
    config = LlamaConfig(
        vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    name = f"learner-{chosen.shard}"
    exchange = diloco.connect(chosen.syncer, run="tiny", learner=name, initialise="if-empty")  # diloco
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=str(chosen.output),
            max_steps=chosen.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            include_num_input_tokens_seen="non_padding",
            save_steps=chosen.save_every,
            seed=chosen.shard,
            report_to="none",
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data["train"].shard(num_shards=2, index=chosen.shard),
        eval_dataset=data["test"],
        processing_class=characters(),
        peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]) if chosen.lora else None,
        # Of what is frozen, the base model under an adapter, only a digest is compared.
        callbacks=[DilocoCallback(exchange, static="digest")],  # diloco
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(chosen.output) if chosen.output.exists() else None)
    trainer.save_model()  # the global model


if __name__ == "__main__":
    main()
