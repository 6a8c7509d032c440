"""`fit`: the largest batch, or the longest sequence, that trains within a memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rockmate.capture.sample import read_sample
from rockmate.capture.size_groups import MIN_SYMBOLIC_SIZE
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import Machine
from rockmate.fits.advice import nothing_fits
from rockmate.fits.device_memory import FixedMemory, fixed_memory
from rockmate.fits.least_memory import SizedPlanners, largest_within
from rockmate.fits.options import FitOptions
from rockmate.fits.result import Fit
from rockmate.fits.rows import RowMaker, marked
from rockmate.fits.size_axis import SizeAxis, input_bytes
from rockmate.fits.sized_steps import SizedSteps
from rockmate.graph.chunking.chunks import Chunks
from rockmate.memory_limit import Optimizer
from rockmate.planner import Planner
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate
from rockmate.step import CapturedStep

_MOST_POWERS = 5  # of two, among the sizes of the rows
_LEAST_TOKENS = 128
_TIME_LIMIT_S = 10.0  # of all solves for one size


def fit(model: nn.Module, sample_input: Any, memory: int | str, **options: Any) -> Fit:
    """The largest batch, or the longest sequence, that trains within a memory.

    The model is trained as it is: parameters that require no gradient are frozen. Costs are
    estimated, from one symbolic capture where that can be made; see `rockmate.costs.estimate`.

    The memory holds parameters, gradients, the optimizer's state, the batch, activations,
    workspaces, and what the device itself takes; see `rockmate.fits.device_memory`. A size fits if
    its smallest peak does. Speeds are of forward and backward alone: an optimizer steps once for
    any number of accumulated batches.

    Args:
        model: in training mode, on any device, the meta device included.
        sample_input: as for `Planner`, with a batch of at least 2.
        memory: of the device, in bytes or as a size ("24GiB").
        **options: of `FitOptions`.

    Raises:
        NothingFitsError: not even the smallest size fits; the text says what takes the memory and
            what would fit.
        FitError: a size or the memory cannot be read, or the axis cannot be told.
        InvalidBudgetError: the optimizer has no rule for its state.
        MachineError: the machine is not known.
        InvalidSampleError, UnsupportedModelError: as for `Planner`.
        TypeError: an option is not known.
    """
    return run_fit(
        model, sample_input, FitOptions(memory=memory, **options), title=type(model).__name__
    )


def run_fit(model: nn.Module, sample_input: Any, options: FitOptions, *, title: str) -> Fit:
    """As `fit`; `title` says what was fitted."""
    limit, machine = options.limit, options.machine_for(model)
    fixed = fixed_memory(
        model,
        limit,
        machine.torch_device,
        rounded=machine.rounded_bytes,
        reserve_bytes=options.reserve_bytes,
    )
    search = _Search(model, sample_input, options, machine, fixed)
    if max(fixed.held_bytes, fixed.held_bytes + fixed.step_bytes) >= limit.limit_bytes:
        raise nothing_fits(fixed, limit, model, options)
    with search.timed("search"):
        largest = search.largest()
    if largest == 0:
        raise nothing_fits(fixed, limit, model, options, least_bytes=search.least_bytes())
    maker = RowMaker(
        model, sample_input, options, search.axis, fixed, search.planners, search.chunks_at
    )
    with search.timed("plans"):
        rows = maker.predicted(search.sizes(largest))
    if options.measure:
        with search.timed("measuring"):
            rows = maker.measured(rows)
    return Fit(
        title=title,
        memory_bytes=limit.limit_bytes,
        optimizer=_optimizer_name(options.optimizer),
        axis=options.vary,
        machine=None if options.measure else machine.name,
        rows=marked(rows, options.vary),
        is_capped=largest + options.step > search.most,
        timings=search.timings,
    )


class _Search:
    """The search for the largest size of one fit."""

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        options: FitOptions,
        machine: Machine,
        fixed: FixedMemory,
    ) -> None:
        self._options = options
        self._machine = machine
        self._fixed = fixed
        self._limit_bytes = options.limit.limit_bytes
        sample = read_sample(model, sample_input, machine.torch_device)
        self.axis = SizeAxis.of(sample.call, options.vary, options.axis)
        self.most = options.most_of(model)
        self.timings: dict[str, float] = {"capture": 0.0}
        self._steps = SizedSteps(
            model, sample, sample_input, self.axis, machine, options.step_options
        )

        def planner_of(step: CapturedStep) -> Planner:
            return Planner.of(
                step, machine=machine, numerics=options.numerics, time_limit_s=_TIME_LIMIT_S
            )

        self.planners = SizedPlanners(self._step, planner_of)
        self._chunks: Chunks | None = None
        self._whole = 0  # the largest size that fits without chunks

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds of a stage, captures aside."""
        begin, captured = time.perf_counter(), self.timings["capture"]
        yield
        captured = self.timings["capture"] - captured
        self.timings[stage] = time.perf_counter() - begin - captured

    def _step(self, size: int) -> CapturedStep:
        before, begin = self._steps.num_captures, time.perf_counter()
        step = self._steps.step(size)
        if self._steps.num_captures > before:
            self.timings["capture"] += time.perf_counter() - begin
        return step

    def need(self, size: int, chunks: Chunks | None = None) -> int:
        """The least memory at a size."""
        planner = self.planners.planner(size, chunks)
        if planner is None:
            return self._limit_bytes + 1
        return self._held_at(size) + planner.minimum_peak_bytes

    def _held_at(self, size: int) -> int:
        inputs_bytes = self._options.num_in_flight * input_bytes(self.axis.call_at(size))
        return self._fixed.held_bytes + inputs_bytes

    def largest(self) -> int:
        """The largest size that fits; 0 if none does."""
        step, known = self._options.step, self._known()
        most = self.most // step
        whole = largest_within(
            lambda units: self.need(units * step), self._limit_bytes, most=most, known=known
        )
        self._whole = whole * step
        if self._options.numerics == "bitwise" or whole == most:
            return self._whole
        above = min(most, max(1, 2 * whole))
        self._chunks = chunks = self.planners.smallest_chunks(above * step)
        if chunks is None:
            return self._whole

        return step * largest_within(
            lambda units: self.need(units * step, chunks),
            self._limit_bytes,
            most=most,
            known={above, 2 * above},
            low=whole,
        )

    def _known(self) -> set[int]:
        """Sizes to begin the search with, in steps."""
        if self._options.vary == "batch":
            return {2, 8}
        units = max(1, self.axis.size // self._options.step)
        return {units, 2 * units}

    def chunks_at(self, size: int) -> Chunks | None:
        """The chunks that a size needs."""
        return None if size <= self._whole else self._chunks

    def least_bytes(self) -> int:
        """The least memory of the smallest size."""
        return min(self.need(self._options.step, chunks) for chunks in {None, self._chunks})

    def sizes(self, largest: int) -> list[int]:
        """The sizes to have rows for."""
        if self._options.sizes is not None:
            return sorted({*(size for size in self._options.sizes if size <= largest), largest})
        step = self._options.step
        first = 2 if step == 1 else _LEAST_TOKENS
        powers = [first << power for power in range(24) if first << power < largest]
        return sorted({*powers[-_MOST_POWERS:], self._not_recomputed(), self._whole, largest} - {0})

    def _not_recomputed(self) -> int:
        """The largest size that fits with nothing recomputed; 0 if none is known to."""
        step = self._options.step

        def need(units: int) -> int:
            size = units * step
            graph = self.planners.step(size).graph
            costs = estimate_costs(graph, self._machine)
            return self._held_at(size) + simulate(graph, baseline_schedule(graph), costs).peak_bytes

        most = self._whole // step
        # A size of 1 would take a capture of its own, for one row of the table.
        low = 0 if most < MIN_SYMBOLIC_SIZE else MIN_SYMBOLIC_SIZE - 1
        if most == 0:
            return 0
        found = largest_within(
            need, self._limit_bytes, most=most, known={most // 4, most // 2}, low=low
        )
        return step * found if found > low else 0


def _optimizer_name(optimizer: Optimizer) -> str:
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__
