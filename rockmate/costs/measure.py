"""Time and workspace of each op, measured on the real device.

Equal calls (op, shapes, strides, dtypes, constants) cost the same, so each distinct one is run alone, on inputs made up for it; the
model as a whole is never run. Rounds go over all distinct calls in turn, so that no call finds its own data in the cache, and the
median over rounds is taken. On a CPU results go to memory that the process has already, as within a step, where they take the place of
what was released: pages that are fresh from the system may take longer than the op, and whether a call gets such is chance. Times
are the processor's where PyTorch has one thread, the wall clock's where it has several, and the device's events on CUDA.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tqdm import tqdm

from rockmate._torch.allocator import workspace_bytes
from rockmate._torch.autocast import autocast_off
from rockmate._torch.engine import is_profiling
from rockmate.capture.roles import RoleKind
from rockmate.costs.cost import Cost, Costs
from rockmate.errors import InvalidSampleError, RockmateError
from rockmate.graph.ir import Graph, Op, SlicedMatmul, call_key

_ADD = torch.ops.aten.add_.Tensor
_ROUNDS = 5
_SLOW_MS = 20.0  # a call this slow is measured well by two runs, the one for the overhead included
_VERY_SLOW_MS = 100.0  # and this slow by that one alone


def measure_costs(
    graph: Graph, *, progress: bool = False, known: dict[Hashable, Cost] | None = None
) -> Costs:
    """Measures every distinct call of the graph on the device of its tensors.

    Random state is left as found. Inputs are constants that suit any op: floating point 0.5, integers 0, booleans false (an op that
    scatters to where a mask is true then finds values enough).

    Args:
        graph: the ops.
        progress: shows a progress bar.
        known: costs of calls that were measured before, by their keys; those measured now are added.

    Raises:
        RockmateError: a profiler is running.
        InvalidSampleError: an op fails on inputs of the shapes and dtypes that the sample gives it.
    """
    if is_profiling():
        msg = "a profiler is running, and planning needs PyTorch's own to see what ops allocate. Plan before you start it."
        raise RockmateError(msg)
    calls: dict[Hashable, _Call] = {}

    def distinct(call: _Call) -> _Call:
        return calls.setdefault(call.key, call)

    parameters = {role.name: node for node, role in graph.inputs if role.kind is RoleKind.PARAMETER}
    first = [distinct(_first_call(parameters, op)) for op in graph.ops]
    recompute = [distinct(_again_call(op)) for op in graph.ops]
    additions = [
        [distinct(_Call(op, _ADD, pair, {})) for pair in _additions(parameters, op)]
        for op in graph.ops
    ]
    keeping = [[distinct(_keeping_call(op))] if op.save_state else [] for op in graph.ops]
    costs = {} if known is None else known
    unknown = [call for key, call in calls.items() if key not in costs]
    cuda = sorted({call.device.index or 0 for call in unknown if call.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda), torch.no_grad(), autocast_off():
        _run_rounds(unknown, progress=progress)
    costs.update({call.key: call.cost() for call in unknown})
    return Costs(
        first=tuple(
            _with_additions(costs[call.key], [costs[a.key] for a in added])
            for call, added in zip(first, additions, strict=True)
        ),
        recompute=tuple(
            _with_additions(costs[call.key], [costs[k.key] for k in kept])
            for call, kept in zip(recompute, keeping, strict=True)
        ),
        num_distinct=len(calls),
    )


def _own_call(op: Op) -> _Call:
    return _Call(op, op.node.target, op.node.args, op.node.kwargs, key=op.call_key)


def _first_call(parameters: Mapping[str, fx.Node], op: Op) -> _Call:
    """What the op calls at its first run: a product that is computed onto `.grad` is measured with the addition."""
    if isinstance(op.gradient_sink_form, SlicedMatmul) and op.gradient_sink_form.is_one_of_several:
        target = (
            _add_flipped_product
            if op.gradient_sink_form.is_flipped
            else torch.ops.aten.addmm_.default
        )
        return _Call(
            op, target, (parameters[op.final_gradients[0][1].name], *op.node.args), op.node.kwargs
        )
    return _own_call(op)


def _again_call(op: Op) -> _Call:
    if op.recompute_target in (None, op.node.target) and op.recompute_args is None:
        return _own_call(op)
    args = op.node.args if op.recompute_args is None else op.recompute_args
    return _Call(op, op.recompute_target or op.node.target, args, op.node.kwargs)


def _keeping_call(op: Op) -> _Call:
    return _Call(op, op.save_state, ([*op.saved_results], *op.node.args), {})


def _add_flipped_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    return total.t().addmm_(left, right)


def _additions(parameters: Mapping[str, fx.Node], op: Op) -> list[tuple[fx.Node, fx.Node]]:
    """What is added to what when the op's gradients are handed over: twice where that goes by pieces, once more for the hooks."""
    if isinstance(op.gradient_sink_form, SlicedMatmul) and op.gradient_sink_form.is_one_of_several:
        return []
    pairs = [(parameters[role.name], node) for node, role in op.final_gradients]
    return pairs * 2 if op.gradient_sink_form else pairs


