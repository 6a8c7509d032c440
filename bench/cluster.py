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
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench import command
from bench.command import Record
from bench.models import Workload, built, makers
from bench.pages import filled
from rockmate import Machine, Planner
from rockmate.costs.machine import load_machine
from rockmate.ops.shards import GATHER
from rockmate.plan.plan import Plan
from rockmate.planning.simulated_ranks import sharded_by_layers

STATE_BYTES = 16
UPDATED_BYTES = 28
HIDDEN_SHARE = 0.1
# Of the cards that torchtitan's figures are from.
THEIR_BANDWIDTH_GB_PER_S = 2400
SIZES = ("8b", "70b")
_LEAST: Any = {"on_infeasible": "least"}


PUBLISHED: list[Record] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)["published"]


class Cluster:
    """A model on ranks of one kind of machine.

    Args:
        options: of the command line.
        machine: what a rank is.
    """

    def __init__(self, options: argparse.Namespace, machine: Machine) -> None:
        self.options, self.machine = options, machine
        self.num_parameters = sum(each.numel() for each in self._workload().model.parameters())

    def _workload(self) -> Workload:
        """The model without memory, in float32; a plan may change what a model's forward does."""
        options = self.options
        sizes = {"layers": options.layers} if options.layers else {}
        make = partial(makers("large")[f"llama-3-{options.model}"], length=options.length, **sizes)
        return built(options.model, make, device="meta")

    def planner(
        self, mesh: str, *, is_hidden: bool = False, saves_products: bool | None = None
    ) -> Planner:
        """A planner for one rank of a mesh: "8" for shards, "2x8" for replicas of them.

        Args:
            mesh: sizes.
            is_hidden: whether collectives take a tenth of their time.
            saves_products: of torchtitan's checkpoints; None without those.
        """
        workload = self._workload()
        further: dict[str, Any] = {}
        if saves_products is not None:
            context = {"context_fn": every_second_product} if saves_products else {}
            model: Any = workload.model
            model.gradient_checkpointing_enable({"use_reentrant": False, **context})
            further["existing_checkpoints"] = "honour"
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return Planner(
            workload.model,
            dict(workload.make_batch(0, self.options.batch)),
            machine=hidden(self.machine) if is_hidden else self.machine,
            mesh=[*map(int, mesh.split("x"))],
            shard=partial(sharded_by_layers, mp_policy=policy),
            outputs="loss",
            numerics="bitwise",
            time_limit_s=self.options.limit,
            **further,
        )

    def row(self, plan: Plan, mesh: str, budget: str, *, is_hidden: bool = False) -> Record:
        """A plan with the step's time and memory on a rank."""
        own = self.num_parameters / int(mesh.split("x")[-1])
        step_ms = plan.overlapped_ms + self.machine.memory_ms(UPDATED_BYTES * own)
        targets = [plan.graph.ops[index].node.target for index in plan.schedule.steps]
        return {
            "mesh": mesh,
            "budget": budget,
            "peak_gib": plan.predicted_peak_bytes / 2**30,
            "rank_gib": (plan.predicted_peak_bytes + STATE_BYTES * own) / 2**30,
            "sum_ms": plan.predicted_ms,
            "overlapped_ms": step_ms,
            "tokens_per_s": 1e3 * self.options.batch * self.options.length / step_ms,
            "num_gathers": targets.count(GATHER),
            "is_hidden": is_hidden,
        }

    def frontier(self, mesh: str) -> Iterator[Record]:
        """The plans for a mesh of ranks."""
        planners = [self.planner(mesh, is_hidden=is_hidden) for is_hidden in (False, True)]
        for budget in map(float, self.options.budgets.split(",")):
            plain, other = (planner.plan(budget, **_LEAST) for planner in planners)
            # The same schedule by the real times of collectives.
            repriced = replace(other, costs=plain.costs, predicted_ms=sum_ms(other, plain))
            best = min((plain, repriced), key=lambda plan: plan.overlapped_ms)
            yield self.row(best, mesh, f"{budget:g}", is_hidden=best is not plain)

    def published(self) -> Iterator[tuple[list[Record], list[Record]]]:
        """What is reported, with the same schedule simulated and plans at the reported memory."""
        rows = [row for row in PUBLISHED if row["model"] == self.options.model]
        for mesh in dict.fromkeys(str(row["ranks"]) for row in rows):
            reported = [row for row in rows if str(row["ranks"]) == mesh]
            theirs = self.planner(mesh, saves_products=reported[0]["saves_products"])
            found = [self.row(theirs.plan(1.0, **_LEAST), mesh, "its schedule, simulated")]
            ours, its_gib = self.planner(mesh), found[0]["rank_gib"]
            state_gib = its_gib - found[0]["peak_gib"]
            # Where no memory is reported: that of the schedule.
            for gib in dict.fromkeys(row.get("gib", its_gib) for row in reported):
                plan = ours.plan(int((gib - state_gib) * 2**30), **_LEAST)
                found.append(self.row(plan, mesh, f"a plan within {gib:.1f} GiB"))
            yield reported, found


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
    link = dict(machine.link)
    for key, value in link.items():
        if "latency" in key:
            link[key] = value * HIDDEN_SHARE
        elif key.startswith("gb_per_s"):
            link[key] = value / HIDDEN_SHARE
    return replace(machine, link=link)


def sum_ms(plan: Plan, priced: Plan) -> float:
    """The sum of the times of a plan's runs, at the costs of another plan of the same step."""
    seen, total = set[int](), 0.0
    for index in plan.schedule.steps:
        costs = priced.costs.recompute if index in seen else priced.costs.first
        total += costs[index].time_ms
        seen.add(index)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = command.parser("cluster", __doc__)
    add = parser.add_argument
    add("--model", choices=SIZES, default="8b")
    add("--layers", type=int)
    add("--length", type=int, default=8192)
    add("--batch", type=int, default=2)
    add("--ranks", default="1,8,64,256,1024,128x8")
    add("--budgets", default="0.1,0.2,0.4,1")
    add("--published", action="store_true")
    add("--limit", type=float, default=10.0)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    machine = load_machine("h100")
    if options.published:
        machine = replace(machine, bandwidth_gb_per_s=THEIR_BANDWIDTH_GB_PER_S)
    cluster = Cluster(options, machine)
    found: dict[str, Any] = (
        {"published": cluster.published()}
        if options.published
        else {"frontier": [row for m in options.ranks.split(",") for row in cluster.frontier(m)]}
    )
    sys.stdout.write("\n".join(filled("cluster", **found)) + "\n")


if __name__ == "__main__":
    main()
