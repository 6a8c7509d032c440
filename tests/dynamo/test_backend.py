"""`torch.compile(model, backend="rockmate")` gives eager's numbers within the budget."""

from __future__ import annotations

import copy
import logging
from typing import Any

import models
import pytest
import torch
from dynamo_networks import WIDTH, Deterministic, Network, Pair, batch
from helpers import differing, gradients_of, same_bits
from torch import Tensor, nn
from torch._dynamo import config
from torch.nn import functional

from rockmate import (
    BackwardError,
    InfeasibleBudgetError,
    InvalidArgumentError,
    InvalidBudgetError,
    RockmateError,
    UnknownOptionError,
    UnsupportedModelError,
    planned_graphs,
)

# Dynamo reads `.grad` of each input and hides the warning, which is an error in tests.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def sizes_of_plans() -> list[tuple[int, int]]:
    return [(each.plan.predicted_peak_bytes, each.plan.budget_bytes) for each in planned_graphs()]


@pytest.mark.parametrize("budget", [1.0, 0.7, 0.5])
def test_steps_are_eagers_within_the_budget(budget: float) -> None:
    pair = Pair(Network(), {"budget": budget})
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (pair.model, pair.eager)]
    for seed in range(3):
        pair.check(batch(64, seed), seed=seed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    [(predicted, allowed)] = sizes_of_plans()
    assert pair.peak_bytes(batch(64)) <= predicted <= allowed


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
@pytest.mark.parametrize("differentiable", ["all", "loss"])
def test_models_have_eagers_gradients(name: str, differentiable: str) -> None:
    workload = models.tiny(name)
    model = copy.deepcopy(workload.model)
    eager = copy.deepcopy(model)
    compiled: Any = torch.compile(
        model, backend="rockmate", options={"budget": 0.6, "differentiable": differentiable}
    )
    losses = []
    for call in (compiled, eager):
        torch.manual_seed(1)
        loss = workload.loss(call, workload.make_batch(1))[1]
        loss.backward()
        losses.append(loss.detach())
    assert same_bits(*losses)
    assert differing(gradients_of(model), gradients_of(eager)) == []
    assert differing(model.state_dict(), eager.state_dict()) == []


def test_loss_alone_needs_less_and_refuses_gradients_of_others() -> None:
    class WithLogits(Deterministic):
        def forward(self, x: Tensor) -> Any:
            loss = super().forward(x)
            return loss, self.layers[0](x)

    model = WithLogits()
    options = {"budget": 1.0, "differentiable": "loss"}
    compiled: Any = torch.compile(model, backend="rockmate", options=options)
    loss, logits = compiled(batch(256))
    loss.backward()
    eager = copy.deepcopy(model)
    eager.zero_grad()
    eager(batch(256))[0].backward()
    assert differing(gradients_of(model), gradients_of(eager)) == []
    alone_bytes = planned_graphs()[-1].plan.baseline_peak_bytes
    torch.compiler.reset()
    both: Any = torch.compile(model, backend="rockmate", options={"budget": 1.0})
    both(batch(256))[0].backward()
    assert alone_bytes < planned_graphs()[-1].plan.baseline_peak_bytes
    with pytest.raises(BackwardError, match='differentiable="all"'):
        compiled(batch(256))[1].sum().backward()
    assert logits.shape == (256, WIDTH)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (None, InvalidBudgetError, "needs one"),
        ({"strategy": "chen"}, InvalidBudgetError, "needs one"),
        ({"budget": "two"}, InvalidBudgetError, "'two' cannot be read"),
        ({"budget": 0.5, "budgets": 1}, UnknownOptionError, "no option 'budgets'.*mean budget"),
        ({"budget": 0.5, "machine": "h100"}, UnknownOptionError, "no option 'machine'"),
        ({"budget": 0.5, "strategy": "fast"}, InvalidArgumentError, "strategy is 'fast'"),
        ({"budget": 0.5, "on_infeasible": "no"}, InvalidArgumentError, "on_infeasible is 'no'"),
        ({"budget": 0.5, "time_limit_s": "9"}, InvalidArgumentError, "time_limit_s is '9'"),
        ({"budget": 100}, InfeasibleBudgetError, "budget of 100 bytes is below"),
    ],
)
@pytest.mark.parametrize("suppressed", [False, True])
def test_bad_options_are_errors_of_our_own(
    options: dict[str, Any] | None, error: type[Exception], text: str, suppressed: bool
) -> None:
    compiled = torch.compile(Deterministic(), backend="rockmate", options=options)
    with config.patch(suppress_errors=suppressed), pytest.raises(error, match=text) as caught:
        compiled(batch(16))
    assert type(caught.value) is error


