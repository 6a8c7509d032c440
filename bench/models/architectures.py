"""Models by the table of their architectures, architectures.toml, which explains it."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

from bench.models import batches, workload
from bench.models.hf import TOKENS, halves, hf, quantized, usual, with_adapters
from bench.models.workload import Made

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_KNOWN = vars(batches) | {"TOKENS": TOKENS, "halves": halves, "usual": usual}


def made(
    name: str, *, rows: int, rank: int = 0, is_quantized: bool = False, **arguments: Any
) -> Made:
    """A model of an architecture.

    Args:
        name: of the architecture.
        rows: of a batch.
        rank: if not 0, the model is frozen, and low-rank adapters of this rank on its linear layers
            are trained (LoRA, Hu et al., 2021).
        is_quantized: whether the frozen model is in 4 bits (QLoRA, Dettmers et al., 2023).
        **arguments: those that the table names, and further fields of the configuration.
    """
    entry = _TABLE[name]
    codes = [compile(entry[key], key, "eval") for key in ("fields", "batch")]
    named = {*re.findall(r"\w+", entry["kind"]), *codes[0].co_names, *codes[1].co_names}
    fields, make_batch = (eval(code, _KNOWN | arguments) for code in codes)
    fields |= {key: value for key, value in arguments.items() if key not in named}
    kind = entry["kind"].format(**arguments)
    model = of_folder(kind)(**fields) if "." in kind else hf(kind, **fields)
    model = quantized(model) if is_quantized else model
    model = of_folder(entry["wrap"])(model) if "wrap" in entry else model
    return Made(
        model=with_adapters(model, rank) if rank else model,
        make_batch=make_batch,
        rows=rows,
        layers=tuple(f"base_model.model.{path}" if rank else path for path in entry["layers"]),
        stages=tuple(entry.get("stages", ())),
        loss=getattr(workload, entry["loss"]) if "loss" in entry else None,
    )


def of_folder(name: str) -> Any:
    """What a file of this folder has; the file's name and its own."""
    module, _, own = name.partition(".")
    return getattr(importlib.import_module(f"bench.models.{module}"), own)
