"""Trainers of TRL for a small Llama, on rows of made-up words. `bench.steps` measures them."""

from __future__ import annotations

import copy
import os
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
NUM_ROWS = 8
KINDS = ("ORPO", "GKD", "Reward", "SFT", "DPO", "KTO", "GRPO")


def tokenizer(num_words: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["[PAD]", "[EOS]", "[UNK]", *map(_word, range(num_words))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.chat_template = TEMPLATE
    return found


def _word(number: int) -> str:
    return f"w{number}"


def text(first: int, number: int) -> str:
    return " ".join(_word((first + 3 * at) % 40) for at in range(number))


def rows_for(kind: str, times: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for at in range(NUM_ROWS):
        prompt, good, bad = (text(at + more, times * n) for more, n in ((0, 3), (5, 5), (7, 5)))
        good, bad = f" {good}", f" {bad}"
        match kind:
            case "SFT":
                rows.append({"text": prompt + good})
            case "GKD":
                said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
                rows.append({"messages": said})
            case "KTO":
                rows.append({"prompt": prompt, "completion": good, "label": at % 2 == 0})
            case "GRPO":
                rows.append({"prompt": prompt})
            case _:
                rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
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

    Args:
        kind: its name begins with this.
        folder: for what it writes.
        size: of the model, as `LlamaConfig` takes it.
        times: how much longer than 8 tokens the rows are.
        adapters: of LoRA, "new" or "trained" before; none if empty.
        callbacks: as the trainer takes them.
        **changes: of the trainer's arguments.
    """
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
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
        from trl.experimental.gkd import GKDConfig as Config
        from trl.experimental.gkd import GKDTrainer as Trainer

        arguments |= {"lmbda": 0.0, "max_length": 16 * times, "max_new_tokens": 4}
        more["teacher_model"] = copy.deepcopy(model).requires_grad_(False)
    elif kind == "ORPO":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer

        arguments |= {"max_length": 16 * times}
    else:
        Config, Trainer = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    if kind == "Reward":
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = transformers.LlamaForSequenceClassification(model.config).train()
    if kind == "GRPO":
        arguments |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    if kind == "KTO":
        arguments |= {"per_device_train_batch_size": 4}
    model.save_pretrained(folder / "start")  # references are loaded from there
    model.config._name_or_path = str(folder / "start")
    if adapters:
        names = ["q_proj", "v_proj"]
        config = peft.LoraConfig(
            target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False
        )
        if adapters == "new":
            more["peft_config"] = config
        else:
            model = peft.get_peft_model(model, config)
    return Trainer(
        model=model,
        args=Config(**arguments | changes),
        processing_class=tokenizer(size["vocab_size"] - 3),
        train_dataset=datasets.Dataset.from_list(rows_for(kind, times)),
        callbacks=list(callbacks),
        **more,
    )
