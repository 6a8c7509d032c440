"""Planned steps of fake CUDA tensors on a machine without a GPU.

PyTorch's own autograd engine, dispatcher and autocast run as on a GPU. Ops give fake tensors, in
the layouts of kernels. An op that reads a value on the host raises, so a step that runs does not
synchronize.

A preloaded library stands for the GPU. In a CUDA build it is the CUDA runtime of `cuda_stub.c`, and
the choice of attention kernels is PyTorch's for compute capability 9.0. In a CPU build it is the
device of `cuda_guard.cpp`; attention is what a plan for a GPU takes that is not there.

    LD_PRELOAD=... python -m fake_cuda      a line "PLACE FORM NAME" in, a line of JSON out
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import architectures
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from rockmate import InfeasibleBudgetError, Plan, Planner, RockmateModule
from rockmate._torch.fake import results_corrected
from rockmate.capture.fake_device import _GpuAttention
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.read_values import NO_VALUES, UnknownValueError
from rockmate.errors import UnsupportedModelError
from rockmate.graph.ir import Op
from rockmate.ops.kernel_layouts import in_kernel_layout
from rockmate.planning.step import capture_step

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("float32", "bfloat16", "autocast")
_BUDGET = 0.6
_HAS_CUDA = torch.version.cuda is not None
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


# --- the stub -------------------------------------------------------------------------------------


def reason_without_stub() -> str:
    """Why fake CUDA tensors cannot be run here; empty if they can."""
    if torch.cuda.is_available():
        return "there is a CUDA device, which tests/cuda uses"
    if sys.platform != "linux":
        return "what stands for a GPU is preloaded, as on Linux"
    if not shutil.which("cc" if _HAS_CUDA else "c++"):
        return "needs a compiler"
    if _HAS_CUDA and not _include_folder():
        return "the headers of the CUDA runtime are not installed"
    return ""


def _include_folder() -> Path | None:
    packages = Path(torch.__file__).resolve().parents[1]
    return next((path.parent for path in packages.glob("nvidia/*/include/driver_types.h")), None)


def build_stub(folder: Path) -> dict[str, str]:
    """Compiles what stands for a GPU; returns the environment of a process that uses it."""
    library = _build_runtime(folder) if _HAS_CUDA else _build_guard(folder)
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    return os.environ | {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
    }


def _build_runtime(folder: Path) -> Path:
    runtime, driver = folder / "libcudart_stub.so", folder / "libcuda.so.1"
    # A header that the wheels of the runtime leave out; the source defines what it needs of it.
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").touch()
    source = str(Path(__file__).with_name("cuda_stub.c"))
    for library in (runtime, driver):
        command = ["cc", "-shared", "-fPIC", f"-I{folder}", f"-I{_include_folder()}"]
        subprocess.run([*command, "-o", str(library), source], check=True)
    return runtime


def _build_guard(folder: Path) -> Path:
    library, source = folder / "libcuda_guard.so", Path(__file__).with_name("cuda_guard.cpp")
    parts = Path(torch.__file__).parent
    command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{parts / 'include'}", str(source)]
    linked = [f"-L{parts / 'lib'}", f"-Wl,-rpath,{parts / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, "-o", str(library), *linked], check=True)
    return library


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
    leaves = tree_leaves(tuple(output.values()))
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    found = {f"output {index}": _described(value) for index, value in enumerate(tensors)}
    named = model.named_parameters()
    return found | {name: _described(each.grad) for name, each in named if each.grad is not None}


def _described(value: Tensor) -> str:
    # Those of dimensions of one element stand for nothing.
    sizes = zip(value.shape, value.stride(), strict=True)
    strides = [stride for size, stride in sizes if size > 1]
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"


@contextlib.contextmanager
def context_of(form: str) -> Iterator[None]:
    """The contexts of a forward in a form."""
    attention = contextlib.nullcontext() if _HAS_CUDA else _GpuAttention()
    with _autocast() if form == "autocast" else contextlib.nullcontext(), attention:
        yield


def _autocast() -> torch.autocast:
    """Autocast of a GPU. PyTorch switches it off with a warning if it finds none."""
    answers = {"is_available": lambda: True, "is_bf16_supported": lambda *_: True}
    with mock.patch.multiple(torch.cuda, **answers):
        return torch.autocast("cuda", torch.bfloat16)


def planned_step(place: str, form: str, name: str) -> dict[str, Any]:
    """Plans an architecture for a GPU, runs a planned and an eager step, and compares them.

    The plan is made "here", with the fake CUDA tensors, or "elsewhere", on a CPU for the GPU.
    """
    dtype = torch.bfloat16 if form == "bfloat16" else None
    model, batch = architectures.case(name)
    fakes = FakeTensors(dtype)
    if place == "elsewhere":
        sample = tree_map(lambda each: _converted(each, dtype), batch)
        planner = Planner(model.to(dtype), sample, machine="h200")
        plan = _tight_plan(planner)
    fakes.replace_in(model)
    batch = tree_map(fakes.of, batch)
    with context_of(form):
        if place == "here":
            planner = Planner(model, batch, machine="h200")
            plan = _tight_plan(planner)
        with fakes.mode:
            step = replace(planner._step.with_chunks_of(plan.options), absence="")
            # Fake tensors have no values to compare with the sample's, whose model is elsewhere.
            state = ModelSignature.of(model)
            planned = replace(step.planned_call(plan), read_values=NO_VALUES, state=state)
            module = RockmateModule.of(model, planned, trial="never")

    def call(callee: Callable[..., Any]) -> Callable[..., Any]:
        def within(**arguments: Any) -> Any:
            with context_of(form):
                return callee(**arguments)

        return within

    with fakes.mode, results_corrected(in_kernel_layout):
        ours = step_of(call(module), batch, model)
        try:
            eager = step_of(call(model), batch, model)
        except DataDependentOutputException:
            # Eager reads a value on the host; the planned step need not.
            eager = ours
    ops = planner._step.graph.ops
    differing = {key for key in ours.keys() | eager.keys() if ours.get(key) != eager.get(key)}
    return {
        "differing": {key: [ours.get(key), eager.get(key)] for key in sorted(differing)},
        "num_gradients": len(ours),
        "num_recomputations": plan.schedule.num_recomputations(),
        "devices": sorted({str(op.device) for op in ops}),
        "product_dtypes": sorted({_dtype(op) for op in ops if op.node.target in _PRODUCTS}),
        "cpu_bytes": sum(op.written_bytes for op in ops if op.device.type == "cpu"),
    }


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    is_converted = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_converted else value


def _tight_plan(planner: Planner) -> Plan:
    try:
        return planner.plan(_BUDGET)
    except InfeasibleBudgetError:
        return planner.plan(planner.minimum_peak_bytes)


def _dtype(op: Op) -> str:
    return str(op.node.meta["val"].dtype).removeprefix("torch.")


def _row(place: str, form: str, name: str) -> dict[str, Any]:
    """What came of a step, and why there is none where the forward itself allows none."""
    try:
        return planned_step(place, form, name)
    except UnsupportedModelError as error:
        try:
            step = capture_step(*architectures.case(name))
        except UnsupportedModelError:
            return {"refused": True}
        if isinstance(error, UnknownValueError) and step.capture.read_values is not NO_VALUES:
            return {"reads_values": True}
        raise


def main() -> None:
    # The stub answers for a device; PyTorch must not initialize it to make fake tensors.
    torch.cuda.is_available = lambda: False
    if not _HAS_CUDA:
        torch.cuda.default_generators = (torch.Generator(),)
        torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: None
    for line in sys.stdin:
        place, form, name = line.split()
        try:
            row = _row(place, form, name)
        except Exception:  # noqa: BLE001 - one architecture must not stop the others
            row = {"error": traceback.format_exc()[-3000:]}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    # The stub has no threads to join.
    os._exit(0)


if __name__ == "__main__":
    main()
