"""What a run of a script tells: what budgets cost, a summary at its end, and a page."""

from __future__ import annotations

import resource
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate.adoption.session import Adopted, Session, is_out_of_memory
from rockmate.budget import size_text
from rockmate.capture.signature import SampleCall
from rockmate.curves.page import page as html_page
from rockmate.curves.sweep_run import sweep
from rockmate.plan.plan import Plan
from rockmate.planner import Planner

_SHARES = (1.0, 0.75, 0.5)


def curve_text(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """A line for each of a few budgets of a call, and for the least: its peak and its time."""
    planner = Planner(model, SampleCall(args, kwargs), differentiable="all", **options)
    budgets = [(f"{share:g}", share) for share in _SHARES]
    budgets.append(("least", planner.minimum_peak_bytes))
    plans = [(name, planner.plan(each, on_infeasible="least")) for name, each in budgets]
    return "\n".join(f"  --budget {name:<6}{_plan_text(plan)}" for name, plan in plans)


def _plan_text(plan: Plan) -> str:
    return (
        f"predicted peak {size_text(plan.predicted_peak_bytes)}, {plan.predicted_ratio:.3f}x of "
        "the time without recomputation"
    )


def end_text(session: Session, page: Path | None, error: BaseException | None) -> list[str]:
    """The lines at the end of a run: where memory ran out, each model, and what is known of all.

    Args:
        session: what was adopted.
        page: where a page of what budgets cost goes, if it is asked for.
        error: that ended the script.
    """
    if session.settings.is_dry and session.has_curve:
        return []
    lines = [*map(_line, session.adopted), *session.refused]
    if not lines:
        lines = ["no model was planned: no optimizer of torch.optim holds parameters of one that "
                 "was called in training mode"]  # fmt: skip
    if page is not None:
        lines += [_write_page(each, page) for each in session.adopted[:1]]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = f"{size_text(torch.cuda.max_memory_allocated())} allocated on the GPU"
    else:
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = f"{size_text(1024 * kilobytes)} resident"
    lines.append(f"peak of the process: {peak}")
    if error is not None and is_out_of_memory(error):
        lines.append(_place_of(error))
    return lines


def _place_of(error: BaseException) -> str:
    """Where memory has run out."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any("/torch/optim/" in name for name in names):
        return "memory ran out in the step of an optimizer, which no plan bounds: lower --memory"
    if any("/rockmate/runtime/" in name for name in names):
        return "memory ran out in a planned step: lower --memory or --budget"
    return (
        "memory ran out outside of planned steps (evaluation, a loss, data), which no plan bounds: "
        "lower --memory, or make the batch of that part smaller"
    )


def _write_page(adopted: Adopted, page: Path) -> str:
    """Writes what budgets cost for the sizes of the first plan; the line that says so."""
    module = adopted.module
    try:
        adopted.call.release()
        module.original.train()
        call = module._plans.runnables[-1].planned.call
        tensors = [
            torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in call.tensors
        ]
        found = sweep(module.original, SampleCall(*call.structure.rebuild(tensors)))
        page.write_text(html_page(found), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - the run is over, and was right
        return f"there is no page, since {error}"
    return f"page: {page}"


def _line(adopted: Adopted) -> str:
    module = adopted.module
    if adopted.trouble:
        how = f"as in eager, since {adopted.trouble}"
    elif module.frames is not None:
        report = module.frames.report()
        how = module.frames.summary() if report is None else report.line()
    elif module.is_planned:
        plan, shapes = module.plan, len(module._plans.runnables)
        how = (
            f"planned, {shapes} shape{'s' if shapes > 1 else ''}; {_plan_text(plan)}, budget "
            f"{size_text(plan.budget_bytes)}"
        )
    else:
        how = "nothing to plan"
    return f"{adopted.what}: {adopted.num_calls} training calls, {how}"
