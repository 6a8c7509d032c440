"""Time at equal peak memory per rank: a sharded model under plans and without.

    python -m bench.sharded [--model gpt2] [--adapters] [--layers 4] [--width 128] [--rounds 5]

Two gloo processes train a GPT-2 or a Llama from a configuration, with dropout. PyTorch's
`fully_shard` has two settings, `reshard_after_forward` with and without a checkpoint around each
layer. For each of the four, a plan gets its measured peak as the budget. One more budget is below
all four. All modules then take turns, step by step. Ratios are the median over rounds of the ratio
within a round, times the least of all rounds. Peaks are those of the allocator's events, the larger
of both ranks, with gradients in place: activations and gathered parameters.

Prints a table in Markdown and, with `--output`, adds a JSON line for each row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from bench import command
from bench.command import Record, add_line
from bench.measure import time_in_turn
from bench.models.architectures import made
from bench.pages import filled
from rockmate import RockmateModule, timeline

NUM_RANKS, VOCABULARY = 2, 512
LEAST_SHARE = 0.85  # below the least peak of the four settings
TIME_LIMIT_S = 3.0  # for the solves of one plan


def model_of(options: argparse.Namespace) -> nn.Module:
    """A language model with dropout, the same on all ranks."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": options.layers, "width": options.width, "heads": 4}
    sizes |= {"words": VOCABULARY, "rows": options.batch, "length": options.length}
    if options.model == "llama":
        sizes |= {"kind": "Llama", "shared_heads": 2, "inner": 3 * options.width}
        sizes |= {"attention_dropout": 0.1}
    model: Any = made({"llama": "rotary"}.get(options.model, "gpt2"), **sizes).model
    if not options.adapters:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def sharded(
    options: argparse.Namespace, mesh: DeviceMesh, *, reshards: bool, has_checkpoints: bool
) -> nn.Module:
    """The model in one of the four settings."""
    model: Any = model_of(options)
    if has_checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return model


def stepper(module: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    """A forward and backward of a module, whose gradients are in place."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        # A plan counts outputs until the backward has ended.
        output = module(**batch)
        output.loss.backward()

    return step


def largest_over_ranks(value: int) -> int:
    """The largest of all ranks' numbers."""
    found = torch.tensor(value)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return int(found)


def peak_of(step: Callable[[], None], *, num_runs: int = 3) -> int:
    """The median of several runs: gloo's threads free a little later in some."""
    step()
    return largest_over_ranks(
        int(statistics.median_low(timeline(step).peak_bytes for _ in range(num_runs)))
    )


def planned(
    options: argparse.Namespace, mesh: DeviceMesh, batch: dict[str, Tensor], budget: int
) -> RockmateModule:
    """The model under a plan."""
    model = sharded(options, mesh, reshards=True, has_checkpoints=False)
    # Chunks add a loss in another order: bits are those of PyTorch's without them.
    return RockmateModule(
        model,
        batch,
        budget,
        numerics="bitwise",
        time_limit_s=TIME_LIMIT_S,
        on_infeasible="least",
        trial="never",
    )


def measured(options: argparse.Namespace, rank: int) -> list[Record]:
    """A row for each setting, and one below them."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (options.batch, options.length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    settings = {
        f"{'reshard' if reshards else 'keep'}{', checkpoints' if has_checkpoints else ''}": partial(
            sharded, options, mesh, reshards=reshards, has_checkpoints=has_checkpoints
        )
        for has_checkpoints in (False, True)
        for reshards in (False, True)
    }
    steps = {name: stepper(make(), batch) for name, make in settings.items()}
    peaks = {name: peak_of(step) for name, step in steps.items()}
    budgets = {**peaks, "none of the four": int(LEAST_SHARE * min(peaks.values()))}
    modules = {name: planned(options, mesh, batch, bytes_) for name, bytes_ in budgets.items()}
    plans = {f"plan: {name}": stepper(module, batch) for name, module in modules.items()}
    plan_peaks = {name: peak_of(step) for name, step in plans.items()}

    def with_barrier(step: Callable[[], None]) -> None:
        step()
        distributed.barrier()

    times = time_in_turn(
        {name: partial(with_barrier, step) for name, step in (steps | plans).items()},
        options.rounds,
        before=distributed.barrier,
        is_wall=True,
        collects=False,
    )
    rows = []
    for name, module in modules.items():
        own = times[f"plan: {name}"]
        collectives = module._plans.runnables[0].runner.program.collectives
        rows.append({
            "setting": name,
            "peak_bytes": budgets[name],
            "step_ms": min(times[name].times_ms) if name in times else None,
            "plan_predicted_bytes": module.plan.predicted_peak_bytes,
            "plan_peak_bytes": plan_peaks[f"plan: {name}"],
            "plan_ms": min(own.times_ms),
            # Whatever else the processor does for a while, it does to the whole of a round.
            "ratio": own.over(times[name]).ratio if name in times else None,
            "num_gathers": sum("gather_shards" in text for text, _ in collectives),
        })  # fmt: skip
    return rows


def enter(rank: int, store: str, options: argparse.Namespace) -> None:
    """One rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    rows = measured(options, rank)
    if rank == 0:
        sys.stdout.write("\n".join(filled("sharded", rows=rows)) + "\n")
        sys.stdout.flush()
        for row in rows if options.output else ():
            add_line(options.output, row)
    distributed.barrier()
    # Gloo and the legacy profiler together: PyTorch aborts in about one teardown of fifty.
    os._exit(0)


def main() -> None:
    """Starts the ranks."""
    parser = command.parser("sharded", __doc__, rounds=5)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--adapters", action="store_true", help="LoRA on all linear layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(enter, (f"{folder}/store", options), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
