"""The clean-up of a captured graph.

What merges, what must not, and that no bit of any result moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
from helpers import check_against_eager, differing, gradients_of
from joint_graphs import SPECIAL, assert_same_bits, bits, captured, captured_for, run
from made_of import made_of
from schedules import verify
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench import measure
from rockmate import Planner
from rockmate.capture.roles import Capture
from rockmate.costs.cost import Cost, Costs
from rockmate.graph.blocks import partition
from rockmate.graph.build import build_graph
from rockmate.graph.ir import Graph
from rockmate.graph.passes import REWRITES, Pass, run_passes
from rockmate.graph.value_numbering import merge_equal_values, remove_dead_calls
from rockmate.planning.lowering import lower_saved
from rockmate.schedule.schedule import Schedule, baseline_schedule, finish
from rockmate.schedule.simulate import simulate

aten = torch.ops.aten


@made_of(lambda function, width=8: {"linear": nn.Linear(8, width), "function": function})
class Written(nn.Module):
    """A linear layer behind which stands a function of its result."""

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def clean(graph: fx.Graph) -> None:
    merge_equal_values(graph)
    remove_dead_calls(graph)


def cleaned(function: Callable[[Tensor], Any]) -> Counter[str]:
    """How often each call stands in the clean graph of a function."""
    capture = captured(Written(function), torch.randn(4, 8))
    clean(capture.joint.graph)
    return calls(capture)


def calls(capture: Capture) -> Counter[str]:
    nodes = [node for node in capture.joint.graph.nodes if node.op == "call_function"]
    return Counter(
        getattr(node.target, "_opname", getattr(node.target, "__name__", "")) for node in nodes
    )


# --- the same bits, and the same memory shared ----------------------------------------------------


def assert_clean_is_the_same(
    make: Callable[[], Capture],
    reduce: Callable[[Capture], None] = lambda capture: clean(capture.joint.graph),
) -> None:
    plain, ours = make(), make()
    remove_dead_calls(plain.joint.graph)
    reduce(ours)
    assert [role for _, role in ours.outputs] == [role for _, role in plain.outputs]
    for specials in (False, True):
        expected, shared, state = run(plain, specials)
        results, ours_shared, ours_state = run(ours, specials)
        assert torch.equal(ours_state, state)
        assert ours_shared == shared
        assert_same_bits(results, expected)


def nasty(h: Tensor) -> Any:
    """Equal outputs, outputs that are views or copies of each other, copies of what is returned,
    draws from equal arguments."""
    a, b = h.exp(), h.exp()
    noise = functional.dropout(h, 0.5) + functional.dropout(h, 0.5)
    noise = noise + torch.rand_like(h) * torch.rand_like(h)
    copy = a.clone() * 1.0
    same = (h * 1.0) ** 1 + h.clone() + (h + 0.0) + (h + -0.0)
    same = same + h.view(h.shape).t().t().expand(h.shape)
    counts = torch.arange(8) + 0, torch.arange(8)
    views = h.t().detach(), h.t().detach(), functional.dropout(h, 0.0)
    return a, b, copy, copy.detach(), same, noise, *counts, *views


def test_nasty_graph_gives_the_same_bits() -> None:
    x = torch.randn(8, 8)
    assert_clean_is_the_same(lambda: captured(Written(nasty), x))

    def loss_of(module: Callable[..., Any], step: int) -> tuple[Any, Tensor]:
        outputs = module(x * step)
        return outputs, torch.stack([tensor.float().sum() for tensor in outputs]).sum()

    check_against_eager(Written(nasty), x, loss_of)


# --- what merges ----------------------------------------------------------------------------------


def test_masks_of_all_layers_are_made_once() -> None:
    workload = models.tiny("gpt2")
    capture = captured(workload.model, **workload.sample)
    before = calls(capture)
    clean(capture.joint.graph)
    after = calls(capture)
    assert all(before[target] == 3 > after[target] == 1 for target in ("ones", "tril", "where"))
    count = sum(after.values())
    clean(capture.joint.graph)
    # a second time there is nothing left
    assert sum(calls(capture).values()) == count < sum(before.values())


def test_equal_calls_merge_through_their_views() -> None:
    found = cleaned(
        lambda h: (h.t().exp() + h.transpose(0, 1).exp().t().t() + h.permute(1, 0).exp()).sum()
    )
    assert found["exp"] == 1


def test_views_that_change_nothing_go() -> None:
    assert cleaned(
        lambda h: h.view(4, 8).expand(4, 8).t().t().view(2, 16).view(4, 8).tanh().sum()
    ) == cleaned(lambda h: h.tanh().sum())


def test_copies_of_nothing_new_go() -> None:
    copying = cleaned(
        lambda h: (
            (functional.dropout(h.clone().tanh() * 1, 0.0) / 1.0)
            .to(torch.float32, copy=True)
            .square()
            .sum()
        )
    )
    assert copying == cleaned(lambda h: h.tanh().square().sum())
    assert copying["pow"] == 1  # the square; the power of one in its derivative is gone


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8]
)
def test_what_counts_as_a_copy_is_one(dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL * 7) if dtype.is_floating_point else torch.arange(-60, 60)
    x = values.to(dtype)
    results = [aten.clone(x), aten._to_copy(x, dtype=dtype)]
    results += [op(x, 1) for op in (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.mul.Scalar)]
    if dtype.is_floating_point:
        ops = aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.div.Tensor
        results += [*(op(x, 1.0) for op in ops), aten.div.Scalar(x, 1)]
    else:
        results += [aten.add.Tensor(x, 0), aten.sub.Tensor(x, 0), aten.add.Scalar(x, 0)]
    defined = (
        torch.ones_like(x, dtype=torch.bool)
        if dtype.itemsize > 2 or not dtype.is_floating_point
        else ~x.isnan()
    )
    # in half precision eager's payloads differ between the vectors of a loop and its tail
    for result in results:
        assert torch.equal(bits(result)[defined], bits(x)[defined])
        assert torch.equal(result.isnan(), x.isnan())


class Remembers(torch.autograd.Function):
    """Keeps its input and takes the exponential again in the backward, as code does that is careful
    with memory."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.exp() + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].exp()


