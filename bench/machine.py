"""What a measurement ran on, as the head of its JSON lines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def machine_record(module: str) -> dict[str, Any]:
    """Command, commit, load, processor and versions of this process, started as `python -m module`."""
    return {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "commit": _commit(),
        "load_average": os.getloadavg()[0],
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine_line(record: Mapping[str, Any]) -> str:
    """The record on one line, for what is printed and not kept."""
    told = ("processor", "torch", "transformers", "commit", "load_average")
    return ", ".join(f"{name} {record[name]}" for name in told)


def hardware_text(record: Mapping[str, Any], *, device: str = "cpu") -> str:
    """Processor or graphics card, cores and threads, as the head of a page says them."""
    hardware = (
        record["gpu"]
        if device.startswith("cuda")
        else f"{record['processor']} ({record['machine']})"
    )
    return f"{hardware}, {record['num_cores']} cores, {record['num_threads']} thread used"


def told_by_model(told: Iterable[tuple[str, str]]) -> str:
    """What holds for which models, from pairs of a model and what is told of it; without the models where the same holds for all."""
    models_of: dict[str, dict[str, None]] = {}
    for model, text in told:
        models_of.setdefault(text, {})[model] = None
    if len(models_of) == 1:
        return next(iter(models_of))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in models_of.items())


def versions_text(record: Mapping[str, Any]) -> str:
    """What was run, as the head of a page says it."""
    return f"Python {record['python']}, PyTorch {record['torch']}, transformers {record['transformers']}"


def _commit() -> str:
    """The checkout's commit, empty outside of one."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _processor() -> str:
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