def _with_additions(cost: Cost, additions: Sequence[Cost]) -> Cost:
    return replace(cost, time_ms=cost.time_ms + sum(addition.time_ms for addition in additions))


def _run_rounds(calls: Sequence[_Call], *, progress: bool) -> None:
    bar = tqdm(
        total=_ROUNDS + 1, desc="measuring ops", unit="round", disable=not progress, leave=False
    )
    with bar:
        for call in calls:
            call.measure_overhead()
        bar.update()
        for round_index in range(_ROUNDS):
            for call in calls:
                if call.first_ms < (_VERY_SLOW_MS if round_index == 0 else _SLOW_MS):
                    call.measure_time()
            bar.update()


def _seconds() -> float:
    """A clock: the thread's own where an op runs on one, which other work on the machine does not drive, else the wall clock."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class _Call:
    """One distinct call, with what has been measured of it."""

    def __init__(
        self,
        op: Op,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        key: Hashable | None = None,
    ) -> None:
        self.op = op
        self.target = target
        self.args, self.kwargs = args, kwargs
        self.device = op.device
        self.key = key or call_key(target, args, kwargs)
        self.times_ms: list[float] = []
        self.overhead_bytes = 0
        self.first_ms = 0.0

    def cost(self) -> Cost:
        return Cost(
            time_ms=statistics.median_low(self.times_ms), overhead_bytes=self.overhead_bytes
        )

    def measure_overhead(self) -> None:
        fake = self.op.node.meta["val"]
        releases = getattr(
            self.target, "released_bytes", 0
        )  # the allocator must have seen them allocated
        made = None if releases else self._make_call()
        if self.device.type == "cpu":
            self._warm_heap()

        def run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            begin = _seconds()
            result = target(*args, **kwargs)
            self.first_ms = (_seconds() - begin) * 1e3
            return _tracked_results(result, fake)

        try:
            self.overhead_bytes = (
                workspace_bytes(lambda: (run, made or self._make_call()), self.device) - releases
            )
        except Exception as error:
            msg = (
                f"{self.target} in {self.op.module or 'the model'} fails on inputs like the sample's: {type(error).__name__}: {error}. "
                "Check the sample's shapes and dtypes against what the model takes."
            )
            raise InvalidSampleError(msg) from error
        if self.device.type == "cuda":
            self.first_ms = 0.0  # the first launch tells nothing
        elif self.first_ms >= _SLOW_MS:
            self.times_ms.append(self.first_ms)

    def measure_time(self) -> None:
        target, args, kwargs = self._make_call()
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target(*args, **kwargs)
            end.record()
            end.synchronize()
            self.times_ms.append(start.elapsed_time(end))
            return
        self._warm_heap()
        begin = _seconds()
        result = target(*args, **kwargs)
        self.times_ms.append((_seconds() - begin) * 1e3)
        del result

    def _warm_heap(self) -> None:
        """Leaves as much memory in the heap as the call allocates."""
        torch.ones(self.op.written_bytes + self.overhead_bytes, dtype=torch.uint8)

    def _make_call(self) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        made: dict[fx.Node, torch.Tensor] = {}

        def make(node: fx.Node) -> torch.Tensor:
            if node not in made:
                made[node] = _synthetic_tensor(node.meta["val"])
            return made[node]

        if hasattr(
            self.target, "on_sample"
        ):  # an untraced submodule, which may not run on made-up values
            return *self.target.on_sample(
                lambda position: fx.map_arg(self.args[position], make)
            ), {}
        return self.target, fx.map_arg(self.args, make), fx.map_arg(self.kwargs, make)


def _tracked_results(result: Any, fake: Any) -> Any:
    """The results that the graph knows of. A kernel may make one that its mask leaves out, as a convolution's gradients on the CPU do.

    Such a result is released with the call, so it is part of what the call takes beside its results.
    """
    if (
        isinstance(result, tuple | list)
        and isinstance(fake, tuple | list)
        and len(result) == len(fake)
    ):
        return [value for value, known in zip(result, fake, strict=True) if known is not None]
    return result


def _synthetic_tensor(fake: torch.Tensor) -> torch.Tensor:
    value = 0.5 if fake.is_floating_point() or fake.is_complex() else 0
    needed = (
        1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
        if fake.numel()
        else 0
    )
    memory = torch.full((needed,), value, dtype=fake.dtype, device=fake.device)
    return memory.as_strided(fake.shape, fake.stride())
