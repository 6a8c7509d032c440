"""Time against memory per rank for a sharded Llama-3-8B on H100s, by simulation.

    python -m bench.cluster [--layers 32] [--ranks 1,8,64,256,1024] [--budgets 0.1,0.2,0.4,1]

Nothing runs: the model is on the meta device, ranks are simulated, and times follow from
`rockmate/costs/machines/h100.toml`. The step is captured once, for 8 ranks. Other numbers of ranks
change the bytes that a rank sends by a factor, which goes into the link's rate. Parameters are
gathered in bfloat16 and gradients reduced in float32; weights, gradients and AdamW's moments are
float32 and take 16 bytes a parameter, divided among the ranks.

Each budget is planned twice: by the sum of all times, and with collectives at a tenth of theirs, as
if nine tenths ran beside other ops. The faster by the replay on two lanes counts.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from rockmate import InfeasibleBudgetError, Machine, fully_shard, simulated_ranks
from rockmate.costs.machine import load_machine
from rockmate.ops.shards import gather_shards
from rockmate.plan.plan import Plan
from rockmate.planning.session import PlanningSession
from rockmate.step import CapturedStep, capture_step

CAPTURED_RANKS = 8
STATE_BYTES = 16
HIDDEN_SHARE = 0.1


class Row(NamedTuple):
    """A plan for a number of ranks."""

    num_ranks: int
    budget: float
    peak_gib: float
    rank_gib: float
    sum_ms: float
    overlapped_ms: float
    tokens_per_s: float
    num_gathers: int
    is_hidden: bool


def captured(options: argparse.Namespace) -> tuple[CapturedStep, int]:
    """The step of one rank, and the number of parameters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=options.length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        tokens = torch.zeros(options.batch, options.length, dtype=torch.long)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    batch = {"input_ids": tokens, "labels": tokens}
    step = capture_step(model, batch, machine=load_machine("h100"), outputs="loss")
    return step, num_parameters


def machine_for(num_ranks: int, *, is_hidden: bool) -> Machine:
    """An H100 whose link takes for `CAPTURED_RANKS` what it takes for so many ranks."""
    machine = load_machine("h100")
    is_within = num_ranks <= machine.link["ranks_in_node"]
    rate = machine.link["gb_per_s" if is_within else "gb_per_s_between_nodes"]
    share, captured_share = (n / (n - 1) if n > 1 else 1e6 for n in (num_ranks, CAPTURED_RANKS))
    factor = 1 / HIDDEN_SHARE if is_hidden else 1
    link = {
        "latency_us": machine.link["latency_us"] / factor,
        "gb_per_s": rate * share / captured_share * factor,
    }
    return replace(machine, link={**machine.link, **link, "ranks_in_node": CAPTURED_RANKS})


def rows_for(
    step: CapturedStep, num_parameters: int, num_ranks: int, options: argparse.Namespace
) -> Iterator[Row]:
    """The plans for a number of ranks."""
    sessions = [
        PlanningSession.of(
            step,
            time_limit_s=options.limit,
            machine=machine_for(num_ranks, is_hidden=is_hidden),
            numerics="bitwise",
        )
        for is_hidden in (False, True)
    ]
    for budget in map(float, options.budgets.split(",")):
        found = []
        for session in sessions:
            try:
                found.append(session.plan(budget))
            except InfeasibleBudgetError as error:
                found.append(session.plan(error.minimum_bytes))
        plain, hidden = found
        # The same schedule by the real times of collectives.
        repriced = replace(hidden, costs=plain.costs, predicted_ms=sum_ms(hidden, plain))
        best = min((plain, repriced), key=lambda plan: plan.overlapped_ms)
        state_bytes = STATE_BYTES * num_parameters / num_ranks
        targets = [best.graph.ops[index].node.target for index in best.schedule.steps]
        yield Row(
            num_ranks,
            budget,
            best.predicted_peak_bytes / 2**30,
            (best.predicted_peak_bytes + state_bytes) / 2**30,
            best.predicted_ms,
            best.overlapped_ms,
            1e3 * options.batch * options.length / best.overlapped_ms,
            targets.count(gather_shards),
            best is not plain,
        )


def sum_ms(plan: Plan, priced: Plan) -> float:
    """The sum of the times of a plan's runs, at the costs of another plan of the same step."""
    seen, total = set[int](), 0.0
    for index in plan.schedule.steps:
        table = priced.costs.recompute if index in seen else priced.costs.first
        total += table[index].time_ms
        seen.add(index)
    return total


HEADER = """\
| ranks | budget | activations, gathered weights | with weights and AdamW | sum of times | \
with overlap | tokens/s a rank | gathers | planned with hidden collectives |
|---|---|---|---|---|---|---|---|---|"""


def text_of(row: Row) -> str:
    """A row in Markdown."""
    return (
        f"| {row.num_ranks:,} | {row.budget:g} | {row.peak_gib:.1f} GiB | {row.rank_gib:.1f} GiB "
        f"| {row.sum_ms:,.0f} ms | {row.overlapped_ms:,.0f} ms | {row.tokens_per_s:,.0f} "
        f"| {row.num_gathers} | {'yes' if row.is_hidden else 'no'} |"
    )


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--ranks", default="1,8,64,256,1024")
    parser.add_argument("--budgets", default="0.1,0.2,0.4,1")
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    def show(line: str) -> None:
        print(line, flush=True)  # noqa: T201
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    with simulated_ranks(CAPTURED_RANKS):
        step, num_parameters = captured(options)
        show(HEADER)
        for num_ranks in map(int, options.ranks.split(",")):
            for row in rows_for(step, num_parameters, num_ranks, options):
                show(text_of(row))


if __name__ == "__main__":
    main()
