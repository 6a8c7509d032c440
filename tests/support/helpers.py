"""What several test files need.

Budgets by regime, plans made once, recorded training steps, and what is left allocated.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import models
import numpy as np
import torch
from made_of import made_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench import measure
from bench.models import Workload
from rockmate import Planner, RockmateModule

torch.set_num_threads(1)

REGIMES = ("loose", "binding", "minimum")


def budget_for(planner: Planner, regime: str) -> int | float:
    minimum, baseline = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    return {"loose": 1.0, "binding": (minimum + baseline) // 2, "minimum": minimum}[regime]


def modules_of(
    model: nn.Module, sample: Any, regimes: Sequence[str] = REGIMES, **options: Any
) -> list[RockmateModule]:
    """One planned module for each regime, all on the same model; bitwise unless options say."""
    planner = Planner(model, sample, **{"numerics": "bitwise", **options})
    return [planner.module(budget_for(planner, regime)) for regime in regimes]


@dataclass(frozen=True)
class Planned:
    """A workload with its planner and the weights that it began with."""

    workload: Workload
    planner: Planner
    before: Mapping[str, Tensor]

    def module(self, regime: str, **options: Any) -> RockmateModule:
        """A module of that regime; the model is put back to its first weights."""
        model = self.workload.model
        model.load_state_dict(self.before)
        model.zero_grad(set_to_none=True)
        model.train()
        return self.planner.module(budget_for(self.planner, regime), **options)

    def eager(self) -> nn.Module:
        """An independent copy of the model with its first weights."""
        twin = copy.deepcopy(self.workload.model)
        twin.load_state_dict(self.before)
        twin.zero_grad(set_to_none=True)
        return twin.train()


@functools.cache
def planned(name: str, size: str = "tiny") -> Planned:
    """The workload of that name with a planner of bitwise plans; made once a session."""
    workload = models.tiny(name) if size == "tiny" else models.medium(name)
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    return Planned(workload, Planner(workload.model, workload.sample, numerics="bitwise"), before)


# --- equality -------------------------------------------------------------------------------------


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in tensors_of(inner)]
    if isinstance(value, tuple | list):
        return [tensor for inner in value for tensor in tensors_of(inner)]
    if dataclasses.is_dataclass(value):
        return [
            t for field in dataclasses.fields(value) for t in tensors_of(getattr(value, field.name))
        ]
    return []


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by name.

    A tied one stands under each of its names, one that is None is left out.
    """
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def differing(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Names that only one side has, or whose values are not the same bit for bit."""
    both = ours.keys() & reference.keys()
    return sorted(
        (ours.keys() ^ reference.keys())
        | {name for name in both if not same_bits(ours[name], reference[name])}
    )


def same_gradients(module: Any, eager: nn.Module, run: Callable[[Any], Any]) -> None:
    """Asserts that `run`, a step from zero gradients and one seed, leaves the same bits in both."""
    assert not {*map(id, module.parameters())} & {*map(id, eager.parameters())}
    for callee in (module, eager):
        callee.zero_grad()
        torch.manual_seed(1)
        run(callee)
    assert gradients_of(eager)
    assert not differing(gradients_of(module), gradients_of(eager))


def assert_alike(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """As many values in both, tensors of the same bits and others equal."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        are_tensors = isinstance(mine, Tensor) and isinstance(other, Tensor)
        assert same_bits(mine, other) if are_tensors else mine == other, f"value {index}"


def assert_gradients_alike(
    ours: nn.Module, theirs: nn.Module, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Parameters without a gradient are the same in both, and gradients within the tolerance."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=rtol, atol=atol)


def records_of(
    callee: Any, owner: nn.Module, loss_of: Callable[[Any, int], Any], num_steps: int = 4
) -> list[Any]:
    """What steps of training leave: losses, gradients, weights, buffers and random numbers.

    Args:
        callee: what a script calls: the model, or what plans it.
        owner: the model.
        loss_of: gives the loss of `callee` in a step, or a list of it and of further values. Those
            that are leaves are recorded with their gradients.
        num_steps: of an optimizer with momentum.
    """
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.01, momentum=0.9)
    found: list[Any] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        given = loss_of(callee, step)
        loss, *others = given if isinstance(given, list) else [given]
        loss.backward()
        leaves = [each for each in others if isinstance(each, Tensor) and each.is_leaf]
        found += [loss.detach(), *others, *(each.grad for each in leaves)]
        found += [each.grad for each in owner.parameters()]
        found += [torch.get_rng_state(), random.random(), float(np.random.rand())]
        optimizer.step()
        plain = (each for each in (*owner.parameters(), *owner.buffers()) if is_plain(each))
        found += [each.detach().clone() for each in plain]
    return found


def is_plain(tensor: Tensor) -> bool:
    """Not of a class of its own, as quantized weights are, which nothing trains."""
    return type(tensor) in (Tensor, nn.Parameter)


def assert_trains_alike(
    module: Any, plain: nn.Module, loss_of: Callable[[Any, int], Any], num_steps: int = 4
) -> None:
    """All that `records_of` a planned module are those of an equal model, bit for bit."""
    assert module.original is not plain
    ours = records_of(module, module.original, loss_of, num_steps)
    assert_alike(ours, records_of(plain, plain, loss_of, num_steps))


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def same_bits(ours: Tensor, reference: Tensor) -> bool:
    """The same shape, dtype and values, of which any NaN is one."""
    if (ours.shape, ours.dtype) != (reference.shape, reference.dtype):
        return False
    mine, other = dense(ours), dense(reference)
    nan = mine.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(mine[~nan], other[~nan])


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over largest value."""
    scale = reference.double().abs().max().item()
    return (ours.double() - reference.double()).abs().max().item() / max(scale, 1e-30)


@dataclass(frozen=True)
class Step:
    """What one training step left behind, in copies."""

    loss: Tensor
    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_state: Tensor


Loss = Callable[[Callable[..., Any], int], tuple[Any, Tensor]]
"""`loss(model, step)` gives (outputs, loss)."""


def one_step(module: nn.Module, owner: nn.Module, loss_of: Loss, seed: int) -> Step:
    """One forward and backward from a fixed random state.

    Gradients are added to what `.grad` holds.
    """
    torch.manual_seed(seed)
    outputs, loss = loss_of(module, seed)
    kept = [tensor.detach().clone() for tensor in tensors_of(outputs)]
    loss.backward()
    return Step(
        loss=loss.detach().clone(),
        outputs=kept,
        gradients=gradients_of(owner),
        buffers={name: buffer.clone() for name, buffer in owner.named_buffers()},
        random_state=torch.get_rng_state(),
    )


def train(module: nn.Module, owner: nn.Module, loss_of: Loss, num_steps: int = 3) -> list[Step]:
    """Training steps with an optimizer between them."""
    optimizer = torch.optim.AdamW([p for p in owner.parameters() if p.requires_grad], lr=1e-2)
    steps = []
    for index in range(num_steps):
        optimizer.zero_grad()
        steps.append(one_step(module, owner, loss_of, index + 1))
        optimizer.step()
    return steps


def workload_loss(workload: Workload) -> Loss:
    return lambda module, step: workload.loss(module, workload.make_batch(step))


def assert_same(ours: Step, reference: Step) -> None:
    """Every figure bit for bit."""
    assert same_bits(ours.loss, reference.loss), (
        f"loss {ours.loss.item()!r} is not {reference.loss.item()!r}"
    )
    assert len(ours.outputs) == len(reference.outputs)
    assert all(same_bits(a, b) for a, b in zip(ours.outputs, reference.outputs, strict=True)), (
        "outputs differ"
    )
    assert not differing(ours.gradients, reference.gradients), "gradients differ"
    assert not differing(ours.buffers, reference.buffers), "buffers differ"
    assert torch.equal(ours.random_state, reference.random_state), "the generator is elsewhere"


def assert_same_steps(ours: Iterable[Step], reference: Iterable[Step]) -> None:
    for mine, other in zip(ours, reference, strict=True):
        assert_same(mine, other)


def check_against_eager(
    model: nn.Module,
    sample: Any,
    loss_of: Loss,
    *,
    num_steps: int = 3,
    regimes: Sequence[str] = REGIMES,
    **options: Any,
) -> RockmateModule:
    """Trains a copy of `model` plainly and others planned for each regime, and compares every step
    bit for bit. Returns the last planned module."""
    reference_model = copy.deepcopy(model)
    reference = train(reference_model, reference_model, loss_of, num_steps)
    before = copy.deepcopy(model.state_dict())
    modules = modules_of(model, sample, regimes, **options)
    for module in modules:
        model.load_state_dict(before)
        model.zero_grad(set_to_none=True)
        assert_same_steps(train(module, model, loss_of, num_steps), reference)
    return modules[-1]


def assert_close(ours: Step, reference: Step) -> None:
    """As `assert_same`, but for rounding.

    For kernels that get the same values in another layout, and so add them in another order.
    """
    assert relative_error(ours.loss, reference.loss) <= 1e-6
    assert ours.gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        # A gradient that is zero but for rounding (a bias ahead of a batch normalisation) has no
        # scale of its own.
        gap = (ours.gradients[name].double() - gradient.double()).abs().max().item()
        largest = max(other.abs().max().item() for other in reference.gradients.values())
        assert gap <= 1e-6 * largest, name
    assert torch.equal(ours.random_state, reference.random_state)


# --- work ---------------------------------------------------------------------------------------


@made_of(lambda: {"counts": Counter()})
class _Counter(TorchDispatchMode):
    """Counts the calls of each op by its name, in place and `out=` forms included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).split(".")[1].rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def counts_of(module: Callable[..., Any], *inputs: Any) -> Counter[str]:
    """How often each op runs in one forward and backward."""
    with _Counter() as counter:
        module(*inputs).backward()
    return counter.counts


# --- memory ---------------------------------------------------------------------------------------


def zero_gradients(model: nn.Module) -> None:
    """Puts `.grad` in place, so that a step which is measured makes none."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def net_allocated(function: Callable[[], Any]) -> int:
    """Bytes that `function` allocates and that nothing has freed when it has returned and its
    result is gone; no garbage collection."""
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            function()
    finally:
        gc.enable()
    live: dict[int, int] = {}
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    for _, address, num_bytes in measure._cpu_events(roots):
        if num_bytes > 0:
            live[address] = num_bytes
        else:
            live.pop(address, None)
    return sum(live.values())


@contextmanager
def no_waits() -> Iterator[None]:
    """Where the host waits for the device, an error is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is new
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
