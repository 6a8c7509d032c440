"""Small captured graphs with fixed costs, and random schedules of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import models
import pytest
import torch
from helpers import Planned
from schedules import verify
from torch import Tensor, nn

import rockmate.bound.lower_bound
import rockmate.planning.checked_forms
from rockmate import Planner
from rockmate.costs.cost import Cost, Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.planning.step import capture_step
from rockmate.schedule.schedule import Schedule, finish

HEURISTIC = ("none", "chen", "rotor", "rockmate")
NAMES = ("gpt2", "llama", "bert-base", "vit-base", "hf-resnet", "resnet50", "mlp", "encoder")


# --- small models with synthetic costs ------------------------------------------------------------


class Chain(nn.Module):
    """Linear layers with an activation that its gradient needs, of unequal widths."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*each, bias=bias) for each in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Returning(Chain):
    """The same with a hidden value returned, which the user then holds and the backward reads."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x.detach())
        return {"loss": x.square().mean(), "hidden": hidden[1]}


class Branches(nn.Module):
    """Two towers that meet twice, one gated.

    The hidden values are returned, so the user holds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(12, 48), nn.Linear(12, 48), nn.Linear(48, 12)
        self.norm = nn.LayerNorm(48)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        gate = torch.sigmoid(self.left(x))
        mixed = self.norm(gate * torch.exp(0.1 * self.right(x)).pow(3))
        out = self.last(mixed + gate)
        return {"loss": (out - x).square().mean(), "hidden": mixed.detach()}


class Pooling(nn.Module):
    """Max pooling keeps where it found its maxima to run again."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((3, 1, 1), 0.5 + index) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = nn.functional.max_pool2d(torch.tanh(x * scale), 3, stride=1, padding=1)
        return x.square().mean()


def _residual() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(models.Stack(2, 12), nn.LayerNorm(12))
    return model, torch.randn(64, 12)


SMALL = {
    "chain": lambda: (Chain(8, 40, 24, 56, 8), torch.randn(48, 8)),
    "returning": lambda: (Returning(8, 40, 48, 56, 8), torch.randn(48, 8)),
    "branches": lambda: (Branches(), torch.randn(96, 12)),
    "dropout": _residual,
    "batch-norm": lambda: (models.BatchNormNet(), torch.randn(4, 3, 6, 6)),
    "pooling": lambda: (Pooling(), torch.randn(4, 3, 16, 16)),
}


@functools.cache
def small(name: str) -> tuple[Graph, Costs]:
    """Graph and synthetic costs of a small model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, sample = SMALL[name]()
        graph = capture_step(model, sample).graph
    return graph, synthetic_costs(graph)


