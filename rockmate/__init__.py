"""Trains a PyTorch model inside a memory budget.

>>> module = RockmateModule(model, sample_input, "6GiB")          # doctest: +SKIP
>>> module(**batch).loss.backward()                                # doctest: +SKIP

Same loss, same gradients; the activations fit. See `RockmateModule`, and `Planner` for several budgets of one model.
"""

from rockmate._torch_version import check_torch_version

check_torch_version()

from rockmate.errors import (  # noqa: E402
    BackwardError,
    InfeasibleBudgetError,
    InvalidBudgetError,
    InvalidSampleError,
    RockmateError,
    SignatureMismatchError,
    UnsupportedModelError,
)
from rockmate.module import RockmateModule  # noqa: E402
from rockmate.plan import Plan  # noqa: E402
from rockmate.planner import FrontierPoint, Planner  # noqa: E402

__all__ = [
    "BackwardError",
    "FrontierPoint",
    "InfeasibleBudgetError",
    "InvalidBudgetError",
    "InvalidSampleError",
    "Plan",
    "Planner",
    "RockmateError",
    "RockmateModule",
    "SignatureMismatchError",
    "UnsupportedModelError",
]
