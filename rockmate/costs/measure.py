"""Measured costs: time and workspace of each op, from running it on the real device.

Equal calls (op, shapes, strides, dtypes, constants) cost the same, so each distinct call runs
alone, on synthetic inputs. The model as a whole never runs. An op's time is the median over rounds;
a round goes over all distinct calls, so that no call finds its own data in the cache.

On CUDA the time is that of an op's kernels. Launches run ahead of the device, so they count only if
they are the slower of the two over the whole step: then each op takes at least its launch.

On a CPU the clock is the thread's processor time if PyTorch has one thread, else the wall clock.
Results go to memory that the process already has, as within a step. Pages fresh from the system may
take longer than the op, and whether a call gets such pages is chance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from rockmate._torch.allocator import is_out_of_memory, refuse_profiler, workspace_bytes
from rockmate._torch.autocast import autocast_off
from rockmate._torch.cuda import kernel_ms
from rockmate._torch.dispatch import is_op, schema_of
from rockmate._util import progress_bar
from rockmate.budget import size_text
from rockmate.capture.roles import RoleKind
from rockmate.costs.collectives import collective_cost
from rockmate.costs.cost import Cost, Costs
from rockmate.costs.layout_check import check_layouts
from rockmate.costs.synthetic_inputs import Fill, InputPool, constant, synthetic_value
from rockmate.errors import InvalidSampleError, RockmateError, UnsupportedModelError
from rockmate.graph.ir import Graph, Op, SlicedMatmul
from rockmate.ops.collectives import is_communication
from rockmate.ops.kernel_layouts import call_key, observe
from rockmate.ops.kernels import cross_entropy_backward, scatter_slice

_ADD = torch.ops.aten.add_.Tensor
_ADD_PRODUCT = torch.ops.aten.addmm_.default
# Number of rounds in which each call is timed; calls that took enough time are in fewer.
_NUM_ROUNDS, _LEAST_ROUNDS = 5, 3
_ENOUGH_MS = 10.0
# Milliseconds from which two runs suffice, the one that measures the workspace included.
_SLOW_MS = 10.0
# Milliseconds from which that one run suffices.
_VERY_SLOW_MS = 100.0
# Larger memories never stay in the heap: glibc gives them back at once (M_MMAP_THRESHOLD).
_MOST_HEAP_BYTES = 1 << 25
# Errors that ATen raises for shapes and dtypes that an op does not take. Their subclasses have
# other causes: no kernel (NotImplementedError), a failed device (AcceleratorError).
_OP_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
# Of integers, they raise where a divisor is zero.
_DIVISIONS = {
    torch.ops.aten.div,
    torch.ops.aten.floor_divide,
    torch.ops.aten.fmod,
    torch.ops.aten.remainder,
}
# Texts of errors of these classes that a device's library or PyTorch itself is at fault for.
_OTHER_CAUSES = ("CUDA error", "cuDNN error", "INTERNAL ASSERT FAILED")


def measure_costs(
    graph: Graph, *, progress: bool = False, known: dict[Hashable, Cost] | None = None
) -> Costs:
    """The costs of all ops, measured on the device of the graph's tensors.

    Random state is left as found. Synthetic inputs are constants that suit any op: floating point
    0.5, integers 0, booleans false. With a false mask, an op that scatters to the true elements
    has enough values.

    Args:
        graph: the ops.
        progress: shows a progress bar.
        known: costs of calls that were measured before, by their keys; new ones are added to it.

    Raises:
        InvalidSampleError: an op fails on inputs of the shapes and dtypes that the sample gives it.
        KernelLayoutError: the graph has other layouts than kernels give; see `layout_check`.
        RockmateError: a profiler is running, or the device has no memory for a single op.
    """
    refuse_profiler()
    calls: dict[Hashable, _Call] = {}

    def distinct(call: _Call) -> _Call:
        return calls.setdefault(call.key, call)

    parameters = _parameters(graph)
    first = [distinct(_first_call(parameters, op)) for op in graph.ops]
    recompute = [distinct(_recompute_call(op)) for op in graph.ops]
    additions = [
        [distinct(_Call(op, _ADD, pair, {})) for pair in _additions(parameters, op)]
        for op in graph.ops
    ]
    state_saves = [
        [distinct(_Call(op, op.save_state, ([*op.saved_results], *op.node.args), {}))]
        if op.save_state else [] for op in graph.ops
    ]  # fmt: skip
    costs = {} if known is None else known
    on_link = [call for call in calls.values() if is_communication(call.target)]
    costs.update({call.key: collective_cost(call.op.node) for call in on_link})
    unknown = [call for key, call in calls.items() if key not in costs]
    cuda = sorted({call.device.index or 0 for call in unknown if call.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda), torch.no_grad(), autocast_off():
        _run_rounds(unknown, progress=progress)
    is_host_bound = sum(call.launch_ms for call in first) > sum(call.kernel_ms for call in first)
    costs.update({call.key: call.cost(is_host_bound=is_host_bound) for call in unknown})
    traced = [op for op in graph.ops if not hasattr(op.node.target, "on_sample")]  # not opaque
    check_layouts((op.place, op.call_key, op.node.meta["val"]) for op in traced)

    def total(calls: Sequence[_Call], further: Sequence[Sequence[_Call]]) -> tuple[Cost, ...]:
        return tuple(
            replace(costs[call.key], time_ms=sum(costs[each.key].time_ms for each in (call, *more)))
            for call, more in zip(calls, further, strict=True)
        )

    return Costs(
        first=total(first, additions),
        recompute=total(recompute, state_saves),
        num_distinct=len(calls),
    )


def _parameters(graph: Graph) -> dict[str, fx.Node]:
    """The parameters that are no wrappers, by name."""
    return {
        role.name: node
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER and not role.inner
    }


# --- the calls of an op -----------------------------------------------------------------------


def _own_call(op: Op) -> _Call:
    """The call of an op; a write into a slice is measured in the memory of what it writes into."""
    if op.node.target is torch.ops.aten.slice_scatter.default:
        into = {"out": op.node.args[0]}
        return _Call(op, scatter_slice, op.node.args, into, key=op.call_key)
    return _Call(op, op.node.target, op.node.args, op.node.kwargs, key=op.call_key)


def _first_call(parameters: Mapping[str, fx.Node], op: Op) -> _Call:
    """The call of an op's first run.

    A product that is computed onto `.grad` is measured with the addition.
    """
    form = op.gradient_sink_form
    if not isinstance(form, SlicedMatmul) or not form.is_one_of_several:
        return _own_call(op)
    target = _add_flipped_product if form.is_flipped else _ADD_PRODUCT
    parameter = parameters[op.final_gradients[0][1].name]
    return _Call(op, target, (parameter, *op.node.args), op.node.kwargs)


def _recompute_call(op: Op) -> _Call:
    if op.recompute_target in (None, op.node.target) and op.recompute_args is None:
        return _own_call(op)
    args = op.node.args if op.recompute_args is None else op.recompute_args
    return _Call(op, op.recompute_target or op.node.target, args, op.node.kwargs)


def _add_flipped_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    return total.t().addmm_(left, right)


def _additions(parameters: Mapping[str, fx.Node], op: Op) -> list[tuple[fx.Node, fx.Node]]:
    """The additions to `.grad` at an op's first run, as pairs of parameter and gradient.

    A gradient that is added slice by slice counts twice: once more for the hooks.
    """
    form = op.gradient_sink_form
    if isinstance(form, SlicedMatmul) and form.is_one_of_several:
        return []
    # `.grad` of a parameter that wraps tensors is taken to be like its gradient.
    pairs = [(parameters.get(role.name, node), node) for node, role in op.final_gradients]
    return pairs * 2 if form else pairs


# --- measuring --------------------------------------------------------------------------------


def _run_rounds(calls: Sequence[_Call], *, progress: bool) -> None:
    with progress_bar(
        total=_NUM_ROUNDS + 1, desc="measuring ops", unit="round", disable=not progress, leave=False
    ) as bar:
        pool = InputPool()
        for call in calls:
            call.pool = pool
            call.measure_overhead()
        bar.update()
        for round_index in range(_NUM_ROUNDS):
            for call in calls:
                if call.needs_round(round_index):
                    call.measure_time()
            bar.update()
        for call in calls:
            call.pool = None


def cpu_seconds() -> float:
    """The clock for ops on a CPU.

    Other work on the machine does not drive a thread's own clock.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class _Call:
    """One distinct call, as it stands in the joint graph, and its measurements.

    Attributes:
        op: an op that makes the call.
        key: equal for calls of equal cost.
        times_ms: the measured times.
        overhead_bytes: the measured workspace.
        first_ms: time of the run that measured the workspace; 0 on CUDA.
        launches_ms: on CUDA, the host's times of issuing the call.
        has_produced_integers: whether integers that another op returns are made by that op, for
            one that zeros do not suit: pivots count from one.
        pool: where large inputs come from while calls are measured.
    """

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
        self.launches_ms: list[float] = []
        self.has_produced_integers = False
        self.pool: InputPool | None = None

    @property
    def kernel_ms(self) -> float:
        """The median of the times; 0 if the call is known and was not timed."""
        return statistics.median_low(self.times_ms or [0.0])

    @property
    def launch_ms(self) -> float:
        """The median of the host's times; 0 on a CPU."""
        return statistics.median_low(self.launches_ms or [0.0])

    def cost(self, *, is_host_bound: bool) -> Cost:
        """The call's time, at least its launch if the host bounds the step, and its workspace."""
        time_ms = max(self.kernel_ms, self.launch_ms) if is_host_bound else self.kernel_ms
        return Cost(time_ms=time_ms, overhead_bytes=self.overhead_bytes)

    def needs_round(self, index: int) -> bool:
        """Whether its time is measured in the round of that index."""
        if self.first_ms >= _SLOW_MS:
            return index == 0 and self.first_ms < _VERY_SLOW_MS
        return index < _LEAST_ROUNDS or sum(self.times_ms) < _ENOUGH_MS

    def measure_overhead(self) -> None:
        """Measures the workspace, and the time of a slow call."""
        with self._errors_explained():
            try:
                self.overhead_bytes = self._most_overhead_bytes()
            except _OP_ERRORS as error:
                if not _is_of_values(error):
                    raise
                self.has_produced_integers = True
                self.overhead_bytes = self._most_overhead_bytes()
        if self.device.type == "cuda":
            # The first launch includes the loading of the kernel.
            self.first_ms = 0.0
        elif self.first_ms >= _SLOW_MS:
            self.times_ms.append(self.first_ms)

    def _most_overhead_bytes(self) -> int:
        num_runs = getattr(self.target, "num_draws", 1)  # of an opaque module
        return max(self._measured_overhead_bytes() for _ in range(num_runs))

    def _measured_overhead_bytes(self) -> int:
        fake = self.op.node.meta["val"]
        released_bytes = getattr(self.target, "released_bytes", 0)
        if self.device.type == "cuda":
            # Loads kernels and lets cuDNN choose its algorithm, by the settings of the training.
            target, args, kwargs = self._make_call()
            target(*args, **kwargs)
            del args, kwargs
        # The allocator must see the allocation of inputs that the call releases.
        made = None if released_bytes else self._make_call()
        if self.device.type == "cpu":
            self._warm_heap()

        def run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            begin = cpu_seconds()
            result = target(*args, **kwargs)
            self.first_ms = (cpu_seconds() - begin) * 1e3
            observe(self.key, result, args if is_op(target) else ())
            return _tracked_results(result, fake)

        measured_bytes = workspace_bytes(lambda: (run, made or self._make_call()), self.device)
        # A peak is no lower than what was there before the call. It only seems to be if a run that
        # draws or halts otherwise than the sample's released less than is planned.
        return max(measured_bytes - released_bytes, -self.op.written_bytes)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Raises an error as the one that a user can act on; others pass, with the op's name."""
        try:
            yield
        except Exception as error:
            place = f"{self.target} in {self.op.module or 'the model'}"
            explained = self._explained(error, place)
            if explained is not None:
                raise explained from error
            error.add_note(f"{place} was being measured")
            raise

    def _explained(self, error: Exception, place: str) -> RockmateError | None:
        """The error that a user can act on; None if the sample is not known to be at fault."""
        cause = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            read_bytes = sum(storage.num_bytes for storage in self.op.reads)
            needed = size_text(read_bytes + self.op.written_bytes)
            return RockmateError(
                f"{self.device} is out of memory while {place} is measured, which runs alone on "
                f"inputs and results of {needed}: {cause}. Release memory on the device, make the "
                "batch smaller, or plan with estimated costs (machine=...)."
            )
        if isinstance(error, torch.linalg.LinAlgError):
            return UnsupportedModelError(
                f"{place} raises for some values, such as those it is measured on: {cause}. Call "
                "the function of torch.linalg that ends in _ex and raises for none."
            )
        # An opaque module runs the user's own code on the sample, which may raise anything.
        if not hasattr(self.target, "on_sample") and not _is_of_values(error):
            return None
        return InvalidSampleError(
            f"{place} fails on inputs like the sample's: {cause}. "
            "Check the sample's shapes and dtypes against what the model takes."
        )

    def measure_time(self) -> None:
        """Measures the time once more."""
        with self._errors_explained():
            target, args, kwargs = self._make_call()
            if self.device.type == "cuda":

                def launch() -> Any:
                    begin = time.perf_counter()
                    result = target(*args, **kwargs)
                    self.launches_ms.append((time.perf_counter() - begin) * 1e3)
                    return result

                self.times_ms.append(kernel_ms(launch, self.device))
                return
            self._warm_heap()
            begin = cpu_seconds()
            result = target(*args, **kwargs)
            self.times_ms.append((cpu_seconds() - begin) * 1e3)
            del result

    def _warm_heap(self) -> None:
        """Leaves as many bytes in the heap as the call allocates."""
        num_bytes = self.op.written_bytes + self.overhead_bytes
        if num_bytes <= _MOST_HEAP_BYTES:
            torch.ones(num_bytes, dtype=torch.uint8)

    def _make_call(self) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        divides = getattr(self.target, "overloadpacket", None) in _DIVISIONS
        fill: Fill = partial(constant, integer=int(divides))
        if self.pool is not None and _keeps_inputs(self.target) and not divides:
            fill = self.pool.for_call()

        @cache
        def make(node: fx.Node) -> torch.Tensor:
            return synthetic_value(node, fill, runs_producer=self.has_produced_integers)

        if hasattr(self.target, "on_sample"):
            # An opaque module may fail on synthetic values.
            def argument(position: int) -> Any:
                return fx.map_arg(self.args[position], make)

            return *self.target.on_sample(argument), {}
        return self.target, fx.map_arg(self.args, make), fx.map_arg(self.kwargs, make)


def _keeps_inputs(target: Any) -> bool:
    """Whether a call leaves its inputs fit for the next one.

    What is added to large constants makes them larger ones, which take no longer.
    """
    if target in (_ADD, _ADD_PRODUCT, _add_flipped_product, cross_entropy_backward):
        return True
    return is_op(target) and not schema_of(target).is_mutable


def _tracked_results(result: Any, fake: Any) -> Any:
    """The results that the graph tracks.

    A kernel may make a result that its mask leaves out, as a convolution's backward on the CPU
    does. It is released with the call, so it is part of the workspace.
    """
    are_lists = isinstance(result, tuple | list) and isinstance(fake, tuple | list)
    if not are_lists or len(result) != len(fake):
        return result
    return [value for value, known in zip(result, fake, strict=True) if known is not None]


def _is_of_values(error: Exception) -> bool:
    """Whether an op does not take the shapes, dtypes or values that it was given."""
    if type(error) not in _OP_ERRORS or is_out_of_memory(error):
        return False
    return not any(cause in str(error) for cause in _OTHER_CAUSES)
