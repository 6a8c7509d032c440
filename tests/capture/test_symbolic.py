"""One symbolic capture for every size.

What it gives is what a capture at those sizes gives, and where it says nothing, that is made.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import architectures
import pytest
import torch
from helpers import assert_alike, assert_same, one_step, relative_error, same_gradients, tensors_of
from made_of import made_of
from torch import Tensor, nn

from bench import measure
from rockmate import Planner, RockmateModule
from rockmate.capture import sample, symbolic
from rockmate.capture.joint import capture_joint
from rockmate.capture.roles import Capture
from rockmate.capture.signature import CallSignature, flatten_call, optional_keywords
from rockmate.capture.size_template import SizeGroups
from rockmate.capture.symbolic import SymbolicCapture
from rockmate.entry import plan_cache, step_family
from rockmate.graph.passes import REWRITES, run_passes
from rockmate.planning import step

SAMPLE = (4, 24)


def batch(name: str, shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(3, 96, shape, generator=draw) for _ in range(2))
    if name in ("gpt2", "llama"):
        return {"input_ids": tokens, "labels": labels}
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, : 1 + seed % 3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def call_of(model: nn.Module, given: dict[str, Tensor]) -> CallSignature:
    return flatten_call((), given, optional_keywords(model))[1]


def symbolic_capture(model: nn.Module, *batches: dict[str, Tensor]) -> SymbolicCapture:
    calls = [call_of(model, given) for given in batches]
    groups = SizeGroups.of(calls[0])
    for call in calls[1:]:
        groups = groups.refined(call)
    return SymbolicCapture(model, calls[0], groups)


def rewritten(capture: Capture) -> Capture:
    return run_passes(REWRITES, capture)


def difference(there: step.CapturedStep, capture: Capture) -> str:
    """What a capture has otherwise than the step that was captured at its sizes."""
    made = step.step_of(capture, there.model, there.call, there.state, there.options)
    return there.snapshot.difference(made.snapshot)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_graph_at_other_sizes_is_the_one_that_is_captured_there(name: str) -> None:
    """Op by op with constants, shapes, strides and wiring.

    Both the capture that is rewritten at its sizes and the generic one.
    """
    model = architectures.make(name)
    capture = symbolic_capture(model, batch(name, SAMPLE))
    generic = capture.generic(rewritten)
    for shape in [(3, 17), (2, 5)]:
        there = step.capture_step(model, batch(name, shape))
        for instance in (rewritten(capture.instance(there.call)), generic.instance(there.call)):
            assert not difference(there, instance)


@made_of(lambda: {"layer": nn.Linear(32, 32)})
class OfPatches(nn.Module):
    """Four patches of two images make one word of two texts, whose gradient waits in a slice."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        words = deep = self.layer(torch.cat([c, d]) + torch.cat([a, b]).view(-1, 32))
        for _ in range(9):
            deep = self.layer(deep)
        return torch.cat([words, deep], 1).square().mean()


def test_sizes_that_guards_make_equal_and_strides_of_copies_are_generic() -> None:
    def given(*rows: int) -> dict[str, Tensor]:
        return {k: torch.randn(n, 8 if k < "c" else 32) for k, n in zip("abcd", rows, strict=True)}

    model = OfPatches()
    capture = symbolic_capture(model, given(40, 56, 12, 12), given(36, 64, 17, 8))
    generic = capture.generic(rewritten, call_of(model, given(36, 64, 17, 8)))
    there = step.capture_step(model, given(8, 20, 4, 3))
    assert not difference(there, generic.instance(there.call))


# --- training -------------------------------------------------------------------------------------


@dataclass
class Work:
    """What has been done since the counting began."""

    captures: list[str] = field(default_factory=list)
    emitted: list[str] = field(default_factory=list)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    done = Work()

    def counting(place: Any, name: str, log: list[str], label: str) -> None:
        function = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *args, **kwargs: log.append(label) or function(*args, **kwargs)
        )

    counting(sample, "capture_joint", done.captures, "fixed")
    counting(symbolic, "capture_joint", done.captures, "symbolic")
    counting(step, "emit", done.emitted, "fixed")
    counting(step_family, "emit", done.emitted, "symbolic")
    return done


