"""The versions that `constraints.txt` pins."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (version,) = (line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))
    return version


def has_pinned_versions() -> bool:
    """Whether PyTorch and transformers are the pinned ones, builds aside."""
    is_torch = torch.__version__.partition("+")[0] == pinned("torch")
    return is_torch and transformers.__version__ == pinned("transformers")
