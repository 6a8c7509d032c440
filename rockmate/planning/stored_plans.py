"""Plans on disk, by what they were made for: a training that starts again need not plan again.

A file is named by the digest of a key: the captured step, the bound, the options, the settings and
the machine that costs depend on, and this package's files. It holds a plan as `Plan.save` writes
it, and is read as any other: damage shows, and the schedule is replayed on the step that runs it.
The key has all calls of the trace and their layouts, too. Those were held against the kernels' when
the plan was made, which is not repeated.

Not stored are plans whose costs depend on code that has no digest: of opaque modules, of ops from
elsewhere. Processes share the folder without locks, since files are written whole and differ in
measured times at most. The files that have not been read for longest go.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rockmate._torch.dispatch import is_op
from rockmate._torch.settings import Settings
from rockmate._util import cache_folder
from rockmate.capture.roles import TracedCall
from rockmate.errors import PlanFileError, PlanMismatchError
from rockmate.graph.snapshot import digest
from rockmate.ops.kernel_layouts import Layout
from rockmate.plan.plan import Plan
from rockmate.planning.options import AT_HOME, PlanOptions
from rockmate.planning.simulated_capture import machine_of
from rockmate.planning.step import CapturedStep
from rockmate.runtime.program import PlannedCall

logger = logging.getLogger(__name__)

_MOST_PLANS, _MOST_BYTES = 256, 1 << 30
# Of options of planning: those that the step has decided, and those that no plan depends on.
_NO_PART = ("progress", "cache", "machine", "marks", "policy", "existing_checkpoints", "shard")
_NAMESPACES = ("aten", "prims", "_c10d_functional")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """Where the plan of a step is, or will be.

    Attributes:
        step: as captured.
        text: tells the step and its options; see `StepSnapshot.text`.
        path: of the file.
    """

    step: CapturedStep
    text: str
    path: Path

    @classmethod
    def of(cls, step: CapturedStep, asked: Any, options: PlanOptions) -> StoredPlan | None:
        """The place for a step; None where nothing is stored.

        Args:
            step: as captured, with eager's kernels.
            asked: what else the plan is made for; its representation is part of the key.
            options: of planning.
        """
        if not may_store(options) or step.absence or not all(map(_is_known, step.graph.ops)):
            return None
        folder, text = cache_folder(), step.text
        names = (each.name for each in fields(options) if each.name not in _NO_PART)
        given = [(name, repr(getattr(options, name))) for name in names]
        layouts = sorted(map(_layouts_text, step.capture.traced))
        device = step.graph.ops[0].device
        key = [text, repr(asked), given, repr(machine_of(options)), layouts, _settings(device)]
        assert folder is not None
        return cls(step=step, text=text, path=folder / "plans" / f"{digest(key)[:32]}.json")

    def read(self, fits: Callable[[Plan], bool]) -> PlannedCall | None:
        """The code that runs the stored plan; None if there is none that fits and can be read."""
        try:
            plan = Plan.load(self.path)
            if not fits(plan):
                return None
            call = self.call_of(plan)
            os.utime(self.path)
        except FileNotFoundError:
            return None
        except (OSError, PlanFileError, PlanMismatchError) as error:
            logger.warning("a stored plan cannot be used, and is replaced: %s", error)
            return None
        logger.info(
            "the plan is that of an earlier start, %s. ROCKMATE_CACHE=off plans again", self.path
        )
        return call

    def call_of(self, plan: Plan) -> PlannedCall:
        """The code that runs a plan of the step."""
        return self.step.with_chunks_of(plan.options).planned_call(plan)

    def write(self, plan: Plan) -> None:
        """Stores the plan. A folder that cannot be written to is told in the log."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(self.path)
            _forget_oldest(self.path.parent)
        except OSError as error:
            logger.info("the plan is not stored for the next start: %s", error)


def may_store(options: PlanOptions) -> bool:
    """Whether plans with these options are stored.

    With fused kernels, compiling takes the time. A plan with weights at home fits what a limit
    leaves with those weights away, which is not what is left when the plan is looked for.
    """
    is_plain = options.kernels == "eager" and options.weights not in AT_HOME
    return options.cache and is_plain and cache_folder() is not None


def _is_known(op: Any) -> bool:
    target = op.node.target
    if is_op(target):
        return target.namespace in _NAMESPACES
    return target.__module__.startswith("rockmate.ops.") and not hasattr(target, "on_sample")


def _layouts_text(call: TracedCall) -> str:
    results = call.results if isinstance(call.results, tuple | list) else (call.results,)
    found = [Layout.of(each) for each in results if isinstance(each, torch.Tensor)]
    return repr((call.key, found))


def _settings(device: torch.device) -> list[Any]:
    """What costs depend on beside the step: versions, device, threads, the choice of kernels."""
    is_cuda, backends = device.type == "cuda", torch.backends
    cpu = torch.backends.cpu.get_cpu_capability()
    name = torch.cuda.get_device_name(device) if is_cuda else f"{platform.machine()} {cpu}"
    # `torch.get_float32_matmul_precision` raises where a script has set these.
    precisions = (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision)
    cudnn = backends.cudnn.deterministic, backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    settings = (*map(str, Settings.now().switches), *precisions, *cudnn, workspace)
    return [torch.__version__, name, torch.get_num_threads(), _code_digest(), *settings]


@cache
def _code_digest() -> str:
    """Of the files of this package: other code may plan otherwise."""
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("rockmate", "rotor", "checkmate")]
    files = [(str(path), path.stat()) for each in folders for path in sorted(each.rglob("*.py"))]
    return digest([(path, stat.st_size, stat.st_mtime_ns) for path, stat in files])


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
    total = 0
    for number, path in enumerate(files):
        total += path.stat().st_size
        if number >= _MOST_PLANS or total > _MOST_BYTES:
            path.unlink(missing_ok=True)
