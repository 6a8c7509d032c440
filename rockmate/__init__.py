"""Trains a PyTorch model inside a memory budget.

>>> module = RockmateModule(model, sample_input, "6GiB")          # doctest: +SKIP
>>> module(**batch).loss.backward()                                # doctest: +SKIP

Same loss, same gradients; the activations fit. See `RockmateModule`, `Planner` for several budgets of one model, and `sweep` for the
whole curve of time against memory.
The planner, and the solvers with it, are loaded when they are first asked for: a saved plan runs without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rockmate._torch.version import check_torch_version

check_torch_version()

from rockmate.costs.machine import Machine  # noqa: E402
from rockmate.errors import (
    BackwardError,
    InfeasibleBudgetError,
    InfeasibleMemoryLimitError,
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
from rockmate.module import RockmateModule  # noqa: E402
from rockmate.plan.plan import Plan  # noqa: E402

if TYPE_CHECKING:
    from rockmate._torch.allocator import Timeline, timeline
    from rockmate.hf.buckets import PadToBuckets
    from rockmate.hf.trainer import wrap_trainer
    from rockmate.planner import Planner
    from rockmate.planning.session import FrontierPoint
    from rockmate.planning.strategies import STRATEGIES
    from rockmate.sweeps.row import SweepRow
    from rockmate.sweeps.run import sweep

__all__ = [
    "STRATEGIES",
    "BackwardError",
    "FrontierPoint",
    "InfeasibleBudgetError",
    "InfeasibleMemoryLimitError",
    "InvalidBudgetError",
    "InvalidSampleError",
    "Machine",
    "MachineError",
    "PadToBuckets",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "Planner",
    "RockmateError",
    "RockmateModule",
    "SignatureMismatchError",
    "SolverLimitError",
    "SweepRow",
    "Timeline",
    "UnknownNameError",
    "UnsupportedModelError",
    "sweep",
    "timeline",
    "wrap_trainer",
]


_LOADED_LATE = {
    "STRATEGIES": "rockmate.planning.strategies",
    "FrontierPoint": "rockmate.planning.session",
    "Planner": "rockmate.planner",
    "SweepRow": "rockmate.sweeps.row",
    "PadToBuckets": "rockmate.hf.buckets",
    "Timeline": "rockmate._torch.allocator",
    "timeline": "rockmate._torch.allocator",
    "wrap_trainer": "rockmate.hf.trainer",
    "sweep": "rockmate.sweeps.run",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_LATE:
        return getattr(import_module(_LOADED_LATE[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
