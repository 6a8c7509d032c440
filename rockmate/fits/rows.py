"""The rows of a fit: predicted, and measured on the device that is here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from rockmate.errors import InfeasibleBudgetError
from rockmate.fits.device_memory import FixedMemory
from rockmate.fits.errors import FitError
from rockmate.fits.least_memory import SizedPlanners
from rockmate.fits.options import FitOptions
from rockmate.fits.row import FitRow, size_of, speed_of, workspace_at_peak
from rockmate.fits.size_axis import SizeAxis, input_bytes
from rockmate.graph.chunking.chunks import Chunks
from rockmate.memory_limit import device_of
from rockmate.plan.plan import Plan
from rockmate.planner import Planner
from rockmate.step import CapturedStep, capture_step
from rockmate.sweeps.measure import activation_peak, run_step, state_kept


class RowMaker:
    """Makes the rows of one fit.

    Args:
        model: the model.
        sample_input: of it.
        options: what the fit was asked for.
        axis: of the size that varies.
        fixed: what is held whatever the size.
        planners: with estimated costs.
        chunks_at: the chunks that a size needs.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        options: FitOptions,
        axis: SizeAxis,
        fixed: FixedMemory,
        planners: SizedPlanners,
        chunks_at: Callable[[int], Chunks | None],
    ) -> None:
        self._model = model
        self._sample_input = sample_input
        self._options = options
        self._axis = axis
        self._fixed = fixed
        self._planners = planners
        self._chunks_at = chunks_at
        self._limit_bytes = options.limit.limit_bytes
        # The tokens of the table where the batch varies, and the rows where the tokens do.
        other = "tokens" if axis.kind == "batch" else "batch"
        self._other = _other_size(axis, other, options)

    def predicted(self, sizes: Sequence[int]) -> list[FitRow]:
        """Rows by estimated costs."""
        return [self._predicted_row(size) for size in self._shown(sizes, "planning")]

    def _predicted_row(self, size: int) -> FitRow:
        found = self._planned(self._planners, size)
        assert found is not None  # the search has planned in these chunks
        return self._row(size, found[1])

    def _shown(self, sizes: Iterable[Any], what: str) -> Iterable[Any]:
        return tqdm(sizes, desc=what, unit="size", disable=not self._options.progress)

    def _planned(self, planners: SizedPlanners, size: int) -> tuple[Planner, Plan] | None:
        """As `SizedPlanners.planner_for`."""
        return planners.planner_for(size, self._chunks_at(size), self.budget_bytes(size))

    def budget_bytes(self, size: int) -> int:
        """What is left for activations."""
        return self._limit_bytes - self._fixed.held_bytes - self._input_bytes(size)

    def _input_bytes(self, size: int) -> int:
        return self._options.num_in_flight * input_bytes(self._axis.call_at(size))

    def _row(self, size: int, plan: Plan) -> FitRow:
        workspace_bytes = workspace_at_peak(plan)
        is_batch = self._axis.kind == "batch"
        return FitRow(
            batch_size=size if is_batch else self._other or 1,
            num_tokens=self._other if is_batch else size,
            device_bytes=self._fixed.device_bytes,
            parameter_bytes=self._fixed.parameter_bytes,
            gradient_bytes=self._fixed.gradient_bytes,
            state_bytes=self._fixed.state_bytes,
            input_bytes=self._input_bytes(size),
            activation_bytes=plan.predicted_peak_bytes - workspace_bytes,
            workspace_bytes=workspace_bytes,
            baseline_peak_bytes=self._planners.whole(size).baseline_peak_bytes,
            predicted_ms=plan.predicted_ms,
            baseline_ms=self._planners.whole(size).baseline_ms,
            num_recomputations=plan.schedule.num_recomputations(),
            loss_chunks=plan.options.get("loss_chunks", ""),
            host_bytes=plan.simulation.host_bytes,
            num_moves=len(plan.schedule.moves),
        )

    # --- measured ---

    def measured(self, rows: Sequence[FitRow]) -> list[FitRow]:
        """The rows with measured costs and steps; sizes that do not fit by those are left out.

        Where the largest size does not, the ones below it are tried.
        """
        sizes = [size_of(self._axis.kind, row) for row in rows]
        found = [self._measured_row(size) for size in self._shown(sizes, "measuring")]
        below = sizes[-1]
        while found[-1] is None and below > self._options.step:
            below -= self._options.step
            found[-1] = self._measured_row(below)
        return [row for row in found if row is not None]

    def _measured_row(self, size: int) -> FitRow | None:
        planners = SizedPlanners(self._captured, self._measured_planner)
        try:
            found = self._planned(planners, size)
        except (InfeasibleBudgetError, torch.OutOfMemoryError):
            return None
        if found is None:
            return None
        planner, plan = found
        row = replace(
            self._row(size, plan),
            baseline_peak_bytes=planners.whole(size).baseline_peak_bytes,
            baseline_ms=planners.whole(size).baseline_ms,
        )
        module = planner.module_of(plan, trial="never")
        sample, device = self._axis.sample_at(self._sample_input, size), device_of(self._model)
        try:
            with state_kept(self._model):
                self._run(module, sample, seed=0)
                peak_bytes = activation_peak(lambda: self._run(module, sample, seed=0), device)
                times_ms = [
                    self._timed_ms(module, sample, seed, device)
                    for seed in range(self._options.num_steps)
                ]
        except torch.OutOfMemoryError:
            return None
        return replace(row, measured_ms=statistics.median(times_ms), measured_peak_bytes=peak_bytes)

    def _captured(self, size: int) -> CapturedStep:
        sample = self._axis.sample_at(self._sample_input, size)
        return capture_step(self._model, sample, **self._options.step_options)

    def _measured_planner(self, step: CapturedStep) -> Planner:
        return Planner.of(step, numerics=self._options.numerics, **self._options.planner_options)

    def _run(self, module: nn.Module, sample: Any, *, seed: int) -> None:
        run_step(module, sample, seed=seed, num_in_flight=self._options.num_in_flight)

    def _timed_ms(self, module: nn.Module, sample: Any, seed: int, device: torch.device) -> float:
        """Of one forward and backward."""
        module.zero_grad(set_to_none=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        self._run(module, sample, seed=seed)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - begin) / self._options.num_in_flight


def _other_size(axis: SizeAxis, kind: Any, options: FitOptions) -> int | None:
    """The size along the other axis; None if the sample has none."""
    try:
        dims = options.token_axis if kind == "tokens" else options.batch_axis
        return SizeAxis.of(axis.call, kind, dims).size
    except FitError:
        return None


def marked(rows: Sequence[FitRow], axis: str) -> tuple[FitRow, ...]:
    """The rows, the largest and the fastest marked."""
    fastest = max(rows, key=lambda row: speed_of(axis, row))
    return tuple(
        replace(row, is_largest=row is rows[-1], is_fastest=row is fastest) for row in rows
    )
