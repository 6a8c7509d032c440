"""Training by other methods than forward: planned, within the budget of all, or with a line."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_trains_alike, zero_gradients
from torch import Tensor, nn

from bench.measure import allocator_peak
from rockmate import InfeasibleBudgetError, RockmateModule

BOTH = ["encode_image", "encode_text"]
NUM_DIMS = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NUM_DIMS, 4 * NUM_DIMS), nn.Linear(4 * NUM_DIMS, NUM_DIMS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Towers(nn.Module):
    def __init__(self, num_text_blocks: int = 3) -> None:
        super().__init__()
        self.image = nn.ModuleList(Block() for _ in range(3))
        self.text = nn.ModuleList(Block() for _ in range(num_text_blocks))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.num_calls = 0

    def encode_image(self, x: Tensor) -> Tensor:
        """Features of images."""
        for block in self.image:
            x = block(x)
        return nn.functional.normalize(x, dim=-1)

    def encode_text(self, x: Tensor, noise: float | None = None) -> Tensor:
        for block in self.text:
            x = block(x)
        x = x if noise is None else x + noise * torch.randn_like(x)
        return nn.functional.normalize(x, dim=-1)

    def encode_both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self(x, y)

    def frozen(self, x: Tensor) -> Tensor:
        return self.encode_image(x).detach()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode_image(x), self.encode_text(y)


def batch(step: int, num_rows: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(num_rows, NUM_DIMS, generator=generator) for _ in range(2))
    return x, y


def contrast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    scores = scale.exp() * image @ text.T
    labels = torch.arange(len(image))
    return nn.functional.cross_entropy(scores, labels) + nn.functional.cross_entropy(
        scores.T, labels
    )


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return contrast(model.encode_image(x), model.encode_text(y), model.scale)


def peak_of(module: Any, inputs: Any) -> int:
    """Bytes of a step with gradients in place."""
    zero_gradients(module)
    return allocator_peak(lambda: loss_of(module, *inputs).backward())


def options_of(mode: str) -> dict[str, Any]:
    return {"mode": mode} if mode == "frames" else {"mode": mode, "numerics": "bitwise"}


def compare(
    model: Any, mode: str, loss: Any, batches: Any, methods: Any, budget: Any = 0.6
) -> RockmateModule:
    plain = copy.deepcopy(model)
    module: Any = RockmateModule(model, budget=budget, methods=methods, **options_of(mode))
    assert_trains_alike(module, plain, lambda m, step: loss(m, *batches[step]), len(batches))
    return module


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "no budget is kept for the method" in each]


# --- planned --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
def test_two_towers_of_one_loss_train_within_the_budget_as_in_eager(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rockmate")
    num_bytes = 500_000
    module = compare(Towers(), mode, loss_of, [batch(step) for step in range(5)], BOTH, num_bytes)
    assert peak_of(module, batch(9)) <= num_bytes
    assert peak_of(copy.deepcopy(module.original), batch(9)) > 1.8 * num_bytes
    assert not lines(caplog)
    for name, each in module.planned_methods.items():
        assert each.is_planned == (mode != "frames")
        assert (each.frames is None) == (mode != "frames")
        assert f"({name}: " in repr(module)


@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_a_budget_holds_for_towers_and_batches_of_unequal_sizes(mode: str) -> None:
    batches = [batch(step, 64 - 24 * (step % 2)) for step in range(6)]
    num_bytes = 700_000
    module = compare(Towers(5), mode, loss_of, batches, BOTH, num_bytes)
    assert peak_of(module, batches[0]) <= num_bytes
    assert peak_of(module, batches[1]) <= num_bytes


@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_other_arguments_of_a_method_are_planned_for(mode: str) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        text = model.encode_text(y, noise=0.1) if len(x) == 64 else model.encode_text(y)
        return contrast(model.encode_image(x), text, model.scale)

    batches = [batch(step, 64 - 8 * (step % 3)) for step in range(6)]
    compare(Towers(), mode, loss, batches, BOTH, 0.9)


def test_forward_and_one_method_in_turns() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if int(y[0, 0] * 100) % 2:
            return model.encode_image(x).square().mean() + model.scale
        return contrast(*model(x, y), scale=model.scale)

    module = compare(
        Towers(), "plan", loss, [batch(step) for step in range(4)], ["forward", "encode_image"]
    )
    assert list(module.planned_methods) == ["encode_image"]
    assert module.is_planned
    assert module.planned_methods["encode_image"].is_planned


def test_a_method_that_calls_the_model_runs_forward_within() -> None:
    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return contrast(*module.encode_both(x, y), scale=module.scale)

    compare(Towers(), "plan", loss, [batch(step) for step in range(3)], ["encode_both"])


def test_a_method_runs_no_hook_of_the_model_as_in_eager() -> None:
    model, seen = Towers(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    module: Any = RockmateModule(model, budget=0.6, methods=BOTH)
    loss_of(module, *batch(0)).backward()
    assert not seen


@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_hooks_of_a_parameter_that_two_methods_share_fire_once_a_backward(mode: str) -> None:
    model: Any = Towers()
    model.text = model.image
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    sizes: list[float] = []
    weight = model.image[0].up.weight
    weight.register_post_accumulate_grad_hook(lambda p: sizes.append(float(p.grad.abs().sum())))
    module: Any = RockmateModule(model, budget=0.9, methods=BOTH, **options_of(mode))
    for step in range(3):
        module.zero_grad()
        loss_of(module, *batch(step)).backward()
        assert weight.grad is not None
        assert sizes[step:] == [float(weight.grad.abs().sum())]


def test_one_method_that_cannot_be_captured_takes_all_to_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Branching(Towers):
        def encode_text(self, x: Tensor, noise: float | None = None) -> Tensor:
            return super().encode_text(x, noise) if x.mean() < 9 and self.text[0](x).sum() else x

    caplog.set_level(logging.WARNING, "rockmate")
    module = compare(Branching(), "auto", loss_of, [batch(step) for step in range(4)], BOTH, 0.9)
    assert all(each.frames is not None for each in module.planned_methods.values())
    assert module.frames is None
    assert "by frames instead of a plan" in caplog.text


def test_an_infeasible_budget_names_the_least_for_all_methods() -> None:
    batches = [batch(step) for step in range(2)]
    with pytest.raises(InfeasibleBudgetError, match="Each of the 2 methods") as error:
        compare(Towers(), "plan", loss_of, batches, BOTH, 100_000)
    compare(Towers(), "plan", loss_of, batches, BOTH, error.value.minimum_bytes)


def test_eval_calls_and_calls_without_gradients_run_the_plain_method() -> None:
    module: Any = RockmateModule(Towers(), budget=0.5, methods=BOTH)
    x, y = batch(0)
    with torch.no_grad():
        module.encode_image(x)
    module.eval()
    assert torch.equal(module.encode_text(y), module.original.encode_text(y))
    assert not any(each.is_planned for each in module.planned_methods.values())


@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_a_copy_plans_methods_of_its_own(mode: str) -> None:
    module: Any = RockmateModule(Towers(), budget=0.9, methods=BOTH, **options_of(mode))
    loss_of(module, *batch(0)).backward()
    copied = copy.deepcopy(module)
    copied.zero_grad(set_to_none=True)
    loss_of(copied, *batch(1)).backward()
    assert list(copied.planned_methods) == BOTH
    for each in (module, copied):
        assert each.encode_image.__self__ is each.original
    assert copied.image[0].up.weight.grad is not None
    assert copied.image[0].up.weight is not module.image[0].up.weight


@pytest.mark.parametrize(
    ("methods", "error", "text"),
    [
        (["encode_images"], ValueError, "Did you mean 'encode_image'"),
        (["nothing_like_it"], ValueError, "has no such method"),
        (["state_dict"], ValueError, "has no such method"),
        (["scale"], ValueError, "has no such method"),
        (["image"], ValueError, r"a submodule.*model\.image = RockmateModule"),
        (["encode_both"], ValueError, r"plan_step.* above encode_both"),  # of Lightning
        ("encode_image", TypeError, r"methods=\['encode_image'\]"),
    ],
)
def test_a_name_that_is_no_method_is_an_error(methods: Any, error: Any, text: str) -> None:
    cls = type("LightningModule" if methods == ["encode_both"] else "Other", (Towers,), {})
    with pytest.raises(error, match=text):
        RockmateModule(cls(), budget=0.5, methods=methods)


def test_a_plan_is_one_of_forward() -> None:
    model, sample = Towers(), batch(0)
    plan = RockmateModule(model, sample, 0.9).plan
    with pytest.raises(TypeError, match="leave methods out"):
        RockmateModule(model, sample, plan=plan, methods=BOTH)
    assert not RockmateModule(model, sample, plan=plan, methods=["forward"]).planned_methods


# --- not planned ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
def test_a_method_that_trains_without_a_budget_is_warned_of_once(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rockmate")
    module = compare(Towers(), mode, loss_of, [batch(step) for step in range(3)], ())
    found = lines(caplog)
    assert len(found) == 2
    assert "the method encode_image," in found[0]
    assert "methods=['encode_image', 'encode_text']" in found[1]
    RockmateModule(module.original, budget=0.5, methods=BOTH)


def test_a_method_that_calls_backward_itself_is_warned_of_in_its_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fitted(nn.Linear):
        def fit(self, x: Tensor, after_step: Callable[[], Any]) -> None:
            for _ in range(2):
                self(x).square().mean().backward()
                after_step()

    module: Any = RockmateModule(Fitted(4, 4), budget=1.0)
    module.register_parameter("lazy", nn.UninitializedParameter())
    told = list[list[str]]()
    module.fit(torch.randn(2, 4), lambda: told.append(lines(caplog)))
    assert [len(each) for each in told] == [1, 1]
    assert "method fit, by which this step trains. Write rockmate.plan_in_place" in told[0][0]


def test_what_does_not_train_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rockmate")
    module: Any = RockmateModule(Towers(), budget=0.5, methods=["encode_text"])
    x, _ = batch(0)
    module.frozen(x)
    with torch.no_grad():
        module.encode_image(x)
    module.eval()
    module.encode_image(x)
    module.train()
    module.state_dict()
    list(module.parameters())
    module.requires_grad_(True)
    assert not lines(caplog)
    module.encode_image(x)
    (line,) = lines(caplog)
    assert "methods=['encode_text', 'encode_image']" in line


@pytest.mark.parametrize("methods", [(), BOTH])
def test_a_method_is_that_of_the_model(methods: Any) -> None:
    model = Towers()
    module: Any = RockmateModule(model, budget=0.5, methods=methods)
    method = module.encode_image
    assert method == module.encode_image
    assert method.__self__ is model
    assert (method.__name__, method.__doc__) == ("encode_image", "Features of images.")
    assert hasattr(module, "encode_image")
    assert not hasattr(module, "encode_sound")
    assert pickle.loads(pickle.dumps(functools.partial(method))).func.__name__ == "encode_image"
    model.encode_image = lambda x: x  # pyright: ignore[reportAttributeAccessIssue]
    assert module.eval().encode_image(3) == 3


def test_a_function_that_was_assigned_is_planned_as_a_method() -> None:
    model: Any = Towers()
    model.encode_image = lambda x: model.image[0](x).sigmoid()
    module: Any = RockmateModule(model, budget=0.9, methods=["encode_image"])
    module.encode_image(batch(0)[0]).sum().backward()
    assert module.planned_methods["encode_image"].is_planned
