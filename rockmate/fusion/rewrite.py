"""Puts compiled groups in the place of their ops in a joint graph."""

from __future__ import annotations

import heapq
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import pairwise

import torch
from torch import fx

from rockmate._torch.distributed import first_offer
from rockmate._torch.fake import mode_of
from rockmate._torch.inductor import Deadline
from rockmate.capture.nodes import storage_ids
from rockmate.capture.roles import Capture, copied_capture
from rockmate.fusion.groups import Group, find_groups
from rockmate.fusion.kernels import CompiledGroup, check_compiler, compiled_groups, uncompiled
from rockmate.fusion.report import COMPILE_LIMIT_S, FusionReport, GroupReport
from rockmate.fusion.subgraph import Subgraph, subgraph_of, takeable
from rockmate.graph.fake_values import refresh_views
from rockmate.graph.ir import Graph, Op
from rockmate.graph.value_numbering import remove_dead_calls
from rockmate.ops.fused import FusedOp
from rockmate.ops.rng import is_random


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """How the groups of a step are fused.

    Attributes:
        refused: keys of the groups that stay unfused. None: each group is measured.
        progress: shows a progress bar while kernels are compiled.
        is_for_other_sizes: whether `refused` was measured for the step at other sizes.
        is_run: whether the step will run here. Otherwise it is planned for another machine, and
            nothing is compiled.
        compile_limit_s: seconds after which compilers are stopped; groups that are not ready by
            then stay unfused.
        report: what fusing has brought; None before `run`.
    """

    refused: tuple[str, ...] | None = None
    progress: bool = False
    is_run: bool = True
    is_for_other_sizes: bool = False
    compile_limit_s: float = COMPILE_LIMIT_S
    report: FusionReport | None = None

    def run(self, capture: Capture, build: Callable[[Capture], Graph]) -> tuple[Fusion, Capture]:
        """Fuses the groups of a captured step, which is not changed.

        Args:
            capture: the step, after all rewrites of its joint graph.
            build: makes the ops and storages of a capture.

        Returns:
            The fusion with its report and with the keys of all groups that stay unfused, and the
            step with one op for each group.

        Ranks of a process group that fuse the same step take the groups of the first to be ready.

        Raises:
            MissingCompilerError: there is no compiler for the step's device.
        """
        fusion, fused = self._run(capture, build)
        if self.refused is not None or fusion.report is None:
            return fusion, fused
        found = sorted(group.name for group in fusion.report.groups)
        own = ",".join(fusion.refused or ())
        agreed = first_offer(f"fused {found}", own)
        if agreed == own:
            return fusion, fused
        refused = tuple(filter(None, agreed.split(",")))
        return replace(self, refused=refused)._run(capture, build)

    def _run(self, capture: Capture, build: Callable[[Capture], Graph]) -> tuple[Fusion, Capture]:
        copied = copied_capture(capture)
        graph = build(copied)
        if graph.ops and self.is_run:
            check_compiler(graph.ops[0].device.type)
        begin, deadline = time.perf_counter(), Deadline.after(self.compile_limit_s)
        left, compiled = set(self.refused or ()), dict[str, CompiledGroup]()
        refused_places = Counter[str]()
        groups = find_groups(graph)
        while True:
            # What a group must return depends on which others there are.
            subgraphs = _subgraphs(graph, groups)
            wanted = [each for each in subgraphs if not self._stays(each, left)]
            compiled |= self._compiled(graph, wanted, deadline)
            refused = (
                (each.key, compiled[each.key]) for each in wanted if compiled[each.key].refusal
            )
            # Where others were measured, only what cannot run stays unfused.
            slow = {key for key, each in refused if self.refused is None or not each.is_right}
            kept = [each for each in wanted if each.key not in slow]
            left |= slow
            refused_places.update(each.key for each in wanted if each.key in slow)
            if len(kept) == len(subgraphs):
                break
            groups = [each.group for each in kept]
        _replace_groups(copied.joint.graph, kept, {key: each.op for key, each in compiled.items()})
        report = _report(kept, compiled, refused_places, time.perf_counter() - begin)
        return replace(self, refused=tuple(sorted(left)), report=report), copied

    def _compiled(
        self, graph: Graph, wanted: list[Subgraph], deadline: Deadline
    ) -> dict[str, CompiledGroup]:
        pairs = [(each, takeable(graph, each)) for each in wanted]
        if not self.is_run:
            return {each.key: uncompiled(each, position) for each, position in pairs}
        return compiled_groups(pairs, deadline=deadline, progress=self.progress)

    def _stays(self, subgraph: Subgraph, left: set[str]) -> bool:
        """Whether a group stays unfused.

        At other sizes than those measured, groups of the same ops stay where all of these did.
        """
        if self.is_for_other_sizes:
            return subgraph.kind in {key[: len(subgraph.kind)] for key in left}
        return subgraph.key in left


