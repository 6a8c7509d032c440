"""Trainers of TRL that compute losses themselves: numbers, metrics and weights of the plain run."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fine_tuning import Record, llama
from helpers import relative_error

from bench.measure import allocator_peak
from rockmate import PlannedStep, wrap_trainer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytestmark = pytest.mark.filterwarnings("ignore")  # of trainers

WORDS = [f"w{number}" for number in range(40)]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} [EOS] {% endfor %}"
NUM_ROWS = 8


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["[PAD]", "[EOS]", "[UNK]", *WORDS]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.chat_template = TEMPLATE
    return found


def text(first: int, number: int) -> str:
    return " ".join(WORDS[(first + 3 * at) % len(WORDS)] for at in range(number))


def rows_for(kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for at in range(NUM_ROWS):
        prompt, good, bad = text(at, 3), " " + text(at + 5, 5), " " + text(at + 7, 5)
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


class Metrics(Record):
    """All that is logged but for times."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.logs.append({k: v for k, v in logs.items() if not k.endswith(("time", "second"))})


def trainer(kind: str, folder: Path, **changes: Any) -> tuple[Any, Metrics]:
    record = Metrics()
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
    model = llama(vocab_size=43, attention_dropout=0.0, pad_token_id=0)
    more: dict[str, Any] = {}
    if kind == "GKD":
        from trl.experimental.gkd import GKDConfig as Config
        from trl.experimental.gkd import GKDTrainer as Trainer

        arguments |= {"lmbda": 0.0, "max_length": 16, "max_new_tokens": 4}
        more["teacher_model"] = copy.deepcopy(model).requires_grad_(False)
    elif kind == "ORPO":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer

        arguments |= {"max_length": 16}
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
    made = Trainer(
        model=model,
        args=Config(**arguments | changes),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows_for(kind)),
        callbacks=[record],
        **more,
    )
    return made, record


KINDS = ("ORPO", "GKD", "Reward", "SFT", "DPO", "KTO", "GRPO")


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_without_a_budget(kind: str, tmp_path: Path) -> None:
    found = []
    for budget in (None, 0.8):
        made, record = trainer(kind, tmp_path)
        step = None if budget is None else wrap_trainer(made, budget)
        made.train()
        found.append((record.logs, made.model.state_dict()))
    assert step is not None
    assert step.is_planned or made.model.is_planned
    assert isinstance(step, PlannedStep) == (kind in ("ORPO", "GKD", "Reward"))
    assert len(found[0][0]) == 3
    for ours, reference in zip(found[1][0], found[0][0], strict=True):
        assert ours == pytest.approx(reference, rel=1e-3, abs=1e-5)
    for name, weight in found[0][1].items():
        assert relative_error(found[1][1][name], weight) < 1e-4


def test_reference_is_within_the_budget(tmp_path: Path) -> None:
    peaks, found = [], []
    for budget in (None, 0.6):
        made, _ = trainer("DPO", tmp_path)
        policy = made.model
        if budget is not None:
            wrap_trainer(made, budget, trial="never")
        with torch.no_grad():  # it was the policy
            made.ref_model.lm_head.weight.mul_(2)
        batch = made._prepare_inputs(next(iter(made.get_train_dataloader())))

        def step(made: Any = made, batch: Any = batch) -> None:
            made.compute_loss(made.model, dict(batch)).backward()

        step()
        policy.zero_grad(set_to_none=False)
        peaks.append(allocator_peak(step))
        found.append({name: each.grad for name, each in policy.named_parameters()})
    for name, grad in found[0].items():
        assert relative_error(found[1][name], grad) < 1e-5
    assert peaks[1] < 0.6 * peaks[0]


def test_mixed_precision(tmp_path: Path) -> None:
    logs = []
    for wrap in (lambda made: made, lambda made: wrap_trainer(made, 0.8)):
        made, record = trainer("DPO", tmp_path, bf16=True)
        wrap(made)
        made.train()
        logs.append([line["loss"] for line in record.logs])
    assert logs[1] == pytest.approx(logs[0], rel=1e-2)
