"""Runs small steps eager and planned, and tells whether each promise holds.

For a version of PyTorch that this package was not tested with, a tiny one is run at import.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import platform
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate._torch.pytree import tree_map
from rockmate._torch.version import known_range
from rockmate._util import cache_folder
from rockmate.capture.behaviour import check_behaviour
from rockmate.checks.cases import Case, InBfloat16, tiny_case
from rockmate.curves.measure import Measurement, SideBySide, run_step, state_kept, tensor_difference
from rockmate.entry.module import RockmateModule
from rockmate.errors import RockmateError, UntestedVersionError
from rockmate.extras import MissingExtraError
from rockmate.plan.plan import Plan

logger = logging.getLogger(__name__)

_NUM_STEPS = 3
_NUM_FIRST_STEPS = 3
# A plan this near to its bound shows as much as a better one.
_GAP_TOLERANCE = 0.02
_PEAK_TOLERANCE = 1.02
# Of a CUDA allocator's blocks, which are not split below a megabyte; and of a CPU's.
_SLACK_BYTES = {"cuda": 2 << 20, "cpu": 4096}
# Errors of two sums of the same numbers in other orders differ by a small factor.
_ERROR_RATIO = 4.0
# A gradient below this share of the largest one is held against that share.
_SMALL = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow(Measurement):
    """What one step took beside eager, and whether that is what is promised.

    Attributes:
        name: of the step.
        failures: promises that do not hold, in words; empty if all do.
        skipped: why it did not run; empty if it did.
        error: largest of a gradient against double precision; None where gradients are eager's, and
            for random models.
        eager_error: that of eager's gradients.
        predicted_peak_bytes: activation peak; the budget of frames.
        predicted_ratio: time over that without recomputation; None for frames.
        num_waits: of the host for a GPU in one planned step, beyond eager's; None on a CPU.
        seconds: that the row took, planning included.
    """

    name: str
    failures: tuple[str, ...] = ()
    skipped: str = ""
    error: float | None = None
    eager_error: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_ratio: float | None = None
    num_waits: int | None = None
    seconds: float = 0.0


def check_behaviour_row() -> CheckRow:
    """Tries each interface of PyTorch and transformers that a capture relies on."""
    name = "interfaces"
    try:
        check_behaviour()
    except RockmateError as error:
        return CheckRow(name=name, failures=(str(error),))
    return CheckRow(name=name)


def check_case(case: Case, device: torch.device) -> CheckRow:
    """Runs one step; an error of any kind is a failure of its row."""
    begin = time.perf_counter()
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about their own deprecated calls
            torch.manual_seed(0)
            return replace(_row(case, device), seconds=time.perf_counter() - begin)
    except MissingExtraError as error:
        return CheckRow(name=case.name, skipped=str(error))
    except Exception as error:  # noqa: BLE001 - a table tells all failures
        text = (
            str(error) if isinstance(error, RockmateError) else f"{type(error).__name__}: {error}"
        )
        return CheckRow(name=case.name, failures=(text,))


def _row(case: Case, device: torch.device) -> CheckRow:
    model, sample = case.build()
    exact = None if case.is_random else copy.deepcopy(model).double().to(device)
    model = model.to(device).train()
    model = InBfloat16(model) if case.autocast else model
    sample = tree_map(lambda each: each.to(device), sample)
    steps = SideBySide(model, sample, num_steps=_NUM_STEPS)
    module = _planned(case, model, sample, steps.eager_peak_bytes or 0)
    found = steps.measure(module)
    is_equal = found.gradient_difference == 0
    errors = _errors(module, model, exact, sample) if exact is not None and not is_equal else None
    if module.is_planned:
        predicted, ratio = module.plan.predicted_peak_bytes, module.plan.predicted_ratio
    else:
        assert module.frames is not None
        predicted, ratio = module.frames.budget_bytes or 0, None
    waits, where = None, ""
    if device.type == "cuda":
        own, eagers = (_least_waits(call, sample) for call in (module, model))
        waits, where = own.total() - eagers.total(), ", ".join(own - eagers)
    return CheckRow(
        **asdict(found),
        name=case.name,
        failures=tuple(_failures(case, found, predicted, errors, waits, where, device)),
        error=errors[0] if errors else None,
        eager_error=errors[1] if errors else None,
        predicted_peak_bytes=predicted,
        predicted_ratio=ratio,
        num_waits=waits,
    )


def _planned(case: Case, model: nn.Module, sample: Any, eager_bytes: int) -> RockmateModule:
    # A fraction of eager's measured peak, which all modes share.
    budget = max(1, int(case.budget * eager_bytes))
    search = {} if "mode" in case.options else {"gap_tolerance": _GAP_TOLERANCE, "cache": False}
    module = RockmateModule(model, sample, budget, trial="never", **search, **case.options)
    with state_kept(model):  # the first steps of frames measure and capture
        for _ in range(0 if module.is_planned else _NUM_FIRST_STEPS):
            run_step(module, sample, seed=0)
    if not case.saves:
        return module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        module.plan.save(path)
        return RockmateModule(model, sample, plan=Plan.load(path), trial="never")


def _failures(
    case: Case,
    found: Measurement,
    predicted_bytes: int,
    errors: tuple[float, float] | None,
    num_waits: int | None,
    where: str,
    device: torch.device,
) -> Iterator[str]:
    """The promises that do not hold."""
    difference, peak_bytes = found.gradient_difference, found.measured_peak_bytes
    assert difference is not None
    assert peak_bytes is not None
    if difference:
        if case.is_bitwise and device.type == "cpu":
            yield f"the gradient of {found.differing_gradient} is not eager's bit for bit"
        elif difference > found.gradient_tolerance and (
            errors is None or errors[0] > _ERROR_RATIO * errors[1]
        ):
            yield (
                f"the gradient of {found.differing_gradient} is {difference:.1e} from eager's, "
                "which rounding does not explain"
            )
    most_bytes = predicted_bytes * _PEAK_TOLERANCE + _SLACK_BYTES[device.type]
    if peak_bytes > most_bytes:
        yield f"the peak is {peak_bytes:,} bytes, and {predicted_bytes:,} were predicted"
    if num_waits:
        yield f"the host waits for the GPU {num_waits} times more than in eager's step, in {where}"


def _errors(
    module: nn.Module, model: nn.Module, exact: nn.Module, sample: Any
) -> tuple[float, float]:
    """The largest errors of planned and of eager gradients against double precision."""
    gradients = []
    for call, owner in ((module, model), (model, model), (exact, exact)):
        inputs = sample
        if call is exact:
            inputs = tree_map(
                lambda each: each.double() if each.is_floating_point() else each, inputs
            )
        with state_kept(owner):
            run_step(call, inputs, seed=0)
            pairs = owner.named_parameters()
            found = {name: each.grad for name, each in pairs if each.grad is not None}
            gradients.append({name.removeprefix("model."): each for name, each in found.items()})
    planned, eager, reference = gradients
    ours, theirs = (tensor_difference(each, reference, small=_SMALL) for each in (planned, eager))
    return ours.largest_relative, theirs.largest_relative


def _least_waits(call: Callable[..., Any], sample: Any) -> Counter[str]:
    """Those of the step with the fewest: a step of frames that plans an inside has more."""
    step = partial(run_step, call, sample, seed=0)
    return min((host_waits(step) for _ in range(_NUM_STEPS)), key=Counter.total)


def host_waits(step: Callable[[], object]) -> Counter[str]:
    """The lines at which one step has the host wait for the GPU, as PyTorch's debug mode says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [each for each in caught if "called a synchronizing" in str(each.message)]
    return Counter(f"{each.filename}:{each.lineno}" for each in waits)


# --- at import ---------------------------------------------------------------------------------


def check_once() -> None:
    """Tries each interface, and one tiny step eager and planned, once for these versions.

    A file in the user's cache folder notes that it has passed. It takes one to two seconds.

    Raises:
        UntestedVersionError: something differs; the text names it.
    """
    passed = _note()
    if passed is not None and passed.exists():
        return
    check_behaviour()
    row = check_case(tiny_case(), torch.device("cpu"))
    if row.failures:
        raise UntestedVersionError("torch", f"a tiny planned step failed: {row.failures[0]}")
    logger.warning(
        "PyTorch %s is outside of the versions tested (%s); the self-check passed. `rockmate "
        "check` tries more.",
        torch.__version__,
        known_range(),
    )
    try:
        if passed is not None:
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    except OSError:
        logger.info("the self-check cannot be noted in %s, so each process repeats it", passed)


def _note() -> Path | None:
    """The file that says that the check has passed for these versions on this machine."""
    versions = (
        torch.__version__,
        torch.version.git_version,
        metadata.version("rockmate-planner"),
        platform.python_version(),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
    )
    folder = cache_folder()
    return folder and folder / hashlib.sha256(" ".join(versions).encode()).hexdigest()[:16]
