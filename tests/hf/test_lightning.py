"""Lightning with one more line: the same losses, weights and files as without it, bit by bit.

The line is in the module's constructor. What Lightning does by default takes place: the sanity
check before the first step, validation, checkpoints with the optimizer's state, a progress bar.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import batch, llama
from torch import Tensor, nn

from rockmate import PlannedStep, RockmateModule, plan_step

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, no logger, ...


def lightning() -> Any:
    """The package, which takes seconds to import: where a test runs, not where it is collected."""
    return pytest.importorskip("lightning")


@functools.cache
def language() -> Any:
    """A language model; planned inside a budget if there is one."""

    class Language(lightning().LightningModule):
        def __init__(self, budget: float | None = None) -> None:
            super().__init__()
            model = llama(attention_dropout=0.1)
            self.model = model if budget is None else RockmateModule(model, budget=budget)
            self.seen: dict[str, list[Tensor]] = {"train": [], "valid": []}

        def training_step(self, rows: Any, _: int) -> Tensor:
            loss = self.model(**rows).loss
            self.log("train", loss)
            self.seen["train"].append(loss.detach())
            return loss

        def validation_step(self, rows: Any, _: int) -> None:
            loss = self.model(**rows).loss
            self.log("valid", loss)
            self.seen["valid"].append(loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Language


def rows_of(num_batches: int, seed: int) -> torch.utils.data.DataLoader:
    rows = [{k: v[0] for k, v in batch(seed + row).items()} for row in range(4 * num_batches)]
    return torch.utils.data.DataLoader(rows, batch_size=4)


def fitted(
    folder: Path,
    budget: float | None,
    *,
    resume: Path | None = None,
    cls: Any = None,
    **settings: Any,
) -> tuple[Any, Path]:
    """Trains two epochs, or those that are left after `resume`; the last checkpoint's path."""
    torch.manual_seed(0)
    module = (cls or language())(budget)
    settings = {"max_epochs": 2, "log_every_n_steps": 1, **settings}
    trainer = lightning().Trainer(accelerator="cpu", default_root_dir=folder, **settings)
    torch.manual_seed(1)
    trainer.fit(module, rows_of(3, 0), rows_of(1, 100), ckpt_path=resume)
    return module, Path(trainer.checkpoint_callback.best_model_path)


def check(ours: Any, theirs: Any) -> None:
    """Losses of all steps, and weights under the same names."""
    assert ours.seen["train"]
    for kind, losses in theirs.seen.items():
        assert len(ours.seen[kind]) == len(losses) > 0
        assert all(map(torch.equal, ours.seen[kind], losses)), kind
    assert_equal(ours.state_dict(), theirs.state_dict())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["default", "accumulation", "bf16"],
)
def test_training_is_that_of_the_plain_model(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs, _ = fitted(tmp_path / "plain", None, **settings)
    ours, saved = fitted(tmp_path / "planned", 0.6, **settings)
    check(ours, theirs)
    assert isinstance(ours.model, RockmateModule)
    assert ours.model.plan.schedule.num_recomputations() > 0
    assert len(ours.seen["valid"]) == 3  # the sanity check, and one batch an epoch
    # The file of the planned run loads into a module without a budget.
    again = language().load_from_checkpoint(saved)
    assert isinstance(again.model, nn.Module)
    assert not isinstance(again.model, RockmateModule)
    assert_equal(again.state_dict(), theirs.state_dict())


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """By a planned run from a plain one's file, as the plain run goes on."""
    _, saved = fitted(tmp_path / "first", None, max_epochs=1)
    theirs, _ = fitted(tmp_path / "plain", None, resume=saved)
    ours, _ = fitted(tmp_path / "planned", 0.6, resume=saved)
    assert len(ours.seen["train"]) == 3
    check(ours, theirs)


def test_a_training_step_that_logs(tmp_path: Path) -> None:
    """The line above `training_step`: what is logged in each step is the plain run's."""

    class Plain(language()):
        scale = 1.0

        def training_step(self, rows: Any) -> Tensor:
            loss = self.scale * self.model(**rows).loss
            self.log("train", loss, on_epoch=True, batch_size=4)
            self.log_dict({"twice": 2 * loss.detach(), "size": loss.item()})
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen["train"] += self.trainer.callback_metrics.values()
            self.scale = 2.0 if self.global_step == 2 else self.scale  # no trial is in the next

    class Planned(Plain):
        training_step = plan_step(Plain.training_step, ["model"], budget=0.6)

    theirs, ours = (fitted(tmp_path, None, cls=each)[0] for each in (Plain, Planned))
    check(ours, theirs)
    assert isinstance(ours.training_step, PlannedStep)
    assert ours.training_step.is_planned
    names = {"train_step", "train_epoch", "twice", "size"}
    assert names <= ours.trainer.callback_metrics.keys()
