"""Planned steps of fake CUDA tensors on a machine without a GPU.

The stub of `cuda_stub.c` stands for the CUDA runtime, so PyTorch's own autograd engine, dispatcher,
autocast and choice of attention kernels run as on a GPU of compute capability 9.0. Ops give fake
tensors. An op that reads a value on the host raises, so a step that runs does not synchronize.

    LD_PRELOAD=... python -m fake_cuda FORM NAME...     a JSON line for each architecture
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import architectures
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from rockmate import InfeasibleBudgetError, Planner
from rockmate.errors import UnsupportedModelError
from rockmate.step import capture_step

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("float32", "bfloat16", "autocast")
_BUDGET = 0.6


# --- the stub -------------------------------------------------------------------------------------


def reason_without_stub() -> str:
    """Why fake CUDA tensors cannot be run here; empty if they can."""
    if torch.version.cuda is None:
        return "this PyTorch has no CUDA"
    if torch.cuda.is_available():
        return "there is a CUDA device, which tests/cuda uses"
    if sys.platform != "linux":
        return "the stub of the CUDA runtime is preloaded, as on Linux"
    return "" if _include_folder() else "the headers of the CUDA runtime are not installed"


def _include_folder() -> Path | None:
    packages = Path(torch.__file__).resolve().parents[1]
    return next((path.parent for path in packages.glob("nvidia/*/include/driver_types.h")), None)


def build_stub(folder: Path) -> dict[str, str]:
    """Compiles the stub and returns the environment of a process that uses it."""
    source = Path(__file__).with_name("cuda_stub.c")
    runtime, driver = folder / "libcudart_stub.so", folder / "libcuda.so.1"
    # A header that the wheels of the runtime leave out; the source defines what it needs of it.
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").touch()
    for library in (runtime, driver):
        command = [
            "cc",
            "-shared",
            "-fPIC",
            f"-I{folder}",
            f"-I{_include_folder()}",
            "-o",
            str(library),
        ]
        subprocess.run([*command, str(source)], check=True)
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    return os.environ | {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
    }


# --- fake models ----------------------------------------------------------------------------------


class FakeTensors:
    """Fake CUDA tensors in place of real ones: one for each, so that tied ones stay tied."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.mode = FakeTensorMode()
        self._dtype = dtype
        self._made: dict[int, Tensor] = {}
        self._replaced: list[Tensor] = []

    def of(self, value: Any) -> Any:
        """The fake of a tensor on `cuda:0`; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            dtype = self._dtype if self._dtype and value.is_floating_point() else value.dtype
            with self.mode:
                fake = torch.empty_strided(
                    value.shape, value.stride(), dtype=dtype, device="cuda:0"
                )
            is_parameter = isinstance(value, nn.Parameter)
            self._made[id(value)] = (
                nn.Parameter(fake, value.requires_grad) if is_parameter else fake
            )
            self._replaced.append(value)
        return self._made[id(value)]

    def replace_in(self, model: nn.Module) -> None:
        """Puts fake tensors in the place of parameters and buffers."""
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update({name: self.of(value) for name, value in table.items()})


# --- one step -------------------------------------------------------------------------------------


def step_of(call: Callable[..., Any], batch: dict[str, Any], model: nn.Module) -> dict[str, str]:
    """Runs a step; gives the metadata of its outputs and of the parameters' gradients, by name."""
    model.zero_grad(set_to_none=True)
    output = call(**batch)
    output.loss.backward()
    found = {f"output {index}": _described(value) for index, value in enumerate(_tensors(output))}
    named = model.named_parameters()
    return found | {name: _described(each.grad) for name, each in named if each.grad is not None}


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in tree_leaves(tuple(output.values())) if isinstance(value, Tensor)]


def _described(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.device}"


@contextlib.contextmanager
def context_of(form: str) -> Iterator[None]:
    """The contexts of a forward in a form."""
    with torch.autocast("cuda", torch.bfloat16) if form == "autocast" else contextlib.nullcontext():
        yield


def planned_step(name: str, form: str) -> dict[str, Any]:
    """Plans an architecture for a GPU, runs a planned and an eager step, and compares them."""
    fakes = FakeTensors(torch.bfloat16 if form == "bfloat16" else None)
    model = architectures.make(name)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    fakes.replace_in(model)
    batch = tree_map(fakes.of, architectures.ARCHITECTURES[name].make_batch(0))

    def call(callee: Callable[..., Any]) -> Callable[..., Any]:
        def within(**arguments: Any) -> Any:
            with context_of(form):
                return callee(**arguments)

        return within

    with context_of(form):
        planner = Planner(model, batch, machine="h200")
        try:
            module = planner.module(_BUDGET)
        except InfeasibleBudgetError:
            module = planner.module(planner.minimum_peak_bytes)
    with fakes.mode:
        ours = step_of(call(module), batch, model)
        try:
            eager = step_of(call(model), batch, model)
        except RuntimeError:
            # Eager reads a value on the host; the planned step need not.
            eager = ours
    ops = planner._step.graph.ops
    devices = {str(op.device) for op in ops}
    differing = {key for key in ours.keys() | eager.keys() if ours.get(key) != eager.get(key)}
    return {
        "differing": {key: [ours.get(key), eager.get(key)] for key in sorted(differing)},
        "num_gradients": len(ours),
        "num_recomputations": module.plan.schedule.num_recomputations(),
        "devices": sorted(devices),
        "cpu_bytes": sum(op.written_bytes for op in ops if op.device.type == "cpu"),
    }


def is_refused_on_cpu(name: str) -> bool:
    """Whether the installed libraries have an architecture that cannot be captured at all."""
    architecture = architectures.ARCHITECTURES[name]
    try:
        capture_step(architectures.make(name), architecture.make_batch(0))
    except UnsupportedModelError:
        return True
    return False


def main(arguments: Sequence[str]) -> None:
    # The stub answers for a device; PyTorch must not initialize it to make fake tensors.
    torch.cuda.is_available = lambda: False
    form, *names = arguments
    for name in names:
        try:
            found = {"refused": True} if is_refused_on_cpu(name) else planned_step(name, form)
        except Exception as error:  # noqa: BLE001 - one architecture must not stop the others
            found = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps({"name": name, **found}) + "\n")
    sys.stdout.flush()
    # The stub has no threads to join.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
