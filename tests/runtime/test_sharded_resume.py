"""A sharded run that stops and goes on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_on_ranks
from sharded_net import batch, net, planned, sharded, whole
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

pytestmark = needs_gloo


class Run:
    """A model with its optimizer, under a plan or without one."""

    def __init__(self, mesh: DeviceMesh, *, splits_batch: bool, is_planned: bool = True) -> None:
        self.model = sharded(net(2), mesh)
        # Ranks of which each draws its own mask would train another model after the change.
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.module: nn.Module = planned(self.model, 0.5) if is_planned else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._part = mesh.get_local_rank(), mesh.size() if splits_batch else 1

    def step(self, number: int) -> None:
        """One update on this rank's part of a batch, or on the whole of it."""
        rank, num_parts = self._part
        tokens = batch(number).chunk(num_parts)[rank % num_parts]
        self.module(tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )

    def tensors(self) -> list[Tensor]:
        """Parameters and moments, whole."""
        found: list[Any] = list(self.model.parameters())
        for state in self.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
        return [whole(value) for value in found]


def check_begin(mesh: DeviceMesh, folder: Path, splits_batch: bool) -> None:
    """Three steps, of which the last two are the reference; the state is saved after the first."""
    run = Run(mesh, splits_batch=splits_batch)
    run.step(0)
    run.save(folder / "0")
    for number in (1, 2):
        run.step(number)
        found = run.tensors()
        if mesh.get_local_rank() == 0:
            torch.save(found, folder / f"expected_{number}.pt")


def check_resume(mesh: DeviceMesh, folder: Path, splits_batch: bool, number: int) -> None:
    """One step from the state before it, under a plan and without; then the state is saved."""
    expected = torch.load(folder / f"expected_{number}.pt")
    for is_planned in (False, True):
        run = Run(mesh, splits_batch=splits_batch, is_planned=is_planned)
        run.load(folder / f"{number - 1}")
        run.step(number)
        found = run.tensors()
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            if splits_batch:  # sums of two halves and of four quarters round otherwise
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(ours, theirs)
    run.save(folder / f"{number}")


@pytest.mark.parametrize("splits_batch", [False, True], ids=["same_batch", "split_batch"])
def test_from_two_ranks_to_four_and_back(tmp_path: Path, splits_batch: bool) -> None:
    """Bit for bit where all ranks have one batch: means of equal gradients are exact."""
    run_on_ranks(check_begin, 2, tmp_path, splits_batch)
    run_on_ranks(check_resume, 4, tmp_path, splits_batch, 1)
    run_on_ranks(check_resume, 2, tmp_path, splits_batch, 2)
