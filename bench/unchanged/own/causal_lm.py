"""In the shape of transformers' run_clm.py: a configuration, a tokenizer, texts in blocks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import load_dataset  # pyright: ignore[reportMissingImports]
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    """What is trained, on what."""

    model_name_or_path: str = field(default="gpt2-tiny")
    train_file: str = field(default="sft/train.jsonl")
    block_size: int = field(default=32)


def main() -> None:
    """Trains, saves, and evaluates."""
    parser = HfArgumentParser((ModelArguments, TrainingArguments))  # pyright: ignore
    model_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw: Any = load_dataset("json", data_files={"train": model_args.train_file})
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_config(config)

    def grouped(rows: Any) -> dict[str, Any]:
        tokens = list(chain.from_iterable(tokenizer(rows["text"])["input_ids"]))
        size = model_args.block_size
        blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size, size)]
        return {"input_ids": blocks, "labels": blocks}

    columns = raw["train"].column_names
    train = raw["train"].map(grouped, batched=True, remove_columns=columns)
    trainer = Trainer(
        model=model, args=training_args, train_dataset=train, eval_dataset=train,
        processing_class=tokenizer, data_collator=default_data_collator,
    )  # fmt: skip
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    sys.exit(main())
