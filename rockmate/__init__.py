"""Trains a PyTorch model inside a memory budget: same loss, same gradients, least extra time.

>>> module = RockmateModule(model, sample_input, "6GiB")          # doctest: +SKIP
>>> module(**batch).loss.backward()                                # doctest: +SKIP

`RockmateModule` wraps a model. `Planner` plans one model for several budgets. `sweep` gives the
curve of time against memory. `wrap_trainer` serves Hugging Face's Trainer.
`torch.compile(model, backend="rockmate", options={"budget": "6GiB"})` needs no import of this
package.

Names are loaded at their first use, and PyTorch with them. A saved plan runs without the solvers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rockmate._torch.version import PACKAGE_VERSION, is_check_skipped, is_tested, refuse_older
from rockmate.errors import (
    BackwardError,
    InfeasibleBudgetError,
    InfeasibleMemoryLimitError,
    InvalidArgumentError,
    InvalidBudgetError,
    InvalidSampleError,
    MachineError,
    MarkError,
    MissingCompilerError,
    NotRepeatableError,
    OffloadError,
    PlanFileError,
    PlanMismatchError,
    RockmateError,
    SignatureMismatchError,
    SolverLimitError,
    TrialError,
    UnknownNameError,
    UnknownOptionError,
    UnsupportedModelError,
    UntestedVersionError,
)

if TYPE_CHECKING:
    from rockmate._torch.allocator import Timeline, timeline
    from rockmate.adoption.in_place import plan_in_place, release
    from rockmate.capture.opaque_functions import register_opaque
    from rockmate.costs.machine import Machine
    from rockmate.curves.errors import FitError, NothingFitsError
    from rockmate.curves.fit import Fit
    from rockmate.curves.fit_options import FitOptions
    from rockmate.curves.fit_row import FitRow
    from rockmate.curves.fit_run import fit
    from rockmate.curves.measure import Measurement
    from rockmate.curves.sweep import Sweep
    from rockmate.curves.sweep_row import SweepRow
    from rockmate.curves.sweep_run import sweep
    from rockmate.dynamo.backend import planned_graphs
    from rockmate.entry.module import RockmateModule
    from rockmate.entry.planner import Planner
    from rockmate.entry.step_function import PlannedStep, plan_step
    from rockmate.hf.trainer import wrap_trainer
    from rockmate.offload.weight_home import send_home
    from rockmate.ops.value_mark import name, recompute, save
    from rockmate.plan.plan import Plan
    from rockmate.planning.options import PlanOptions
    from rockmate.planning.session import FrontierPoint
    from rockmate.planning.simulated_ranks import simulated_ranks
    from rockmate.planning.strategies import STRATEGIES

__version__ = PACKAGE_VERSION

__all__ = [
    "STRATEGIES",
    "BackwardError",
    "Fit",
    "FitError",
    "FitOptions",
    "FitRow",
    "FrontierPoint",
    "InfeasibleBudgetError",
    "InfeasibleMemoryLimitError",
    "InvalidArgumentError",
    "InvalidBudgetError",
    "InvalidSampleError",
    "Machine",
    "MachineError",
    "MarkError",
    "Measurement",
    "MissingCompilerError",
    "NotRepeatableError",
    "NothingFitsError",
    "OffloadError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "PlanOptions",
    "PlannedStep",
    "Planner",
    "RockmateError",
    "RockmateModule",
    "SignatureMismatchError",
    "SolverLimitError",
    "Sweep",
    "SweepRow",
    "Timeline",
    "TrialError",
    "UnknownNameError",
    "UnknownOptionError",
    "UnsupportedModelError",
    "UntestedVersionError",
    "fit",
    "name",
    "plan_in_place",
    "plan_step",
    "planned_graphs",
    "recompute",
    "register_opaque",
    "release",
    "save",
    "send_home",
    "simulated_ranks",
    "sweep",
    "timeline",
    "wrap_trainer",
]


_LAZY_NAMES = {
    "Machine": "rockmate.costs.machine",
    "Plan": "rockmate.plan.plan",
    "RockmateModule": "rockmate.entry.module",
    "name": "rockmate.ops.value_mark",
    "recompute": "rockmate.ops.value_mark",
    "register_opaque": "rockmate.capture.opaque_functions",
    "save": "rockmate.ops.value_mark",
    "STRATEGIES": "rockmate.planning.strategies",
    "FrontierPoint": "rockmate.planning.session",
    "PlanOptions": "rockmate.planning.options",
    "Planner": "rockmate.entry.planner",
    "Measurement": "rockmate.curves.measure",
    "Sweep": "rockmate.curves.sweep",
    "SweepRow": "rockmate.curves.sweep_row",
    "planned_graphs": "rockmate.dynamo.backend",
    "Fit": "rockmate.curves.fit",
    "FitError": "rockmate.curves.errors",
    "FitOptions": "rockmate.curves.fit_options",
    "FitRow": "rockmate.curves.fit_row",
    "NothingFitsError": "rockmate.curves.errors",
    "fit": "rockmate.curves.fit_run",
    "Timeline": "rockmate._torch.allocator",
    "timeline": "rockmate._torch.allocator",
    "send_home": "rockmate.offload.weight_home",
    "plan_in_place": "rockmate.adoption.in_place",
    "release": "rockmate.adoption.in_place",
    "wrap_trainer": "rockmate.hf.trainer",
    "simulated_ranks": "rockmate.planning.simulated_ranks",
    "PlannedStep": "rockmate.entry.step_function",
    "plan_step": "rockmate.entry.step_function",
    "sweep": "rockmate.curves.sweep_run",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_NAMES:
        from rockmate._util import gc_paused

        with gc_paused():  # a collection walks all of PyTorch's objects, and importing makes many
            return getattr(import_module(_LAZY_NAMES[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


refuse_older()
if not is_tested() and not is_check_skipped():
    from rockmate.checks.run import check_once

    check_once()
