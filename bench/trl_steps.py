"""Trainers of TRL for `bench.steps`: a small GPT-2 with a whole vocabulary, words without sense."""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from typing import Any

_COLUMNS = {
    "DPO": ("prompt", "chosen", "rejected"),
    "KTO": ("prompt", "completion", "label"),
    "ORPO": ("prompt", "chosen", "rejected"),
    "Reward": ("prompt", "chosen", "rejected"),
    "GKD": ("messages",),
    "GRPO": ("prompt",),
    "SFT": ("text",),
}
KINDS = tuple(_COLUMNS)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(60))]
    made: Any = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.chat_template = "{% for each in messages %}{{ each['content'] }} [EOS] {% endfor %}"
    return found


def _row(at: int, size: int) -> dict[str, Any]:
    texts = (" " + " ".join(f"w{at + n + i}" for i in range(size)) for n in (0, 7, 13))
    prompt, good, bad = texts
    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
    row = {"prompt": prompt, "completion": good, "label": at % 2 == 0, "text": prompt + good}
    return {**row, "chosen": good, "rejected": bad, "messages": said}


def trainer_of(kind: str, size: int) -> Any:
    """A trainer of a kind, of sequences of twice `size` words out of 1,570 times as many."""
    import datasets  # pyright: ignore[reportMissingImports]
    import transformers

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    config = transformers.GPT2Config(
        vocab_size=max(64, 1570 * size), n_layer=4, n_embd=64 + 6 * size, n_head=2, n_positions=128,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.num_labels = 1  # of a reward
    cls = "GPT2ForSequenceClassification" if kind == "Reward" else "GPT2LMHeadModel"
    model, more = getattr(transformers, cls)(config), dict[str, Any]()
    folder = model.config._name_or_path = tempfile.mkdtemp()  # references are loaded from there
    model.save_pretrained(folder)
    given: dict[str, Any] = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    given |= {"bf16": False, "gradient_checkpointing": False, "output_dir": folder}
    if kind == "GKD":
        given |= {"lmbda": 0.0, "max_length": 2 * size + 4, "max_new_tokens": 4}
        more["teacher_model"] = copy.deepcopy(model).requires_grad_(False)
    if kind == "GRPO":
        given |= {"num_generations": 2, "max_completion_length": size, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(each)) for each in completions]
    is_apart = kind in ("GKD", "ORPO")
    trl = importlib.import_module(f"trl.experimental.{kind.lower()}" if is_apart else "trl")
    rows = [{name: _row(at, size)[name] for name in _COLUMNS[kind]} for at in range(8)]
    more |= {"args": getattr(trl, f"{kind}Config")(**given), "processing_class": _tokenizer()}
    data = datasets.Dataset.from_list(rows)
    made = getattr(trl, f"{kind}Trainer")(model=model.train(), train_dataset=data, **more)
    made.current_gradient_accumulation_steps = 1
    return made


def batch_of(trainer: Any) -> Any:
    """Its first batch, with completions where it generates them."""
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
