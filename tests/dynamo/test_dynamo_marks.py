"""Names, marks and checkpoints in a forward that Dynamo traced are those of a planned module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers import differing, gradients_of, same_bits
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rockmate
from rockmate import InvalidSampleError, MarkError, Plan, Planner, planned_graphs

# Dynamo reads `.grad` of each input and hides the warning, which is an error in tests.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def plainly(run: Callable[..., Any], x: Tensor) -> Any:
    return run(x)


class Block(nn.Module):
    """A residual block; `mark` is called with its hidden value, and `wrap` with its body."""

    def __init__(
        self, mark: Callable[[Tensor], Any] | None, wrap: Callable[..., Any] = plainly
    ) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)
        self.mark, self.wrap = mark, wrap

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.mark is not None:
            self.mark(hidden)
        return self.drop(self.down(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wrap(self.body, x)


def network(mark: Callable[[Tensor], Any] | None, wrap: Callable[..., Any] = plainly) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(mark, wrap), Block(mark, wrap), nn.Linear(16, 1))


def sample(num_rows: int = 8) -> Tensor:
    return torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The loss and the gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = run(x).square().mean()
    loss.backward()
    return [loss.detach(), *(each.clone() for each in gradients_of(model).values())]


def compiled_plan(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    """The plan of a compiled model, whose step has eager's bits."""
    eager = copy.deepcopy(model)
    options = {"budget": 1.0, "on_infeasible": "least", **options}
    run: Any = torch.compile(model, backend="rockmate", options=options)
    ours, theirs = trained(model, run, x), trained(eager, eager, x)
    assert all(map(same_bits, ours, theirs))
    return planned_graphs()[-1].plan


def marked(plan: Plan) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Of each marked value its name, its mark, its submodule, and what asked for the mark."""
    values = [
        (plan.snapshot.storages[storage], op.module)
        for op in plan.snapshot.ops
        for storage in op.writes
    ]
    return [(each.name, each.mark, path, each.mark_sources) for each, path in values if each.mark]


def hidden_name(x: Tensor) -> None:
    rockmate.name(x, "hidden")


def saved(x: Tensor) -> None:
    rockmate.save(x)


def recomputed(x: Tensor) -> None:
    rockmate.recompute(x)


@pytest.mark.parametrize("word", ["save", "recompute"])
def test_a_named_value_is_marked(word: str) -> None:
    model, x, marks = network(hidden_name), sample(), {"hidden": word}
    module_plan = Planner(copy.deepcopy(model), x, marks=marks).plan(1.0)
    plan = compiled_plan(model, x, marks=marks)
    expected = [(word, path, ("hidden",)) for path in ("0", "1")]
    assert [mark[1:] for mark in marked(plan)] == expected
    assert marked(plan) == marked(module_plan)


@pytest.mark.parametrize("mark", [saved, recomputed])
def test_marks_on_the_spot_are_named_by_their_line(mark: Callable[[Tensor], Any]) -> None:
    model, x = network(mark), sample()
    module_plan = Planner(copy.deepcopy(model), x).plan(1.0)
    plan = compiled_plan(model, x)
    line = mark.__code__.co_firstlineno + 1
    assert {source for *_, sources in marked(plan) for source in sources} == {
        f"line {line} of {mark.__name__}"
    }
    assert marked(plan) == marked(module_plan) != []


def test_other_sizes_keep_the_marks() -> None:
    model = network(hidden_name)
    options = {"budget": 1.0, "on_infeasible": "least", "marks": {"hidden": "recompute"}}
    run: Any = torch.compile(model, backend="rockmate", options=options)
    for num_rows in (8, 12, 20):
        trained(model, run, sample(num_rows))
        assert len(marked(planned_graphs()[-1].plan)) == 2


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(MarkError, match="Similar: hidden"):
        compiled_plan(network(hidden_name), sample(), marks={"hiden": "save"})


# --- calls that are wrong -------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no tensor": (lambda _: rockmate.save("up"), "marks tensors"),  # pyright: ignore
    "no text": (lambda x: rockmate.name(x, 5), "a text is needed"),  # pyright: ignore
    "no name": (lambda x: rockmate.name(x, None), "a text is needed"),  # pyright: ignore
    "empty": (lambda x: rockmate.name(x, ""), "needs letters"),
    "pattern": (lambda x: rockmate.recompute(x, "a*"), "needs letters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_errors_of_plans_alone(name: str) -> None:
    mark, words = WRONG[name]
    with pytest.raises(InvalidSampleError, match=words):
        compiled_plan(network(mark), sample())
    torch.compiler.reset()
    model = network(mark)
    run: Any = torch.compile(model, backend="eager", fullgraph=True)
    reference = network(None)
    assert all(
        map(same_bits, trained(model, run, sample()), trained(reference, reference, sample()))
    )


# --- other backends -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_other_backends_compile_the_model_as_without_marks(backend: str) -> None:
    found = []
    for mark in (hidden_name, None):
        torch.compiler.reset()
        model = network(mark)
        run: Any = torch.compile(model, backend=backend, fullgraph=True)
        found.append(trained(model, run, sample()))
    assert not differing(dict(enumerate(found[0])), dict(enumerate(found[1])))


def test_nothing_is_left_below_dynamos_graph() -> None:
    graphs: list[fx.Graph] = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    model = network(recomputed)
    run: Any = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    trained(model, run, sample())
    assert len(graphs) == 2
    assert not any("rockmate" in str(node.target) for graph in graphs for node in graph.nodes)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_needs_no_op_of_this_package(strict: bool) -> None:
    exported = torch.export.export(network(recomputed), (sample(),), strict=strict)
    assert not any("rockmate" in str(node.target) for node in exported.graph.nodes)


# --- checkpoints ----------------------------------------------------------------------------------


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE


def checkpointed(run: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(run, x, use_reentrant=False)


def with_debug(run: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(run, x, use_reentrant=False, debug=True)


def selected(run: Callable[..., Any], x: Tensor) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(run, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("wrap", [checkpointed, selected, with_debug])
def test_checkpointed_calls_are_honoured(wrap: Callable[..., Any]) -> None:
    model, x, options = network(None, wrap), sample(), {"existing_checkpoints": "honour"}
    module_plan = Planner(copy.deepcopy(model), x, **options).plan(1.0, on_infeasible="least")
    plan = compiled_plan(model, x, **options)
    assert marked(plan) == marked(module_plan) != []
    assert {each.module for each in plan.snapshot.ops} >= {"0.up", "0.drop", "1.down"}


@pytest.mark.parametrize("wrap", [checkpointed, selected])
def test_marks_within_checkpointed_calls(wrap: Callable[..., Any]) -> None:
    plan = compiled_plan(network(recomputed, wrap), sample())
    assert [mark for _, mark, *_ in marked(plan)] == ["recompute", "recompute"]