def test_mode_of_another_backend_is_refused() -> None:
    compiled = torch.compile(Deterministic(), backend="rockmate", mode="max-autotune")
    with pytest.raises(TypeError, match="takes no mode"):
        compiled(batch(16))


def test_eval_and_no_grad_run_without_a_plan() -> None:
    before = len(planned_graphs())
    pair = Pair(Deterministic(), {"budget": 0.8})
    with torch.no_grad():
        assert same_bits(pair.compiled(batch(16)), pair.eager(batch(16)))
    pair.model.eval()
    pair.check(batch(16))
    assert len(planned_graphs()) == before
    pair.model.train()  # no code of the model reads the mode, and the budget has to hold
    pair.check(batch(16))
    assert len(planned_graphs()) == before + 1
    assert pair.peak_bytes(batch(16)) <= planned_graphs()[-1].plan.budget_bytes
    pair.model.eval()
    pair.check(batch(16))
    assert len(planned_graphs()) == before + 1


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_other_batch_sizes_are_planned_within_the_same_bytes(dynamic: bool | None) -> None:
    pair = Pair(Network(), {"budget": "180KB"}, {"dynamic": dynamic})
    for rows in (64, 40, 96, 40):
        pair.check(batch(rows))
        assert pair.peak_bytes(batch(rows)) <= 180_000


def test_fraction_is_one_of_the_first_call() -> None:
    pair = Pair(Network(), {"budget": 0.6})
    pair.check(batch(64))
    pair.check(batch(32))
    assert len({allowed for _, allowed in sizes_of_plans()[-2:]}) == 1
    with pytest.raises(InfeasibleBudgetError):
        pair.compiled(batch(4096))


def test_python_values_may_decide_and_vary() -> None:
    class Choosing(Network):
        def forward(self, x: Tensor, scale: float = 1.0, is_short: bool = False) -> Any:
            y = self.blocks[0](x) if is_short else super().forward(x)
            return y.square().mean() * scale

    pair = Pair(Choosing(), {"budget": "1MB"})
    for args in [(1.0, False), (1.0, True), (2.5, True), (3.5, True), (1.0, False)]:
        pair.check(batch(64), *args)


def test_outputs_that_are_no_tensors() -> None:
    class Counting(Deterministic):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.shape[0] * 2 + 1, None, "text"

    model = Counting()
    compiled: Any = torch.compile(model, backend="rockmate", options={"budget": "1MB"})
    for rows in (16, 24, 40):
        loss, *rest = compiled(batch(rows))
        loss.backward()
        assert rest == [rows * 2 + 1, None, "text"]
        assert type(rest[0]) is int


def test_hooks_fire_once_for_two_calls_of_other_sizes() -> None:
    pair = Pair(Deterministic(), {"budget": "1MB"})
    seen: dict[nn.Module, list[tuple[str, float]]] = {pair.model: [], pair.eager: []}
    for model, calls in seen.items():
        for name, parameter in model.named_parameters():
            parameter.register_hook(
                lambda grad, name=name, calls=calls: calls.append((name, grad.sum().item()))
            )
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, calls=calls: calls.append((name, p.grad.sum().item()))
            )
    for call in (pair.compiled, pair.eager):
        (call(batch(16)) * call(batch(24))).backward()
    assert sorted(seen[pair.model]) == sorted(seen[pair.eager])
    assert differing(gradients_of(pair.model), gradients_of(pair.eager)) == []


