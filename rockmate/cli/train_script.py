"""The script that `rockmate fit --write` writes: a Trainer at the fastest size that was found."""

from __future__ import annotations

import argparse
import shlex
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from rockmate.curves.fit import Fit

OPTIMIZERS = {"adamw": "adamw_torch", "adafactor": "adafactor", "sgd": "sgd"}
OPTIMIZERS |= {"adamw_8bit": "adamw_bnb_8bit"}
"""Those of a fit, as `TrainingArguments` calls them."""
_PLANNING = ("numerics", "outputs", "offload", "host_budget", "weights", "untraced")


def script(arguments: argparse.Namespace, model: nn.Module, found: Fit) -> str:
    """The script."""
    row, base, imports, adapted, given = found.fastest, model, "", "", vars(arguments)
    if arguments.lora:
        base = model.get_base_model()  # pyright: ignore
        imports = "from peft import LoraConfig, get_peft_model\n"
        rank, targets = arguments.lora_rank, list(arguments.lora_targets) or "all-linear"
        lora = f"LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets!r})"
        adapted = f"model = get_peft_model(model, {lora})\n"
    elif arguments.frozen:
        imports = "from fnmatch import fnmatchcase\n"
        adapted = (
            "for name, parameter in model.named_parameters():\n"
            f"    paths = {[path for each in arguments.frozen for path in (each, f'{each}.*')]}\n"
            "    if any(fnmatchcase(name, path) for path in paths):\n"
            "        parameter.requires_grad_(False)\n"
        )
    options = {name: given[name] for name in _PLANNING}
    usual = (None, (), "any_order", "by_limit")
    unusual = {name: value for name, value in options.items() if value not in usual}
    texts = [repr(arguments.memory), *(f"{name}={value!r}" for name, value in unusual.items())]
    path, template = Path(arguments.model), resources.files("rockmate.cli") / "train_script.txt"
    values: dict[str, Any] = {"name": type(base).__name__, "memory": arguments.memory}
    values |= {"command": command_of(arguments), "imports": imports, "adapted": adapted}
    values |= {"source": repr(str(path.resolve()) if path.exists() else arguments.model)}
    values |= {"dtype": arguments.dtype or "float32", "options": ", ".join(texts)}
    values |= {"rows": 8 * row.batch_size, "num_tokens": row.num_tokens, "batch": row.batch_size}
    values |= {"optimizer": repr(OPTIMIZERS[arguments.optimizer])}
    return Template(template.read_text(encoding="utf-8")).substitute(values)


def command_of(arguments: argparse.Namespace) -> str:
    """The command that was given."""
    return shlex.join(["rockmate", *arguments.given])
