"""What a share of the sample's peak stands for when a state or a set of keywords is first seen on a
batch of another size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import InfeasibleBudgetError, Planner, RockmateModule, SignatureMismatchError
from rockmate._torch.allocator import timeline
from rockmate.capture import sample as sample_file
from rockmate.capture import symbolic as symbolic_file

SHARE = 0.85


class Reader(nn.Module):
    """Embedding, a wide layer, and a loss over the positions that an optional mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 20))

    def forward(
        self,
        words: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        states = self.embed(words)
        if shift is not None:
            states = states + shift
        scores = self.layers(states)
        if labels is None:
            return scores.square().mean()
        losses = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.mean() if mask is None else (losses * mask.flatten()).sum() / mask.sum()


def call(rows: int, length: int, *extra: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    words = torch.randint(20, (rows, length), generator=generator)
    mask = torch.arange(length).expand(rows, length) < length - 2
    named = {
        "words": words,
        "labels": words.clone(),
        "mask": mask,
        "shift": torch.ones(rows, length, 16),
    }
    return {name: named[name] for name in ("words", *extra)}


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader().train()


def gradients(module: nn.Module, owner: nn.Module, named: dict[str, Tensor]) -> list[Tensor]:
    owner.zero_grad()
    module(**named).backward()
    return [
        parameter.grad.clone() for parameter in owner.parameters() if parameter.grad is not None
    ]


def assert_as_eager(module: RockmateModule, named: dict[str, Tensor]) -> None:
    reference = copy.deepcopy(module.original)
    ours, theirs = gradients(module, module.original, named), gradients(reference, reference, named)
    assert theirs
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def peak_bytes(module: RockmateModule, named: dict[str, Tensor]) -> int:
    module(**named).backward()  # makes .grad
    module.original.zero_grad(set_to_none=False)
    return timeline(lambda: module(**named).backward()).peak_bytes


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each capture that has been made."""
    made: list[int] = []
    capture = sample_file.capture_joint
    for place in (sample_file, symbolic_file):
        monkeypatch.setattr(
            place,
            "capture_joint",
            lambda *args, **kwargs: made.append(1) or capture(*args, **kwargs),
        )
    return made


STATES: dict[str, Callable[[Reader], Any]] = {
    "another dtype": lambda model: model.bfloat16(),
    "new rows": lambda model: setattr(model, "embed", nn.Embedding(30, 16)),
}


@pytest.mark.parametrize("state", STATES)
def test_a_share_is_one_of_the_samples_peak_in_a_state_first_seen_on_a_small_batch(
    state: str,
) -> None:
    model, twin = reader(), reader()
    module = RockmateModule(model, call(8, 24, "labels"), SHARE)
    STATES[state](model)
    STATES[state](twin)
    expected_bytes = Planner(twin, call(8, 24, "labels")).plan(SHARE).budget_bytes
    if state != "another dtype":  # whose gradients in pieces round otherwise
        assert_as_eager(module, call(8, 5, "labels"))
    for named in (call(8, 5, "labels"), call(8, 24, "labels"), call(3, 24, "labels")):
        assert peak_bytes(module, named) <= expected_bytes
        assert module.plan.budget_bytes == expected_bytes


def test_autocast_first_seen_on_a_small_batch() -> None:
    module = RockmateModule(reader(), call(8, 24, "labels"), SHARE)
    with torch.autocast("cpu", torch.bfloat16):
        expected_bytes = Planner(reader(), call(8, 24, "labels")).plan(SHARE).budget_bytes
        for length in (5, 24):
            module(**call(8, length, "labels")).backward()
            assert module.plan.budget_bytes == expected_bytes


def test_bytes_are_bytes_in_every_state() -> None:
    model = reader()
    module = RockmateModule(
        model,
        call(8, 24, "labels"),
        Planner(reader(), call(8, 24, "labels")).plan(SHARE).budget_bytes,
    )
    budget_bytes = module.plan.budget_bytes
    model.bfloat16()
    module(**call(8, 5, "labels")).backward()
    assert module.plan.budget_bytes == budget_bytes


def test_a_sample_that_does_not_fit_in_the_new_state_is_refused_with_its_own_minimum() -> None:
    sample = call(8, 24, "labels")
    model = reader()
    module = RockmateModule(model, sample, Planner(model, sample).minimum_peak_bytes)
    model.double()
    with pytest.raises(InfeasibleBudgetError) as expected:
        Planner(reader().double(), sample).plan(1000)
    with pytest.raises(InfeasibleBudgetError) as found:
        module(**call(8, 5, "labels"))
    assert found.value.minimum_bytes == expected.value.minimum_bytes > module.plan.budget_bytes


def test_other_keywords_and_other_lengths_keep_the_samples_bytes_and_take_one_symbolic_capture(
    captures: list[int],
) -> None:
    module = RockmateModule(reader(), call(8, 24, "labels"), SHARE)
    budget_bytes = module.plan.budget_bytes
    assert_as_eager(module, call(8, 7, "labels", "mask"))
    assert module.plan.budget_bytes == budget_bytes
    assert len(captures) == 2
    for length in (9, 24, 13, 7):  # larger ones than the first with these keywords among them
        assert_as_eager(module, call(8, length, "labels", "mask"))
        assert module.plan.budget_bytes == budget_bytes
        assert peak_bytes(module, call(8, length, "labels", "mask")) <= budget_bytes
    assert len(captures) == 3
    for length in (10, 24, 12):  # those of the sample, in turn with the others
        assert_as_eager(module, call(8, length, "labels"))
        module(**call(8, length, "labels", "mask"))
        assert module.plan.budget_bytes == budget_bytes
    assert len(captures) == 4


def test_other_keywords_at_the_samples_size_have_a_share_of_their_own_peak() -> None:
    module = RockmateModule(reader(), call(8, 24), SHARE)
    module(**call(8, 24, "labels")).backward()
    assert (
        module.plan.budget_bytes
        == Planner(reader(), call(8, 24, "labels")).plan(SHARE).budget_bytes
    )


def test_an_input_that_begins_to_require_a_gradient_is_planned_for() -> None:
    module = RockmateModule(reader(), call(8, 24, "labels", "shift"), SHARE)
    found = []
    for length, wanted in ((24, False), (9, True), (24, True), (9, False), (9, True)):
        named = call(8, length, "labels", "shift")
        named["shift"].requires_grad_(wanted)
        module(**named).backward()
        reference = call(8, length, "labels", "shift")
        reference["shift"].requires_grad_(wanted)
        copy.deepcopy(module.original)(**reference).backward()
        found.append(named["shift"].grad is not None)
        if wanted:
            torch.testing.assert_close(
                named["shift"].grad, reference["shift"].grad, rtol=1e-6, atol=1e-8
            )
    assert found == [False, True, True, False, True]
    twin = call(8, 24, "labels", "shift")
    twin["shift"].requires_grad_()
    assert module.plan.budget_bytes == Planner(reader(), twin).plan(SHARE).budget_bytes


def test_without_replanning_the_message_names_requires_grad() -> None:
    module = RockmateModule(reader(), call(8, 24, "labels", "shift"), SHARE, replan=False)
    named = call(8, 24, "labels", "shift")
    named["shift"].requires_grad_()
    with pytest.raises(
        SignatureMismatchError,
        match="requires a gradient in one of them alone: set its requires_grad as planned",
    ):
        module(**named)