def test_function_around_a_model_and_accumulation() -> None:
    model = Network()
    pair = Pair(model, {"budget": 0.7})
    loss: Any = torch.compile(
        lambda x, y: functional.mse_loss(model.blocks[0](x), y) + model(x),
        backend="rockmate",
        options={"budget": 0.7},
    )
    for seed in range(2):
        torch.manual_seed(seed)
        loss(batch(32), batch(32, 1)).backward()
        torch.manual_seed(seed)
        x, y = batch(32), batch(32, 1)
        (functional.mse_loss(pair.eager.blocks[0](x), y) + pair.eager(x)).backward()
    assert differing(gradients_of(model), gradients_of(pair.eager)) == []


def test_gradients_of_inputs_and_returned_ones() -> None:
    pair = Pair(Deterministic(), {"budget": 0.9})
    inputs = [batch(16).requires_grad_() for _ in range(2)]
    for call, x in zip((pair.compiled, pair.eager), inputs, strict=True):
        call(x * 2).backward()
    assert same_bits(*[x.grad for x in inputs])
    with pytest.raises(BackwardError, match='gradients="returned"'):
        torch.autograd.grad(pair.compiled(batch(16)), list(pair.model.parameters()))
    returned: Any = torch.compile(
        pair.model, backend="rockmate", options={"budget": 1.0, "gradients": "returned"}
    )
    ours = torch.autograd.grad(returned(batch(16)), list(pair.model.parameters()))
    theirs = torch.autograd.grad(pair.eager(batch(16)), list(pair.eager.parameters()))
    assert all(map(same_bits, ours, theirs))


def test_parameters_are_those_of_the_call() -> None:
    pair = Pair(Deterministic(), {"budget": 1.0})
    pair.check(batch(16))
    num_graphs = len(planned_graphs())
    for model in (pair.model, pair.eager):
        model.zero_grad()
        model.layers[1].weight = nn.Parameter(batch(WIDTH, 7))
    pair.check(batch(16))
    assert len(planned_graphs()) == num_graphs


def test_one_graph_serves_equal_layers() -> None:
    model = Network()
    eager = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="rockmate", options={"budget": 1.0})
    for seed in range(2):
        for each in (model, eager):
            torch.manual_seed(seed)
            each(batch(32)).backward()
    assert differing(gradients_of(model), gradients_of(eager)) == []
    assert differing(model.state_dict(), eager.state_dict()) == []


def test_frozen_parameters_and_autocast() -> None:
    pair = Pair(Deterministic(), {"budget": "1MB"})
    for model in (pair.model, pair.eager):
        model.layers[0].requires_grad_(False)
    pair.check(batch(16))
    with torch.autocast("cpu", torch.bfloat16):
        pair.check(batch(16))


def test_plan_has_the_paths_of_the_model() -> None:
    pair = Pair(Network(), {"budget": 0.7})
    pair.check(batch(32))
    graph = planned_graphs()[-1]
    text = graph.plan.tree()
    assert all(f"blocks.{number}" in text for number in range(4))
    fresh = Pair(Network(), {"budget": 0.7})
    assert fresh.compiled is not None
    assert [*pair.model.state_dict()] == [*pair.eager.state_dict()]


def test_a_graph_without_a_call_has_no_plan() -> None:
    graph = None
    pair = Pair(Deterministic(), {"budget": 1})
    with pytest.raises(InfeasibleBudgetError):
        pair.compiled(batch(16))
    graph = planned_graphs()[-1]
    with pytest.raises(RockmateError, match="has not run yet"):
        _ = graph.plan


def test_last_compilation_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(Deterministic(), {"budget": "1MB"}, {"dynamic": False})
    with config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "rockmate"):
        pair.check(batch(16))
        assert "recompile_limit" not in caplog.text
        pair.check(batch(24))
        assert "runs uncompiled, and no budget bounds it" in caplog.text


def test_input_changed_in_place_is_refused() -> None:
    class Changing(Deterministic):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x)

    compiled = torch.compile(Changing(), backend="rockmate", options={"budget": 1.0})
    with pytest.raises(UnsupportedModelError, match="in place, which a plan cannot repeat"):
        compiled(batch(16).requires_grad_() * 1)
