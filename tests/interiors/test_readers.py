"""A gradient for each reader: as they arrive in eager, and as a captured graph hands them over."""

from __future__ import annotations

import torch
from made_of import made_of
from torch import Tensor, nn

from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.sample import read_sample, trace_sample
from rockmate.frames.interiors.gradients import contributions_noted, one_gradient_per_reader


def test_gradients_arrive_in_the_order_of_the_backward() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    outputs = [x * 2 + x.sin() + y, x.exp()]
    ones = [torch.ones(3), torch.ones(3)]
    with contributions_noted(outputs, [x, y]) as found:
        _ = torch.autograd.grad(outputs, [x, y], ones)
    of_x, of_y = found
    expected = [x.exp(), x.cos(), torch.full((3,), 2.0)]  # the last op goes first
    assert all(torch.equal(one, other) for one, other in zip(of_x, expected, strict=True))
    assert [each.tolist() for each in of_y] == [[1.0] * 3]


@made_of(lambda: {"scale": nn.Parameter(torch.randn(4))})
class Twice(nn.Module):
    """Reads its input three times, and a parameter twice."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin() + (x + self.scale).exp() + x


def _captured(module: nn.Module, x: Tensor, counts: dict[Role, int]) -> list[Role] | None:
    sample = read_sample(module, (x,), None)
    capture = trace_sample(module, sample, differentiable="all", outputs="all", untraced=())
    apart = one_gradient_per_reader(capture, counts)
    return None if apart is None else [role for _, role in apart.outputs]


def test_a_sum_is_taken_apart() -> None:
    x = torch.randn(4, requires_grad=True)
    of_input = Role(RoleKind.INPUT_GRADIENT, index=0)
    of_scale = Role(RoleKind.PARAMETER_GRADIENT, name="scale")
    roles = _captured(Twice(), x, {of_input: 3, of_scale: 2})
    assert roles is not None
    assert roles.count(of_input) == 3
    assert roles.count(of_scale) == 2


def test_a_count_that_is_not_that_of_the_sum_is_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    assert _captured(Twice(), x, {Role(RoleKind.INPUT_GRADIENT, index=0): 9}) is None
