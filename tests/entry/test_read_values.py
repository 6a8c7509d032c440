"""Forwards that read values of their inputs: each branch has a plan of its own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from helpers import assert_trains_alike
from made_of import made_of
from torch import nn

from rockmate import Planner, RockmateModule
from rockmate.costs.machine import load_machine
from rockmate.errors import SignatureMismatchError, UnsupportedModelError
from rockmate.planning.step import capture_step


@made_of(lambda: {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "drop": nn.Dropout(0.3)})
class Branches(nn.Module):
    """Runs one of two layers, as a flag among the inputs says."""

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        layer = self.first if (flag > 0).sum() == flag.numel() else self.second
        return self.drop(torch.tanh(layer(x)))


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Scaled(nn.Module):
    """Reads a length and uses it as a number and as a size."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        return self.layer(x[:, :longest]).sin() / longest


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class InPlace(nn.Module):
    """Reads a value that ops in place have made."""

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(2, dtype=torch.int64)
        total[0].add_(flag.sum())
        base = torch.tensor([1, 2])
        base += total
        return self.layer(x) * (2.0 if base.tolist()[0] > 4 else 3.0)


class Started(nn.Module):
    """Initializes itself from its first batch, as a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("is_started", torch.tensor(False))
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_started:
            self.offset.copy_(x.detach().mean(0))
            self.is_started.fill_(True)
        return self.layer(x - self.offset).tanh()


Calls = list[tuple[torch.Tensor, ...]]


def check_equal(make: Callable[[], nn.Module], calls: Calls) -> RockmateModule:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    module = RockmateModule(model, calls[0], budget=1.0, on_infeasible="least")
    loss: Callable[..., torch.Tensor] = lambda m, step: m(*calls[step]).square().mean()  # noqa: E731
    assert_trains_alike(module, plain, loss, len(calls))
    return module


def x(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_each_branch_has_a_plan() -> None:
    calls = [(x(i), flags(1, i % 2)) for i in range(6)]
    module = check_equal(Branches, calls)
    assert len(module._plans.runnables) == 2


def test_other_shapes_read_their_own_values(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [(i, 4 + i % 3) for i in range(8)]
    calls = [(torch.randn(2, n, 8), torch.ones(2, n).long() * (i % 2)) for i, n in lengths]
    with caplog.at_level(logging.INFO):
        check_equal(Branches, calls)
    assert caplog.text.count("captured with symbolic sizes") == 2  # one for each branch
    assert caplog.text.count("captured for these sizes alone") == 1


def test_numbers_and_sizes_from_values() -> None:
    calls = [
        (torch.randn(2, 6, 8), torch.tensor(lengths))
        for lengths in ([3, 6], [6, 1], [2, 4], [4, 4], [3, 6])
    ]
    check_equal(Scaled, calls)


def test_values_after_changes_in_place() -> None:
    calls = [(x(i), flags(i, 1)) for i in (1, 2, 3, 4, 3, 2)]
    module = check_equal(InPlace, calls)
    assert len(module._plans.runnables) == 4  # one for each list


def test_values_of_buffers() -> None:
    check_equal(Started, [(x(i),) for i in range(3)])


def test_a_given_plan_refuses_other_values() -> None:
    model = Branches()
    module = RockmateModule(model, (x(0), flags(1, 1)), budget=1.0, replan=False)
    module(x(1), flags(2, 3))
    with pytest.raises(SignatureMismatchError, match="was True and is False"):
        module(x(1), flags(0, 1))


def test_another_value_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    module = RockmateModule(Branches(), (x(0), flags(1, 1)), budget=1.0)
    with caplog.at_level(logging.WARNING):
        module(x(1), flags(0, 1))
    assert "the forward reads from its inputs or buffers was True and is False" in caplog.text


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Activations(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.exp() if y.sum() > 0 else y.sin()


class Draws(Activations):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.exp() if torch.rand([]) > 0.5 else y.sin()


class Overwritten(Activations):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4, 8)
        view = total[0]
        total.add_(self.layer(x).detach())
        return self.layer(x) * (2.0 if view.sum() > 0 else 3.0)


@pytest.mark.parametrize("model_class", [Activations, Draws, Overwritten])
def test_values_that_the_call_does_not_decide_are_refused(model_class: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedModelError, match="reads the value of a tensor"):
        RockmateModule(model_class(), x(0), budget=1.0)


@made_of(lambda: {"layer": nn.Linear(8, 8), "head": nn.Linear(8, 3)})
class Masked(nn.Module):
    """Takes rows of activations where a mask is true, and writes to them."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh() * 2
        y[mask] = self.layer(y[mask]).sin()
        rows = mask.nonzero(as_tuple=True)[0]
        weights = torch.linspace(0, 1, mask.numel()).masked_select(mask)
        return (self.head(y[rows]) * weights[:, None] + mask.nonzero().sum()).cos()


