"""The cost of batches of other lengths, or other grids of images, after the first.

    python -m bench.lengths                # writes bench/results/lengths_cpu_<yyyymm>.*
    python -m bench.lengths --model gpt2 --lengths 5

Each model is planned for a batch of 4 x 96 tokens at half of its activation peak, without chunks:
a plan with them is made anew for each length. Then come batches of other lengths; every third has 3
sequences. Each is trained on planned and in eager, from the same weights and random state, and once
more under the allocator's meter. The cost of a length is the processor time between its call and
its program. The first other length pays for the symbolic capture, which counts among captures.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench import command, measure
from bench.command import Record
from bench.models import batches, built, makers
from bench.pages import about, filled
from bench.registries import tiny
from rockmate import RockmateModule
from rockmate.entry.plan_cache import PlanCache

BATCH, LENGTH, WORDS = 4, 96, 8192
_GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm_ocr")
_SIDES = (16, 12, 8, 4)  # of a grid, in patches
MODELS = makers("lengths")


def batch_of(name: str, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Random tokens and labels.

    BERT also gets a mask that pads each sequence by another number of tokens.
    """
    rows, length = shape
    draw = torch.Generator().manual_seed(seed)
    batch = batches.translated(length, length, WORDS)(draw, rows)
    if name == "bert":
        padded = torch.arange(rows)[:, None] * 5
        batch["attention_mask"] = (torch.arange(length) >= padded).long()
    return batch


def shapes_of(num_lengths: int) -> list[tuple[int, int]]:
    """So many different lengths below the sample's, in no order of size.

    Every third batch has one sequence less.
    """
    lengths = [LENGTH - 1 - 37 * index % 89 for index in range(num_lengths)]
    return [(BATCH - (index % 3 == 2), length) for index, length in enumerate(lengths)]


def images_of(config: Any, grids: Sequence[Sequence[int]], seed: int) -> dict[str, Tensor]:
    """A row of text around an image for each grid, which is its height and width in patches."""
    draw, vision = torch.Generator().manual_seed(seed), config.vision_config
    counts = [height * width for height, width in grids]
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    words = torch.randint(10, 200, (len(grids), max(counts) // 4 + 8), generator=draw)
    for row, count in zip(words, counts, strict=True):
        row[1 : 1 + count // vision.spatial_merge_size**2] = config.image_token_id
    is_image = words == config.image_token_id
    return {
        "pixel_values": torch.randn(sum(counts), width, generator=draw),
        "image_grid_thw": torch.tensor([[1, *each] for each in grids]),
        "input_ids": words,
        "mm_token_type_ids": is_image.int(),
        "labels": words.masked_fill(is_image, -100),
    }


def _workload(name: str, number: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model, its sample, and so many further batches."""
    if name in MODELS:
        shapes = [(BATCH, LENGTH), *shapes_of(number)]
        made = [batch_of(name, shape, seed) for seed, shape in enumerate(shapes)]
        return built(name, MODELS[name]).model, made
    torch.manual_seed(0)
    model: Any = next(tiny.builders("image-text-to-text", name))()
    largest, *sizes = itertools.product(_SIDES, repeat=2)
    others = random.Random(0).sample([*itertools.permutations(sizes, 2)], number)
    grids = enumerate([(largest, sizes[0]), *others])
    return model, [images_of(model.config, each, seed) for seed, each in grids]


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """Trains one model on the sample and on other sizes."""
    model, (sample, *others) = _workload(name, options.lengths)
    eager = copy.deepcopy(model)
    begin = time.process_time()
    how: Any = {"numerics": "bitwise", "on_infeasible": "least", "trial": "never"}
    module = RockmateModule(model, sample, 0.5, **how)
    _gradients_after(module, model, sample)
    plan_s = time.process_time() - begin
    with measure.heard(logging.INFO) as log:
        lengths = [_measured_length(module, model, eager, batch) for batch in others]
    later = [length["cost_ms"] for length in lengths[1:]] or [0.0]
    yield {
        "model": name,
        "plan_s": plan_s,
        "first_s": lengths[0]["cost_ms"] / 1e3,
        "later_ms": statistics.median(later),
        "largest_ms": max(later),
        "step_ms": statistics.median(length["step_ms"] for length in lengths),
        "num_captures": sum(each.startswith(("captured", "planned for this call")) for each in log),
        "peak_share": max(length["peak_share"] for length in lengths),
        "num_equal": sum(length["is_equal"] for length in lengths),
        "num_lengths": len(lengths),
    }


def _measured_length(
    module: RockmateModule, model: nn.Module, eager: nn.Module, batch: dict[str, Tensor]
) -> Record:
    begin = time.process_time()
    with _timed_preparation() as spent_ms:
        ours = _gradients_after(module, model, batch)
    total_ms = (time.process_time() - begin) * 1e3
    peak_bytes = measure.allocator_peak(lambda: module(**batch).loss.backward())
    return {
        "cost_ms": sum(spent_ms),
        "step_ms": total_ms - sum(spent_ms),
        "peak_share": peak_bytes / module.plan.budget_bytes,
        "is_equal": measure.same_bits(ours, _gradients_after(eager, eager, batch)),
    }


@contextmanager
def _timed_preparation() -> Iterator[list[float]]:
    """Collects the processor time in ms that the module takes to prepare a call of other sizes."""
    prepare, spent_ms = PlanCache._plan_for_shapes, []

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        runnable = prepare(*args)
        spent_ms.append((time.process_time() - begin) * 1e3)
        return runnable

    with mock.patch.object(PlanCache, "_plan_for_shapes", timed):
        yield spent_ms


def _gradients_after(
    callee: nn.Module, owner: nn.Module, batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The loss and all gradients of one step from a fixed random state."""
    owner.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    loss = callee(**batch).loss
    loss.backward()
    return {"": loss.detach(), **measure.gradients_of(owner)}


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the slowest later length as its headline."""
    newest = command.newest(records, "model")
    slowest = max(newest, key=lambda record: record["later_ms"])
    return filled("lengths", slowest=slowest, lines=newest, about=about(newest, __doc__))


_NUMBER = "number of different lengths after the first, at most 89, and of grids, at most 210"
main = command.main_of(
    "lengths", __doc__, measured, page, models=(*MODELS, *_GRID_MODELS), stem="lengths_cpu",
    further={"--lengths": {"type": int, "default": 20, "help": _NUMBER}},
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
