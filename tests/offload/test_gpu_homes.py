"""Weights at home in the memory of a GPU's host, on a CUDA runtime which only copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
import torch

SCRIPT = """
import torch
from torch import nn
from rockmate import send_home
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.offload.trained_home import gradient_at_home
from rockmate.offload.weight_home import homes_of

model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).requires_grad_(False)
for each in model:
    each.bias.requires_grad_(True)
before = {name: value.clone() for name, value in model.state_dict().items()}

def is_whole():
    return all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())

send_home(model, "host", "cuda")
assert {each.device.type for each in model.parameters()} == {"cuda"}
assert torch.cuda.memory_allocated() == 4 * 512
assert is_whole()
weight, homes = model[1].weight, homes_of(model)
value, pending = homes.fetch(weight)
pending.wait()
assert value.data_ptr() != weight.data_ptr() and torch.equal(value.cpu(), before["1.weight"])
assert torch.cuda.memory_allocated() == 4 * 512 + value.nbytes
weight.data.copy_(torch.full((64, 64), 2.0))
value, pending = homes.fetch(weight)
pending.wait()
assert value.cpu().unique() == 2.0
weight.data.copy_(before["1.weight"])
del value, pending
for names in ("0.weight",), ("2.weight",), ():
    homes.hold({name: model.get_parameter(name) for name in names}, OffloadRequest("host"))
    assert torch.cuda.memory_allocated() == 4 * 512 + (4 - len(names)) * weight.nbytes
    assert is_whole()
homes.hold({}, OffloadRequest("host", with_trained=True))
taken, bias = torch.cuda.memory_allocated(), model[1].bias
gradient = gradient_at_home(bias)
gradient.copy_(bias.detach())
assert gradient.device == bias.device and torch.equal(gradient.cpu(), bias.detach().cpu())
assert torch.cuda.memory_allocated() == taken
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch")
@pytest.mark.skipif(
    bool(fake_cuda.reason_without_stub()), reason=fake_cuda.reason_without_stub() or "-"
)
def test_weights_of_a_gpu_lie_in_its_hosts_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(
        command,
        env=fake_cuda.build_stub(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
