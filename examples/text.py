"""The text that the examples train on: the sources of Python's standard library."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

_MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "difflib",
    "inspect",
    "pathlib",
    "statistics",
    "textwrap",
    "typing",
    "zipfile",
)


def source_text() -> str:
    """The sources, one after the other."""
    paths = [importlib.import_module(name).__file__ for name in _MODULES]
    return "\n".join(
        Path(path).read_text(encoding="utf-8") for path in paths if path and path.endswith(".py")
    )


def rows_of_tokens(length: int, num_rows: int, tokenizer: Any = None) -> torch.Tensor:
    """Rows of `length` tokens each, shape (num_rows, length).

    Bytes are the tokens if there is no tokenizer.
    """
    text = source_text()
    tokens = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
    return torch.tensor(tokens[: num_rows * length]).view(-1, length)


class Rows(torch.utils.data.Dataset):
    """Rows of tokens that are their own labels."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
