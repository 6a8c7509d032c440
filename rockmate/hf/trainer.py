"""Hugging Face Trainer: one call that puts a trainer's model inside a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rockmate._torch.members import forward_hooks
from rockmate._util import attributes_set
from rockmate.budget import Budget
from rockmate.entry.module import RockmateModule
from rockmate.entry.step_function import PlannedStep
from rockmate.errors import (
    InvalidArgumentError,
    InvalidSampleError,
    TrialError,
    UnsupportedModelError,
)
from rockmate.hf.longest_batch import largest_call
from rockmate.hf.reference import PolicyCalls, names_in_loss
from rockmate.memory_limit import Optimizer
from rockmate.runtime.ddp import REPLICATED

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer


def wrap_trainer(
    trainer: Trainer,
    budget: Budget | None = None,
    *,
    memory_limit: int | str | None = None,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> RockmateModule | PlannedStep:
    """Plans the training step of a trainer that has not started.

    The plan is made at the first batch, for the longest of 1,024 rows of the training set.
    `RockmateModule` as the trainer's `model` does nearly the same. Options follow the trainer:

    - With `memory_limit`, the optimizer is that of the trainer's arguments.
    - If the trainer reads only the loss in training, the planned forward returns the loss alone.
    - If the trainer computes its loss from other outputs, that is planned, too, with teachers; or,
      in a process group or where the model computes log-probabilities for TRL, the model alone.
    - Where no schedule fits, the smallest peak is taken. Without a graph, frames keep the budget.

    A trainer that replaces the model's `forward` (TRL's do) must do so first.

    Args:
        trainer: a `transformers.Trainer`, or a subclass's.
        budget: as for `RockmateModule`.
        memory_limit: as for `RockmateModule`.
        optimizer: with `memory_limit`, what will step; None takes the trainer's, or the one that
            its arguments name.
        **options: as for `RockmateModule`, as `outputs="all"`, `on_infeasible="error"`, `mode`.

    Returns:
        The module, which now is `trainer.model`; or the step, where the loss is planned.

    Raises:
        InvalidArgumentError: the trainer has no model.
        UnsupportedModelError: as for `RockmateModule`; also for several GPUs without a launcher.
        InvalidBudgetError: as for `RockmateModule`; also if the trainer's optimizer has no rule for
            its state.
    """
    bound = {"budget": budget, "memory_limit": memory_limit}
    if memory_limit is not None and optimizer is not None:
        options["optimizer"] = optimizer
    module, options = wrap_model_of(trainer, bound, options)
    return _planned_loss(trainer, module, {**options, **bound})


def wrap_model_of(
    trainer: Trainer, bound: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[RockmateModule, dict[str, Any]]:
    """The module that is the trainer's model from here on, and its options beside the bound.

    Arguments and errors are those of `wrap_trainer`, with `budget` and `memory_limit` as one
    mapping, the bound.
    """
    model = _model_of(trainer)
    if bound["memory_limit"] is not None:
        named = trainer.args.optim  # of the arguments, where the trainer has none yet
        own = trainer.optimizer or str(getattr(named, "value", named))
        options = {"optimizer": own, **options}
    options = {**_options_for(trainer, options), **options}
    calls = PolicyCalls(trainer) if _has_log_probs(trainer) else None
    module = RockmateModule(model, **bound, **options)
    if calls is not None:
        calls.take(module)
    module.plan_cache.largest = partial(largest_call, trainer)
    trainer.model = trainer.model_wrapped = module
    return module, options


def _computes_loss(trainer: Trainer) -> bool:
    """Whether the loss is computed of outputs by what the trainer does, and not by the model."""
    from transformers import Trainer

    return (
        trainer.compute_loss_func is not None
        or trainer.label_smoother is not None
        or getattr(trainer.compute_loss, "__func__", None) is not Trainer.compute_loss
    )


def _has_log_probs(trainer: Trainer) -> bool:
    """Whether the loss has the model's forward compute log-probabilities, as TRL's do."""
    return "fused_lm_head" in names_in_loss(trainer)


def _planned_loss(
    trainer: Trainer, module: RockmateModule, options: dict[str, Any]
) -> PlannedStep | RockmateModule:
    """Has `compute_loss` of a trainer planned in training; where it cannot be, the model alone."""
    is_alone = trainer.args.world_size > 1 or options.get("mode") == "frames"
    if is_alone or not _computes_loss(trainer) or _has_log_probs(trainer):
        return module
    compute_loss, model = trainer.compute_loss, module.original
    attributes = {**vars(trainer), "model": model, "model_wrapped": None}
    modules = {name: each for name, each in attributes.items() if isinstance(each, nn.Module)}
    options = {**options, "mode": "plan", "differentiable": "loss"}
    step = PlannedStep(partial(_loss, trainer, compute_loss, model), modules, None, options)
    step.plan_cache.largest = partial(largest_call, trainer)
    step.plan_cache.new_plans.hands_over = True  # it ends in an error, and the model is planned
    for name in modules.keys() & {"teacher_model", "ref_model"}:
        modules[name].eval()  # as their first step does
    is_planned = True

    def planned(given: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        nonlocal is_planned
        if return_outputs or not (model.training and torch.is_grad_enabled()):
            return compute_loss(given, inputs, return_outputs, **keywords)
        if is_planned:
            read = {key: each for key, each in inputs.items() if not _is_text(each)}
            try:
                return step(read, **keywords)
            except (UnsupportedModelError, InvalidSampleError, TrialError) as error:
                is_planned, step.module = False, module  # which has the plan
                logger.warning("the model alone is planned, not what computes the loss: %s", error)
        return compute_loss(module, inputs, **keywords)

    trainer.compute_loss = planned  # pyright: ignore[reportAttributeAccessIssue]
    return step


def _is_text(value: Any) -> bool:
    """Whether a part of a batch is text, for each of which there would be a plan."""
    return isinstance(value, list) and any(isinstance(each, str) for each in value)


def _loss(
    trainer: Trainer, compute_loss: Any, model: nn.Module, inputs: Any, **keywords: Any
) -> Any:
    """The loss of a batch, of which a trainer may take keys out.

    Accelerate has the forward of the model that it is given, and no more, run in a lower precision.
    """
    forward = model.forward
    if trainer.accelerator.native_amp:
        from accelerate.utils import convert_outputs_to_fp32

        forward = convert_outputs_to_fp32(trainer.accelerator.autocast()(forward))
    with attributes_set((model, "forward", forward)):
        return compute_loss(model, dict(inputs), **keywords)


def _model_of(trainer: Trainer) -> nn.Module:
    if not hasattr(trainer, "args"):
        msg = f"a {type(trainer).__name__} is no Trainer. Write RockmateModule(model, budget=0.7)."
        raise InvalidArgumentError(msg)
    if trainer.args.n_gpu > 1:  # Trainer would wrap the module in nn.DataParallel
        raise UnsupportedModelError(REPLICATED)
    if trainer.model is None:
        raise InvalidArgumentError("the trainer has no model yet: give it one, not a model_init.")
    return trainer.model


def _options_for(trainer: Trainer, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `RockmateModule` that suit the trainer's use of the model."""
    options: dict[str, Any] = {"on_infeasible": "least", "mode": "auto"}
    if given.get("mode") == "frames":  # which capture no outputs
        return options
    if _reads_outputs(trainer):
        return {**options, "differentiable": "all"}
    if "outputs" not in given:
        logger.info(
            "the planned forward returns the loss alone, since Trainer reads nothing else in "
            'training. wrap_trainer(..., outputs="all") keeps the other outputs.'
        )
    return {**options, "outputs": "loss"}


def _reads_outputs(trainer: Trainer) -> bool:
    """Whether the loss or a hook may read other outputs of the model than its loss.

    A method may be replaced in a subclass or in the object.
    """
    from transformers import Trainer

    model = trainer.model
    return (
        _computes_loss(trainer)
        or getattr(trainer.training_step, "__func__", None) is not Trainer.training_step
        or (model is not None and bool(forward_hooks(model)))
    )
