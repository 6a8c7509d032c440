"""Batches of random shapes: resident memory and time beside eager.

    python -m bench.soak                   # 2,000 steps, minutes on one core
    python -m bench.soak --steps 200

A GPT-2 of two layers trains on batches of one to eight rows and 2 to 128 tokens, eager and planned
in turn. Each line has the growth of the process's resident memory since the first step, the planned
steps' share of time, new plans included, and the number of captures and plans so far.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from bench import command
from bench.lengths import CaptureLog
from bench.models import text
from rockmate import RockmateModule

MAX_ROWS, MAX_TOKENS, VOCABULARY = 8, 128, 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a JSON line for each tenth of the steps."""
    parser = command.parser("soak", __doc__)
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
    with CaptureLog() as log:
        yield from _rows(num_steps, budget, log)


def _rows(num_steps: int, budget: float, log: CaptureLog) -> Iterator[dict[str, Any]]:
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
                "captures": log.num_captures,
                "plans": log.num_plans,
            }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return text.gpt2(
        layers=2, width=64, heads=2, words=VOCABULARY, rows=MAX_ROWS, length=MAX_TOKENS
    ).model


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
