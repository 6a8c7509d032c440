"""A sweep: one capture, one measurement of ops, and a plan for each of many budgets.

If asked for, training steps are measured at each budget.

The whole curve of step time against activation memory, before anything is chosen. See `sweep` and
the command `rockmate sweep`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate._util import begin_stage, is_terminal, progress_bar, stages_shown
from rockmate.budget import Budget, budgets_in_bytes, check_budgets, parse_budgets
from rockmate.curves.errors import SweepError, check_measuring
from rockmate.curves.measure import SideBySide
from rockmate.curves.sweep import Key, Sweep
from rockmate.curves.sweep_folder import SweepFolder
from rockmate.curves.sweep_row import SweepRow, planned_row
from rockmate.entry.planner import Planner
from rockmate.errors import InfeasibleBudgetError, SolverLimitError
from rockmate.plan.plan import Plan
from rockmate.planning.options import PlanOptions
from rockmate.planning.strategies import BITWISE, STRATEGIES, UNMOVED

_DEFAULT = "rockmate"  # the strategy that plans for many budgets together


def sweep(
    model: nn.Module,
    sample_input: Any,
    *,
    budgets: Sequence[Budget] | str | None = None,
    strategies: Sequence[str] | None = None,
    measure: bool = False,
    num_steps: int = 5,
    out: str | Path | None = None,
    progress: bool = False,
    options: PlanOptions | None = None,
    **keywords: Any,
) -> Sweep:
    """What each of many activation budgets buys, from one capture of the model.

    Args:
        model: a module in training mode.
        sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments.
        budgets: each as for `Planner.plan`, or text as "0.2:1.0:9" or "2GiB,4GiB"; by default every
            tenth of the peak with nothing recomputed down to the smallest feasible one without
            chunks. They are planned together; see `Planner.plans`.
        strategies: names out of `rockmate.STRATEGIES`, to compare; by default "rockmate", with
            `offload` "recompute" as well, which moves nothing, and "bitwise", which runs nothing in
            chunks, where plans of "rockmate" do.
        measure: trains a few steps at each budget beside eager: adds measured peak, time, and the
            difference of the gradients. Takes memory for one copy of the weights and gradients on
            the host. The model is put back to what it was.
        num_steps: how many steps are timed and compared.
        out: a folder for the rows, a page and the plans; measured rows that are there already are
            kept and not measured again.
        progress: shows progress bars.
        options: of planning, all at once.
        **keywords: single options of planning; `rockmate.PlanOptions` documents them.

    Returns:
        The rows by strategy and ascending budget; one that is not feasible is among them and says
        so. With `out`, what was measured in earlier runs is too.

    Raises:
        InvalidBudgetError: a budget cannot be read.
        SweepError: a strategy is not known, or what is asked for cannot be measured.
        SweepError: the folder cannot be written to, or holds a sweep of another model.
        MissingExtraError: `out` is given, and matplotlib is not installed.
        InvalidSampleError, UnsupportedModelError, MachineError: as for `Planner`.
    """
    asked = SweepOptions(budgets, strategies, measure, num_steps, progress)
    planning = PlanOptions.of(options, keywords, known=sweep.__annotations__)
    return run_sweep(model, sample_input, asked, planning, title=type(model).__name__, out=out)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What to sweep over; see `sweep`."""

    budgets: Sequence[Budget] | str | None = None
    strategies: Sequence[str] | None = None
    measure: bool = False
    num_steps: int = 5
    progress: bool = False

    def check(self, machine: object = None) -> None:
        """Raises what `sweep` raises of that which can be told before a model is captured."""
        names = (_DEFAULT,) if self.strategies is None else self.strategies
        unknown = [strategy for strategy in names if strategy not in STRATEGIES]
        if unknown or not names:
            what = f"strategy {unknown[0]!r} is not known" if unknown else "no strategy is given"
            raise SweepError(f"{what}; choose among {', '.join(STRATEGIES)}.")
        check_measuring(SweepError, measure=self.measure, machine=machine, num_steps=self.num_steps)
        if self.budgets is not None:
            check_budgets(self.parsed or [])

    @property
    def parsed(self) -> list[Budget] | None:
        """The budgets as a list."""
        return None if self.budgets is None else parse_budgets(self.budgets)


def run_sweep(
    model: nn.Module,
    sample_input: Any,
    options: SweepOptions,
    planning: PlanOptions | None = None,
    *,
    title: str,
    out: str | Path | None = None,
) -> Sweep:
    """As `sweep`; `title` says what was swept.

    If it is interrupted, the folder holds what was found until then.
    """
    planning = PlanOptions.of(planning, {"progress": options.progress and is_terminal()})
    options.check(planning.machine)
    folder = None if out is None else SweepFolder(Path(out))
    planner = Planner(model, sample_input, planning)
    default = (_DEFAULT,) if planning.offload is None else (_DEFAULT, UNMOVED)
    strategies = default if options.strategies is None else options.strategies
    run = _Run(planner, options, strategies, _begin(planner, model, title), folder)
    try:
        run.predict()
        if options.measure:
            num_in_flight = run.found.baseline.options.in_flight
            meter = SideBySide(
                model, sample_input, num_steps=options.num_steps, num_in_flight=num_in_flight
            )
            run.measure(meter)
        run.found.is_complete = True
    finally:  # an interrupt too leaves the files of what was found
        if folder is not None and run.found.rows:
            folder.write(run.found)
            with stages_shown(is_shown=options.progress):
                begin_stage("drawing the page")
                folder.write_page(run.found)
    return run.found


