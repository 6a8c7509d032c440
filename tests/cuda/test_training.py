"""On a GPU, loops as people write them: Trainer in bfloat16, a scaler of losses in float16 with
clipping, moves to the host, frames, channels last. The plain model in the same loop is the judge.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fine_tuning import batch, gpt2, llama, trained, trainer
from torch import Tensor, nn

from rockmate import RockmateModule, wrap_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer


def images(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.Flatten(1), nn.LazyLinear(8))
    model(torch.randn(1, 3, 32, 32))
    draw = torch.randn(16, 3, 32, 32).to(device, memory_format=torch.channels_last)
    return model.to(device, memory_format=torch.channels_last).train(), draw  # pyright: ignore


def dropped(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return models.Stack(num_layers=6, width=256).to(device).train(), torch.randn(
        512, 256, device=device
    )


def loop(module: nn.Module, model: nn.Module, batch: Tensor, *, is_scaled: bool) -> list[Tensor]:
    """The losses and parameters of four steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler(batch.device.type, enabled=is_scaled)
    losses = []
    for number in range(4):
        torch.manual_seed(number)
        with torch.autocast(batch.device.type, torch.float16, enabled=is_scaled):
            loss = module(batch + number).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [torch.stack(losses), *(each.detach().clone() for each in model.parameters())]


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("make", [images, dropped])
@pytest.mark.parametrize(
    "options", [{}, {"mode": "frames"}, {"offload": "host"}], ids=["plan", "frames", "moves"]
)
def test_a_plain_loop(
    device: torch.device, make: Any, options: dict[str, Any], *, is_scaled: bool
) -> None:
    if device.type == "cpu" and "offload" in options:
        pytest.skip("moves to the host are those of a GPU")
    model, batch = make(device)
    reference, repeated = copy.deepcopy(model), copy.deepcopy(model)
    expected = loop(reference, reference, batch, is_scaled=is_scaled)
    again = loop(repeated, repeated, batch, is_scaled=is_scaled)
    module = RockmateModule(model, budget=0.6, on_infeasible="least", **options)
    found = loop(module, model, batch, is_scaled=is_scaled)
    least = 0.05 * max(each.norm().item() for each in expected)
    # Convolutions round single precision to ten bits by default, and half precision has as many.
    rounding = 2e-3 if is_scaled or make is images else 1e-5
    for ours, theirs, once_more in zip(found, expected, again, strict=True):
        noise = (once_more - theirs).norm().item()
        scale = max(theirs.norm().item(), least)
        assert (ours - theirs).norm().item() <= 3 * noise + rounding * scale


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_trainer_in_bfloat16(device: torch.device, tmp_path: Path, *, is_handed_over: bool) -> None:
    options: dict[str, Any] = {"bf16": True, "use_cpu": device.type == "cpu"}
    logs, reference = trained(llama, lambda model: model, tmp_path, **options)
    if is_handed_over:
        model = llama()
        made, record = trainer(model, tmp_path, **options)
        wrap_trainer(made, 0.6)
        made.train()
        own_logs = record.logs
    else:
        own_logs, model = trained(llama, partial(RockmateModule, budget=0.6), tmp_path, **options)
    losses, own = ([each["loss"] for each in own if "loss" in each] for own in (logs, own_logs))
    assert len(losses) >= 4
    assert own == pytest.approx(losses, rel=1e-3)
    for name, expected in reference.state_dict().items():
        difference = (model.state_dict()[name] - expected).norm().item()
        assert difference <= 1e-3 * expected.norm().item(), name


@pytest.mark.parametrize("is_loaded", [False, True])
def test_attention_with_dropout_where_no_op_was_measured(
    cuda: torch.device, tmp_path: Path, *, is_loaded: bool
) -> None:
    # The seed of the kernel's forward is on the host, and the backward reads it there.
    model = gpt2(n_embd=64).to(cuda)
    tokens = {key: each.to(cuda) for key, each in batch().items()}
    if is_loaded:
        path = tmp_path / "plan.json"
        RockmateModule(model, tokens, 0.7, outputs="loss").plan.save(path)
        script = f"""
import sys; sys.path[:0] = {[*map(str, sys.path)]!r}
from fine_tuning import batch, gpt2
from rockmate import Plan, RockmateModule
model = gpt2(n_embd=64).cuda()
tokens = {{key: each.cuda() for key, each in batch().items()}}
module = RockmateModule(model, tokens, plan=Plan.load({str(path)!r}))
module(**tokens).loss.backward()
"""
        subprocess.run([sys.executable, "-c", script], check=True)
        return
    module = RockmateModule(model, tokens, 0.7, outputs="loss", machine="h100")
    module(**tokens).loss.backward()


@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_statistics_of_the_script_stay(cuda: torch.device, mode: Any) -> None:
    model, draw = dropped(cuda)
    module = RockmateModule(model, draw, 0.6, mode=mode)
    for _ in range(6):
        module(draw).square().mean().backward()
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        module(draw).square().mean().backward()
    assert torch.cuda.max_memory_allocated(cuda) - before > draw.nbytes
