"""Training steps of TRL's trainers, for `bench.steps`: a small GPT-2 with a whole vocabulary."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import torch

KINDS = ("DPO", "KTO", "ORPO", "Reward", "GKD", "GRPO", "SFT")
_WORDS = [f"w{number}" for number in range(60)]
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} [EOS] {% endfor %}"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: at for at, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *_WORDS])}
    made = Tokenizer(models.WordLevel(known, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.chat_template = _TEMPLATE
    return found


def _row(at: int, size: int) -> dict[str, Any]:
    prompt, good, bad = (" " + " ".join(_WORDS[at + n : at + n + size]) for n in (0, 7, 13))
    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
    one = {"prompt": prompt, "completion": good, "label": at % 2 == 0, "text": prompt + good}
    return {**one, "chosen": good, "rejected": bad, "messages": said}


def trainer_of(kind: str, size: int) -> Any:
    """A trainer of one kind, with sequences of twice `size` words, and 1,600 times the words."""
    import datasets
    import transformers
    import trl

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=max(64, 1570 * size), n_layer=4, n_embd=64 + 6 * size, n_head=2, n_positions=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    given: dict[str, Any] = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    given |= {"bf16": False, "gradient_checkpointing": False, "output_dir": tempfile.mkdtemp()}
    model, more, keys = transformers.GPT2LMHeadModel(config), dict[str, Any](), {"messages"}
    source = trl
    if kind in ("GKD", "ORPO"):
        source = __import__(f"trl.experimental.{kind.lower()}", fromlist=[kind])
    match kind:
        case "GKD":
            given |= {"lmbda": 0.0, "max_length": 2 * size + 4, "max_new_tokens": 4}
            more["teacher_model"] = copy.deepcopy(model).requires_grad_(False)
        case "GRPO":
            given |= {"num_generations": 2, "max_completion_length": size, "beta": 0.1}
            more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
            keys = {"prompt"}
        case "Reward":
            config.num_labels = 1
            model = transformers.GPT2ForSequenceClassification(config)
    keys = {"KTO": {"prompt", "completion", "label"}, "SFT": {"text"}}.get(kind, keys)
    keys = {"prompt", "chosen", "rejected"} if kind in ("DPO", "ORPO", "Reward") else keys
    model.save_pretrained(given["output_dir"])  # references are loaded from there
    model.config._name_or_path = given["output_dir"]
    rows = [{key: each for key, each in _row(at, size).items() if key in keys} for at in range(8)]
    made = getattr(source, f"{kind}Trainer")(
        model=model, args=getattr(source, f"{kind}Config")(**given), processing_class=_tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows), **more,
    )  # fmt: skip
    made.current_gradient_accumulation_steps = 1
    model.train()
    return made


def batch_of(trainer: Any) -> Any:
    """Its first batch, with completions where it generates them."""
    torch.manual_seed(0)
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
