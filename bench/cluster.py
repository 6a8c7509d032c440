"""Time against memory per rank for a sharded Llama-3 on H100s, by simulation.

    python -m bench.cluster [--model 8b] [--ranks 1,8,64,256,1024,128x8] [--budgets 0.1,0.2,0.4,1]
    python -m bench.cluster --published [--model 70b]

Nothing runs: the model is on the meta device, ranks are simulated, and times follow from
`rockmate/costs/machines/h100.toml`. Parameters are gathered in bfloat16 and gradients reduced in
float32. Weights, gradients and AdamW's moments are float32 and take 16 bytes a parameter, divided
among the ranks. A step is a forward, a backward with collectives beside other ops, and AdamW, which
reads four values of each parameter on the rank and writes three.

Each budget is planned twice: by the sum of all times, and with collectives at a tenth of theirs, as
if nine tenths ran beside other ops. The faster by the replay on two lanes counts.

`--published` sets the simulation beside what torchtitan reports, on an H100 with their memory's
bandwidth. One row is torchtitan's own schedule (checkpoints around layers, with or without saved
products), simulated; one is a plan at the memory that they report.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.models.hf import hf, usual
from bench.pages import Column, records_table, table
from rockmate import InfeasibleBudgetError, Machine, Planner, fully_shard
from rockmate.costs.machine import load_machine
from rockmate.ops.shards import gather_shards
from rockmate.plan.plan import Plan

STATE_BYTES = 16
UPDATED_BYTES = 28
HIDDEN_SHARE = 0.1
# Of the cards that torchtitan's figures are from.
THEIR_BANDWIDTH_GB_PER_S = 2400


class Size(NamedTuple):
    """Dimensions of a Llama-3."""

    width: int
    inner: int
    layers: int
    heads: int


SIZES = {"8b": Size(4096, 14336, 32, 32), "70b": Size(8192, 28672, 80, 64)}


class Published(NamedTuple):
    """A figure of torchtitan's `benchmarks/`, at commit b5bcd76.

    Attributes:
        model: a key of `SIZES`.
        ranks: number of GPUs.
        what: how it was run.
        saves_products: whether checkpoints save every second product and attention.
        tokens_per_s: of a GPU.
        gib: memory of a GPU; None: not reported.
    """

    model: str
    ranks: int
    what: str
    saves_products: bool
    tokens_per_s: float
    gib: float | None


PUBLISHED = (
    Published("8b", 8, "FSDP", True, 5762, 82.4),
    Published("8b", 8, "FSDP, torch.compile", True, 6667, 77.0),
    Published("8b", 128, "FSDP", True, 5605, 67.0),
    Published("8b", 128, "FSDP, torch.compile", True, 6514, 62.0),
    Published("70b", 256, "FSDP 32 x TP 8, torch.compile", False, 597.3, None),
    Published("70b", 256, "FSDP 32 x async TP 8, torch.compile", False, 652.4, None),
)


class Row(NamedTuple):
    """A plan for a mesh of ranks."""

    mesh: str
    budget: str
    peak_gib: float
    rank_gib: float
    sum_ms: float
    overlapped_ms: float
    tokens_per_s: float
    num_gathers: int
    is_hidden: bool


def model_and_batch(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model without memory, and a batch of one rank."""
    size = SIZES[options.model]
    with torch.device("meta"):
        model = hf(
            "LlamaForCausalLM",
            **usual(options.layers or size.layers, size.width, size.heads, size.inner, 128256),
            num_key_value_heads=8, max_position_embeddings=options.length, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        tokens = torch.zeros(options.batch, options.length, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def meta_llama(size: str, *, layers: int | None = None, length: int = 8192) -> Any:
    """A Llama-3 in bfloat16 on the meta device, and one sequence."""
    options = argparse.Namespace(model=size, layers=layers, length=length, batch=1)
    model, sample = model_and_batch(options)
    return model.to(torch.bfloat16), sample


def planner_for(
    options: argparse.Namespace, machine: Machine, mesh: str, **further: Any
) -> Planner:
    """A planner for one rank of a mesh: "8" for shards, "2x8" for replicas of them."""
    model, batch = model_and_batch(options)
    saves_products = further.pop("saves_products", None)
    if saves_products is not None:
        context = {"context_fn": every_second_product} if saves_products else {}
        made: Any = model
        made.gradient_checkpointing_enable({"use_reentrant": False, **context})
        further["existing_checkpoints"] = "honour"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return Planner(
        model,
        batch,
        machine=machine,
        mesh=[*map(int, mesh.split("x"))],
        shard=partial(fully_shard, mp_policy=policy),
        outputs="loss",
        numerics="bitwise",
        time_limit_s=options.limit,
        **further,
    )


def every_second_product() -> Any:
    """As torchtitan's selective checkpoints: attention is saved, and every second product."""
    seen = Counter[bool]()

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        seen[context.is_recompute] += is_product
        is_saved = seen[context.is_recompute] % 2 if is_product else "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def hidden(machine: Machine) -> Machine:
    """The same machine, with a tenth of the time of each collective."""
    link = {
        key: value * HIDDEN_SHARE
        if "latency" in key
        else value / HIDDEN_SHARE
        if key.startswith("gb_per_s")
        else value
        for key, value in machine.link.items()
    }
    return replace(machine, link=link)


def planned(planner: Planner, budget: float | int) -> Plan:
    """The plan for a budget, or that of the smallest peak."""
    try:
        return planner.plan(budget)
    except InfeasibleBudgetError as error:
        return planner.plan(error.minimum_bytes)


def sum_ms(plan: Plan, priced: Plan) -> float:
    """The sum of the times of a plan's runs, at the costs of another plan of the same step."""
    seen, total = set[int](), 0.0
    for index in plan.schedule.steps:
        table = priced.costs.recompute if index in seen else priced.costs.first
        total += table[index].time_ms
        seen.add(index)
    return total


def row_of(
    plan: Plan, mesh: str, budget: str, options: argparse.Namespace, *, is_hidden: bool = False
) -> Row:
    """A plan with the step's time and memory on a rank."""
    model, _ = model_and_batch(options)
    num_shards = int(mesh.split("x")[-1])
    own = sum(parameter.numel() for parameter in model.parameters()) / num_shards
    step_ms = plan.overlapped_ms + options.machine.memory_ms(UPDATED_BYTES * own)
    targets = [plan.graph.ops[index].node.target for index in plan.schedule.steps]
    return Row(
        mesh,
        budget,
        plan.predicted_peak_bytes / 2**30,
        (plan.predicted_peak_bytes + STATE_BYTES * own) / 2**30,
        plan.predicted_ms,
        step_ms,
        1e3 * options.batch * options.length / step_ms,
        targets.count(gather_shards),
        is_hidden,
    )


def frontier_rows(mesh: str, options: argparse.Namespace) -> Iterator[Row]:
    """The plans for a mesh of ranks."""
    machines = options.machine, hidden(options.machine)
    planners = [planner_for(options, machine, mesh) for machine in machines]
    for budget in map(float, options.budgets.split(",")):
        plain, other = (planned(planner, budget) for planner in planners)
        # The same schedule by the real times of collectives.
        repriced = replace(other, costs=plain.costs, predicted_ms=sum_ms(other, plain))
        best = min((plain, repriced), key=lambda plan: plan.overlapped_ms)
        is_hidden = best is not plain
        yield row_of(best, mesh, f"{budget:g}", options, is_hidden=is_hidden)


_FRONTIER: tuple[Column, ...] = (
    ("ranks", lambda r: r.mesh),
    ("budget", lambda r: r.budget),
    ("activations, gathered weights", lambda r: f"{r.peak_gib:.1f} GiB"),
    ("with weights and AdamW", lambda r: f"{r.rank_gib:.1f} GiB"),
    ("sum of times", lambda r: f"{r.sum_ms:,.0f} ms"),
    ("step with overlap", lambda r: f"{r.overlapped_ms:,.0f} ms"),
    ("tokens/s a rank", lambda r: f"{r.tokens_per_s:,.0f}"),
    ("gathers", lambda r: str(r.num_gathers)),
    ("planned with hidden collectives", lambda r: "yes" if r.is_hidden else "no"),
)
_PUBLISHED_COLUMNS = ("GPUs", "", "tokens/s a GPU", "times the reported", "memory", "gathers")


def published_rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """What is reported, the same schedule simulated, and plans at the reported memory."""
    rows = [row for row in PUBLISHED if row.model == options.model]
    for num_ranks in dict.fromkeys(row.ranks for row in rows):
        reported = [row for row in rows if row.ranks == num_ranks]
        for row in reported:
            memory = f"{row.gib:.1f} GiB" if row.gib else "-"
            speed = f"{row.tokens_per_s:,}"
            yield [str(num_ranks), f"reported: {row.what}", speed, "1", memory, ""]
        first = reported[0]
        theirs = planner_for(
            options, options.machine, str(num_ranks), saves_products=first.saves_products
        )
        same = row_of(planned(theirs, 1.0), str(num_ranks), "its schedule, simulated", options)
        ours = planner_for(options, options.machine, str(num_ranks))
        state_gib = same.rank_gib - same.peak_gib
        # Where no memory is reported: that of the schedule.
        limits = [row.gib or same.rank_gib for row in reported]
        found = [same]
        for gib in dict.fromkeys(limits):
            plan = planned(ours, int((gib - state_gib) * 2**30))
            found.append(row_of(plan, str(num_ranks), f"a plan within {gib:.1f} GiB", options))
        for row in found:
            shares = " and ".join(f"{row.tokens_per_s / r.tokens_per_s:.2f}" for r in reported)
            yield [
                *(str(num_ranks), row.budget, f"{row.tokens_per_s:,.0f}", shares),
                *(f"{row.rank_gib:.1f} GiB", str(row.num_gathers)),
            ]


def lines(options: argparse.Namespace) -> list[str]:
    """The table that was asked for."""
    if options.published:
        return table(_PUBLISHED_COLUMNS, published_rows(options))
    meshes = options.ranks.split(",")
    return records_table(
        _FRONTIER, (row for mesh in meshes for row in frontier_rows(mesh, options))
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--ranks", default="1,8,64,256,1024,128x8")
    parser.add_argument("--budgets", default="0.1,0.2,0.4,1")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    options.machine = load_machine("h100")
    if options.published:
        options.machine = replace(options.machine, bandwidth_gb_per_s=THEIR_BANDWIDTH_GB_PER_S)
    text = "\n".join(lines(options)) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