def synthetic_costs(graph: Graph) -> Costs:
    """A cost for each op from its place and bytes alone.

    A second run takes less or more time than the first.
    """
    rng = random.Random(len(graph.ops))
    first, recompute = [], []
    for op in graph.ops:
        time_ms = (
            rng.uniform(0.05, 1.0)
            + (op.written_bytes + sum(storage.num_bytes for storage in op.reads)) / 1e5
        )
        overhead_bytes = rng.choice((0, 0, op.written_bytes // 3))
        first.append(Cost(time_ms=time_ms, overhead_bytes=overhead_bytes))
        recompute.append(
            Cost(time_ms=time_ms * rng.uniform(0.6, 1.3), overhead_bytes=overhead_bytes)
        )
    return Costs(first=tuple(first), recompute=tuple(recompute), num_distinct=len(first))


def no_clock(graph: Graph, **_: object) -> Costs:
    return synthetic_costs(graph)


@functools.cache
def fixed(name: str) -> Planned:
    """The tiny model of that name with a planner on synthetic costs.

    Made once for all the files that ask.
    """
    workload = models.tiny(name)
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rockmate.planning.checked_forms, "measure_costs", no_clock)
        return Planned(
            workload, Planner(workload.model, workload.sample, numerics="bitwise"), before
        )


def graph_and_costs(planner: Planner) -> tuple[Graph, Costs]:
    plan = planner.plan(1.0)
    return plan.graph, plan.costs


def budgets_between(low: int, high: int, number: int) -> list[int]:
    return [low + (high - low) * step // (number - 1) for step in range(number)]


# --- schedules ------------------------------------------------------------------------------------


class _Writer:
    """Runs ops one by one into a list, making again what is wanted and not at hand."""

    def __init__(self, graph: Graph) -> None:
        self.at_hand: set[Storage] = {
            storage for storage in graph.storages if storage.is_static or storage.is_tangent
        }
        self.lasting = {storage for storage in graph.storages if storage.is_result}
        self.steps: list[int] = []

    def run(self, op: Op) -> None:
        for storage in op.reads:
            if storage not in self.at_hand:
                assert storage.producer is not None
                self.run(storage.producer)
        self.steps.append(op.index)
        self.at_hand.update(op.writes)

    def forget(self, chosen: set[Storage]) -> None:
        """Loses the chosen values, but for what cannot be made again, what others hold, and
        gradients."""
        for storage in chosen - self.lasting:
            producer = storage.producer
            if (
                producer is not None
                and producer.phase is not Phase.BACKWARD
                and producer.recompute_target is not None
            ):
                self.at_hand.discard(storage)


def schedule_of(graph: Graph, lost: set[Storage]) -> Schedule:
    """The forward, all values in `lost` forgotten, and the backward in the graph's order."""
    writer = _Writer(graph)
    for op in graph.forward_ops:
        writer.run(op)
    num_forward = len(writer.steps)
    writer.forget(lost)
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            writer.run(op)
    return _checked(graph, writer.steps, num_forward)


def random_schedule(graph: Graph, rng: random.Random, *, any_order: bool = True) -> Schedule:
    """A valid schedule: values are forgotten at random, in the forward, at its end, and throughout
    the backward."""
    in_forward = rng.choice((0, 0, 0.05))
    at_loss = rng.random()
    in_backward = rng.choice((0, 0, 0.03, 0.2))
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    writer = _Writer(graph)
    for op in _shuffled(graph.forward_ops, rng) if any_order else graph.forward_ops:
        writer.run(op)
        writer.forget(_some(writer.at_hand, in_forward, rng))
    num_forward = len(writer.steps)
    writer.forget(_some(writer.at_hand, at_loss, rng))
    for op in _shuffled(backward, rng) if any_order else backward:
        writer.run(op)
        writer.forget(_some(writer.at_hand, in_backward, rng))
    return _checked(graph, writer.steps, num_forward)


def _some(storages: set[Storage], share: float, rng: random.Random) -> set[Storage]:
    return (
        {
            storage
            for storage in sorted(storages, key=lambda storage: storage.index)
            if rng.random() < share
        }
        if share
        else set()
    )


def _shuffled(ops: tuple[Op, ...] | list[Op], rng: random.Random) -> list[Op]:
    """A random order that respects every read, with random ops as they are."""
    order: list[Op] = []
    waiting = list(ops)
    while waiting:
        made_later = {storage for op in waiting for storage in op.writes}
        ready = [op for op in waiting if made_later.isdisjoint(op.reads)]
        drawing = [op for op in waiting if op.is_random][:1]
        op = rng.choice([op for op in ready if not op.is_random or op in drawing])
        waiting.remove(op)
        order.append(op)
    return order


def _checked(graph: Graph, steps: list[int], num_forward: int) -> Schedule:
    schedule = finish(graph, steps[:num_forward], steps[num_forward:])
    verify(graph, schedule, keeps_marks=False)
    return schedule


def candidates(name: str, number: int = 400) -> Iterator[Schedule]:
    """Schedules of a small model.

    All sets of its largest values forgotten at the loss, and random ones.
    """
    graph, _ = small(name)
    read_later = {
        storage
        for op in graph.backward_ops
        for storage in op.reads
        if storage.producer in graph.forward_ops
    }
    large = sorted(read_later, key=lambda storage: (-storage.num_bytes, storage.index))[:8]
    for count in range(len(large) + 1):
        for lost in combinations(large, count):
            yield schedule_of(graph, set(lost))
    rng = random.Random(len(name))
    for _ in range(number):
        yield random_schedule(graph, rng)
