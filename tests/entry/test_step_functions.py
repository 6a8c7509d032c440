"""Steps that are functions: several modules, modes of their own, second derivatives, numbers."""

from __future__ import annotations

import collections
import copy
import logging
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits
from ranks import needs_gloo, run_on_ranks
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import rockmate
from bench.measure import allocator_peak
from rockmate import BackwardError, InvalidArgumentError, PlannedStep, UnsupportedModelError
from rockmate.entry.step_function import step_module


def mlp(num_in: int, num_out: int, *, width: int = 64, activation: type = nn.GELU) -> nn.Module:
    layers = [nn.Linear(num_in, width), activation(), nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, num_out))


def loss_in(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    found = [each.grad for module in modules for each in module.parameters()]
    for module in modules:
        module.zero_grad()
    return found


def check(
    step: PlannedStep, function: Callable[..., Any], modules: list[nn.Module], *batch: Any
) -> None:
    """Three steps: losses, gradients and random state are eager's, bit for bit."""
    for seed in range(3):
        torch.manual_seed(seed)
        loss = loss_in(function(*batch))
        loss.backward()
        expected, drawn = gradients(modules), torch.rand(1)
        torch.manual_seed(seed)
        ours = loss_in(step(*batch))
        ours.backward()
        assert same_bits(ours, loss)
        assert torch.equal(torch.rand(1), drawn)
        for one, other in zip(gradients(modules), expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or same_bits(one, other)
    assert step.is_planned


# --- several modules ------------------------------------------------------------------------------


def test_a_contrastive_loss_of_two_encoders() -> None:
    image, text, criterion = mlp(16, 32), mlp(24, 32), nn.CrossEntropyLoss()

    def contrastive(pixels: Tensor, tokens: Tensor) -> Tensor:
        logits = 10 * F.normalize(image(pixels), dim=1) @ F.normalize(text(tokens), dim=1).T
        pairs = torch.arange(len(pixels))
        return (criterion(logits, pairs) + criterion(logits.T, pairs)) / 2

    batch = torch.randn(256, 16), torch.randn(256, 24)
    step = rockmate.plan_step(contrastive, [image, text], batch, budget=0.6)
    assert {name.split(".")[0] for name, _ in step.named_parameters()} == {"image", "text"}
    check(step, contrastive, [image, text], *batch)
    step(*batch).backward()  # gradients are there
    peak = allocator_peak(lambda: step(*batch).backward())
    assert peak <= step.plan.predicted_peak_bytes <= 0.6 * step.plan.baseline_peak_bytes


def test_players_of_a_game_are_frozen_in_turn() -> None:
    generator, critic = mlp(8, 16), mlp(16, 1)

    @rockmate.plan_step(modules=[generator, critic], budget=0.8)
    def play(noise: Tensor) -> dict[str, Tensor]:
        score = critic(generator(noise)).mean()
        return {"loss": -score, "score": score.detach()}

    for frozen in (critic, generator):
        frozen.requires_grad_(False)
        check(play, play.original.forward, [generator, critic], torch.randn(64, 8))
        frozen.requires_grad_(True)


class Distillation:
    """A job with a teacher in eval mode; its method is planned."""

    def __init__(self) -> None:
        self.teacher, self.student, self.temperature = mlp(16, 10).eval(), mlp(16, 10), 2.0

    def plain_step(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            told = (self.teacher(x) / self.temperature).softmax(1)
        said = self.student(x)
        soft = F.kl_div((said / self.temperature).log_softmax(1), told, reduction="batchmean")
        return soft + F.cross_entropy(said, labels)

    step = rockmate.plan_step(plain_step, ["teacher", "student"], budget=0.8)


def test_a_teacher_in_eval_mode_and_a_method() -> None:
    job, other = Distillation(), Distillation()
    batch = torch.randn(32, 16), torch.randint(10, (32,))
    modules = [job.teacher, job.student]
    check(job.step, job.plain_step, modules, *batch)
    assert not job.teacher.training
    assert job.student.training
    assert job.step is job.step is not other.step
    job.temperature = 3.0  # what the method reads of its object is watched
    check(job.step, job.plain_step, modules, *batch)
    job.teacher.train()
    check(job.step, job.plain_step, modules, *batch)
    check(other.step, other.plain_step, [other.teacher, other.student], *batch)


def test_modes_are_not_those_of_the_step() -> None:
    one, other = mlp(8, 8), mlp(8, 8).eval()
    step = rockmate.plan_step(lambda x: other(one(x)).sum(), [one, other], budget=0.9)
    step.eval()
    assert one.training
    step(torch.randn(4, 8))
    assert not step.is_planned  # the function has run as it is
    step.train()
    assert not other.training
    with torch.no_grad():
        step(torch.randn(4, 8))
    assert not step.is_planned
    step(torch.randn(4, 8))
    assert step.is_planned


def test_gradients_in_eval_mode_and_of_inputs_alone() -> None:
    model = mlp(8, 1, activation=nn.Tanh).eval().requires_grad_(False)
    energy = rockmate.plan_step(model, budget=0.7)
    x = torch.randn(32, 8, requires_grad=True)
    for _ in range(2):
        (force,) = torch.autograd.grad(energy(x).sum(), x)
        assert same_bits(force, torch.autograd.grad(model(x).sum(), x)[0])
    assert energy.is_planned
    assert not model.training
    model.requires_grad_(True)
    (force,) = torch.autograd.grad(energy(x).sum(), x)
    assert same_bits(force, torch.autograd.grad(model(x).sum(), x)[0])
    assert all(each.grad is None for each in model.parameters())
    bare = nn.Sequential(nn.Softplus(), nn.Tanh()).eval()  # without parameters
    planned = rockmate.plan_step(bare, budget=1.0)
    (force,) = torch.autograd.grad(planned(x).sum(), x)
    assert same_bits(force, torch.autograd.grad(bare(x).sum(), x)[0])
    assert planned.is_planned


def test_what_is_not_among_the_modules_is_named() -> None:
    model, head = mlp(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedModelError, match=r"shape \(8, 8\).*list of modules"):
        rockmate.plan_step(lambda x: head(model(x)).sum(), [model], x, budget=0.9)
    with pytest.raises(InvalidArgumentError, match="no modules are given"):
        rockmate.plan_step(Distillation.plain_step, budget=0.9)(x)
    with pytest.raises(InvalidArgumentError, match=r"Parameter, and no nn\.Module"):
        rockmate.plan_step(lambda x: x, [nn.Parameter(x)], budget=0.9)
    model = rockmate.RockmateModule(model, budget=0.9)
    with pytest.raises(InvalidArgumentError, match=r"its \.original"):
        rockmate.plan_step(lambda x: model(x), [model], budget=0.9)


def test_a_plan_of_a_step_is_a_file_and_serves_other_sizes(tmp_path: Path) -> None:
    model, other = mlp(8, 8), mlp(8, 8)

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) - other(x)).square().mean()

    x = torch.randn(64, 8)
    step = rockmate.plan_step(loss_fn, [model, other], x, budget=0.7)
    check(step, loss_fn, [model, other], x[:48])
    step.plan.save(tmp_path / "step.json")
    plan = rockmate.Plan.load(tmp_path / "step.json")
    loaded = rockmate.plan_step(loss_fn, [model, other], x[:48], plan=plan)
    check(loaded, loss_fn, [model, other], x[:48])
    framed = rockmate.plan_step(loss_fn, [model, other], budget=0.9, mode="frames")
    torch.manual_seed(0)
    loss = loss_fn(x)
    torch.manual_seed(0)
    assert same_bits(framed(x), loss)
    assert framed.frames is not None


def trained_on_a_rank(rank: int, *, is_planned: bool) -> Any:
    """Gradients after each of two steps of two trained modules and a frozen one, in turn."""
    torch.manual_seed(0)
    student, projection, teacher = mlp(16, 8), mlp(8, 8), mlp(16, 8).eval().requires_grad_(False)

    def loss_fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            told = teacher(x).softmax(1)
        return F.kl_div(projection(student(x)).log_softmax(1), told, reduction="batchmean")

    modules, x = [teacher, student, projection], torch.randn(64, 16) + rank
    module = step_module(loss_fn, modules)
    if is_planned:
        module = rockmate.plan_step(loss_fn, modules, x, budget=0.7, trial="always").module
        assert module.plan.predicted_peak_bytes <= 0.7 * module.plan.baseline_peak_bytes
    parallel, found = DistributedDataParallel(module), []
    for seed in range(2):
        torch.manual_seed(10 * rank + seed)
        parallel(x).backward()
        found += gradients([student, projection])
    assert not any(each is not None for each in gradients([teacher]))
    return found


def check_two_ranks(mesh: Any) -> None:
    ours = trained_on_a_rank(mesh.get_rank(), is_planned=True)
    assert all(map(same_bits, ours, trained_on_a_rank(mesh.get_rank(), is_planned=False)))
    one, other = torch.empty(2, 1)
    distributed.all_gather([one, other], sum(each.sum() for each in ours).reshape(1))
    assert torch.equal(one, other)


@needs_gloo
def test_data_parallel_of_three_modules_on_two_ranks() -> None:
    run_on_ranks(check_two_ranks, 2)


# --- second derivatives ---------------------------------------------------------------------------


def test_the_advice_for_a_second_derivative_by_the_script() -> None:
    model, x = mlp(8, 1, activation=nn.Tanh), torch.randn(512, 8, requires_grad=True)
    module = rockmate.RockmateModule(model, (x,), budget=0.9)
    output = module(x)
    with pytest.raises(BackwardError) as caught:
        torch.autograd.grad(output.sum(), x, create_graph=True)
    lines = str(caught.value).split("\n")[1:]
    names = {"grad": torch.autograd.grad, "model": model, "rockmate": rockmate, "x": x}
    exec("\n".join(line[2:] for line in lines), names)
    model.zero_grad()
    check(names["step"], names["loss_fn"], [model], x)
    module(x).sum().backward()  # the planned module serves later steps, and gives the same advice
    with pytest.raises(BackwardError) as later:
        module(x).sum().backward(create_graph=True)
    assert str(later.value) == str(caught.value)


def test_derivatives_by_functions() -> None:
    model, x = mlp(8, 1, activation=nn.Tanh).eval(), torch.randn(4, 8)
    grad, hessian, jacrev, vmap = (
        getattr(torch.func, name) for name in ("grad", "hessian", "jacrev", "vmap")
    )

    def energy(row: Tensor) -> Tensor:
        return model(row).sum()

    def loss_fn(x: Tensor) -> Tensor:
        rows = sum(jacrev(jacrev(energy))(row).norm() for row in x)  # what the error below advises
        return rows + vmap(grad(energy))(x).norm() + vmap(hessian(energy))(x).norm()

    step = rockmate.plan_step(loss_fn, [model], (x,), budget=1.0, on_infeasible="least")
    check(step, loss_fn, [model], x)
    bent = rockmate.plan_step(
        lambda x: sum(hessian(energy)(row).norm() for row in x), [model], budget=1.0
    )
    with pytest.raises(UnsupportedModelError, match=r"jacrev\(torch\.func\.jacrev\(f\)\)"):
        bent(x)


class WrongBatchError(Exception):
    """A user's own."""


@pytest.mark.parametrize("error", [WrongBatchError, ValueError, RuntimeError])
def test_what_the_function_raises_arrives_as_in_eager(error: type[Exception]) -> None:
    model, seen = mlp(4, 1), []

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(len(x))
        if len(x) == 3 or (len(x) == 4 and type(x.detach()) is not Tensor):
            raise error(f"{len(x)} rows")
        return model(x).sum()

    step = rockmate.plan_step(loss_fn, [model], budget=1.0, on_infeasible="least")
    for call in (step, lambda x: rockmate.plan_step(loss_fn, [model], (x,), budget=1.0)):
        with pytest.raises(error, match="3 rows") as caught:
            call(torch.randn(3, 4))
        assert caught.traceback[-1].name == "loss_fn"
    step(torch.randn(8, 4)).backward()
    with pytest.raises(error, match="3 rows"):
        step(torch.randn(3, 4))
    seen.clear()
    with pytest.raises(rockmate.RockmateError, match="4 rows"):
        step(torch.randn(4, 4))  # which the trace alone raises
    assert not seen  # the run in eager is undone


# --- numbers that are only handed on --------------------------------------------------------------


class Logging:
    """Reads numbers for its logs, as trainers do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy, self.reference = mlp(8, 4), mlp(8, 4).eval()
        self.metrics: Any = {"train": collections.defaultdict(list)}
        self.history: collections.deque[Any] = collections.deque()
        self.last = 0.0

    def loss(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        said = self.policy(x)
        with torch.no_grad():
            told = self.reference(x)
        gap = (said - told).square().mean()
        metrics = self.metrics["train"]
        metrics["gap"].append(gap.item())
        metrics["num_tokens"] = [mask.sum().item()]
        metrics["share"].append((gap / mask.sum()).item() if mask.sum() > 0 else 0.0)
        metrics["again"].append(metrics["gap"][-1])
        metrics["mean"].extend(said.mean(0).tolist())
        self.metrics.setdefault("largest", []).append(said.max().item())
        self.history.append(said.detach().mean())
        self.last = gap.item()
        return {"loss": gap + said.mean(), "gap": gap.item()}


def run(step_of: Callable[[Logging], Callable[..., Any]]) -> list[Any]:
    job, found = Logging(), []
    step = step_of(job)
    for seed in range(5):
        torch.manual_seed(seed)
        output = step(torch.randn(16, 8), torch.rand(16) > 0.3)
        output["loss"].backward()
        found += [output["loss"].item(), output["gap"], job.last]
        found.append(copy.deepcopy(job.metrics))
        if seed == 2:
            job.metrics["train"].clear()
    return [*found, [each.item() for each in job.history]]


def test_numbers_that_are_logged_are_those_of_each_step() -> None:
    steps = []

    def planned(job: Logging) -> PlannedStep:
        steps.append(rockmate.plan_step(job.loss, [job.policy, job.reference], budget=0.9))
        return steps[0]

    assert run(planned) == run(lambda job: job.loss)
    assert steps[0].module._plans.new_plans.num_calls == 5
    assert len(steps[0].module._plans.runnables) == 1  # no value has had a plan of its own


GLOBAL_LOG: list[float] = []


def test_numbers_in_globals_and_closures() -> None:
    model, log, last, seen = mlp(4, 4), {}, [0.0], []

    def loss_fn(x: Tensor) -> Tensor:
        loss = model(x).mean()
        log["loss"] = last[0] = loss.item()
        GLOBAL_LOG.append(loss.item())
        return loss

    step = rockmate.plan_step(loss_fn, [model], budget=1.0)
    for seed in range(4):
        torch.manual_seed(seed)
        loss = step(torch.randn(8, 4)).item()
        assert [log["loss"]] == last == [loss]
        seen.append(loss)
    assert seen == GLOBAL_LOG
    assert len(set(seen)) == 4


def refused(how: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    sink: queue.Queue[float] = queue.Queue()
    history, numbers = [0.0], {"steps": 0, "loss": 0.0}

    def loss_fn(x: Tensor) -> Tensor:
        loss = model(x).mean()
        match how:
            case "branch":
                return 2 * loss if loss.item() > 0 else loss
            case "text":
                logging.getLogger("any").warning(f"loss {loss.item():.3f}")
            case "other code":
                sink.put(loss.item())
            case "length":
                history.append(loss.item())
                return loss * len(history)
            case "count":
                numbers["steps"] += 1
                numbers["loss"] = loss.item()
        return loss

    return loss_fn


@pytest.mark.parametrize("how", ["branch", "text", "other code", "length", "count"])
def test_what_is_more_than_a_log_is_refused_by_its_line(how: str) -> None:
    model, x = mlp(4, 4), torch.randn(8, 4)
    with pytest.raises(rockmate.RockmateError, match=r"test_step_functions\.py|history"):
        rockmate.plan_step(refused(how, model), [model], x, budget=1.0)(x)