def test_call_of_the_backward_merges_into_the_forward_and_can_still_run_again() -> None:
    assert cleaned(lambda h: Remembers.apply(h).sum())["exp"] == 1
    model = nn.Sequential(*(Written(lambda h: Remembers.apply(h * 0.1)) for _ in range(6)))
    x = torch.randn(512, 8)
    planner = Planner(model, x)
    plan = planner.plan(planner.minimum_peak_bytes)
    recompute = Counter(plan.graph.ops[index].node.target for index in plan.schedule.steps)
    assert recompute[aten.exp.default] > 6
    check_against_eager(model, x, lambda module, step: (None, module(x * step).square().mean()))


def test_checkpoints_in_the_model_are_undone() -> None:
    layers = nn.ModuleList(models.Stack(2, 8, dropout=0.0) for _ in range(2))

    @made_of(lambda is_careful: {"layers": layers, "is_careful": is_careful})
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.is_careful else layer(x)
            return x

    counts = []
    for is_careful in (True, False):
        capture = captured(Careful(is_careful), torch.randn(4, 8))
        clean(capture.joint.graph)
        counts.append(calls(capture))
    assert counts[0] == counts[1]


# --- what does not --------------------------------------------------------------------------------


def test_draws_do_not_merge() -> None:
    found = cleaned(
        lambda h: (
            functional.dropout(h, 0.5) * functional.dropout(h, 0.5)
            + torch.rand_like(h)
            + torch.rand_like(h)
        ).sum()
    )
    assert found["native_dropout"] == 2
    assert found["rand_like"] == 2


def test_draw_that_nobody_reads_stays() -> None:
    def overwritten(h: Tensor) -> Tensor:
        functional.dropout(h, 0.5)
        noise = functional.dropout(h, 0.5)
        torch.rand(3)
        noise.copy_(h)
        return noise.sum()

    x = torch.randn(64, 8)
    check_against_eager(Written(overwritten), x, lambda module, step: (None, module(x * step)))


def test_constants_of_different_kind_do_not_merge() -> None:
    def kinds(h: Tensor) -> tuple[Tensor, ...]:
        integers = (h.detach() > 0).long()
        made = [integers * factor for factor in (True, 1, 1.0)]
        made += [integers + 2, integers + 2.0, integers.float(), integers.double()]
        filled = (torch.full((3,), 1), torch.full((3,), 1.0), torch.full((3,), True))
        return h, *(t + 1 for t in made), *(t.clone() for t in filled)

    x = torch.randn(4, 8)
    assert_clean_is_the_same(lambda: captured(Written(kinds), x))


def test_zeros_of_different_sign_do_not_merge() -> None:
    found = cleaned(
        lambda h: ((h + 0.0).reciprocal() + (h + -0.0).reciprocal() + (h - 0.0).reciprocal()).sum()
    )
    assert found["reciprocal"] == 3


def test_multiplying_a_complex_number_by_one_stays() -> None:
    found = cleaned(lambda h: (torch.view_as_complex(h.view(4, 4, 2)) * 1).abs().sum())
    assert found["mul"] >= 1


def test_large_constant_is_filled_again_and_what_is_made_of_it_merges() -> None:
    def masked(h: Tensor, size: int) -> Tensor:
        for _ in range(3):
            h = h + torch.full((size, 8), -1.0).tril()[:4]
        return (h * torch.ones(size, 8).sum() * torch.ones(size, 8).mean()).sum()

    small, large = cleaned(lambda h: masked(h, 8)), cleaned(lambda h: masked(h, 1 << 13))
    assert small["tril"] == large["tril"] == 1
    assert small["full"] == large["full"] == 1
    assert (small["ones"], large["ones"]) == (1, 2)


