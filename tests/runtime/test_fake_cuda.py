"""Planned steps run on fake CUDA tensors: devices, dtypes, shapes and strides are eager's.

No op reads a value on the host.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from pins import pinned

# Some models compute scalars and small tables on the CPU.
SMALL_BYTES = 16384
# Convolutions and batch normalization; attention; layouts of a backward that fake tensors have not.
QUICK = ("gpt2", "resnet", "swin")
# The forward reads values of the call, which fake tensors have not. A CPU has them for a GPU.
READING = ("longformer",)
# In a CPU build the choice among attention kernels is not PyTorch's: these stand for all there.
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(ARCHITECTURES)
    if name in QUICK or torch.version.cuda is not None
]
pytestmark = pytest.mark.skipif(
    bool(fake_cuda.reason_without_stub()), reason=fake_cuda.reason_without_stub()
)


class Device:
    """A process with fake CUDA tensors. One runs many steps: its imports take seconds."""

    def __init__(self, folder: Path) -> None:
        """Builds what stands for a GPU in a folder."""
        self._errors, self._environment = folder / "errors.txt", fake_cuda.build_stub(folder)
        self._process: subprocess.Popen[str] | None = None

    def step(self, place: str, form: str, name: str) -> dict[str, Any]:
        """What `fake_cuda` finds; fails with the end of the process's errors if it has ended."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        assert self._process.stdin
        assert self._process.stdout
        print(place, form, name, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, self._errors.read_text(encoding="utf-8")[-2000:]
        return json.loads(line)

    def _started(self) -> subprocess.Popen[str]:
        with self._errors.open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "fake_cuda"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
            )

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    device = Device(tmp_path_factory.mktemp("fake_cuda"))
    yield device
    device.close()


def assert_eagers(row: dict[str, Any], form: str) -> None:
    # An older transformers has architectures that no device can capture.
    if row.get("refused") and transformers.__version__ != pinned("transformers"):
        return
    assert "error" not in row, row["error"]
    assert not row["differing"]
    assert row["cpu_bytes"] <= SMALL_BYTES
    assert "cuda:0" in row["devices"]
    assert row["product_dtypes"] == ["float32" if form == "float32" else "bfloat16"]
    assert row["num_recomputations"]
    assert row["num_gradients"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", fake_cuda.FORMS)
def test_planned_steps_run_as_eagers_on_fake_tensors(device: Device, form: str, name: str) -> None:
    row = device.step("here", form, name)
    if name in READING:
        assert row == {"reads_values": True}
        return
    assert_eagers(row, form)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_steps_planned_on_a_cpu_for_a_gpu_run_as_eagers_on_fake_tensors(
    device: Device, form: str, name: str
) -> None:
    assert_eagers(device.step("elsewhere", form, name), form)
