"""Gradients of parameters come first in the backward.

Order, peak, rounding of shared parameters, and when hooks fire.
"""

from __future__ import annotations

import copy
from functools import partial

import models
import pytest
import torch
from helpers import differing, gradients_of, modules_of, same_bits
from joint_graphs import captured_for
from made_of import mlp
from schedules import verify
from torch import Tensor, nn

from bench import measure
from rockmate import Planner, RockmateModule
from rockmate.graph.build import build_graph
from rockmate.graph.ir import Graph, Op, Phase
from rockmate.graph.parameters import owner_names
from rockmate.graph.pass_options import PassOptions
from rockmate.graph.passes import REWRITES, run_passes
from rockmate.graph.weight_gradients_first import weight_gradients_first
from rockmate.planning.branch_order import memory_minimizing_order
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

NAMES = ("mlp", "gpt2", "llama", "t5-small", "resnet50")


def autograds_order(model: nn.Module, sample: object) -> Graph:
    return build_graph(run_passes(REWRITES, captured_for(model, sample)))


def peak_of(ops: tuple[Op, ...]) -> int:
    """Peak of running every op once, counted apart from the simulator.

    All bytes alive at each op, nothing in place.
    """
    last = {
        storage: position for position, op in enumerate(ops) for storage in (*op.writes, *op.reads)
    }
    peak = 0
    for position in range(len(ops)):
        made = [storage for op in ops[: position + 1] for storage in op.writes]
        live = (s for s in made if last[s] >= position or s.is_output or s.is_kept_to_end)
        peak = max(peak, sum(s.num_bytes for s in live))
    return peak


def options_of(model: nn.Module) -> PassOptions:
    return PassOptions(owner_of=owner_names(model))


@pytest.mark.parametrize("name", NAMES)
def test_no_op_is_lost_and_the_peak_does_not_rise(name: str) -> None:
    workload = models.tiny(name)
    before = autograds_order(workload.model, workload.sample)
    ops = before.ops
    after = weight_gradients_first(before, options_of(workload.model))
    assert sorted(op.name for op in after.ops) == sorted(op.name for op in ops)
    assert [op.name for op in after.forward_ops] == [
        op.name for op in ops if op.phase is Phase.FORWARD
    ]
    assert peak_of(after.ops) <= peak_of(ops)


def test_a_weights_gradient_precedes_the_inputs() -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4))
    names = [op.name for op in autograds_order(model, torch.randn(3, 6)).backward_ops]
    graph = autograds_order(model, torch.randn(3, 6))
    ordered = [op.name for op in weight_gradients_first(graph, options_of(model)).backward_ops]
    products = [name for name in names if name.startswith("mm")]
    # input, weight, input, weight, weight: autograd's order
    assert products == ["mm", "mm_1", "mm_2", "mm_3", "mm_4"]
    products = [name for name in ordered if name.startswith("mm")]
    assert products == ["mm_1", "mm", "mm_3", "mm_2", "mm_4"]