def _begin(planner: Planner, model: nn.Module, title: str) -> Sweep:
    baseline = planner.plan(planner.baseline_peak_bytes, strategy="none")
    snapshot, device = baseline.snapshot, next(iter(model.parameters())).device
    settings = {
        "title": title,
        "graph": snapshot.fingerprint,
        "call": snapshot.call_fingerprint,
        "options": baseline.options.to_json(),
        "machine": baseline.machine,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "baseline_peak_bytes": planner.baseline_peak_bytes,
    }
    if baseline.offload is not None:
        settings["offload"] = [baseline.offload.text, baseline.offload.host_bytes]
    if planner.numerics != "any_order":
        settings["numerics"] = planner.numerics
    return Sweep(title=title, settings=settings, baseline=baseline, timings=dict(planner.timings))


class _Run:
    """The work of one sweep.

    Attributes:
        found: the sweep so far.
    """

    def __init__(
        self,
        planner: Planner,
        options: SweepOptions,
        strategies: Sequence[str],
        found: Sweep,
        folder: SweepFolder | None,
    ) -> None:
        """Takes up what the folder holds of this sweep."""
        self._planner = planner
        self._options = options
        self._folder = folder
        self.found = found
        self._strategies = strategies
        before = []
        if folder is not None:
            before = folder.budgets_bytes(found.settings)
            for row, plan in folder.measured():
                found.put(row, plan)
        if options.parsed is not None:
            self._budgets_bytes = budgets_in_bytes(options.parsed, planner.baseline_peak_bytes)
        else:
            # The smallest peak may differ a little from run to run, and with it a row that has
            # been measured.
            self._budgets_bytes = before or planner.curve_budgets(strategies)
        found.settings["budgets_bytes"] = self._budgets_bytes

    # --- prediction ---

    def predict(self) -> None:
        """Plans for every budget that has no row."""
        begin = time.perf_counter()
        self._predict(self._strategies)
        is_chunked = any(plan.options.loss_chunks for plan in self.found.plans.values())
        if self._options.strategies is None and is_chunked:
            self._predict((BITWISE,))
        self.found.timings["sweep"] = time.perf_counter() - begin

    def _predict(self, strategies: Sequence[str]) -> None:
        known, shown = {row.key for row in self.found}, self._options.progress
        keys = [(strategy, budget) for strategy in strategies for budget in self._budgets_bytes]
        wanted = [key for key in keys if key not in known]
        together = self._planner.plans(
            [budget for strategy, budget in wanted if strategy == _DEFAULT], progress=shown
        )
        plans = {(_DEFAULT, budget): plan for budget, plan in together.items()}
        num_left = len(set(wanted) - plans.keys())
        with progress_bar(
            total=num_left, desc="planning", unit="budget", disable=not (shown and num_left)
        ) as bar:
            for key in wanted:
                if key in plans:
                    self._put(plans[key], self._planner.minimum_peak_bytes)
                else:
                    self._predict_row(key)
                    bar.update()

    def _predict_row(self, key: Key) -> None:
        strategy, budget_bytes = key
        try:
            plan = self._planner.plan(budget_bytes, strategy=strategy)
            self._put(plan, self._planner.minimum_peak(strategy))
        except (InfeasibleBudgetError, SolverLimitError) as error:
            row = SweepRow(
                strategy=strategy,
                budget_bytes=budget_bytes,
                budget_share=budget_bytes / self._planner.baseline_peak_bytes,
                is_feasible=False,
                problem=str(error),
                minimum_bytes=getattr(error, "minimum_bytes", None),
            )
            self.found.put(row)

    def _put(self, plan: Plan, minimum_bytes: int) -> None:
        self.found.put(planned_row(plan, minimum_bytes=minimum_bytes), plan)

    # --- measurement ---

    def measure(self, meter: SideBySide) -> None:
        """Takes steps of every plan that was asked for and has not been measured so."""
        begin, found = time.perf_counter(), self.found
        wanted = [
            row
            for row in found.feasible
            if row.strategy in self._strategies
            and row.budget_bytes in self._budgets_bytes
            and row.num_steps != self._options.num_steps
        ]
        for row in progress_bar(
            wanted, desc="measuring", unit="budget", disable=not self._options.progress
        ):
            plan = found.plans[row.key]
            if row.is_measured:
                plan = self._planner.plan(row.budget_bytes, strategy=row.strategy)
            planned = planned_row(plan, minimum_bytes=row.minimum_bytes or 0)
            try:
                measured = meter.measure(self._planner.module_of(plan, trial="never"))
                found.put(planned.with_measurement(measured), plan)
            except torch.OutOfMemoryError as error:
                problem = f"out of memory: {str(error).partition(chr(10))[0]}"
                found.put(replace(planned, problem=problem), plan)
            if self._folder is not None:  # one by one: whatever stops the sweep, these are kept
                self._folder.write(found, plans=[row.key])
        found.timings["measuring"] = time.perf_counter() - begin
