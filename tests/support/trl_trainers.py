"""Trainers of TRL for a small Llama, on rows of made-up words. `bench.steps` measures them."""

from __future__ import annotations

import copy
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from fine_tuning import llama

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} [EOS] {% endfor %}"
KINDS = ("ORPO", "GKD", "Reward", "SFT", "DPO", "KTO", "GRPO")


def tokenizer(num_words: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["[PAD]", "[EOS]", "[UNK]", *(f"w{at}" for at in range(num_words))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    more = {"chat_template": TEMPLATE, **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **more)


def rows_for(kind: str, times: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in range(8):
        prompt, good, bad = (
            " ".join(f"w{(first + 3 * at) % 40}" for at in range(number * times))
            for first, number in ((row, 3), (row + 5, 5), (row + 7, 5))
        )
        said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
        columns = {
            "SFT": {"text": f"{prompt} {good}"},
            "GKD": {"messages": said},
            "KTO": {"prompt": prompt, "completion": f" {good}", "label": row % 2 == 0},
            "GRPO": {"prompt": prompt},
        }
        pair = {"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"}
        rows.append(columns.get(kind, pair))
    return rows


def trainer(
    kind: str,
    folder: Path,
    *,
    size: dict[str, Any] | None = None,
    times: int = 1,
    adapters: str = "",
    callbacks: Any = (),
    **changes: Any,
) -> Any:
    """A trainer of one of the `KINDS`, made as users make it.

    Its model has the fields `size` of a `LlamaConfig`, and adapters that are "new" or "trained"
    before. Rows are `times` as long as 8 tokens. Changes are those of its arguments.
    """
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 if kind == "KTO" else 2,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    size = {"vocab_size": 43, **(size or {})}
    model: Any = llama(attention_dropout=0.0, pad_token_id=0, **size)
    more: dict[str, Any] = {}
    if kind == "GKD":
        arguments |= {"lmbda": 0.0, "max_length": 16 * times, "max_new_tokens": 4}
        more["teacher_model"] = copy.deepcopy(model).requires_grad_(False)
    elif kind == "ORPO":
        arguments |= {"max_length": 16 * times}
    elif kind == "Reward":
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = transformers.LlamaForSequenceClassification(model.config).train()
    elif kind == "GRPO":
        arguments |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    model.save_pretrained(folder / "start")  # references are loaded from there
    model.config._name_or_path = str(folder / "start")
    if adapters:
        of_lora: Any = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        config = peft.LoraConfig(task_type="CAUSAL_LM", **of_lora)
        is_new = adapters == "new"
        model = model if is_new else peft.get_peft_model(model, config)
        more |= {"peft_config": config} if is_new else {}
    experimental = f"trl.experimental.{kind.lower()}"
    library = import_module(experimental) if kind in ("GKD", "ORPO") else trl
    return getattr(library, f"{kind}Trainer")(
        model=model,
        args=getattr(library, f"{kind}Config")(**arguments | changes),
        processing_class=tokenizer(size["vocab_size"] - 3),
        train_dataset=datasets.Dataset.from_list(rows_for(kind, times)),
        callbacks=list(callbacks),
        **more,
    )
