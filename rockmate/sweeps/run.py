"""A sweep: one capture, one measurement of ops, and a plan for each of many budgets.

If asked for, training steps are measured at each budget.

The whole curve of step time against activation memory, before anything is chosen. See `sweep` and
the command `rockmate sweep`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from rockmate.budget import Budget, budgets_in_bytes, check_budgets, parse_budgets
from rockmate.capture.options import num_in_flight_of
from rockmate.errors import InfeasibleBudgetError, SolverLimitError
from rockmate.module import RockmateModule
from rockmate.plan.plan import Plan
from rockmate.planner import Planner
from rockmate.planning.strategies import BITWISE, STRATEGIES, UNMOVED
from rockmate.progress import is_terminal
from rockmate.sweeps.measure import SideBySide
from rockmate.sweeps.result import Sweep, SweepError, SweepOptions
from rockmate.sweeps.row import SweepRow, planned_row
from rockmate.sweeps.store import SweepFolder

_TENTHS = 10
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
    **planner_options: Any,
) -> list[SweepRow]:
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
        out: a folder for the rows, the report and the plans; measured rows that are there already
            are kept and not measured again.
        progress: shows progress bars.
        **planner_options: as for `Planner`.

    Returns:
        The rows by strategy and ascending budget; one that is not feasible is among them and says
        so. With `out`, what was measured in earlier runs is too.

    Raises:
        InvalidBudgetError: a budget cannot be read.
        SweepError: a strategy is not known, or what is asked for cannot be measured.
        SweepFolderError: the folder cannot be written to, or holds a sweep of another model.
        InvalidSampleError, UnsupportedModelError, MachineError: as for `Planner`.
    """
    options = SweepOptions(
        budgets=budgets,
        strategies=default_strategies(planner_options.get("offload"))
        if strategies is None
        else strategies,
        adds_bitwise=strategies is None,
        measure=measure,
        num_steps=num_steps,
        progress=progress,
    )
    return run_sweep(
        model, sample_input, options, title=type(model).__name__, out=out, **planner_options
    ).rows


def run_sweep(
    model: nn.Module,
    sample_input: Any,
    options: SweepOptions,
    *,
    title: str,
    out: str | Path | None = None,
    **planner_options: Any,
) -> Sweep:
    """As `sweep`, with what the report needs; `title` says what was swept.

    If it is interrupted, the folder holds what was found until then.
    """
    asked = check_options(options, planner_options.get("machine"))
    folder = SweepFolder(Path(out)) if out is not None else None
    planner = Planner(
        model, sample_input, progress=options.progress and is_terminal(), **planner_options
    )
    state = _begin(planner, model, title)
    if folder is not None:
        folder.check_settings(state.settings)
    budgets_bytes = _budgets_bytes(planner, asked, options.strategies, folder)
    state.settings["budgets_bytes"] = budgets_bytes
    if folder is not None:
        for key, (row, plan) in folder.measured().items():
            state.plans[key] = plan
            state.put(row)
    try:
        _predict(state, planner, budgets_bytes, options)
        if options.measure:
            _measure(
                state,
                planner,
                SideBySide(
                    model,
                    sample_input,
                    num_steps=options.num_steps,
                    num_in_flight=num_in_flight_of(state.baseline.options.get("in_flight", 1)),
                ),
                options,
                folder,
            )
        state.is_complete = True
    finally:  # an interrupt too leaves the files of what was found
        if folder is not None and state.rows:
            _write(state, folder)
    return state


def default_strategies(offload: str | None) -> tuple[str, ...]:
    """The strategies of a sweep: where values may move, both curves."""
    return (_DEFAULT,) if offload is None else (_DEFAULT, UNMOVED)


def check_options(options: SweepOptions, machine: Any = None) -> list[Budget] | None:
    """The budgets as a list; all that can be told before a model is captured is told here.

    Raises:
        InvalidBudgetError, SweepError: as for `sweep`.
    """
    unknown = [strategy for strategy in options.strategies if strategy not in STRATEGIES]
    if unknown or not options.strategies:
        what = f"strategy {unknown[0]!r} is not known" if unknown else "no strategy is given"
        raise SweepError(f"{what}; choose among {', '.join(STRATEGIES)}.")
    if options.measure and machine is not None:
        raise SweepError(
            f"costs are estimated for {machine!r}, which is not measured from here. Leave out "
            "measuring, or the machine."
        )
    if options.num_steps < 1:
        raise SweepError(f"{options.num_steps} steps cannot be measured. Take at least 1.")
    if options.budgets is None:
        return None
    budgets = (
        parse_budgets(options.budgets)
        if isinstance(options.budgets, str)
        else list(options.budgets)
    )
    check_budgets(budgets)
    return budgets


