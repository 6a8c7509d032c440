"""Three training steps of a model in eager and inside a budget, and what differs.

Both run the same batches from the same seeds, dropout included. Equal is bit for bit: losses,
gradients, which parameters have none, and buffers. What is not is judged by the model in float64:
the distance to it may be at most `TOLERANCE`, which is set beforehand. Where eager itself is
farther (small models of many batch norms mostly), eager is the judge, run once more from parameters
that are off by one rounding: ours may be no farther from eager than that run is.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from rockmate import RockmateModule
from rockmate.errors import RockmateError
from rockmate.state.opened_object import copied_with, tensors_within

NUM_STEPS = 3
TOLERANCE = 1e-4
"""Largest distance to float64, relative to the norm: a thousand times the spacing of float32."""
FRACTION = 0.6
_LEARNING_RATE = 1e-2
_SHARE_OF_ALL = 1e-2

Batch = dict[str, Any]
Builder = Callable[[], nn.Module]
BatchMaker = Callable[[nn.Module, int], Batch]


class Step(NamedTuple):
    """What one training step leaves."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


class Run(NamedTuple):
    """Three steps and the buffers after them."""

    steps: list[Step]
    buffers: dict[str, Tensor]

    def by_name(self) -> dict[str, Tensor | None]:
        """All that is compared."""
        found: dict[str, Tensor | None] = {}
        for number, step in enumerate(self.steps, start=1):
            found[f"step {number}, loss"] = step.loss
            found |= {f"step {number}, gradient of {n}": g for n, g in step.gradients.items()}
        after = f"after {len(self.steps)} steps"
        return found | {f"buffer {name} {after}": each for name, each in self.buffers.items()}


def trial(builders: list[Builder], make_batch: BatchMaker, device: str = "cpu") -> dict[str, Any]:
    """The verdict on one model on a device, its reason, and the seconds of each part."""
    torch.backends.cudnn.allow_tf32 = False  # else float32 has the precision of 10 bits there

    def batch_there(model: nn.Module, seed: int) -> Batch:
        made = make_batch(model, seed)
        if device == "cpu":
            return made
        moved = {id(each): each.to(device) for each in tensors_within(made)}
        return copied_with(made, moved)

    begin = time.perf_counter()
    found = _first_that_runs(builders, batch_there, device)
    if isinstance(found, str):
        return {"verdict": "eager-fails", "detail": found}
    model, eager = found
    record: dict[str, Any] = {
        "num_parameters": sum(each.numel() for each in model.parameters()),
        "eager_s": round(time.perf_counter() - begin, 2),
    }
    batches = [batch_there(model, seed) for seed in range(NUM_STEPS)]
    reference, moved = copy.deepcopy(model).double(), _moved(model)
    begin = time.perf_counter()
    try:
        module = _wrapped(model, batches[0])
        planned = _train(module, model, batches)
    except Exception as error:  # noqa: BLE001
        verdict = "refused" if isinstance(error, RockmateError) else "error"
        return record | {"verdict": verdict, "detail": _text(error)}
    record |= {
        "planned_s": round(time.perf_counter() - begin, 2),
        "mode": "plan" if module.frames is None else "frames",
    } | _peak(module)
    difference = _difference(planned, eager)
    if not difference:
        return record | {"verdict": "bitwise", "detail": ""}
    is_right, detail = _judged(planned, eager, reference, moved, batches)
    verdict = "within rounding" if is_right else "WRONG"
    return record | {"verdict": verdict, "detail": detail, "difference": difference}


def _peak(module: RockmateModule) -> dict[str, Any]:
    """What the steps take, and the smallest peak that is known, as shares of eager's."""
    if module.frames is None:
        plan = module.plan
        own = {"ratio": round(plan.predicted_ratio, 3), "num_ops": len(plan.snapshot.ops)}
        return own | {"share": round(plan.predicted_peak_bytes / plan.baseline_peak_bytes, 3)}
    found = module.frames.report()
    if found is None or not found.counts.num_frames:
        return {"mode": "eager"}
    return {"share": round(found.minimum_bytes / found.baseline_bytes, 3)}


def _first_that_runs(
    builders: list[Builder], make_batch: BatchMaker, device: str
) -> tuple[nn.Module, Run] | str:
    """The first build that eager can train, untrained, with eager's steps; or why none can."""
    reasons = []
    for build in builders:
        try:
            torch.manual_seed(0)
            model = build().to(device)
            copied = copy.deepcopy(model)
            batches = [make_batch(model, seed) for seed in range(NUM_STEPS)]
            run = _train(copied, copied, batches)
        except Exception as error:  # noqa: BLE001
            reasons.append(_text(error))
            continue
        if all(bool(step.loss.isfinite()) for step in run.steps):
            return model, run
        reasons.append("the loss is not finite")
    return reasons[0]


