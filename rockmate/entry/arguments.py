"""What can be told of the arguments of `RockmateModule` before capture and search are loaded."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate.budget import Budget, check_on_infeasible, parse_budget, slowdown_of
from rockmate.capture.compiled_model import require_module
from rockmate.errors import InvalidArgumentError, InvalidBudgetError, check_choice
from rockmate.memory_limit import MemoryLimit, Optimizer
from rockmate.planning.options import PlanOptions
from rockmate.schedule.offload_request import OffloadRequest

if TYPE_CHECKING:
    from rockmate.plan.plan import Plan


def checked_budget(
    model: Any,
    sample_input: Any,
    budget: Budget | None,
    max_slowdown: float | None,
    memory_limit: int | str | None,
    plan: Plan | None,
) -> Budget | None:
    """The budget, or the slowdown that it may cost in its place.

    Raises for a model that is none, a budget in the place of the sample, or no one bound.
    """
    if max_slowdown is not None:
        if budget is not None:
            msg = (
                f"budget {budget!r} and max_slowdown {max_slowdown!r} are given; give one of them."
            )
            raise InvalidArgumentError(msg)
        budget = f"{max_slowdown}x"
    if isinstance(sample_input, nn.Module) and not isinstance(model, nn.Module):
        msg = "a model is in the place of the sample. Write RockmateModule(model, sample, ...)."
        raise InvalidArgumentError(msg)
    require_module(model)
    values = {"budget": budget, "memory_limit": memory_limit, "plan": plan}
    given = [name for name, value in values.items() if value is not None]
    if isinstance(sample_input, int | float | str):
        msg = (
            f"{sample_input!r} stands in the place of the sample. Write RockmateModule(model, "
            f"sample, {sample_input!r}), or without a sample RockmateModule(model, "
            f"budget={sample_input!r})."
        )
        raise InvalidBudgetError(msg)
    if not given:
        msg = (
            'budget None: give RockmateModule a budget (bytes, "6GiB", or a fraction in (0, 1]), '
            "a memory_limit for the whole device, or a plan."
        )
        raise InvalidBudgetError(msg)
    if len(given) > 1:
        msg = (
            f"RockmateModule was given {' and '.join(given)}; give one of them. A plan has its "
            "budget, plan.budget_bytes."
        )
        raise InvalidArgumentError(msg)
    if plan is not None:
        check_plan(plan)
    if budget is not None and slowdown_of(budget) is None:
        # An unreadable budget fails before the capture, not after it. The peak is unknown here.
        parse_budget(budget, 1 << 62)
    return budget


def check_plan(plan: Any) -> None:
    """Raises `InvalidArgumentError` for what is no plan."""
    from rockmate.plan.plan import Plan

    if not isinstance(plan, Plan):
        msg = f"plan {reprlib.repr(plan)} is of type {type(plan).__name__}; a Plan is needed."
        msg += " Give plan=Plan.load(path) for a saved one, or what Planner.plan gave."
        raise InvalidArgumentError(msg)


def check_choices(on_infeasible: str, **flags: Any) -> None:
    """Raises `InvalidArgumentError` unless it is a value of that argument, and flags bools."""
    check_on_infeasible(on_infeasible)
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name} is {value!r}; give True or False")


def check_options(options: PlanOptions, model: nn.Module, strategy: str | None) -> None:
    """Raises for values of options that planning would refuse, maybe hours after the call."""
    _ = options.moves
    if options.marks or options.policy is not None:
        _ = options.step
    if options.machine is not None:
        from rockmate.costs.machine import load_machine

        load_machine(options.machine)
    if options.untraced:
        from rockmate.capture.opaque_module import opaque_modules

        opaque_modules(model, options.untraced)
    if strategy is not None:
        from rockmate.planning.strategies import STRATEGIES  # loads the solvers

        check_choice("strategy", strategy, STRATEGIES)


def check_mode(
    mode: str,
    keep: Collection[str],
    plan: Plan | None,
    strategy: str | None,
    options: Collection[str],
) -> None:
    """Raises for an unknown mode, and for arguments that it does not take."""
    check_choice("mode", mode, ("plan", "frames", "auto"))
    if mode != "plan" and plan is not None:
        msg = f'a plan is run as it is: leave mode="{mode}" out, or give a budget.'
        raise InvalidArgumentError(msg)
    if keep and mode == "plan":
        msg = 'keep names submodules that frames leave alone: it needs mode="frames" or "auto".'
        raise InvalidArgumentError(msg)
    if mode == "frames" and (options or strategy is not None):
        msg = (
            f"{', '.join(options) or 'strategy'} belongs to planning, and "
            'mode="frames" does not plan. Leave it out.'
        )
        raise InvalidArgumentError(msg)


def checked_plan(
    plan: Plan, strategy: str | None, options: dict[str, Any], *, has_sample: bool
) -> Plan:
    """The plan, at the tier that `offload` names if it is given.

    Raises `InvalidArgumentError` for an argument that excludes a plan, and for a missing sample.
    """
    plan = _at_new_tier(plan, options)
    given = [*options, *(["strategy"] if strategy else [])]
    if not given and has_sample:
        return plan
    made_with = {"strategy": plan.strategy, **plan.options.to_json()}
    settings = ", ".join(f"{name}={value!r}" for name, value in made_with.items())
    if given:
        what = f"{', '.join(given)} cannot be given"
        next_step = "Leave that out, or give a budget instead of the plan."
    else:
        what = "a sample must be given"
        next_step = "Give the sample that it was made for."
    msg = f"{what} with a plan. The plan was made with {settings}. {next_step}"
    raise InvalidArgumentError(msg)


def _at_new_tier(plan: Plan, options: dict[str, Any]) -> Plan:
    """A plan whose values move to the tier that `options` name, which are taken out of them.

    Raises:
        InvalidArgumentError: nothing moves in the plan.
        ValueError, OffloadError: as for `OffloadRequest.parse`.
    """
    if "offload" not in options:
        return plan
    if plan.offload is None:
        msg = "offload cannot be given with a plan in which nothing moves; plan with offload."
        raise InvalidArgumentError(msg)
    limit = options.pop("host_budget", plan.offload.host_bytes)
    request = OffloadRequest.parse(options.pop("offload"), limit)
    with_trained = plan.offload.with_trained
    return replace(plan, offload=request and replace(request, with_trained=with_trained))


def memory_limit_of(
    limit: int | str | None, optimizer: Optimizer, steps_in_backward: bool
) -> MemoryLimit | None:
    """The bound on the whole device; None where none is given."""
    if limit is None:
        return None
    return MemoryLimit(limit=limit, optimizer=optimizer, steps_in_backward=steps_in_backward)