def _begin(planner: Planner, model: nn.Module, title: str) -> Sweep:
    baseline = planner.plan(planner.baseline_peak_bytes, strategy="none")
    snapshot = baseline.snapshot
    settings = {
        "title": title,
        "graph": snapshot.fingerprint,
        "call": snapshot.call_fingerprint,
        "options": dict(baseline.options),
        "machine": baseline.machine,
        "device": _device_name(next(iter(model.parameters())).device),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "baseline_peak_bytes": planner.baseline_peak_bytes,
    }
    if baseline.offload is not None:
        settings["offload"] = [baseline.offload.text, baseline.offload.host_bytes]
    if planner.numerics != "any_order":
        settings["numerics"] = planner.numerics
    return Sweep(title=title, settings=settings, baseline=baseline, timings=dict(planner.timings))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _budgets_bytes(
    planner: Planner,
    asked: Iterable[Budget] | None,
    strategies: Sequence[str],
    folder: SweepFolder | None,
) -> list[int]:
    if asked is not None:
        return budgets_in_bytes(asked, planner.baseline_peak_bytes)
    before = folder.budgets_bytes() if folder is not None else []
    if before:
        # The smallest peak may differ a little from run to run, and with it a row that has been
        # measured.
        return before
    smallest = min(planner.minimum_peak(strategy) for strategy in strategies)
    tenths = budgets_in_bytes(
        [tenth / _TENTHS for tenth in range(1, _TENTHS + 1)], planner.baseline_peak_bytes
    )
    return [smallest, *(num_bytes for num_bytes in tenths if num_bytes > smallest)]


# --- prediction -----------------------------------------------------------------------------------


def _predict(
    state: Sweep, planner: Planner, budgets_bytes: Sequence[int], options: SweepOptions
) -> None:
    begin = time.perf_counter()
    _predict_strategies(state, planner, budgets_bytes, options.strategies, options.progress)
    is_chunked = any("loss_chunks" in plan.options for plan in state.plans.values())
    if options.adds_bitwise and is_chunked:
        _predict_strategies(state, planner, budgets_bytes, (BITWISE,), options.progress)
    state.timings["sweep"] = time.perf_counter() - begin


def _predict_strategies(
    state: Sweep,
    planner: Planner,
    budgets_bytes: Sequence[int],
    strategies: Sequence[str],
    progress: bool,
) -> None:
    known = {row.key for row in state.rows}
    wanted = [
        (strategy, budget)
        for strategy in strategies
        for budget in budgets_bytes
        if (strategy, budget) not in known
    ]
    plans = planner.plans(
        [budget for strategy, budget in wanted if strategy == _DEFAULT], progress=progress
    )
    num_left = sum(strategy != _DEFAULT or budget not in plans for strategy, budget in wanted)
    with tqdm(
        total=num_left, desc="planning", unit="budget", disable=not (progress and num_left)
    ) as bar:
        for strategy, budget_bytes in wanted:
            if strategy == _DEFAULT and budget_bytes in plans:
                _put_plan(state, plans[budget_bytes], minimum_bytes=planner.minimum_peak_bytes)
            else:
                _predict_row(state, planner, strategy, budget_bytes)
                bar.update()


def _predict_row(state: Sweep, planner: Planner, strategy: str, budget_bytes: int) -> None:
    try:
        _put_plan(
            state,
            planner.plan(budget_bytes, strategy=strategy),
            minimum_bytes=planner.minimum_peak(strategy),
        )
    except (InfeasibleBudgetError, SolverLimitError) as error:
        row = SweepRow(
            strategy=strategy,
            budget_bytes=budget_bytes,
            budget_share=budget_bytes / planner.baseline_peak_bytes,
            is_feasible=False,
            problem=str(error),
            minimum_bytes=error.minimum_bytes if isinstance(error, InfeasibleBudgetError) else None,
        )
        state.put(row)


def _put_plan(state: Sweep, plan: Plan, *, minimum_bytes: int) -> None:
    row = planned_row(plan, minimum_bytes=minimum_bytes)
    state.plans[row.key] = plan
    state.put(row)


# --- measurement ----------------------------------------------------------------------------------


def _measure(
    state: Sweep,
    planner: Planner,
    meter: SideBySide,
    options: SweepOptions,
    folder: SweepFolder | None,
) -> None:
    begin = time.perf_counter()
    asked = {
        (strategy, budget)
        for strategy in options.strategies
        for budget in state.settings["budgets_bytes"]
    }
    wanted = [
        row
        for row in state.rows
        if row.is_feasible and row.key in asked and row.num_steps != options.num_steps
    ]
    for row in tqdm(wanted, desc="measuring", unit="budget", disable=not options.progress):
        plan = (
            planner.plan(row.budget_bytes, strategy=row.strategy)
            if row.is_measured
            else state.plans[row.key]
        )
        state.plans[row.key] = plan
        state.put(
            _measured_row(
                planned_row(plan, minimum_bytes=row.minimum_bytes or 0),
                planner.module_of(plan, trial="never"),
                meter,
            )
        )
        if folder is not None:  # one by one: whatever stops the sweep, these are kept
            folder.write_plans({row.key: plan})
            folder.write(state.rows, state.settings)
    state.timings["measuring"] = time.perf_counter() - begin


def _measured_row(row: SweepRow, module: RockmateModule, meter: SideBySide) -> SweepRow:
    try:
        return row.with_measurement(meter.measure(module))
    except torch.OutOfMemoryError as error:
        return replace(row, problem=f"out of memory: {str(error).partition(chr(10))[0]}")


def _write(state: Sweep, folder: SweepFolder) -> None:
    from rockmate.sweeps.report import report_html

    folder.write(state.rows, state.settings)
    folder.write_plans({row.key: state.plans[row.key] for row in state.rows if row.is_recommended})
    folder.write_report(report_html(state))