def _wrapped(model: nn.Module, batch: Batch) -> RockmateModule:
    """Within `FRACTION` of the peak or the smallest peak; in frames if it cannot be captured."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"mode": "auto", "on_infeasible": "least", "outputs": "loss"}
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    machine = "cpu-avx2" if is_on_cpu else "h100"
    return RockmateModule(model, batch, FRACTION, machine=machine, **options)


def _train(module: nn.Module, model: nn.Module, batches: list[Batch]) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    steps = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(100 + seed)
        numpy.random.seed(100 + seed)  # speech models mask time steps by it
        random.seed(100 + seed)  # layers are dropped by it
        optimizer.zero_grad(set_to_none=True)
        loss = module(**batch).loss
        loss.backward()
        gradients = {
            name: None if each.grad is None else each.grad.detach().clone()
            for name, each in model.named_parameters()
        }
        steps.append(Step(loss.detach().clone(), gradients))
        optimizer.step()
    return Run(steps, {name: each.clone() for name, each in model.named_buffers()})


def _difference(run: Run, other: Run) -> str:
    """The first thing that is not equal bit for bit; empty if nothing is."""
    ours = run.by_name()
    for name, expected in other.by_name().items():
        found = ours.get(name)
        if found is None or expected is None:
            if found is not expected:
                return f"{name}: {'missing' if found is None else 'eager has none'}"
        elif not torch.equal(found.nan_to_num(), expected.nan_to_num()) or not torch.equal(
            found.isnan(), expected.isnan()
        ):
            gap = (found.double() - expected.double()).abs().max().item()
            return f"{name}: largest difference {gap:.2e}"
    return ""


def _moved(model: nn.Module) -> nn.Module:
    """A copy with each parameter off by about one rounding."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copied.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + signs.to(parameter.device) * torch.finfo(parameter.dtype).eps)
    return copied


def _judged(
    planned: Run, eager: Run, reference: nn.Module, moved: nn.Module, batches: list[Batch]
) -> tuple[bool, str]:
    """Whether a run is within rounding, beside float64 or beside eager from moved parameters.

    Random numbers or choices may differ in float64; eager's own distance shows it.
    """
    ours, theirs = planned.by_name(), eager.by_name()
    if any((ours[name] is None) != (each is None) for name, each in theirs.items()):
        return False, "other parameters have gradients than in eager"
    doubled = [copied_with(each, _doubles(each)) for each in batches]
    try:
        exact = _train(reference, reference, doubled)
    except Exception as error:  # noqa: BLE001
        own = _distance(planned, eager)
        return own <= TOLERANCE, f"no float64 ({_text(error)}); distance to eager {own:.1e}"
    own, eagers = _distance(planned, exact), _distance(eager, exact)
    detail = f"distance to float64 {own:.1e}, eager's {eagers:.1e}"
    if eagers <= TOLERANCE:
        return own <= TOLERANCE, detail
    own, by_rounding = _distance(planned, eager), _distance(_train(moved, moved, batches), eager)
    detail += f", to eager {own:.1e}, where eager moves by {by_rounding:.1e} by a rounding"
    return own <= by_rounding, detail


def _doubles(batch: Batch) -> dict[int, Any]:
    """Each tensor in a batch, by its address, in double precision if it is of real numbers."""
    tensors = tensors_within(batch)
    return {id(each): each.double() if each.is_floating_point() else each for each in tensors}


def _distance(run: Run, exact: Run) -> float:
    """The largest distance of a loss or a gradient, relative to its norm.

    A gradient far below all others is compared with a share of them: it may be all rounding.
    """
    largest = 0.0
    for ours, theirs in zip(run.steps, exact.steps, strict=True):
        loss = theirs.loss.double()
        largest = max(largest, ((ours.loss.double() - loss).abs() / loss.abs()).item())
        known = {n: g.double() for n, g in theirs.gradients.items() if g is not None}
        norms = {name: gradient.norm().item() for name, gradient in known.items()}
        least = _SHARE_OF_ALL * max(norms.values(), default=0.0)
        for name, gradient in known.items():
            found = ours.gradients[name]
            assert found is not None
            distance = (found.double() - gradient).norm().item()
            largest = max(largest, distance / max(norms[name], least, 1e-30))
    return largest


def _text(error: BaseException) -> str:
    words = " ".join(str(error).split()).replace(f"{Path(torch.__file__).parents[1]}/", "")
    return f"{type(error).__name__}: {words}"[:600]