def test_calls_of_other_libraries_do_not_merge() -> None:
    drawn = iter(range(100))

    @torch.library.custom_op("rockmate_tests::next_number", mutates_args=())
    def next_number(x: Tensor) -> Tensor:
        return x + next(drawn)

    next_number.register_fake(torch.empty_like)
    found = cleaned(lambda h: (h * next_number(h.detach()) + next_number(h.detach())).sum())
    assert found["next_number"] == 2


def test_equal_outputs_stay_apart() -> None:
    """A user who writes into one of them changes neither the other nor the gradient."""

    def outputs(h: Tensor) -> tuple[Tensor, ...]:
        hidden = h.tanh()
        copies = hidden.clone().detach(), hidden.detach().clone(), (hidden * 1.0).detach()
        return h.cos(), h.cos(), *copies, hidden.sin()

    x = torch.randn(16, 8)

    def loss_of(module: nn.Module, step: int) -> tuple[None, Tensor]:
        first, second, *copies, last = module(x * step)
        expected = second.detach().clone()
        with torch.no_grad():
            for index, tensor in enumerate(copies):
                tensor.fill_(index)
            assert [tensor.mean().item() for tensor in copies] == [0.0, 1.0, 2.0]
            first.add_(1)
        assert torch.equal(second.detach(), expected)
        return None, second.sum() * 0.0 + last.square().sum()

    for budget in ("loose", "minimum"):
        model = Written(outputs)
        planner = Planner(model, x)
        module = planner.module(1.0 if budget == "loose" else planner.minimum_peak_bytes)
        loss_of(module, 1)[1].backward()
        ours = gradients_of(model)
        model.zero_grad()
        model(x)[-1].square().sum().backward()
        assert len(ours) == 2
        assert not differing(ours, gradients_of(model))


def test_buffers_that_get_equal_values_keep_memory_of_their_own() -> None:
    @made_of(lambda: {"linear": nn.Linear(8, 8)} | {k: nn.Buffer(torch.zeros(8)) for k in "abc"})
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            self.a.add_(h.detach().mean(0))
            self.b.add_(h.detach().mean(0))
            self.c.copy_(self.a.clone())
            return h * h.detach().mean(0) + self.c * 1.0

    x = torch.randn(16, 8)
    model = Counting()
    check_against_eager(model, x, lambda module, step: (None, module(x * step).square().sum()))
    assert len({buffer.untyped_storage().data_ptr() for buffer in model.buffers()}) == 3


# --- what it gives --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_schedule_of_the_plain_graph_costs_no_more_on_the_clean_one(name: str) -> None:
    """A schedule without the merged and dropped calls computes the step.

    It takes as little memory, except for shared storages."""
    workload = models.tiny(name)

    def graph_of(passes: Sequence[Pass[Capture]]) -> Graph:
        capture = captured_for(workload.model, workload.sample)
        return build_graph(run_passes(passes, capture))

    def peak(graph: Graph, schedule: Schedule) -> int:
        costs = (Cost(time_ms=1.0, overhead_bytes=0),) * len(graph.ops)
        return simulate(
            graph, schedule, Costs(first=costs, recompute=costs, num_distinct=1)
        ).peak_bytes

    # Without copies of inputs, which the lowered schedule would have to save.
    passes = REWRITES[:-1]
    ours = graph_of(passes)
    plain = graph_of([each for each in passes if each.__name__ != "merge_equal_values"])
    index = {op.name: op.index for op in ours.ops}
    assert len(index) < len(plain.ops)
    for schedule in (baseline_schedule(plain), lower_saved(plain, partition(plain), ())):
        halves = [
            [plain.ops[step].name for step in half]
            for half in (schedule.forward, schedule.backward)
        ]
        mapped = finish(ours, *([index[step] for step in half if step in index] for half in halves))
        verify(ours, mapped)
        mask_bytes = 16 * 16 * 4  # the causal mask of GPT-2, one for all layers
        assert peak(ours, mapped) <= peak(plain, schedule) + mask_bytes


@made_of(lambda: {"linear": nn.Linear(8, 512)})
class Classifier(nn.Module):
    """Returns its loss, and scores that take more memory than all else."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.linear(x)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


def test_loss_without_scores_holds_one_matrix_of_their_size() -> None:
    model, batch = Classifier(), {"x": torch.randn(4096, 8), "labels": torch.randint(512, (4096,))}
    planner = Planner(model, batch, outputs="loss")
    plan, module = planner.plan(1.0), planner.module(1.0)

    def step() -> None:
        module(**batch)["loss"].backward()

    step()
    measured = measure.allocator_peak(step)
    scores_bytes = 4096 * 512 * 4
    assert measured <= 1.02 * plan.predicted_peak_bytes
    # log-probabilities and their gradient take the scores' place
    assert scores_bytes <= plan.predicted_peak_bytes < 1.5 * scores_bytes
