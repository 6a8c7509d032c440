"""Which ops are grouped: convex groups, kept values that end them, what they absorb, draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import architectures
import models
import pytest
import torch
from joint_graphs import captured_for, verify_joint
from made_of import made_of
from torch import Tensor, nn

from rockmate.capture.roles import Capture
from rockmate.fusion.fusible import is_fusible
from rockmate.fusion.groups import Group, find_groups, sources_of
from rockmate.fusion.rewrite import Fusion
from rockmate.graph.build import build_graph
from rockmate.graph.ir import Graph, Op, Phase
from rockmate.graph.passes import REWRITES, run_passes

NAMES = ("gpt2", "llama", "bert-base", "t5-small", "vit-base", "hf-resnet", "resnet50", "encoder")


@dataclass
class Fused:
    """A step before and after fusing, without kernels."""

    graph: Graph
    groups: list[Group]
    capture: Capture
    fused: Graph


def fused(model: nn.Module, sample: object) -> Fused:
    capture = run_passes(REWRITES, captured_for(model, sample))
    graph = build_graph(capture)
    _, joined = Fusion(is_run=False).run(capture, build_graph)
    return Fused(graph, find_groups(graph), joined, build_graph(joined))


def tiny(name: str) -> Fused:
    workload = models.tiny(name)
    return fused(workload.model, workload.sample)


def calls(group: Group) -> list[str]:
    return [str(op.node.target).removeprefix("aten.").split(".")[0] for op in group.ops]


# --- properties of every step ---------------------------------------------------------------------


def depends(graph: Graph, groups: list[Group]) -> Iterator[tuple[object, object]]:
    """Pairs of units, an op or a group, of which the second reads the first; draws in order."""
    unit: dict[Op, object] = {op: op for op in graph.ops}
    for group in groups:
        unit.update(dict.fromkeys(group.ops, group))
    for op in graph.ops:
        for read in op.reads:
            if read.producer is not None:
                yield unit[read.producer], unit[op]
    draws = [op for op in graph.ops if op.is_random]
    for earlier, later in itertools.pairwise(draws):
        yield unit[earlier], unit[later]


def has_cycle(pairs: list[tuple[object, object]]) -> bool:
    """Whether a relation has a cycle, by removing what nothing stands before."""
    left = {pair for pair in pairs if pair[0] is not pair[1]}
    while left:
        later = {second for _, second in left}
        kept = {pair for pair in left if pair[0] in later}
        if len(kept) == len(left):
            return True
        left = kept
    return False


def test_the_check_for_cycles_finds_one() -> None:
    assert has_cycle([(1, 2), (2, 3), (3, 1), (0, 1)])
    assert not has_cycle([(1, 2), (2, 3), (1, 3)])


def check(found: Fused) -> None:
    assert not has_cycle(list(depends(found.graph, found.groups)))
    members = [op for group in found.groups for op in group.ops]
    assert len(members) == len(set(members))
    for group in found.groups:
        assert group.num_calls > 1
        assert {op.phase for op in group.ops} == {group.phase}
        assert all(map(is_fusible, [*group.ops, *group.absorbed]))
        assert all(op.phase is not Phase.BACKWARD for op in group.absorbed)
        assert not group.absorbed or group.phase is Phase.BACKWARD
    verify_joint(found.capture)
    found.fused.verify()
    names = {op.node.name for op in found.fused.ops}
    inside = {op.node.name for op in members if op.node.name in names}
    assert not inside, f"{inside} are left beside their groups"
    draws = [[op.name for op in graph.ops if op.is_random] for graph in (found.graph, found.fused)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_convex_and_stand_in_place_of_their_ops(name: str) -> None:
    check(tiny(name))


@pytest.mark.parametrize("name", sorted(architectures.ARCHITECTURES))
def test_groups_of_architectures(name: str) -> None:
    architectures.skip_if_refused(name)
    check(fused(*architectures.case(name)))


# --- the rules ------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two large addends, then a normalization in single ops: the sum is a kept value."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        total = self.first(x) * 2 + self.second(x) * 3
        return self.last(self.after(total)).square().mean()


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * 1.5


def forward_groups(model: nn.Module) -> list[list[str]]:
    found = fused(model, (torch.randn(32, 16),))
    return [calls(group) for group in found.groups if group.phase is Phase.FORWARD]


def test_a_sum_of_two_large_values_ends_a_group() -> None:
    groups = forward_groups(Residual(rms_norm))
    assert ["mul", "mul", "add"] in groups
    assert ["pow", "mean", "add", "rsqrt", "mul", "mul"] in groups


def test_an_activation_is_not_fused_with_the_sum_that_it_is_recomputed_from() -> None:
    groups = forward_groups(Residual(lambda x: torch.sigmoid(x.tanh() * 2)))
    assert ["mul", "mul", "add"] in groups
    assert ["tanh", "mul", "sigmoid"] in groups


def test_sources_are_the_one_large_value_that_suffices() -> None:
    model = Residual(lambda x: x.tanh() * 2)
    capture = run_passes(REWRITES, captured_for(model, (torch.randn(32, 16),)))
    graph = build_graph(capture)
    sources = sources_of(graph)
    made = {str(op.node.target): op.writes[0] for op in graph.forward_ops}
    total, tanh = made["aten.add.Tensor"], made["aten.tanh.default"]
    assert sources[total] is total
    assert sources[tanh] is total
    assert sources[made["aten.addmm.default"]] is made["aten.addmm.default"]


def test_the_backward_computes_cheap_forward_values_itself() -> None:
    found = fused(Residual(lambda x: torch.sin(torch.cos(x) * 2)), (torch.randn(32, 16),))
    absorbed = [
        str(op.node.target)
        for group in found.groups
        if group.phase is Phase.BACKWARD
        for op in group.absorbed
    ]
    assert "aten.mul.Tensor" in absorbed


def test_a_value_that_a_product_of_the_backward_reads_is_not_absorbed() -> None:
    found = fused(models.Stack(num_layers=2, dropout=0.0), (torch.randn(32, 16),))
    products = [op for op in found.graph.backward_ops if not is_fusible(op)]
    needed = {read.producer for op in products for read in op.reads}
    for group in found.groups:
        assert needed.isdisjoint(group.absorbed)


@made_of(lambda: {"first": nn.Linear(16, 16), "second": nn.Linear(16, 16)})
class TwoLosses(nn.Module):
    """Two outputs with a gradient, which meet in one value."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = torch.tanh(self.first(x))
        return torch.sin(shared * 2).sum(), torch.cos(self.second(shared)).sum()


def test_gradients_of_different_outputs_do_not_meet_inside_of_a_group() -> None:
    from joint_graphs import captured

    capture = run_passes(REWRITES, captured(TwoLosses(), torch.randn(32, 16)))
    graph = build_graph(capture)
    reached: dict[object, frozenset[str]] = {}
    for storage in graph.storages:
        reached[storage] = frozenset([storage.name] if storage.is_tangent else [])
    for op in graph.ops:
        own = frozenset().union(*(reached[read] for read in op.reads))
        reached.update(dict.fromkeys(op.writes, own))
    assert len({own for own in reached.values() if own}) == 3  # each alone, and both
    for group in find_groups(graph):
        read = {reached[read] for op in group.ops for read in op.reads} - {frozenset()}
        assert len(read) <= 1