def test_contributions_to_a_shared_weight_keep_their_order() -> None:
    class Shared(nn.Module):
        """One matrix under three names, used by layers of which autograd differentiates the last
        first."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(16, 16, bias=False) for _ in range(3))
            self.second.weight = self.third.weight = self.first.weight

        def forward(self, vectors: Tensor) -> Tensor:
            return (
                self.third(torch.tanh(self.second(torch.tanh(self.first(vectors))))).pow(2).mean()
            )

    torch.manual_seed(0)
    model, vectors = Shared(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    reference(vectors).backward()
    for module in modules_of(model, vectors):
        model.zero_grad(set_to_none=True)
        module(vectors).backward()
        assert not differing(gradients_of(model), gradients_of(reference))


@pytest.mark.parametrize("register", ["register_post_accumulate_grad_hook", "register_hook"])
def test_a_hook_may_change_the_parameter_that_the_inputs_gradient_reads(register: str) -> None:
    """A hook fires when nothing is left to read its parameter, although the gradient was ready
    before."""
    torch.manual_seed(0)
    model, vectors = nn.Sequential(*mlp(16, 16), nn.GELU()), torch.randn(8, 16)

    def trained(callee: nn.Module, owner: nn.Module) -> dict[str, Tensor]:
        def zero(parameter: nn.Parameter, _: Tensor) -> None:
            parameter.data.zero_()

        handles = [
            getattr(parameter, register)(partial(zero, parameter))
            for parameter in owner.parameters()
        ]
        callee(vectors).pow(2).mean().backward()
        for handle in handles:
            handle.remove()
        assert all(not parameter.any() for parameter in owner.parameters())
        return gradients_of(owner)

    reference = copy.deepcopy(model)
    reference(vectors).pow(2).mean().backward()
    expected = gradients_of(reference)
    weights = copy.deepcopy(model.state_dict())
    for module in modules_of(model, vectors, differentiable="all"):
        model.load_state_dict(weights)
        model.zero_grad(set_to_none=True)
        assert not differing(trained(module, model), expected)


def test_firing_hooks_leaves_grad_as_it_is() -> None:
    """Bit for bit, a negative zero included, and without a gradient's worth of memory."""
    from rockmate.runtime.gradient_sink import GradientSink

    weight = nn.Parameter(torch.ones(256, 256))
    weight.grad = torch.full_like(weight, -0.0)
    before, fired = weight.grad.clone(), []
    weight.register_post_accumulate_grad_hook(
        lambda parameter: fired.append(parameter.grad is not None)
    )
    sink = GradientSink({"weight": weight})
    sink.accumulate("weight", torch.full_like(weight, -0.0), is_final=False)
    assert not fired
    peak_bytes = measure.allocator_peak(lambda: sink.fire_hooks("weight"))
    assert same_bits(weight.grad, before)
    assert fired == [True]
    assert peak_bytes < weight.numel()


class Meeting(nn.Module):
    """Two branches: the one that runs last, so that autograd takes it first, needs much for its
    gradients; the other releases much."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.deep = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.wide = nn.ModuleList(
            [nn.Linear(16, 16), nn.Linear(16, 128), nn.Linear(128, 16), nn.Linear(16, 16)]
        )
        if is_shared:
            self.deep[0].weight = self.wide[0].weight

    def forward(self, vectors: Tensor) -> Tensor:
        deep = wide = vectors
        for layer in self.deep:
            deep = torch.tanh(layer(deep))
        for layer in self.wide:
            wide = torch.tanh(layer(wide))
        return (deep.mean(0) + wide.mean(0)).pow(2).mean()


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_branch_that_releases_most_comes_first(is_shared: bool) -> None:
    torch.manual_seed(0)
    model, vectors = Meeting(is_shared=is_shared), torch.randn(512, 16)
    plan = Planner(model, vectors).plan(1.0)
    graph = plan.graph
    order = memory_minimizing_order(graph, plan.costs)
    assert order is not None
    schedule = baseline_schedule(graph, order)
    verify(graph, schedule)
    assert sorted(schedule.backward) == [op.index for op in graph.backward_ops]
    assert simulate(graph, schedule, plan.costs).peak_bytes < 0.9 * plan.baseline_peak_bytes
    names = [role.name for op in order for _, role in op.final_gradients]
    assert names.index("deep.3.weight") < names.index("wide.1.weight")
    for name in names:
        makers = [
            op.index for op in order if any(role.name == name for _, role in op.final_gradients)
        ]
        assert makers == sorted(makers)


@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_of_branches_in_another_order_are_the_same_bit_for_bit(is_shared: bool) -> None:
    torch.manual_seed(0)
    model, vectors = Meeting(is_shared=is_shared), torch.randn(512, 16)
    reference = copy.deepcopy(model)
    reference(vectors).backward()
    module = RockmateModule(model, vectors, budget=0.9)
    assert not module.plan.schedule.num_recomputations()
    module(vectors).backward()
    assert not differing(gradients_of(model), gradients_of(reference))


def test_a_chain_keeps_its_order() -> None:
    workload = models.tiny("gpt2")
    plan = Planner(workload.model, workload.sample).plan(1.0)
    assert memory_minimizing_order(plan.graph, plan.costs) is None
