"""Hooks fire as in eager: exactly once a backward, on the summed gradient.

Optimizers in the backward; failures in the middle.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from helpers import (
    REGIMES,
    assert_same,
    differing,
    gradients_of,
    modules_of,
    one_step,
    planned,
    same_bits,
    workload_loss,
)
from torch import Tensor

from rockmate import RockmateModule

TIED = ("gpt2", "mlp")  # the first ties its embedding and its head
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("gradients", ["accumulated", "returned"])
@pytest.mark.parametrize("name", TIED)
def test_post_accumulate_hooks_fire_once_a_backward(name: str, gradients: str) -> None:
    case = planned(name)
    model = case.eager()
    for module in modules_of(model, case.workload.sample, gradients=gradients):
        fired: collections.Counter[int] = collections.Counter()
        seen: dict[int, Tensor] = {}

        def hook(parameter: Tensor, fired: Any = fired, seen: Any = seen) -> None:
            fired[id(parameter)] += 1
            seen[id(parameter)] = parameter.grad.clone()

        handles = [
            parameter.register_post_accumulate_grad_hook(hook) for parameter in model.parameters()
        ]
        for times in (1, 2):
            _, loss = case.workload.loss(module, case.workload.make_batch(times))
            loss.backward()
            assert [fired[id(parameter)] for parameter in model.parameters()] == [times] * len(
                list(model.parameters())
            )
            assert all(
                same_bits(seen[id(parameter)], parameter.grad) for parameter in model.parameters()
            )
        for handle in handles:
            handle.remove()
        model.zero_grad()


@pytest.mark.parametrize("name", TIED)
def test_hooks_of_accumulation_nodes_run_once_a_backward(name: str) -> None:
    """They cannot be seen from Python, and DistributedDataParallel's are such.

    `.grad` is complete when each runs, as in eager.
    """
    case = planned(name)
    model, eager = case.eager(), case.eager()
    for callee, owner in (
        (eager, eager),
        *((module, model) for module in modules_of(model, case.workload.sample)),
    ):
        owner.zero_grad()
        # nodes that are hooked only after a step must be told, too
        one_step(callee, owner, workload_loss(case.workload), 1)
        ran: collections.Counter[str] = collections.Counter()
        seen: dict[str, Tensor] = {}

        def note(key: str, parameter: Tensor, ran: Any = ran, seen: Any = seen) -> None:
            ran[key] += 1
            seen[key] = parameter.grad.clone()

        nodes = {
            key: torch.autograd.graph.get_gradient_edge(parameter).node
            for key, parameter in owner.named_parameters()
        }
        handles = [
            nodes[key].register_hook(
                lambda *_, key=key, parameter=parameter, note=note: note(key, parameter)
            )
            for key, parameter in owner.named_parameters()
        ]
        for times in (1, 2):
            case.workload.loss(callee, case.workload.make_batch(times))[1].backward()
            assert ran == dict.fromkeys(nodes, times)
            assert all(
                same_bits(seen[key], parameter.grad) for key, parameter in owner.named_parameters()
            )
        for handle in handles:
            handle.remove()


def test_a_sparse_grad_is_added_to() -> None:
    model = models.Stack()
    reference = copy.deepcopy(model)
    for callee, owner in (
        (reference, reference),
        *((module, model) for module in modules_of(model, X)),
    ):
        for parameter in owner.parameters():
            parameter.grad = (
                torch.zeros_like(parameter).index_fill(0, torch.tensor([0]), 2.0).to_sparse()
            )
        torch.manual_seed(1)
        callee(X).square().sum().backward()
        assert not differing(
            gradients_of(model if owner is model else reference), gradients_of(reference)
        )


@pytest.mark.parametrize("name", TIED)
def test_tensor_hooks_see_the_summed_gradient_once_and_may_replace_it(name: str) -> None:
    case = planned(name)
    model, eager = case.eager(), case.eager()
    found = []
    for callee, owner in (
        (eager, eager),
        *((module, model) for module in modules_of(model, case.workload.sample)),
    ):
        calls: list[tuple[str, Tensor]] = []
        handles = [
            parameter.register_hook(
                lambda gradient, key=key, calls=calls: (
                    calls.append((key, gradient.clone())),
                    gradient * 0.5,
                )[1]
            )
            for key, parameter in owner.named_parameters()
        ]
        owner.zero_grad()
        step = one_step(callee, owner, workload_loss(case.workload), 1)
        found.append((dict(calls), step.gradients))
        assert sorted(key for key, _ in calls) == sorted(key for key, _ in owner.named_parameters())
        for handle in handles:
            handle.remove()
    for calls, gradients in found[1:]:
        assert not differing(calls, found[0][0])
        assert not differing(gradients, found[0][1])


@contextlib.contextmanager
def detecting_anomalies() -> Iterator[None]:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        yield


def cloning() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda tensor: tensor)


@pytest.mark.parametrize("around", [cloning, detecting_anomalies])
def test_saved_tensor_hooks_and_anomaly_mode_around(around: Any) -> None:
    model = models.Stack()
    reference = copy.deepcopy(model)
    for callee in (reference, *modules_of(model, X)):
        model.zero_grad()
        torch.manual_seed(1)
        with around():
            callee(X).square().sum().backward()
        assert callee is reference or not differing(gradients_of(model), gradients_of(reference))


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_failure_in_the_middle_of_a_backward_leaves_it_usable(name: str) -> None:
    case = planned(name)
    eager = case.eager()
    reference = one_step(eager, eager, workload_loss(case.workload), 4)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")

    for regime in REGIMES:
        module, model = case.module(regime), case.workload.model
        parameters = list(model.parameters())
        for victim in (parameters[0], parameters[len(parameters) // 2], parameters[-1]):
            handle = victim.register_hook(fail)
            torch.manual_seed(1)
            _, loss = case.workload.loss(module, case.workload.make_batch(1))
            state = torch.get_rng_state()
            with pytest.raises(ArithmeticError, match="on purpose"):
                loss.backward()
            assert torch.equal(torch.get_rng_state(), state), (
                "the generator is left in the middle of a replay"
            )
            handle.remove()
            del loss
        model.load_state_dict(case.before)
        model.zero_grad()
        assert_same(one_step(module, model, workload_loss(case.workload), 4), reference)


def test_module_hooks_of_the_planned_module_run() -> None:
    module = RockmateModule(models.Stack(), X, 1.0)
    calls = []
    module.register_forward_pre_hook(lambda m, args: calls.append("before"))
    module.register_forward_hook(lambda m, args, output: calls.append("after"))
    module(X).sum().backward()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("gradients", ["accumulated", "returned"])
def test_hooks_that_come_between_forward_and_backward(gradients: str) -> None:
    model = models.Stack()
    for module in modules_of(model, X, gradients=gradients):
        fired: collections.Counter[str] = collections.Counter()
        loss = module(X).square().sum()
        handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name, fired=fired: fired.update([name])
            )
            for name, parameter in model.named_parameters()
        ]
        loss.backward()
        assert fired == dict.fromkeys([name for name, _ in model.named_parameters()], 1)
        for handle in handles:
            handle.remove()


def test_a_hook_may_differentiate() -> None:
    model = models.Stack()
    for module in modules_of(model, X):
        found: list[bool] = []

        def hook(parameter: Tensor, found: list[bool] = found) -> None:
            with torch.enable_grad():
                copied = parameter.detach().requires_grad_()
                (slope,) = torch.autograd.grad(copied.square().sum(), copied)
            found.append(torch.equal(slope, 2 * parameter.detach()))

        handles = [
            parameter.register_post_accumulate_grad_hook(hook) for parameter in model.parameters()
        ]
        module(X).square().sum().backward()
        assert found == [True] * len(list(model.parameters()))
        for handle in handles:
            handle.remove()
