"""A loop of accelerate with one more line: evaluation, saved states and resumption, bit by bit.

`test_trainer.py` has accumulation and mixed precision.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fine_tuning import BATCH, batch, llama
from torch import Tensor, nn

from rockmate import RockmateModule

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerate
STEPS = 4


def loop(
    folder: Path, budget: float | None, *, first: int = 0, last: int = STEPS
) -> tuple[list[float], dict[str, Tensor]]:
    """Steps `first` to `last`, from the state of the one before; losses and weights.

    A step is followed by an evaluation, whose loss is one of the losses, and the last by a saved
    state.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model: nn.Module = llama()
    rows = [{k: v[0] for k, v in batch(seed).items()} for seed in range(BATCH * STEPS)]
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if budget is not None:
        model = RockmateModule(model, budget=budget)  # the line
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(1)
    batches = list(loader)  # it draws a number, so before generators are restored
    if first:
        accelerator.load_state(str(folder / f"step{first}"))
    losses = []
    for rows in batches[first:last]:
        loss = model(**rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), model(**rows).loss.item()]
        model.train()
    accelerator.save_state(str(folder / f"step{last}"))
    if budget is not None:
        assert accelerator.unwrap_model(model).is_planned
    weights = accelerator.get_state_dict(model)
    return losses, {name: value.clone() for name, value in weights.items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("before", [None, 0.7])
def test_a_saved_state_is_resumed(before: float | None, tmp_path: Path) -> None:
    """The state of a plain run by a planned one, and that of a planned run."""
    losses, weights = loop(tmp_path / "whole", None)
    loop(tmp_path, before, last=2)
    our_losses, our_weights = loop(tmp_path, 0.7, first=2)
    assert our_losses == losses[4:]
    assert_equal(our_weights, weights)
