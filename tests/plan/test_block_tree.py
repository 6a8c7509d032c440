"""The tree of blocks holds every op once.

What passes blocks by is kept or made again.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from bench import models
from rockmate import Plan, Planner
from rockmate.plan.block_tree import BlockNode


class Streams(nn.Module):
    """Two streams that read each other in every layer, so that no single value cuts the step."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(num_layers)
        )

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        for layer in self.layers:
            left, right = torch.tanh(layer[0](one)), torch.tanh(layer[1](other))
            one, other = left * other.exp(), right * one.exp()
        return one + other


@functools.cache
def planner_of(name: str) -> Planner:
    if name == "streams":
        return Planner(
            Streams(12, 16).train(), tuple(torch.ones(8, 16).split(4)), machine="cpu-avx2"
        )
    workload = models.build(name, tiny=True).with_loss_inside()
    return Planner(workload.model, workload.sample, machine="cpu-avx2")


def parts(plan: Plan) -> list[BlockNode]:
    return [part for _, part in plan.block_tree.walk()]


@pytest.mark.parametrize("name", ["unet", "t5-small", "hrnet", "streams"])
def test_every_part_holds_the_ops_of_its_parts_and_the_leaves_hold_all_once(name: str) -> None:
    plan = planner_of(name).plan(1.0)
    in_leaves = Counter(op for leaf in plan.block_tree.blocks() for op in leaf.ops)
    assert in_leaves == Counter(range(len(plan.snapshot.ops)))
    for part in parts(plan):
        forward = [op for op in part.ops if plan.snapshot.ops[op].phase == "forward"]
        assert Counter(forward) == Counter(part.forward)
        if part.parts:
            assert Counter(part.ops) == Counter(op for inner in part.parts for op in inner.ops)
            assert [op for inner in part.parts for op in inner.forward] == list(part.forward)
    order = [op.name for op in plan.snapshot.ops if op.phase == "forward"]
    assert [
        plan.snapshot.ops[op].name for leaf in plan.block_tree.blocks() for op in leaf.forward
    ] == order


def test_a_part_is_explained_by_the_name_that_the_tree_gives_it() -> None:
    plan = planner_of("unet").plan(1.0)
    part = next(part for part in parts(plan) if " to " in part.name)
    made = [
        plan.snapshot.storages[storage].name
        for op in part.forward
        for storage in plan.snapshot.ops[op].writes
    ]
    assert [storage.name for storage in plan.explain(part.name).storages] == made


def _crossing(plan: Plan) -> list[int]:
    """Values that a later block reads beside its input, largest first."""
    block_of = {op: number for number, block in enumerate(plan.chain.blocks) for op in block.ops}
    found = set()
    for storage in plan.graph.storages:
        if storage.producer is None or storage.producer not in plan.graph.forward_ops:
            continue
        begin = block_of[storage.producer.index]
        ends = [block_of[op.index] for op in plan.graph.forward_ops if storage in op.reads]
        hands_on = plan.chain.blocks[begin].output == storage.index
        if max(ends, default=begin) > begin + hands_on:
            found.add(storage.index)
    return sorted(found, key=lambda each: (-plan.snapshot.storages[each].num_bytes, each))


def test_a_skip_of_a_unet_is_kept_at_a_loose_budget_and_made_again_at_a_tight_one() -> None:
    planner = planner_of("unet")
    loose, tight = planner.plan(1.0), planner.plan(planner.minimum_peak_bytes)
    name = loose.snapshot.storages[_crossing(loose)[0]].name
    kept, made_again = loose.explain(name).storages[0], tight.explain(name).storages[0]
    assert kept.is_kept
    assert kept.num_recomputations == 0
    assert not made_again.is_kept
    assert made_again.num_recomputations >= 1
    runs = [tight.snapshot.ops[index].name for index in tight.schedule.steps]
    assert runs.count(name) == 1 + made_again.num_recomputations


def test_the_tree_is_read_off_a_saved_plan_as_well() -> None:
    plan = planner_of("unet").plan(0.6)
    text = plan.tree()
    assert Plan.from_text(plan.to_text()).tree() == text
    assert text.splitlines()[1].startswith("the whole model ")
    assert all(f"─ {part.name} " in text for part in parts(plan)[1:])
    name = plan.snapshot.ops[plan.block_tree.blocks()[1].forward[0]].name
    assert plan.explain(name).storages[0].option.startswith("strategy 'rockmate', block 1 (")