def _subgraphs(graph: Graph, groups: Sequence[Group]) -> list[Subgraph]:
    group_of = {op: group for group in groups for op in group.ops}
    absorbing: dict[Op, list[Group]] = {}
    for group in groups:
        for op in group.absorbed:
            absorbing.setdefault(op, []).append(group)
    found = (subgraph_of(graph, group, group_of, absorbing) for group in groups)
    return [each for each in found if each is not None and each.inputs]


def _report(
    kept: list[Subgraph],
    compiled: dict[str, CompiledGroup],
    refused_places: Counter[str],
    seconds: float,
) -> FusionReport:
    """The groups that are in the step, and those that were refused.

    A refusal changes what other groups return, so that some kernels are in neither.
    """
    places = Counter(each.key for each in kept)
    inner_bytes = {each.key: _inner_bytes(each) for each in kept}
    reports = [
        GroupReport(
            name=group.op.__name__,
            calls=group.op.calls,
            num_places=places[key] or refused_places[key],
            fused_ms=group.fused_ms,
            separate_ms=group.separate_ms,
            saved_bytes=inner_bytes.get(key, 0),
            num_in_place=len(group.op.in_place),
            refusal="" if key in places else group.refusal,
        )
        for key, group in compiled.items()
        if key in places or key in refused_places
    ]
    reports.sort(key=lambda each: each.num_places * (each.fused_ms - each.separate_ms))
    return FusionReport(groups=tuple(reports), compile_s=seconds)


def _inner_bytes(subgraph: Subgraph) -> int:
    made = {storage for op in subgraph.group.ops for storage in op.writes}
    return sum(storage.num_bytes for storage in made.difference(subgraph.results))


def _replace_groups(
    joint: fx.Graph, subgraphs: Iterable[Subgraph], ops: dict[str, FusedOp]
) -> None:
    """Replaces groups by their ops, in place."""
    order = {node: position for position, node in enumerate(joint.nodes)}
    made: dict[fx.Node, fx.Node] = {}
    for subgraph in subgraphs:
        _replace_group(joint, subgraph, ops[subgraph.key], made, order)
    _sort(joint, order)
    remove_dead_calls(joint)


def _replace_group(
    joint: fx.Graph,
    subgraph: Subgraph,
    op: FusedOp,
    made: dict[fx.Node, fx.Node],
    order: dict[fx.Node, int],
) -> None:
    last: Op = subgraph.group.ops[-1]
    place = order[last.node]
    roots = [storage.root for storage in subgraph.inputs]
    with joint.inserting_after(last.node):
        call = joint.call_function(op, tuple(made.get(root, root) for root in roots))
    call.meta = {key: value for key, value in last.node.meta.items() if key != "val"}
    results = [storage.root for storage in subgraph.results]
    fakes = [_fresh(root.meta["val"]) for root in results]
    order[call] = place
    if len(results) == 1:
        call.meta["val"] = fakes[0]
        items = [call]
    else:
        call.meta["val"] = tuple(fakes)
        items = []
        for index in reversed(range(len(results))):
            with joint.inserting_after(call):
                item = joint.call_function(operator.getitem, (call, index))
            item.meta = {**call.meta, "val": fakes[index]}
            order[item] = place
            items.insert(0, item)
    for root, item in zip(results, items, strict=True):
        left = storage_ids(root)
        root.replace_all_uses_with(item)
        made[root] = item
        refresh_views(item, left)


def _fresh(fake: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same layout in memory of its own."""
    with mode_of(fake):
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _sort(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """Sorts a graph by its dependencies, as near to `order` as can be; draws keep their order."""
    nodes = list(graph.nodes)
    position = {node: (order[node], index) for index, node in enumerate(nodes)}
    sorter = TopologicalSorter({node: node.all_input_nodes for node in nodes})
    draws = [node for node in nodes if node.op == "call_function" and is_random(node.target)]
    for earlier, later in pairwise(sorted(draws, key=position.__getitem__)):
        sorter.add(later, earlier)
    sorter.prepare()  # raises where a group is not convex
    done, ready = list[fx.Node](), list[tuple[tuple[int, int], fx.Node]]()
    while sorter.is_active():
        for node in sorter.get_ready():
            heapq.heappush(ready, (position[node], node))
        done.append(heapq.heappop(ready)[1])
        sorter.done(done[-1])
    last: fx.Node | None = None
    for node in done:
        if last is not None:
            last.append(node)
        last = node
