"""Batches of random shapes: resident memory and time beside eager.

    python -m bench.soak                   # 2,000 steps, minutes on one core
    python -m bench.soak --steps 200

A GPT-2 of two layers trains on batches of one to eight rows and 2 to 128 tokens, eager and planned
in turn. Each line has the growth of the process's resident memory since the first step, the planned
steps' share of time, new plans included, and the number of captures and plans so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
import transformers
from torch import nn

from rockmate import RockmateModule

MAX_ROWS, MAX_TOKENS, VOCABULARY = 8, 128, 256


class _Counter(logging.Handler):
    """Counts captures and plans by their lines in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captures = self.num_plans = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.num_captures += text.startswith("captured")
        self.num_plans += text.startswith("planned for this call")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a JSON line for each tenth of the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--budget", type=float, default=0.7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for row in soak(options.steps, options.budget):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    return 0


def soak(num_steps: int, budget: float) -> Iterator[dict[str, Any]]:
    """The lines of `main`, each as soon as it is known."""
    counter = _Counter()
    logger = logging.getLogger("rockmate")
    logger.addHandler(counter)
    level, logger.level = logger.level, logging.INFO
    try:
        yield from _rows(num_steps, budget, counter)
    finally:
        logger.removeHandler(counter)
        logger.setLevel(level)


def _rows(num_steps: int, budget: float, counter: _Counter) -> Iterator[dict[str, Any]]:
    eager, model = _model(), _model()
    module = RockmateModule(model, _batch(MAX_ROWS, MAX_TOKENS), budget, machine="cpu-avx2")
    for _ in range(3):
        _seconds(eager, MAX_ROWS, MAX_TOKENS)
        _seconds(module, MAX_ROWS, MAX_TOKENS)
    gc.collect()
    draw, process = random.Random(0), psutil.Process()
    first_bytes, eager_s, planned_s = process.memory_info().rss, 0.0, 0.0
    for step in range(1, num_steps + 1):
        shape = draw.randint(1, MAX_ROWS), draw.randint(2, MAX_TOKENS)
        eager_s += _seconds(eager, *shape)
        planned_s += _seconds(module, *shape)
        if step % max(1, num_steps // 10) == 0:
            gc.collect()
            yield {
                "steps": step,
                "growth_mb": round((process.memory_info().rss - first_bytes) / 1e6, 1),
                "time_ratio": round(planned_s / eager_s, 3),
                "captures": counter.num_captures,
                "plans": counter.num_plans,
            }


def _model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=VOCABULARY, n_positions=MAX_TOKENS
    )
    return transformers.GPT2LMHeadModel(config)


def _batch(num_rows: int, num_tokens: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (num_rows, num_tokens))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _seconds(module: nn.Module, num_rows: int, num_tokens: int) -> float:
    batch = _batch(num_rows, num_tokens)
    begin = time.perf_counter()
    module(**batch).loss.backward()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
