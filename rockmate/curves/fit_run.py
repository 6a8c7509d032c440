"""`fit`: the largest batch, or the longest sequence, that trains within a memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rockmate._util import progress_bar
from rockmate.capture.compiled_model import require_module
from rockmate.capture.sample import read_sample
from rockmate.capture.size_template import MIN_SYMBOLIC_SIZE
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import Machine
from rockmate.curves.advice import nothing_fits
from rockmate.curves.device_memory import FixedMemory, fixed_memory, optimizer_name
from rockmate.curves.errors import FitError, NothingFitsError
from rockmate.curves.fit import Fit
from rockmate.curves.fit_options import FitOptions
from rockmate.curves.fit_row import FitRow, workspace_at_peak
from rockmate.curves.least_memory import SizedPlanners, largest_within
from rockmate.curves.measure import SideBySide
from rockmate.curves.size_axis import Kind, SizeAxis, input_bytes
from rockmate.curves.sized_steps import SizedSteps
from rockmate.entry.planner import Planner
from rockmate.errors import InfeasibleBudgetError
from rockmate.graph.chunking.chunks import Chunks
from rockmate.plan.plan import Plan
from rockmate.planning.options import AT_HOME
from rockmate.planning.step import CapturedStep, capture_step
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

_MOST_POWERS = 5  # of two, among the sizes of the rows
_LEAST_TOKENS = 128
_TIME_LIMIT_S = 10.0  # of all solves for one size


def fit(model: nn.Module, sample_input: Any, memory: int | str, **keywords: Any) -> Fit:
    """The largest batch, or the longest sequence, that trains within a memory.

    The model is trained as it is: parameters that require no gradient are frozen. Costs are
    estimated, from one symbolic capture where that can be made; see `rockmate.costs.estimate`.

    The memory holds parameters, gradients, the optimizer's state, the batch, activations,
    workspaces, and what the device itself takes; see `rockmate.curves.device_memory`. A size fits
    if its smallest peak does. Speeds are of forward and backward alone: an optimizer steps once for
    any number of accumulated batches.

    Args:
        model: in training mode, on any device, the meta device included.
        sample_input: as for `Planner`, with a batch of at least 2.
        memory: of the device, in bytes or as a size ("24GiB").
        **keywords: of `FitOptions` and of `PlanOptions`, which document them.

    Raises:
        NothingFitsError: not even the smallest size fits; the text says what takes the memory and
            what would fit.
        FitError: a size or the memory cannot be read, or the axis cannot be told.
        InvalidBudgetError: the optimizer has no rule for its state.
        MachineError: the machine is not known, or has no rates of copies to another memory tier.
        OffloadError: values of this model cannot move to the tier.
        InvalidSampleError, UnsupportedModelError: as for `Planner`.
        UnknownOptionError: an option is not known.
    """
    require_module(model)
    options = FitOptions.of({"memory": memory, **keywords})
    return run_fit(model, sample_input, options, title=type(model).__name__)


def run_fit(model: nn.Module, sample_input: Any, options: FitOptions, *, title: str) -> Fit:
    """As `fit`; `title` says what was fitted."""
    try:
        return _run_fit(model, sample_input, options, title=title)
    except NothingFitsError as error:
        options = replace(options, planning=options.planning.with_homes(model, error))
    return _run_fit(model, sample_input, options, title=title)


def _run_fit(model: nn.Module, sample_input: Any, options: FitOptions, *, title: str) -> Fit:
    limit, machine = options.limit, options.machine_for(model)
    fixed = fixed_memory(
        model,
        limit,
        machine.torch_device,
        rounded=machine.rounded_bytes,
        reserve_bytes=options.reserve_bytes,
        weights=options.planning.weights,
    )
    run = _Run(model, sample_input, options, machine, fixed)
    fixed = run.fixed
    if fixed.held_bytes + fixed.step_bytes >= limit.limit_bytes:
        raise nothing_fits(fixed, limit, model, options)
    with run.bar, run.timed("search"):
        largest = run.largest()
    if largest == 0:
        raise nothing_fits(fixed, limit, model, options, least_bytes=run.least_bytes())
    with run.timed("plans"):
        rows = [run.predicted_row(size) for size in run.shown(run.sizes(largest), "planning")]
    if options.measure:
        with run.timed("measuring"):
            rows = run.measured([row.size(options.vary) for row in rows])
    fastest = max(rows, key=lambda row: row.speed(options.vary))
    return Fit(
        title=title,
        memory_bytes=limit.limit_bytes,
        optimizer=optimizer_name(options.optimizer),
        axis=options.vary,
        machine=None if options.measure else machine.name,
        margin_bytes=fixed.margin_bytes,
        offload=options.planning.offload,
        rows=tuple(
            replace(row, is_largest=row is rows[-1], is_fastest=row is fastest) for row in rows
        ),
        is_capped=largest + options.step > run.most,
        timings=run.timings,
    )


class _Run:
    """The work of one fit: the search for the largest size, and the rows.

    Attributes:
        fixed: what every batch takes, weights that can be at home left out.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        options: FitOptions,
        machine: Machine,
        fixed: FixedMemory,
    ) -> None:
        self._model = model
        self._sample_input = sample_input
        self._options = options
        self._machine = machine
        self.fixed = fixed
        self._limit_bytes = options.limit.limit_bytes
        sample = read_sample(model, sample_input, machine.torch_device)
        self._axis = SizeAxis.of(sample.call, options.vary, options.axis)
        self.most = options.most_of(model)
        self.timings: dict[str, float] = {"capture": 0.0}
        self.bar = progress_bar(
            desc="capturing", unit="size", disable=not options.planning.progress
        )
        planning = replace(
            options.planning, machine=machine, time_limit_s=_TIME_LIMIT_S, progress=False
        )
        self._steps = SizedSteps(model, sample, sample_input, self._axis, machine, planning.step)
        self._planners = SizedPlanners(self._step, lambda step: Planner.of(step, planning))
        self._chunks: Chunks | None = None
        self._whole = 0  # the largest size that fits without chunks

        if options.planning.weights in AT_HOME:
            weight_bytes = self._planners.whole(self._options.step).weight_bytes
            left_bytes = fixed.parameter_bytes - weight_bytes
            self.fixed = replace(fixed, parameter_bytes=left_bytes)

        # The tokens of the table where the batch varies, and the rows where the tokens do.
        self._other = self._other_size("tokens" if options.vary == "batch" else "batch")

    def _other_size(self, kind: Kind) -> int | None:
        """The size along the other axis; None if the sample has none."""
        options = self._options
        dims = options.token_axis if kind == "tokens" else options.batch_axis
        with suppress(FitError):
            return SizeAxis.of(self._axis.call, kind, dims).size

    def shown(self, sizes: Iterable[int], what: str) -> Iterable[int]:
        """The sizes, with a progress bar."""
        return progress_bar(
            sizes, desc=what, unit="size", disable=not self._options.planning.progress
        )

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

    # --- the search ---

    def need(self, size: int, chunks: Chunks | None = None) -> int:
        """The least memory at a size."""
        self.bar.set_description_str(f"trying {self._options.vary} {size}")
        planner = self._planners.planner(size, chunks)
        self.bar.update()
        if planner is None:
            return self._limit_bytes + 1
        return self._held_at(size) + planner.minimum_peak_bytes

    def _held_at(self, size: int) -> int:
        return self.fixed.held_bytes + self._input_bytes(size)

    def _input_bytes(self, size: int) -> int:
        return self._options.planning.in_flight * input_bytes(self._axis.call_at(size))

    def largest(self) -> int:
        """The largest size that fits; 0 if none does."""
        step, known = self._options.step, self._known()
        most = self.most // step
        whole = largest_within(
            lambda units: self.need(units * step), self._limit_bytes, most=most, known=known
        )
        self._whole = whole * step
        if self._options.planning.numerics == "bitwise" or whole == most:
            return self._whole
        above = min(most, max(1, 2 * whole))
        self._chunks = chunks = self._planners.smallest_chunks(above * step)
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
        units = max(1, self._axis.size // self._options.step)
        return {units, 2 * units}

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
            graph = self._planners.step(size).graph
            costs = estimate_costs(graph, self._machine)
            return self._held_at(size) + simulate(graph, baseline_schedule(graph), costs).peak_bytes

        most = self._whole // step
        # A size of 1 would take a capture of its own, for one row of the table.
        low = 0 if most < MIN_SYMBOLIC_SIZE else MIN_SYMBOLIC_SIZE - 1
        found = largest_within(
            need, self._limit_bytes, most=most, known={most // 4, most // 2}, low=low
        )
        return step * found if found > low else 0

    # --- the rows ---

    def predicted_row(self, size: int) -> FitRow:
        """The row of a size by estimated costs."""
        planner, budget = self._planners.whole(size), self._budget_bytes(size)
        try:
            plan = planner.plan(budget)
        except InfeasibleBudgetError:
            # Beside weights that are fetched, other chunks are the smallest than without.
            chunked = self._planners.planner(size, self._chunks) if self._chunks else None
            if chunked is None:
                raise
            planner, plan = chunked, chunked.plan(budget)
        return self._row(size, planner, plan)

    def _budget_bytes(self, size: int) -> int:
        return self._limit_bytes - self._held_at(size)

    def _row(self, size: int, planner: Planner, plan: Plan) -> FitRow:
        resident_bytes = self._budget_bytes(size) - plan.budget_bytes
        home_bytes = planner.weight_bytes - resident_bytes if planner.weight_bytes else 0
        workspace_bytes = workspace_at_peak(plan)
        is_batch = self._options.vary == "batch"
        return FitRow(
            batch_size=size if is_batch else self._other or 1,
            num_tokens=self._other if is_batch else size,
            device_bytes=self.fixed.device_bytes,
            parameter_bytes=self.fixed.parameter_bytes + planner.weight_bytes - home_bytes,
            gradient_bytes=self.fixed.gradient_bytes,
            state_bytes=self.fixed.state_bytes,
            input_bytes=self._input_bytes(size),
            activation_bytes=plan.predicted_peak_bytes - workspace_bytes,
            workspace_bytes=workspace_bytes,
            baseline_peak_bytes=planner.baseline_peak_bytes,
            predicted_ms=plan.predicted_ms,
            baseline_ms=planner.baseline_ms,
            num_recomputations=plan.schedule.num_recomputations(),
            loss_chunks=str(plan.options.loss_chunks or ""),
            host_bytes=plan.simulation.host_bytes + home_bytes + self.fixed.home_bytes,
            num_moves=len(plan.schedule.moves),
        )

    def measured(self, sizes: Sequence[int]) -> list[FitRow]:
        """Rows with measured costs and steps; sizes that do not fit by those are left out.

        Where the largest size does not, the ones below it are tried.
        """
        found = [self._measured_row(size) for size in self.shown(sizes, "measuring")]
        below = sizes[-1]
        while found[-1] is None and below > self._options.step:
            below -= self._options.step
            found[-1] = self._measured_row(below)
        return [row for row in found if row is not None]

    def _measured_row(self, size: int) -> FitRow | None:
        options = self._options
        sample = self._axis.sample_at(self._sample_input, size)
        try:
            step = capture_step(self._model, sample, options.planning.step)
            planner = Planner.of(step, options.planning, progress=False)
            plan = planner.plan(self._budget_bytes(size))
            meter = SideBySide(
                self._model,
                sample,
                num_steps=options.num_steps,
                num_in_flight=options.planning.in_flight,
                with_eager=False,
            )
            measured = meter.measure(planner.module_of(plan, trial="never"))
        except (InfeasibleBudgetError, torch.OutOfMemoryError):
            return None
        return self._row(size, planner, plan).with_measurement(measured)