def steps_of(model: nn.Module, module: nn.Module, given: dict[str, Tensor]) -> tuple[Any, Any]:
    """A planned and an eager step, from the same random state."""
    eager = copy.deepcopy(model)

    def loss_of(callee: nn.Module, _: int) -> tuple[list[Tensor], Tensor]:
        output = callee(**given)
        output = output if isinstance(output, Tensor) else dict(output)
        return tensors_of(output), output if isinstance(output, Tensor) else output["loss"]

    model.zero_grad(set_to_none=True)
    eager.zero_grad(set_to_none=True)
    return one_step(module, model, loss_of, seed=5), one_step(eager, eager, loss_of, seed=5)


@pytest.mark.parametrize("shape", [(4, 15), (3, 19), (2, 2)])
def test_the_program_at_other_sizes_is_the_one_that_is_written_there(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    model = Tagger()
    module = RockmateModule(model, torch.zeros(4, 20, dtype=torch.long), 1.0)
    module(torch.zeros(shape, dtype=torch.long)).sum().backward()
    assert "plan" not in vars(module._plans.runnables[0].planned)  # its trial makes none
    ours = module._plans.runnables[0].planned.program
    there = step.capture_step(model, torch.zeros(shape, dtype=torch.long))
    theirs = there.planned_call(there.adapted(module._plans.runnables[-1].planned.plan)).program
    for half in ("forward", "backward"):
        function = getattr(ours, half)
        code, numbers = function.code, function.run.__globals__
        names = set(re.findall(r"\bsize_\d+\b", code))
        assert names
        for name in names:
            code = re.sub(rf"\b{name}\b", str(numbers[name]), code)
        assert code == getattr(theirs, half).code


def test_gradients_with_respect_to_inputs_of_other_sizes_equal_eager(work: Work) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 1))
    module = RockmateModule(model, torch.randn(6, 20, 8, requires_grad=True), 1.0)
    work.captures.clear()
    for shape in [(6, 15, 8), (5, 20, 8), (3, 4, 8)]:
        values = [
            torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
            for _ in range(2)
        ]
        for callee, value in zip((module, model), values, strict=True):
            torch.manual_seed(1)
            callee(value).square().sum().backward()
        assert torch.equal(values[0].grad, values[1].grad)
    assert work.captures == ["symbolic"]


def test_images_of_other_sizes_equal_eager_and_update_buffers(work: Work) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3),
        nn.AdaptiveAvgPool2d(1),
    )
    eager = copy.deepcopy(model)
    module = RockmateModule(model, torch.randn(4, 3, 16, 16), 1.0)
    work.captures.clear()
    for shape in [(4, 3, 12, 12), (3, 3, 10, 10), (2, 3, 8, 8)]:
        images = torch.randn(shape)
        same_gradients(module, eager, lambda each, x=images: each(x).square().sum().backward())
        assert_alike(model.buffers(), eager.buffers())
    assert work.captures == ["symbolic"]


