"""Small Hugging Face models, data and recorded trainer runs, shared by the fine-tuning tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH = 64, 12, 4


def gpt2(**changes: Any) -> nn.Module:
    """Two layers, dropout on, tied output embedding; the same weights at each call."""
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**options, **changes}))
    model.loss_type = "ForCausalLM"
    return model.train()


def llama(**changes: Any) -> nn.Module:
    """One layer, untied output embedding; the same weights at each call."""
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 32, "attention_dropout": 0.1, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes})).train()


class Sentences(torch.utils.data.Dataset):
    """Random tokens, some of them not to be predicted, beside a column that no model takes."""

    def __init__(self, num_rows: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(VOCABULARY, (num_rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.rows[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.rows[index], "labels": labels, "text": "a column to be removed"}


def batch(seed: int = 1) -> dict[str, Tensor]:
    words = torch.randint(
        VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    return {"input_ids": words, "labels": words.clone()}


class Record(transformers.TrainerCallback):
    """What the trainer logged: losses, gradient norms, evaluation losses."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        kept = {"loss", "grad_norm", "eval_loss", "learning_rate", "epoch"}
        self.logs.append({name: value for name, value in (logs or {}).items() if name in kept})


def trainer(
    model: nn.Module, folder: Path, **arguments: Any
) -> tuple[transformers.Trainer, Record]:
    """A trainer on the CPU that logs every step."""
    record = Record()
    extra = {
        name: arguments.pop(name)
        for name in ("train_dataset", "compute_loss_func")
        if name in arguments
    }
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH, "num_train_epochs": 1, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "learning_rate": 1e-2, "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**settings, **arguments})
    data = {"train_dataset": Sentences(), "eval_dataset": Sentences(8), **extra}
    return transformers.Trainer(model=model, args=args, callbacks=[record], **data), record


def trained(
    build: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    folder: Path,
    **arguments: Any,
) -> tuple[Any, nn.Module]:
    """Logs of a run, and the plain model after it."""
    model = build()
    worker, record = trainer(wrap(model), folder, **arguments)
    worker.train()
    return record.logs, model
