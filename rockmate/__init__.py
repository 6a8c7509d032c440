"""Trains a PyTorch model inside a memory budget.

>>> module = RockmateModule(model, sample_input, "6GiB")          # doctest: +SKIP
>>> module(**batch).loss.backward()                                # doctest: +SKIP

Same loss, same gradients; the activations fit. See `RockmateModule`, and `Planner` for several budgets of one model.
The planner, and the solvers with it, are loaded when they are first asked for: a saved plan runs without them.
"""

from typing import TYPE_CHECKING, Any

from rockmate._torch_version import check_torch_version

check_torch_version()

from rockmate.errors import (  # noqa: E402
    BackwardError,
    InfeasibleBudgetError,
    InvalidBudgetError,
    InvalidSampleError,
    MachineError,
    PlanFileError,
    PlanMismatchError,
    RockmateError,
    SignatureMismatchError,
    SolverLimitError,
    UnknownNameError,
    UnsupportedModelError,
)
from rockmate.machine import Machine  # noqa: E402
from rockmate.module import RockmateModule  # noqa: E402
from rockmate.plan import Plan  # noqa: E402

if TYPE_CHECKING:
    from rockmate.planner import FrontierPoint, Planner
    from rockmate.strategies import STRATEGIES

__all__ = [
    "STRATEGIES",
    "BackwardError",
    "FrontierPoint",
    "InfeasibleBudgetError",
    "InvalidBudgetError",
    "InvalidSampleError",
    "Machine",
    "MachineError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "Planner",
    "RockmateError",
    "RockmateModule",
    "SignatureMismatchError",
    "SolverLimitError",
    "UnknownNameError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    if name == "STRATEGIES":
        from rockmate.strategies import STRATEGIES

        return STRATEGIES
    if name in {"FrontierPoint", "Planner"}:
        from rockmate import planner

        return getattr(planner, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
