"""LoRA: a frozen base under adapters trains as without the wrapper; plans know what is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fine_tuning import batch, llama, trained
from helpers import differing, gradients_of
from torch import nn

from rockmate import Planner, RockmateModule

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer and of PEFT

EVERYWHERE = {"target_modules": "all-linear"}
SOME_LAYERS = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
# Parametrized in each forward, as the stacked weights of experts.
TENSORS = {"target_modules": [], "target_parameters": ["down_proj.weight"], "lora_dropout": 0.0}


def adapted(**changes: Any) -> nn.Module:
    options = {"lora_dropout": 0.1, **EVERYWHERE, **changes}
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(llama(num_hidden_layers=2), config).train()


@pytest.mark.parametrize(
    "where", [EVERYWHERE, SOME_LAYERS, TENSORS], ids=["everywhere", "one layer", "tensors"]
)
def test_trains_the_adapters_and_nothing_else(where: dict[str, Any], tmp_path: Path) -> None:
    logs, reference = trained(lambda: adapted(**where), lambda model: model, tmp_path / "plain")
    before = {name: value.clone() for name, value in adapted(**where).state_dict().items()}
    our_logs, model = trained(
        lambda: adapted(**where),
        lambda model: RockmateModule(model, budget=0.7),
        tmp_path / "planned",
    )
    assert our_logs == logs
    assert not differing(model.state_dict(), reference.state_dict())
    trains = {name: each.requires_grad for name, each in model.named_parameters()}
    assert {*differing(model.state_dict(), before)} == {name for name in trains if trains[name]}
    assert all(each.grad is None for each in model.parameters() if not each.requires_grad)


def test_frozen_weights_have_no_gradient_in_the_plan_and_their_inputs_are_not_kept() -> None:
    models = adapted(**SOME_LAYERS), llama(num_hidden_layers=2)
    frozen, whole = (Planner(each, batch()) for each in models)
    delivered = {role.name for op in frozen.plan(1.0).graph.ops for _, role in op.final_gradients}
    assert len(delivered) == 2
    assert all(".layers.1." in name and "lora_" in name for name in delivered)
    assert frozen.baseline_peak_bytes < 0.9 * whole.baseline_peak_bytes
    kept, all_kept = (each.plan(1.0).simulation.saved_bytes for each in (frozen, whole))
    assert kept < 0.7 * all_kept  # the first layer's backward does not exist


def test_unfreezing_after_planning_plans_anew() -> None:
    model = adapted(**SOME_LAYERS)
    module = RockmateModule(model, batch(), 0.7)
    module(**batch()).loss.backward()
    head = model.get_output_embeddings().weight
    assert head.grad is None
    head.requires_grad_(True)
    model.zero_grad()
    torch.manual_seed(1)
    module(**batch()).loss.backward()
    ours = gradients_of(model)
    model.zero_grad()
    torch.manual_seed(1)
    model(**batch()).loss.backward()
    assert head.grad is not None
    assert not differing(ours, gradients_of(model))
