"""Scripts by accelerate, Hugging Face's Trainer, peft and diffusers, plain and wrapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers import DDPMScheduler, UNet2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from twice import Numbers, Script, Wrap, differences

VOCABULARY = 64


def language_model(tied: bool = True) -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=24, n_embd=32, n_layer=2, n_head=2,
            tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    ).train()  # fmt: skip


def classifier() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=24, num_labels=3,
        )
    ).train()  # fmt: skip


def rows(count: int, shortest: int = 6, longest: int = 12) -> list[dict[str, list[int]]]:
    lengths = torch.randint(shortest, longest + 1, (count,)).tolist()
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,)).tolist()} for n in lengths]


def with_labels(each: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    return [{**row, "label": int(torch.randint(3, ()))} for row in each]


def trainer_of(
    model: nn.Module, folder: Path, *, evaluates: bool = False, steps: int = 6, **options: Any
) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4,
        per_device_eval_batch_size=4, learning_rate=1e-3, logging_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True, remove_unused_columns=True,
        eval_strategy="steps" if evaluates else "no", eval_steps=2,
        **{"save_strategy": "no"} | options,
    )  # fmt: skip

    class Padding:
        def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
            longest = max(len(row["input_ids"]) for row in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for index, row in enumerate(batch):
                ids[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
                mask[index, : len(row["input_ids"])] = 1
            if "label" in batch[0]:
                labels = torch.tensor([row["label"] for row in batch])
            else:
                labels = ids.masked_fill(mask == 0, -100)
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    data = rows(24)
    held_out = rows(6)
    if isinstance(model, transformers.BertForSequenceClassification):
        data, held_out = with_labels(data), with_labels(held_out)

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) ==
                                          prediction.label_ids))}  # fmt: skip

    return transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=held_out,
        data_collator=Padding(),
        compute_metrics=metrics if "label" in data[0] else None,
    )  # fmt: skip


def logged(trainer: transformers.Trainer) -> list[float]:
    names = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "learning_rate", "train_loss")
    return [
        float(line[name]) for line in trainer.state.log_history for name in names if name in line
    ]


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Script]:
    """A script that trains by Trainer."""

    def script_of(make: Callable[[], nn.Module], **options: Any) -> Script:
        def script(wrap: Wrap) -> Numbers:
            model = make()
            trainer = trainer_of(wrap(model), tmp_path, **options)
            trainer.train()
            return [*logged(trainer), model]

        return script

    return script_of


@pytest.mark.parametrize(
    "options",
    [
        {"evaluates": True},
        {"bf16": True, "evaluates": True},
        {"train_sampling_strategy": "group_by_length", "lr_scheduler_type": "cosine",
         "warmup_steps": 2},
        {"optim": "adafactor", "weight_decay": 0.1},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_trainer_on_batches_of_other_lengths(
    trained: Callable[..., Script], options: dict[str, Any]
) -> None:
    assert differences(trained(language_model, **options), zeroes_last=True) == []


def test_trainer_of_a_classifier_with_metrics(trained: Callable[..., Script]) -> None:
    assert differences(trained(classifier, evaluates=True), zeroes_last=True) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_trainer_of_an_adapter(trained: Callable[..., Script]) -> None:
    def adapted() -> nn.Module:
        settings = LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        return get_peft_model(language_model(), settings)

    assert differences(trained(adapted, evaluates=True), zeroes_last=True) == []


def diffusion(wrap: Wrap) -> Numbers:
    """DDPM on small images, with an average of the weights."""
    model = wrap(
        UNet2DModel(
            sample_size=16, in_channels=1, out_channels=1, layers_per_block=1,
            block_out_channels=(8, 16), norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ).train()
    )  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
    average = {name: each.detach().clone() for name, each in model.named_parameters()}
    losses = []
    for _ in range(3):
        images = torch.rand(4, 1, 16, 16) * 2 - 1
        noise, times = torch.randn_like(images), torch.randint(0, 50, (4,))
        noisy = schedule.add_noise(images, noise, times)
        loss = F.mse_loss(model(noisy, times).sample, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, each in model.named_parameters():
                average[name].lerp_(each, 0.1)
        losses.append(loss.item())
    return [*losses, *average.values(), model]


def test_a_script_logs_and_trains_the_same_numbers() -> None:
    assert differences(diffusion, zeroes_last=True) == []