class Wide(nn.Module):
    """Words to many logits: the loss block is most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 16)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 1024, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.head(torch.tanh(self.dropout(self.words(words)))).flatten(0, 1), labels.flatten()
        )


def words_of(*shape: int) -> dict[str, Tensor]:
    return {name: torch.randint(1024, shape) for name in ("words", "labels")}


def in_chunks(work: Work) -> tuple[Wide, RockmateModule]:
    """A model and its module, planned in chunks; what is done is counted from here."""
    torch.manual_seed(0)
    model, given = Wide(), words_of(4, 24)
    module = RockmateModule(model, given, Planner(model, given).minimum_peak_bytes // 3)
    work.captures.clear()
    return model, module


def test_twenty_lengths_of_a_plan_in_chunks_take_one_symbolic_capture(work: Work) -> None:
    model, module = in_chunks(work)
    planned, budget_bytes = module.plan, module.plan.budget_bytes
    shapes = [(4, 24 - index) for index in range(1, 17)] + [(3, 24), (2, 19), (3, 5), (3, 11)]
    for index, shape in enumerate(shapes):
        given = words_of(*shape)
        ours, theirs = steps_of(model, module, given)
        assert relative_error(ours.loss, theirs.loss) <= 1e-6  # sums in another order
        assert all(
            relative_error(ours.gradients[name], theirs.gradients[name]) <= 2e-6
            for name in theirs.gradients
        )
        assert ours.gradients.keys() == theirs.gradients.keys()
        assert torch.equal(ours.random_state, theirs.random_state)
        assert module.plan.options.loss_chunks == planned.options.loss_chunks
        assert module.plan.predicted_peak_bytes <= budget_bytes
        if index % 7 == 0:
            peak_bytes = measure.allocator_peak(lambda given=given: module(**given).backward())
            assert peak_bytes <= budget_bytes
    assert work.captures == ["symbolic"]


def test_a_larger_batch_than_that_of_a_plan_in_chunks_is_planned_for_without_a_capture(
    work: Work,
) -> None:
    model, module = in_chunks(work)
    given = words_of(4, 30)
    ours, theirs = steps_of(model, module, given)
    assert relative_error(ours.loss, theirs.loss) <= 1e-6
    assert module.plan.options.loss_chunks
    assert measure.allocator_peak(lambda: module(**given).backward()) <= module.plan.budget_bytes
    assert work.captures == ["symbolic"]


# --- where sizes decide ---------------------------------------------------------------------------


class Tagger(nn.Module):
    """A score for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 12)
        self.dropout = nn.Dropout(0.2)
        self.layer = nn.Linear(12, 12)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(words))
        scores = hidden.reshape(words.shape[0], words.shape[1], 3, 4).transpose(1, 2).softmax(-1)
        return self.layer(scores.transpose(1, 2).reshape(*words.shape, 12)).square()


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Branching(nn.Module):
    """Goes another way for short inputs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return (hidden.tanh() if x.shape[1] > 10 else hidden.sigmoid() * 2).square().mean()


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Scaling(nn.Module):
    """Computes a number that is no integer from a size."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * (1.0 / (x.shape[1] + 0.3))).sum()


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Pair(nn.Module):
    """Takes two inputs whose lengths, as Python has them, have nothing to do with each other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ones = torch.ones(len(x[0]), 8), torch.ones(len(y[0]), 8)
        hidden = self.layer(x).tanh() * ones[0], self.layer(y).sigmoid() * ones[1]
        return hidden[0].sum() + hidden[1].square().sum()


def planned(model: nn.Module, work: Work, num_rows: int = 4) -> RockmateModule:
    """A module that is planned for so many rows of length 20; what is done is counted from here."""
    module = RockmateModule(model, {"x": torch.randn(num_rows, 20, 8)}, 1.0)
    work.captures.clear()
    return module


def check(module: RockmateModule, **given: Tensor) -> None:
    assert_same(*steps_of(module.original, module, given))


def check_sizes(module: RockmateModule, *sizes: tuple[int, int]) -> None:
    for num_rows, length in sizes:
        check(module, x=torch.randn(num_rows, length, 8))


def test_a_branch_on_a_size_is_captured_by_itself(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    module = planned(Branching(), work)
    with caplog.at_level(logging.INFO, logger="rockmate"):
        check_sizes(module, (4, 15), (4, 11))
        assert work.captures == ["symbolic"]
        check_sizes(module, (4, 10))
    assert work.captures == ["symbolic", "fixed"]
    (alone,) = (text for text in caplog.messages if "captured for these sizes alone" in text)
    assert "float32[4, 10, 8]" in alone


def test_numbers_that_are_no_integers_are_rounded_as_in_eager(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    module = planned(Scaling(), work)
    with caplog.at_level(logging.INFO, logger="rockmate"):
        check_sizes(module, (4, 19), (4, 13), (4, 7), (4, 3))
    assert work.captures == ["symbolic"]
    assert "no integer" in caplog.text


def test_a_batch_of_one_begins_a_family_with_one_symbolic_capture(work: Work) -> None:
    module = planned(Branching(), work)
    check_sizes(module, (1, 20))
    assert work.captures == ["fixed"]
    check_sizes(module, (1, 13), (1, 17), (1, 12), (1, 19))
    assert work.captures == ["fixed", "symbolic"]
    check_sizes(module, (4, 11))
    assert work.captures == ["fixed", "symbolic", "symbolic"], "the sample has a family of its own"
    check_sizes(module, (1, 11), (3, 12))
    assert len(work.captures) == 3


def test_one_other_batch_is_captured_as_it_is_and_a_second_one_with_symbols(work: Work) -> None:
    module = planned(Branching(), work, num_rows=6)
    check_sizes(module, (5, 20), (5, 20))
    assert work.captures == ["fixed"]
    check_sizes(module, (4, 20), (3, 20))
    assert work.captures == ["fixed", "symbolic"]


def test_sizes_that_were_equal_by_chance_get_symbols_of_their_own_when_they_differ(
    work: Work,
) -> None:
    sample = {"x": torch.randn(4, 20, 8), "y": torch.randn(4, 20, 8)}
    module = RockmateModule(Pair(), sample, 1.0)
    work.captures.clear()
    for lengths in ((15, 15), (15, 9), (6, 11)):
        check(module, **{k: torch.randn(4, n, 8) for k, n in zip("xy", lengths, strict=True)})
    assert work.captures == ["symbolic", "symbolic"]


def test_a_model_without_a_symbolic_capture_is_captured_for_each_size(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    @made_of(lambda: {"layer": nn.Linear(8, 8)})
    class Listing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x.shape[1], int):
                raise TypeError("this size is no int")
            return self.layer(x).tanh().sum()

    module = planned(Listing(), work)
    with caplog.at_level(logging.INFO, logger="rockmate"):
        check_sizes(module, (4, 15), (4, 12))
    assert work.captures == ["symbolic", "fixed", "fixed"]
    assert re.search("no symbolic capture for all sizes .*this size is no int", caplog.text)


def test_a_symbolic_graph_that_is_another_at_the_samples_sizes_is_not_used(
    work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, other = planned(Branching(), work), Scaling()

    def of_another_model(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return capture_joint(other, *args, **kwargs)

    monkeypatch.setattr(symbolic, "capture_joint", of_another_model)
    with caplog.at_level(logging.INFO, logger="rockmate"):
        check_sizes(module, (4, 15))
    assert work.captures == ["fixed"]
    assert "at the sample's sizes the graph is another" in caplog.text


def test_larger_inputs_are_planned_for_without_a_capture(work: Work) -> None:
    model = Branching()
    larger = RockmateModule(copy.deepcopy(model), {"x": torch.randn(4, 30, 8)}, 1.0)
    module = RockmateModule(model, {"x": torch.randn(4, 20, 8)}, larger.plan.budget_bytes)
    work.captures.clear()
    check_sizes(module, (4, 30))
    assert work.captures == ["symbolic"]
    assert module.plan.baseline_peak_bytes == larger.plan.baseline_peak_bytes
    planned = module.plan
    check_sizes(module, (4, 25))  # under the larger one's schedule
    assert work.captures == ["symbolic"]
    assert module.plan.schedule == planned.schedule
    assert module.plan.predicted_peak_bytes < planned.predicted_peak_bytes


def test_what_was_planned_outlives_the_sizes_that_took_it_over(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    module = planned(Branching(), work)
    work.emitted.clear()
    check_sizes(module, *((4, length) for length in (19, 18, 17, 16, 19, 20)))
    assert (work.captures, work.emitted) == (["symbolic"], ["symbolic"])
    assert len(module._plans.runnables) == 3


def test_a_copy_has_the_plan_and_a_symbolic_capture_of_its_own(work: Work) -> None:
    module = planned(Branching(), work)
    check_sizes(module, (4, 15))
    other = copy.deepcopy(module)
    work.captures.clear()
    work.emitted.clear()
    check_sizes(other, (4, 20), (4, 14), (4, 13))
    assert (work.captures, work.emitted) == (["symbolic"], ["symbolic"])


def test_a_changed_module_has_a_symbolic_capture_of_its_own(work: Work) -> None:
    model = Branching()
    module = planned(model, work)
    check_sizes(module, (4, 15))
    model.layer.bias.requires_grad_(False)
    check_sizes(module, (4, 20))
    work.captures.clear()
    check_sizes(module, (4, 15), (4, 14))
    assert work.captures == ["symbolic"]
    assert model.layer.bias.grad is None