def test_masks_of_one_count_share_a_plan() -> None:
    rows = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1]]
    module = check_equal(Masked, [(x(i), torch.tensor(row).bool()) for i, row in enumerate(rows)])
    assert len(module._plans.runnables) == 2


def test_a_mask_without_a_true_element() -> None:
    calls = [(x(i), torch.tensor(row).bool()) for i, row in enumerate([[1, 0, 1], [0, 0, 0]])]
    check_equal(Masked, [(row[:3], mask) for row, mask in calls])


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Packed(nn.Module):
    """Rows in packs, whose lengths, numbers and boundaries follow from an input."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pack_of_row = torch.repeat_interleave(lengths)
        offsets = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return self.layer(x[offsets]) * (1 + pack_of_row[:, None])


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Unique(nn.Module):
    """Sizes from the distinct values of an input, and a tensor made of tensors."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bounds = torch.unique_consecutive(ids)
        parts = [part.tanh().mean(0) for part in x.split(bounds.diff().tolist())]
        ends = torch.tensor([bounds[0], bounds[-1]])
        return self.layer(torch.stack(parts)) * ends.sum() + torch.bincount(ids).sum()


def test_repetitions_of_one_number_share_a_plan() -> None:
    lengths = ([1, 3], [2, 2], [4, 0], [2, 3])
    module = check_equal(Packed, [(x(i, 6), flags(*row)) for i, row in enumerate(lengths)])
    assert len(module._plans.runnables) == 2


def test_distinct_values_of_an_input() -> None:
    ids = ([0, 1, 4], [0, 1, 4], [0, 3, 4], [0, 4, 4], [0, 1, 4])
    module = check_equal(Unique, [(x(i), flags(*row)) for i, row in enumerate(ids)])
    assert len(module._plans.runnables) == 3


@pytest.mark.parametrize(
    ("model_class", "call"),
    [
        (Branches, (x(0), flags(1, 1))),
        (Branches, (x(0), flags(1, 0))),
        (Scaled, (torch.randn(2, 6, 8), torch.tensor([2, 4]))),
        (InPlace, (x(0), flags(2, 1))),
        (Started, (x(0),)),
        (Masked, (x(0), flags(1, 0, 1, 0).bool())),
    ],
)
def test_a_plan_for_a_machine_that_is_not_here_is_that_of_the_values(
    model_class: type[nn.Module], call: tuple[torch.Tensor, ...]
) -> None:
    model = model_class().train()
    model.drop = nn.Identity()  # a GPU has another kernel
    here, elsewhere = (
        [
            (op.node.target, str(op.node.args))
            for op in capture_step(model, call, machine=each).graph.ops
        ]
        for each in (None, load_machine("a100"))
    )
    assert here == elsewhere


def test_values_of_a_sample_without_any_are_asked_for() -> None:
    model, given = Branches().to("meta").train(), x(0)
    assert Planner(model, (given, given), machine="h100").baseline_ms > 0
    with pytest.raises(UnsupportedModelError, match=r"reads the value .*on the CPU has the values"):
        Planner(model, (given.to("meta"), given.to("meta")), machine="h100")


@made_of(lambda: {"layer": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
class Grids(nn.Module):
    """Packed rows of images: split by lengths that follow from an input, and positions in them."""

    def forward(self, x: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        ends = torch.nn.functional.pad(grids.prod(-1).cumsum(0), (1, 0))
        parts = [
            self.layer(part).tanh() * (1 + self.layer(part).softmax(0))
            for part in x.split((ends[1:] - ends[:-1]).tolist())
        ]
        rows = torch.cat([torch.arange(h).repeat_interleave(w) for h, w in grids.tolist()])
        return self.head(torch.cat(parts)).sin() * (1 + rows[:, None])


def of_grids(*grids: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return x(0, sum(h * w for h, w in grids)), torch.tensor(grids)


@pytest.mark.parametrize(
    ("model_class", "calls"),
    [
        (Masked, [(x(0, 24), torch.arange(24) < number) for number in (20, 12, 7, 9, 15)]),
        (
            Grids,
            [
                of_grids((4, 3), (3, 4)),
                of_grids((2, 3), (3, 3)),
                of_grids((3, 4), (2, 3)),
                of_grids((2, 2), (4, 5)),
                of_grids((3, 2), (2, 2)),
            ],
        ),
    ],
)
def test_other_numbers_take_over_a_schedule(
    model_class: Callable[[], nn.Module], calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rockmate")
    module = check_equal(model_class, calls)
    assert sum(each.is_adapted for each in module._plans.runnables) >= len(calls) - 3
    assert "captured with symbolic sizes" in caplog.text
    assert "there is no" not in caplog.text
