"""Small steps with random marks, and a checker of marks that knows nothing of the library's own."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from small_graphs import SMALL, synthetic_costs
from torch import fx

from rockmate.bound.lower_bound import LowerBound
from rockmate.capture.roles import copied_capture
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Phase
from rockmate.graph.mark_request import Mark
from rockmate.graph.node_marks import MARKS
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.step import CapturedStep, capture_step, step_of
from rockmate.planning.strategies import Searcher, Searches
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import simulate


@functools.cache
def captured(name: str) -> CapturedStep:
    """The step of a small model, as captured."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, sample = SMALL[name]()
        return capture_step(model, sample)


def marked_graph(name: str, rng: random.Random, *, in_flight: int = 1) -> Graph:
    """The graph of a small model with random ops saved and random ops recomputed."""
    step = captured(name)
    save_share, recompute_share = rng.choice(((0.0, 0.3), (0.3, 0.0), (0.2, 0.2), (0.1, 0.6)))
    unmarked = {op.node.name for op in step.graph.ops if op.phase is not Phase.FORWARD}
    capture = copied_capture(step.capture)
    for node in capture.joint.graph.nodes:
        node.meta = dict(node.meta)
        if node.op != "call_function" or node.name in unmarked or MARKS in node.meta:
            continue
        draw = rng.random()
        if draw < save_share:
            _mark(node, "save")
        elif draw < save_share + recompute_share:
            _mark(node, "recompute")
    options = replace(step.options, in_flight=in_flight)
    return step_of(capture, step.model, step.call, step.state, options).graph


def _mark(node: fx.Node, word: str) -> None:
    """Marks a node; all results of a saved op are saved."""
    if node.target is operator.getitem and word == "save":
        return
    for each in (node, *(user for user in node.users if user.target is operator.getitem)):
        each.meta[MARKS] = (Mark(word, word),)


def marks_in(graph: Graph) -> dict[str, str]:
    """The mark of each value that has one, by the name of the node that makes it."""
    return {storage.name: storage.mark for storage in graph.storages if storage.mark}


def broken(graph: Graph, schedule: Schedule) -> list[str]:
    """Names of the values whose mark a schedule does not keep.

    A value made by its op's run p is in memory at the border if p is in the forward and a run of
    the backward reads it before the op runs again.
    """
    steps, num_forward = schedule.steps, len(schedule.forward)
    found = []
    for storage in graph.storages:
        producer = storage.producer
        if producer is None or not storage.mark:
            continue
        runs = [place for place, index in enumerate(steps) if index == producer.index]
        if storage.mark == "save":
            if len(runs) > 1 or (producer.phase is Phase.FORWARD and runs[0] >= num_forward):
                found.append(storage.name)
            continue
        reads = [place for place, index in enumerate(steps) if storage in graph.ops[index].reads]
        makers = [max(run for run in runs if run < read) for read in reads]
        if any(run < num_forward <= read for run, read in zip(makers, reads, strict=True)):
            found.append(storage.name)
    return found


def search_of(strategy: str, graph: Graph, costs: Costs) -> tuple[Searcher, LowerBound]:
    """The search of a strategy and the lower bound, both for one graph."""
    searches = Searches(graph, costs, rule=StoppingRule(time_limit_s=10.0))
    return searches.search(strategy), searches.lower_bound


def random_marked(
    name: str, seed: int, *, in_flight: int = 1
) -> tuple[Graph, Costs, Sequence[int]]:
    """A graph with random marks, its costs, and budgets from its baseline's peak downwards."""
    graph = marked_graph(name, random.Random(seed), in_flight=in_flight)
    costs = synthetic_costs(graph)
    peak = simulate(graph, baseline_schedule(graph), costs).peak_bytes
    return graph, costs, [peak, int(0.8 * peak), int(0.6 * peak), int(0.4 * peak)]
