"""Planned steps run on fake CUDA tensors: devices, dtypes and shapes are eager's, and no op reads
a value on the host."""

from __future__ import annotations

import json
import subprocess
import sys

import fake_cuda
import pytest
import transformers
from architectures import ARCHITECTURES
from pins import pinned

NUM_GROUPS = 8
# Some models compute scalars and small tables on the CPU.
SMALL_BYTES = 16384
GROUPS = [sorted(ARCHITECTURES)[index::NUM_GROUPS] for index in range(NUM_GROUPS)]
pytestmark = pytest.mark.skipif(
    bool(fake_cuda.reason_without_stub()), reason=fake_cuda.reason_without_stub()
)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake_cuda.build_stub(tmp_path_factory.mktemp("cuda_stub"))


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
@pytest.mark.parametrize("form", fake_cuda.FORMS)
def test_planned_steps_run_as_eagers_on_fake_tensors(
    environment: dict[str, str], form: str, names: list[str]
) -> None:
    command = [sys.executable, "-m", "fake_cuda", form, *names]
    finished = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = {row.pop("name"): row for row in map(json.loads, finished.stdout.splitlines())}
    assert sorted(found) == names
    # An older transformers has architectures that no device can capture.
    refused = {name for name, row in found.items() if row.get("refused")}
    assert not refused or transformers.__version__ != pinned("transformers")
    found = {name: row for name, row in found.items() if name not in refused}
    faults = {name: row["error"] for name, row in found.items() if "error" in row}
    assert not faults
    assert not {name: row["differing"] for name, row in found.items() if row["differing"]}
    assert all(row["cpu_bytes"] <= SMALL_BYTES for row in found.values())
    assert all("cuda:0" in row["devices"] for row in found.values())
    assert all(row["num_recomputations"] and row["num_gradients"] for row in found.values())
